"""The text of a sweep, tokenized for each of its models."""

import hashlib
import tempfile
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from inspect import signature
from itertools import tee
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from embedgeo.capture.layers import resolve_layers
from embedgeo.capture.structure import measured_model
from embedgeo.checkpoints import hub, is_local, loading
from embedgeo.checkpoints.files import TOKENIZER_FILES, VOCABULARIES, StoredFile, hashed_file
from embedgeo.checkpoints.loading import load_config, placement
from embedgeo.formatting import listed, reason
from embedgeo.functional import types_by_frequency
from embedgeo.sweep.plan import Planned
from embedgeo.sweep.settings import SweepSettings
from embedgeo.text import (
    Documents,
    SpelledWords,
    TokenizedText,
    cut_texts,
    hash_ids,
    hashing,
    tokenize_joined,
    tokenize_texts,
)

_MASKED_SHARE = 0.15


class Batch(NamedTuple):
    """Some of the texts, each a row, padded on the right; all of shape (texts, positions).

    Attributes:
        token_ids: int64.
        mask: bool, False = padding; None where there is none.
        masked: for an encoder, the tokens that its loss is computed at; bool.
        word_ids: if asked for, the number of each token's word in its text, int64; -1 for tokens of no word.
        word_types: likewise, the type of each token's word, or -1.
    """

    token_ids: Tensor
    mask: Tensor | None = None
    masked: Tensor | None = None
    word_ids: Tensor | None = None
    word_types: Tensor | None = None


@dataclass(frozen=True)
class ProbeText:
    """The tokens that every checkpoint of a model is measured on: sequences of one length, or texts of several.

    Attributes:
        token_ids: of all texts in a row, shape (n,), int64.
        lengths: number of tokens of each text, int64.
        masked: for an encoder, the tokens that its loss is computed at; bool, shape of ``token_ids``.
        mask_token_id: for an encoder, the token that replaces these.
        pad_token_id: the token that shorter texts of a batch are filled up with.
        words: the word of each token, if asked for.
        token_texts: each token type as text, if tables of token types are asked for; or each type of words.
        type_sizes: mean number of tokens of the words of each type.
        occurrence_types: those of which occurrences are kept, if tables of token types are asked for.
        num_cut: how many texts were longer and have been cut.
        text_sha256: hash of the documents that it was made from; of a dataset, of the texts taken from it.
    """

    token_ids: Tensor
    lengths: Tensor
    masked: Tensor | None = None
    mask_token_id: int | None = None
    pad_token_id: int = 0
    words: SpelledWords | None = None
    token_texts: Mapping[int, str] = field(default_factory=dict)
    type_sizes: Mapping[int, float] = field(default_factory=dict)
    occurrence_types: tuple[int, ...] = ()
    num_cut: int = 0
    text_sha256: str = ""

    @property
    def is_even(self) -> bool:
        """Whether all texts have the same length, as sequences have."""
        return len(self.lengths.unique()) <= 1

    @property
    def sha256(self) -> str:
        """The sha256 of the tokens and their texts."""
        if self.is_even:
            return hash_ids(self.token_ids.view(len(self.lengths), -1))
        return hash_ids(torch.cat((self.lengths, self.token_ids)))

    def batches(self, batch_size: int, rank: int = 0, world_size: int = 1) -> list[Batch]:
        """The batches of one rank: every ``world_size``-th of all batches.

        Texts of several lengths are sorted by length into batches, which then are put into a random order, always the
        same one: a metric that samples rows, or takes them in turn, does not get those of the shortest texts first.

        Raises:
            ValueError: there are fewer batches than ranks.
        """
        groups = self.lengths.argsort(stable=True).split(batch_size)
        if len(groups) < world_size:
            raise ValueError(
                f"batch_size must leave a batch to each of {world_size} processes; {len(self.lengths)} sequences "
                f"make {len(groups)}. Take a smaller one, or more tokens."
            )
        order = torch.arange(len(groups))
        if not self.is_even:
            order = torch.randperm(len(groups), generator=torch.Generator().manual_seed(0))
        starts = self.lengths.cumsum(0) - self.lengths
        return [
            self._batch(self.lengths[texts], starts[texts]) for texts in (groups[i] for i in order[rank::world_size])
        ]

    def _batch(self, lengths: Tensor, starts: Tensor) -> Batch:
        """A batch of the texts of these lengths, which start at these places."""
        positions = torch.arange(int(lengths.max()))
        real = positions < lengths[:, None]
        places = torch.where(real, starts[:, None] + positions, 0)

        def padded(values: Tensor | None, fill: int) -> Tensor | None:
            return None if values is None else values[places].masked_fill(~real, fill)

        token_ids = self.token_ids[places].masked_fill(~real, self.pad_token_id)
        word_ids, types = (None, None) if self.words is None else (self.words.word_ids, self.words.word_types)
        word_ids = padded(word_ids, -1)
        if word_ids is not None:  # numbered over all texts
            first = torch.where(word_ids < 0, len(self.token_ids), word_ids).amin(1, keepdim=True)
            word_ids = torch.where(word_ids < 0, -1, word_ids - first)
        mask = None if bool(real.all()) else real
        return Batch(token_ids, mask, padded(self.masked, 0), word_ids, padded(types, -1))


