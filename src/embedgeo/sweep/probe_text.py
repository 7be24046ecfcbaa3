"""The probe text of a sweep: which tokenizer, and whether the models fit it."""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from embedgeo.capture.layers import resolve_layers
from embedgeo.checkpoints import Checkpoint, hub, is_local, loading
from embedgeo.checkpoints.files import TOKENIZER_FILES, VOCABULARIES
from embedgeo.results.wording import reason
from embedgeo.sweep.measure import choose_masked
from embedgeo.sweep.plan import Planned
from embedgeo.sweep.settings import SweepSettings
from embedgeo.text import hash_ids, tokenize_sequences


@dataclass(frozen=True)
class ProbeText:
    """What every checkpoint is measured on.

    Attributes:
        token_ids: shape (sequences, seq_len).
        masked: of an encoder, which tokens its loss is about; shape of ``token_ids``.
        mask_token_id: of an encoder, what stands for these.
        token_texts: what each token type reads, where tables of these are asked for.
    """

    token_ids: Tensor
    masked: Tensor | None = None
    mask_token_id: int | None = None
    token_texts: Mapping[int, str] = field(default_factory=dict)

    @property
    def sha256(self) -> str:
        """Of the token ids."""
        return hash_ids(self.token_ids)


def prepare_text(documents: Sequence[str], plan: Sequence[Planned], settings: SweepSettings) -> ProbeText:
    """Tokenize the text for the models of a plan, and check that a model can be measured on it.

    Small files are fetched into a temporary folder: the cache holds what was there before.

    Raises:
        ValueError: no tokenizer, a text or layers that do not fit the model.
    """
    with tempfile.TemporaryDirectory(prefix="embedgeo-") as folder:
        model, for_encoder = _first_model(plan, settings, Path(folder))
        tokenizer = find_tokenizer(plan, settings, Path(folder))
    token_ids = tokenize_sequences(
        documents, tokenizer, seq_len=settings.seq_len, num_tokens=settings.num_tokens, for_encoder=for_encoder
    )
    if model is not None:
        require_fit(model, token_ids, settings)
    texts = {i: str(tokenizer.decode([i])) for i in token_ids.unique().tolist()} if settings.token_tables else {}
    if not for_encoder or tokenizer.mask_token_id is None:
        return ProbeText(token_ids, token_texts=texts)
    return ProbeText(token_ids, choose_masked(token_ids, tokenizer.all_special_ids), tokenizer.mask_token_id, texts)


def require_fit(model: nn.Module, token_ids: Tensor, settings: SweepSettings) -> None:
    """Check layers, positions and vocabulary of a model against what is to be measured.

    Raises:
        ValueError: they do not fit.
    """
    resolve_layers(model, settings.layers)
    require_vocabulary(model, token_ids)
    longest = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    if isinstance(longest, int) and settings.seq_len > longest:
        raise ValueError(f"seq_len must be at most the model's {longest} positions; got {settings.seq_len}.")


def require_vocabulary(model: nn.Module, token_ids: Tensor) -> None:
    """Check that a model has an embedding of every token.

    Raises:
        ValueError: it has not.
    """
    known = loading.num_token_types(model)
    if known is not None and int(token_ids.max()) >= known:
        raise ValueError(
            f"tokenizer must give ids below the {known} that the model embeds; it gives {int(token_ids.max())}. "
            "Name the model's own by tokenizer=."
        )


