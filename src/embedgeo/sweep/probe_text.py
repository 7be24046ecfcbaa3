"""The text that the models of a sweep are measured on, and whether they fit it."""

import tempfile
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from embedgeo.capture.layers import resolve_layers
from embedgeo.capture.structure import measured_model
from embedgeo.checkpoints import hub, is_local, loading
from embedgeo.checkpoints.configuration import load_config
from embedgeo.checkpoints.devices import placement
from embedgeo.checkpoints.files import TOKENIZER_FILES, VOCABULARIES
from embedgeo.results.wording import listed, reason
from embedgeo.sweep.plan import Planned
from embedgeo.sweep.settings import SweepSettings
from embedgeo.text import tokenize_sequences

_MASKED_SHARE = 0.15


@dataclass(frozen=True)
class ProbeText:
    """The tokens that every checkpoint is measured on.

    Attributes:
        token_ids: shape (sequences, seq_len); without sequences if nothing is to be measured.
        masked: for an encoder, the tokens that its loss is computed at; bool, shape of ``token_ids``.
        mask_token_id: for an encoder, the token that replaces these.
        token_texts: each token type as text, if tables of token types are asked for.
    """

    token_ids: Tensor = field(default_factory=lambda: torch.zeros(0, 0, dtype=torch.int64))
    masked: Tensor | None = None
    mask_token_id: int | None = None
    token_texts: Mapping[int, str] = field(default_factory=dict)

    def batches(self, batch_size: int, rank: int = 0, world_size: int = 1) -> list[tuple[Tensor, Tensor | None]]:
        """The batches of one rank, as token ids and masked tokens: every ``world_size``-th of all batches.

        Raises:
            ValueError: there are fewer batches than ranks.
        """
        ids = self.token_ids.split(batch_size)
        if len(ids) < world_size:
            raise ValueError(
                f"batch_size must leave a batch to each of {world_size} processes; {len(self.token_ids)} sequences "
                f"make {len(ids)}. Take a smaller one, or more tokens."
            )
        masked = [None] * len(ids) if self.masked is None else self.masked.split(batch_size)
        return list(zip(ids, masked, strict=True))[rank::world_size]


def choose_masked(token_ids: Tensor, special: Sequence[int], seed: int = 0) -> Tensor:
    """Choose 15 % of the tokens that are not special, always the same ones; bool, shape of ``token_ids``."""
    drawn = torch.rand(token_ids.shape, generator=torch.Generator().manual_seed(seed)) < _MASKED_SHARE
    return drawn & ~torch.isin(token_ids, torch.tensor(list(special), dtype=token_ids.dtype))