def choose_masked(token_ids: Tensor, special: Sequence[int], seed: int = 0) -> Tensor:
    """Choose 15 % of the tokens that are not special, always the same ones; bool, shape of ``token_ids``."""
    drawn = torch.rand(token_ids.shape, generator=torch.Generator().manual_seed(seed)) < _MASKED_SHARE
    return drawn & ~torch.isin(token_ids, torch.tensor(list(special), dtype=token_ids.dtype))


def require_fit(model: nn.Module, text: ProbeText, settings: SweepSettings) -> None:
    """Check that a model has the layers, positions and embeddings that are to be measured.

    Raises:
        ValueError: it lacks some.
    """
    resolve_layers(model, settings.layer_patterns)
    require_vocabulary(model, text.token_ids)
    if settings.device_map is not None:
        placement(model, settings.device_map)
    measured = measured_model(model)
    if not loading.has_own(measured, "forward"):
        raise ValueError(
            f"model_class must be a model that can be run; {type(measured).__name__} has neither forward nor "
            "predict_step. Give it a forward that takes token ids of shape (sequences, positions)."
        )
    if settings.unit != "sequence" and not _takes_mask(measured):
        raise ValueError(
            f"unit must be 'sequence' for a model that takes no attention_mask, as texts of several lengths need one; "
            f"{type(measured).__name__} takes none, and unit is {settings.unit!r}."
        )
    longest_text = int(text.lengths.max())
    longest = getattr(getattr(measured, "config", None), "max_position_embeddings", None)
    if isinstance(longest, int):
        longest -= _num_unused_positions(measured)
    else:
        longest = _longest(measured, text.token_ids[:longest_text].view(1, -1))
    if longest_text > longest > 0:
        raise ValueError(f"seq_len must be at most the model's {longest} positions; got {settings.seq_len}.")


def _takes_mask(model: nn.Module) -> bool:
    return isinstance(model, PreTrainedModel) and "attention_mask" in signature(model.forward).parameters


def _num_unused_positions(model: nn.Module) -> int:
    """Positions up to that of padding, which RoBERTa and its kind have in the same table: tokens get later ones."""
    tables = (module for name, module in model.named_modules() if name.endswith("position_embeddings"))
    return max(
        (1 + table.padding_idx for table in tables if getattr(table, "padding_idx", None) is not None), default=0
    )


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


Identity = tuple[str, ...]
"""The kind of a tokenizer, and the names and hashes of its files."""


class MissingTokenizerError(ValueError):
    """A model has no files of a tokenizer."""


class Found(NamedTuple):
    """A tokenizer, and what tells it from others."""

    tokenizer: PreTrainedTokenizerBase
    identity: Identity