def _first_model(plan: Sequence[Planned], settings: SweepSettings, folder: Path) -> tuple[nn.Module | None, bool]:
    """A model of the plan, without its weights where that is possible, and whether it is an encoder.

    None where no checkpoint gives one: each will fail for its own reason.
    """
    files = [planned.name for planned in plan if planned.checkpoint.path and planned.checkpoint.path.is_file()]
    if files and settings.model_class is None:
        raise ValueError(f"model_class must name the LightningModule of {files[0]}; got none.")
    if settings.model_class is not None:
        loading.import_class(settings.model_class)
    for planned in plan:
        path = planned.checkpoint.path
        try:
            if settings.model_class is not None and path is not None and path.is_file():
                loaded = loading.load_lightning(path, settings.model_class, dtype=getattr(torch, settings.dtype))
                return loaded.model, loaded.is_encoder
            config = loading.load_config(
                _small_files(planned, ["config.json"], folder), trust_remote_code=settings.trust_remote_code
            )
            model = loading.empty_model(config, trust_remote_code=settings.trust_remote_code)
            return model, loading.is_encoder(config)
        except Exception:  # it fails again when it is its turn, and is recorded then
            continue
    return None, False


def find_tokenizer(plan: Sequence[Planned], settings: SweepSettings, folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer asked for; else that of the first checkpoint that has one; else that of ``main``, or of the folder.

    Raises:
        ValueError: there is none, or it does not load.
    """
    tried: list[str] = []
    for source, path in _tokenizer_folders(plan, settings, folder, tried):
        try:
            return loading.load_tokenizer(path, trust_remote_code=settings.trust_remote_code)
        except Exception as error:
            tried.append(f"{source} ({reason(error)})")
    raise ValueError(
        f"a tokenizer must come from tokenizer=, the checkpoints or main; found none that loads. Tried: "
        f"{'; '.join(tried) or 'nothing, no files of one were found'}. Name one by tokenizer=."
    )


def _tokenizer_folders(
    plan: Sequence[Planned], settings: SweepSettings, folder: Path, tried: list[str]
) -> Iterator[tuple[str, Path]]:
    if settings.tokenizer is not None:
        with _trying(settings.tokenizer, tried):
            if is_local(settings.tokenizer):
                yield settings.tokenizer, Path(settings.tokenizer).expanduser()
            else:
                yield settings.tokenizer, _tokenizer_of_main(settings.tokenizer, folder)
        return
    owner = next((planned for planned in plan if VOCABULARIES & set(_names(planned.checkpoint, planned))), None)
    if owner is not None:
        with _trying(owner.name, tried):
            names = [
                name for name in _names(owner.checkpoint, owner) if name in TOKENIZER_FILES or name == "config.json"
            ]
            yield owner.name, _small_files(owner, names, folder)
    for model in dict.fromkeys(planned.checkpoint.model for planned in plan):
        with _trying(f"main of {model}", tried):
            if not is_local(model):
                yield f"main of {model}", _tokenizer_of_main(model, folder)
            elif VOCABULARIES & {path.name for path in Path(model).expanduser().glob("*")}:
                yield model, Path(model).expanduser()


@contextmanager
def _trying(source: str, tried: list[str]) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        tried.append(f"{source} ({reason(error)})")


def _names(checkpoint: Checkpoint, planned: Planned) -> list[str]:
    if checkpoint.path is None:
        return [] if planned.contents is None else planned.contents.names
    return [path.name for path in checkpoint.path.glob("*")] if checkpoint.path.is_dir() else []


def _small_files(planned: Planned, names: Sequence[str], folder: Path) -> Path:
    checkpoint = planned.checkpoint
    return checkpoint.path or hub.fetch_small(checkpoint.model, checkpoint.commit, names, folder)


def _tokenizer_of_main(repository: str, folder: Path) -> Path:
    commit = hub.list_revisions(repository).get("main")
    if commit is None:
        raise FileNotFoundError(f"{repository} has no branch main")
    names = [file.name for file in hub.list_files(repository, commit)]
    wanted = [name for name in names if name in TOKENIZER_FILES or name == "config.json"]
    if not VOCABULARIES & set(wanted):
        raise FileNotFoundError("it has no files of a tokenizer")
    return hub.fetch_small(repository, commit, wanted, folder)


def empty_text() -> ProbeText:
    """No text at all: where nothing is to be measured."""
    return ProbeText(torch.zeros(0, 0, dtype=torch.int64))