def prepare_text(documents: Sequence[str], plan: Sequence[Planned], settings: SweepSettings) -> ProbeText:
    """Tokenize the text for the models of a plan, and check that a model can be measured on it.

    Raises:
        ValueError: no tokenizer, or a text or layers that do not fit the model.
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
    """Check that a model has the layers, positions and embeddings that are to be measured.

    Raises:
        ValueError: it lacks some.
    """
    resolve_layers(model, settings.layer_patterns)
    require_vocabulary(model, token_ids)
    if settings.device_map is not None:
        placement(model, settings.device_map)
    measured = measured_model(model)
    if not loading.has_own(measured, "forward"):
        raise ValueError(
            f"model_class must be a model that can be run; {type(measured).__name__} has neither forward nor "
            "predict_step. Give it a forward that takes token ids of shape (sequences, positions)."
        )
    longest = getattr(getattr(measured, "config", None), "max_position_embeddings", None)
    if not isinstance(longest, int):
        longest = _longest(measured, token_ids)
    if settings.seq_len > longest > 0:
        raise ValueError(f"seq_len must be at most the model's {longest} positions; got {settings.seq_len}.")


def _longest(model: nn.Module, token_ids: Tensor) -> int:
    """Positions of the first sequence that a model can be run on: all that are asked for, or fewer."""

    def fails(num_positions: int) -> bool:
        try:
            model(token_ids[:1, :num_positions])
        except Exception:
            return True
        return False

    num_positions = token_ids.shape[1]
    if any(parameter.is_meta for parameter in model.parameters()):
        return num_positions
    with torch.inference_mode():
        return bisect_left(range(1, num_positions + 1), True, key=fails) if fails(num_positions) else num_positions


def require_vocabulary(model: nn.Module, token_ids: Tensor) -> None:
    """Check that a model has an embedding of every token.

    Raises:
        ValueError: it lacks some.
    """
    known = loading.num_token_types(model)
    if known is not None and int(token_ids.max()) >= known:
        raise ValueError(
            f"tokenizer must give ids below the {known} that the model embeds; it gives {int(token_ids.max())}. "
            "Name the model's own by tokenizer=."
        )


def _first_model(plan: Sequence[Planned], settings: SweepSettings, folder: Path) -> tuple[nn.Module | None, bool]:
    """The first model of the plan that loads, without weights if possible, and whether it is an encoder.

    The model is None if none loads: each will be tried again, and its failure recorded.
    """
    files = {
        planned.name: path
        for planned in plan
        if (path := planned.checkpoint.path) and path.is_file() and not planned.error
    }
    if files and settings.model_class is None:
        raise ValueError(f"model_class must name the LightningModule of {next(iter(files))}; got none.")
    if settings.model_class is not None:
        loading.import_class(settings.model_class)
    trusted = settings.trust_remote_code
    for planned in plan:
        try:
            if settings.model_class is not None and planned.name in files:
                dtype = getattr(torch, settings.dtype)
                loaded = loading.load_lightning(files[planned.name], settings.model_class, dtype=dtype)
                return loaded.model, loaded.is_encoder
            config = load_config(_small_files(planned, ["config.json"], folder), trust_remote_code=trusted)
            return loading.empty_model(config, trust_remote_code=trusted), loading.is_encoder(config)
        except Exception:  # recorded when it fails again
            continue
    return None, False


def find_tokenizer(plan: Sequence[Planned], settings: SweepSettings, folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer asked for, else that of the first checkpoint that has one, else that of ``main`` or of the folder.

    Raises:
        ValueError: there is none, or it does not load.
    """
    tried: list[str] = []
    for source, locate in _tokenizer_sources(plan, settings, folder):
        try:
            return loading.load_tokenizer(locate(), trust_remote_code=settings.trust_remote_code)
        except Exception as error:
            tried.append(f"{source} ({reason(error)})")
    models = listed(list(dict.fromkeys(planned.checkpoint.model for planned in plan)))
    found = f"none loads: {'; '.join(tried)}" if tried else f"{models} has no files of one, nor have its checkpoints"
    raise ValueError(
        f"a tokenizer must come from tokenizer=, the checkpoints or main; {found}. Name a folder, a repository or a "
        "tokenizer.json by tokenizer=."
    )


def _tokenizer_sources(
    plan: Sequence[Planned], settings: SweepSettings, folder: Path
) -> Iterator[tuple[str, Callable[[], Path]]]:
    """Where a tokenizer may come from, and what returns the folder with its files."""
    if settings.tokenizer is not None:
        yield settings.tokenizer, partial(_tokenizer_of, settings.tokenizer, folder)
        return
    owner = next((planned for planned in plan if VOCABULARIES & set(_file_names(planned))), None)
    if owner is not None:
        yield owner.name, partial(_small_files, owner, _of_tokenizer(_file_names(owner)), folder)
    for model in dict.fromkeys(planned.checkpoint.model for planned in plan):
        if not is_local(model):
            yield f"main of {model}", partial(_tokenizer_of, model, folder)
        elif VOCABULARIES & {path.name for path in Path(model).expanduser().glob("*")}:
            yield model, partial(_tokenizer_of, model, folder)


def _tokenizer_of(source: str, folder: Path) -> Path:
    """A local folder or file itself; of a repository, the files of its branch ``main``, fetched into ``folder``."""
    if is_local(source):
        return Path(source).expanduser()
    commit = hub.list_revisions(source).get("main")
    if commit is None:
        raise FileNotFoundError(f"{source} has no branch main")
    names = _of_tokenizer(file.name for file in hub.list_files(source, commit))
    if not VOCABULARIES & set(names):
        raise FileNotFoundError("it has no files of a tokenizer")
    return hub.fetch_small(source, commit, names, folder)


def _of_tokenizer(names: Iterable[str]) -> list[str]:
    return [name for name in names if name in TOKENIZER_FILES or name == "config.json"]


def _file_names(planned: Planned) -> list[str]:
    path = planned.checkpoint.path
    if path is None:
        return [] if planned.contents is None else [file.name for file in planned.contents.files]
    return [file.name for file in path.glob("*")]


def _small_files(planned: Planned, names: Sequence[str], folder: Path) -> Path:
    """The checkpoint's own folder or file; of one on the Hub, some of its files, fetched into ``folder``."""
    checkpoint = planned.checkpoint
    return checkpoint.path or hub.fetch_small(checkpoint.model, checkpoint.commit, names, folder)