def find_tokenizers(
    models: Mapping[str, Sequence[Planned]], settings: SweepSettings, folder: Path
) -> tuple[dict[str, Found], list[str]]:
    """The tokenizer of each model, and sentences about models that have none and so get that of the first other one.

    Args:
        models: the checkpoints of each.
        settings: of the sweep.
        folder: files are fetched into it.

    Raises:
        ValueError: there is none, or one does not load.
    """
    found: dict[str, Found] = {}
    missing: list[MissingTokenizerError] = []
    by_files: dict[tuple[StoredFile, ...], Found] = {}  # as listed, so that they need not be fetched
    for model, plan in models.items():
        files = () if settings.tokenizer else _listed_files(plan)
        try:
            found[model] = by_files.get(files) or find_tokenizer(plan, settings, folder)
            if files:
                by_files[files] = found[model]
        except MissingTokenizerError as error:
            missing.append(error)
    if not found:
        raise missing[0]
    lender = next(iter(found))
    without = [model for model in models if model not in found]
    lines = [f"{model} has no tokenizer: that of {lender} is used; name another by tokenizer=" for model in without]
    return {model: found.get(model, found[lender]) for model in models}, lines


def find_tokenizer(plan: Sequence[Planned], settings: SweepSettings, folder: Path) -> Found:
    """The tokenizer asked for, else that of the first checkpoint that has one, else that of ``main`` or of the folder.

    Raises:
        MissingTokenizerError: there is none.
        ValueError: it does not load.
    """
    tried: list[str] = []
    kind: type[ValueError] = MissingTokenizerError
    for source, locate in _tokenizer_sources(plan, settings, folder):
        try:
            path = locate()
            tokenizer = loading.load_tokenizer(path, trust_remote_code=settings.trust_remote_code)
            return Found(tokenizer, _identity(tokenizer, path))
        except Exception as error:
            tried.append(f"{source} ({reason(error)})")
            if not isinstance(error, FileNotFoundError) or settings.tokenizer is not None:
                kind = ValueError
    models = listed(list(dict.fromkeys(planned.checkpoint.model for planned in plan)))
    found = f"none loads: {'; '.join(tried)}" if tried else f"{models} has no files of one, nor have its checkpoints"
    raise kind(
        f"a tokenizer must come from tokenizer=, the checkpoints or main; {found}. Name a folder, a repository or a "
        "tokenizer.json by tokenizer=."
    )


def _listed_files(plan: Sequence[Planned]) -> tuple[StoredFile, ...]:
    """The files of the first checkpoint's own tokenizer and ``config.json``, which may tell its kind.

    Empty where it has none, or they are not listed.
    """
    files = () if plan[0].contents is None else plan[0].contents.others
    return files if any(file.name in VOCABULARIES for file in files) else ()


def _identity(tokenizer: PreTrainedTokenizerBase, path: Path) -> Identity:
    files = [path] if path.is_file() else sorted(path / name for name in TOKENIZER_FILES if (path / name).is_file())
    return type(tokenizer).__name__, *(f"{file.name} {hashed_file(file).digest}" for file in files)


def _tokenizer_sources(
    plan: Sequence[Planned], settings: SweepSettings, folder: Path
) -> Iterator[tuple[str, Callable[[], Path]]]:
    """Where a tokenizer may come from, and what returns the folder with its files."""
    if settings.tokenizer is not None:
        yield settings.tokenizer, partial(_tokenizer_of, settings.tokenizer, folder)
        return
    owner = next((planned for planned in plan if VOCABULARIES & set(_file_names(planned))), None)
    if owner is not None:
        yield owner.name, partial(small_files, owner, _of_tokenizer(_file_names(owner)), folder)
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


def small_files(planned: Planned, names: Sequence[str], folder: Path) -> Path:
    """The checkpoint's own folder or file; of one on the Hub, some of its files, fetched into ``folder``."""
    checkpoint = planned.checkpoint
    return checkpoint.path or hub.fetch_small(checkpoint.model, checkpoint.commit, names, folder)


_LEAST_LETTERS = 3


def frequent_types(
    text: TokenizedText, spelled: Mapping[int, str], special: Collection[int], settings: SweepSettings
) -> tuple[int, ...]:
    """The token types that `embedgeo.functional.types_by_frequency` chooses, the same at every layer and checkpoint.

    They have at least three characters beside white space, and are no special tokens.

    Args:
        text: the tokens of all texts.
        spelled: the types as texts.
        special: ids of tokens that stand for no text; words have none.
        settings: of the sweep, which say what a row is and what is left out.
    """
    types, counts = _rows(text, settings).unique(return_counts=True)
    is_text = [
        len(spelled[token_id].strip()) >= _LEAST_LETTERS and (text.words is not None or token_id not in special)
        for token_id in types.tolist()
    ]
    chosen = types_by_frequency(counts, torch.tensor(is_text, dtype=torch.bool))
    return tuple(types[chosen].tolist())


def counting(text: TokenizedText, settings: SweepSettings) -> Tensor:
    """Which tokens count, shape (n,), bool."""
    first = (text.lengths.cumsum(0) - text.lengths).repeat_interleave(text.lengths)
    kept = torch.arange(len(text.token_ids)) - first >= settings.skip_first_positions
    return kept & ~torch.isin(text.token_ids, torch.tensor(list(settings.ignore_token_ids), dtype=torch.int64))


def _rows(text: TokenizedText, settings: SweepSettings) -> Tensor:
    """The type of each row that counts."""
    kept = counting(text, settings)
    if text.words is not None:
        words = torch.stack((text.words.word_types, text.words.word_ids))
        return words[:, kept & (text.words.word_ids >= 0)].unique(dim=1)[0]
    places = kept.nonzero().flatten()
    if settings.rows in ("first", "last"):
        of_text = torch.arange(len(text.lengths)).repeat_interleave(text.lengths)[places]
        is_end = of_text.diff(prepend=of_text.new_tensor([-1])) != 0
        places = places[is_end if settings.rows == "first" else is_end.roll(-1)]  # the first one begins a text, too
    return text.token_ids[places]


def prepare_texts(
    documents: Documents, plan: Sequence[Planned], settings: SweepSettings
) -> tuple[dict[str, ProbeText], list[str]]:
    """Tokenize the text for each model of a plan, and check that the model can be measured on it.

    Models with the same tokenizer share what it gives.

    Returns:
        The text of each model; and sentences about models that have no tokenizer of their own.

    Raises:
        ValueError: no tokenizer, or a text or layers that do not fit a model.
    """
    models: dict[str, list[Planned]] = {}
    for planned in plan:
        models.setdefault(planned.checkpoint.model, []).append(planned)
    _require_class(plan, settings)
    limits: dict[str, Any] = {"min_words": settings.min_words, "max_words": settings.max_words}
    (cut,) = tee(cut_texts(documents, settings.unit, share=settings.sample, **limits), 1)  # read once, copied for each
    texts: dict[str, ProbeText] = {}
    made: dict[tuple[bool, Identity], ProbeText] = {}
    fitting: dict[tuple[str, Identity], ProbeText] = {}  # by the configuration of a model
    with tempfile.TemporaryDirectory(prefix="embedgeo-") as name:
        folder = Path(name)
        tokenizers, lines = find_tokenizers(models, settings, folder)
        for each, its_plan in models.items():
            tokenizer, identity = tokenizers[each]
            config = next((planned.contents.config_digest for planned in its_plan if planned.contents), "")
            if config and (config, identity) in fitting:
                texts[each] = fitting[config, identity]
                continue
            model, for_encoder = _first_model(its_plan, settings, folder)
            if (for_encoder, identity) not in made:
                prepared = _prepare(copy(cut), tokenizer, settings, for_encoder=for_encoder)
                if not documents.is_streamed:
                    prepared = replace(prepared, text_sha256=documents.sha256)
                made[for_encoder, identity] = prepared
            text = texts[each] = made[for_encoder, identity]
            if model is not None:
                require_fit(model, text, settings)
                fitting[config, identity] = text
    return texts, lines


def _prepare(
    texts: Iterable[str], tokenizer: PreTrainedTokenizerBase, settings: SweepSettings, *, for_encoder: bool
) -> ProbeText:
    digest = hashlib.sha256()
    tokenized = _tokenized(hashing(texts, digest), tokenizer, settings, for_encoder=for_encoder)
    token_ids, words = tokenized.token_ids, tokenized.words
    if words is not None:
        spelled = dict(enumerate(words.spelled))
    else:
        types = token_ids.unique().tolist() if settings.token_tables else []
        spelled = {i: str(tokenizer.decode([i])) for i in types}
    is_masked = for_encoder and tokenizer.mask_token_id is not None
    padding = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
    known = int(token_ids.max())  # a token that was added for padding may have no embedding
    return ProbeText(
        token_ids,
        tokenized.lengths,
        choose_masked(token_ids, tokenizer.all_special_ids) if is_masked else None,
        tokenizer.mask_token_id if is_masked else None,
        next(token_id for token_id in padding if token_id is not None and token_id <= known),
        words,
        spelled,
        _type_sizes(tokenized, settings),
        frequent_types(tokenized, spelled, tokenizer.all_special_ids, settings) if settings.token_tables else (),
        tokenized.num_cut,
        digest.hexdigest(),
    )


def _tokenized(
    texts: Iterable[str], tokenizer: PreTrainedTokenizerBase, settings: SweepSettings, *, for_encoder: bool
) -> TokenizedText:
    options: dict[str, Any] = {
        "num_tokens": settings.num_tokens,
        "special_tokens": settings.special_tokens,
        "with_words": settings.rows == "words",
    }
    if settings.unit != "sequence":
        return tokenize_texts(texts, tokenizer, max_length=settings.seq_len, **options)
    return tokenize_joined(texts, tokenizer, seq_len=settings.seq_len, for_encoder=for_encoder, **options)


def _type_sizes(text: TokenizedText, settings: SweepSettings) -> Mapping[int, float]:
    """Mean number of tokens, of those that count, of the words of each type."""
    if text.words is None:
        return {}
    word_ids, types = text.words.word_ids, text.words.word_types
    kept = (word_ids >= 0) & counting(text, settings)
    occurrences = torch.stack((types, word_ids))[:, kept].unique(dim=1)[0].bincount()
    sizes = types[kept].bincount() / occurrences
    return dict(enumerate(sizes.tolist()))  # NaN for types of which nothing counts


def _require_class(plan: Sequence[Planned], settings: SweepSettings) -> None:
    files = list(filter(None, map(_lightning_file, plan)))
    if files and settings.model_class is None:
        raise ValueError(f"model_class must name the LightningModule of {files[0]}; got none.")
    if settings.model_class is not None:
        loading.import_class(settings.model_class)


def _lightning_file(planned: Planned) -> Path | None:
    path = planned.checkpoint.path
    return path if path and path.is_file() and not planned.error else None


def _first_model(plan: Sequence[Planned], settings: SweepSettings, folder: Path) -> tuple[nn.Module | None, bool]:
    """The first model of the plan that loads, without weights if possible, and whether it is an encoder.

    The model is None if none loads: each will be tried again, and its failure recorded.
    """
    trusted = settings.trust_remote_code
    for planned in plan:
        try:
            if settings.model_class is not None and (path := _lightning_file(planned)):
                dtype = getattr(torch, settings.dtype)
                loaded = loading.load_lightning(path, settings.model_class, dtype=dtype)
                return loaded.model, loaded.is_encoder
            config = load_config(small_files(planned, ["config.json"], folder), trust_remote_code=trusted)
            return loading.empty_model(config, trust_remote_code=trusted), loading.is_encoder(config)
        except Exception:  # recorded when it fails again
            continue
    return None, False
