"""The text of a sweep, tokenized for each of its models."""

import hashlib
import tempfile
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from inspect import signature
from itertools import tee
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from embedgeo.capture.layers import resolve_layers
from embedgeo.capture.structure import input_embedding, measured_model
from embedgeo.checkpoints import hub, loading
from embedgeo.checkpoints.files import TOKENIZER_FILES, VOCABULARIES, StoredFile, hashed_file
from embedgeo.checkpoints.iteration import require_model_class
from embedgeo.checkpoints.sources import Checkpoint, is_local
from embedgeo.formatting import listed, reason
from embedgeo.sweep.settings import SPECIAL, SweepSettings
from embedgeo.text.reading import Documents, cut_texts, hashing
from embedgeo.text.tokenizing import (
    SpelledWords,
    TokenizedText,
    chosen_special_tokens,
    hash_ids,
    tokenize_joined,
    tokenize_texts,
)

# of a word's continuation (WordPiece) or start (byte-level BPE, SentencePiece)
_MARKS = ("##", "Ġ", "▁")
_TOKENIZER_FILES = sorted({*TOKENIZER_FILES, "config.json"})
Identity = tuple[str, ...]  # the kind of a tokenizer, and the names and hashes of its files


class Batch(NamedTuple):
    """Texts as rows, padded on the right; all of shape (texts, positions)."""

    token_ids: Tensor
    mask: Tensor | None  # False = padding; None where there is none
    masked: Tensor | None  # for an encoder, the tokens that its loss is computed at
    word_ids: Tensor | None = None  # numbers of words; -1 for tokens of no word
    word_types: Tensor | None = None

    def to(self, device: torch.device) -> "Batch":
        """The batch on a device."""
        others = (None if part is None else part.to(device) for part in self[1:])
        return Batch(self.token_ids.to(device), *others)


@dataclass(frozen=True)
class ProbeText:
    """The tokens that every checkpoint of a model is measured on: sequences of one length, or texts
    of several.
    """

    token_ids: Tensor  # of all texts in a row, shape (n,), int64
    lengths: Tensor  # number of tokens of each text, int64
    # for an encoder, the tokens that its loss is computed at; bool, shape (n,)
    masked: Tensor | None = None
    mask_token_id: int | None = None  # which replaces these
    words: SpelledWords | None = None  # of each token, if asked for
    types: Tensor | None = None  # of each token, where these are not the ids
    # by token type, or type of words, for tables of them
    token_texts: Mapping[int, str] = field(default_factory=dict)
    num_cut: int = 0  # texts that were longer
    skip_first_positions: int = 0  # of each text, which are no rows
    ignore_token_ids: tuple[int, ...] = ()  # which are no rows
    begins_with: str = ""  # what each text of a decoder begins with, in words
    special_token_ids: Sequence[int] = ()
    text_sha256: str = ""  # of the documents, or of the texts taken from a dataset

    @property
    def is_even(self) -> bool:
        """True where all texts have the same length, as sequences have."""
        return len(self.lengths.unique()) <= 1

    @property
    def counted(self) -> Tensor:
        """Marks of the tokens that count, shape (n,)."""
        starts = (self.lengths.cumsum(0) - self.lengths).repeat_interleave(self.lengths)
        places = torch.arange(len(self.token_ids)) - starts
        ignored = torch.tensor(self.ignore_token_ids, dtype=torch.int64)
        return (places >= self.skip_first_positions) & ~torch.isin(self.token_ids, ignored)

    @property
    def type_counts(self) -> Tensor:
        """Number of tokens of each type, those that are special apart."""
        types = self.token_ids if self.types is None else self.types
        special = self.token_ids.new_tensor(self.special_token_ids)
        return types[~torch.isin(self.token_ids, special)].unique(return_counts=True)[1]

    @property
    def type_sizes(self) -> Mapping[int, float]:
        """Mean number of tokens that count in the words of each type; NaN where none does."""
        if self.words is None:
            return {}
        counts = self.counted & (self.words.word_ids >= 0)
        types = self.words.word_types[counts]
        words = torch.stack((types, self.words.word_ids[counts])).unique(dim=1)[0]
        return dict(enumerate((types.bincount() / words.bincount()).tolist()))

    @property
    def sha256(self) -> str:
        """The sha256 of the tokens, of their texts, and of what they count for."""
        of_words = [] if self.words is None else [self.words.word_ids, self.words.word_types]
        parts = (self.lengths, self.token_ids, self.counted, self.masked, self.types, *of_words)
        return hash_ids(torch.cat([part.long() for part in parts if part is not None]))

    def batches(self, batch_size: int, fill: int) -> list[Batch]:
        """Batches of texts sorted by length; the token ``fill`` fills up the shorter ones."""
        groups = self.lengths.argsort(stable=True).split(batch_size)
        batches = torch.arange(len(groups))
        # or else metrics that take rows in turn would get those of the shortest texts first
        if not self.is_even:
            batches = torch.randperm(len(groups), generator=torch.Generator().manual_seed(0))
        starts = self.lengths.cumsum(0) - self.lengths
        return [self._batch(self.lengths[groups[i]], starts[groups[i]], fill) for i in batches]

    def _batch(self, lengths: Tensor, starts: Tensor, fill: int) -> Batch:
        positions = torch.arange(int(lengths.max()))
        real = positions < lengths[:, None]
        places = torch.where(real, starts[:, None] + positions, 0)

        def padded(values: Tensor, fill: int) -> Tensor:
            return values[places].masked_fill(~real, fill)

        token_ids = padded(self.token_ids, fill)
        mask = None if bool(real.all()) else real
        masked = None if self.masked is None else padded(self.masked, 0)
        if self.words is None:
            types = None if self.types is None else padded(self.types, 0)
            return Batch(token_ids, mask, masked, word_types=types)
        words = padded(self.words.word_ids, -1), padded(self.words.word_types, -1)
        return Batch(token_ids, mask, masked, *words)


def prepare_texts(
    documents: Documents, plan: Sequence[Checkpoint], settings: SweepSettings
) -> tuple[dict[str, ProbeText], list[str]]:
    """The text of each model, which it fits; and sentences about models of fewer positions."""
    models = _by_model(plan)
    require_model_class(plan, settings.model_class)
    cut = cut_texts(
        documents,
        settings.unit,
        min_words=settings.min_words,
        max_words=settings.max_words,
        share=settings.sample,
    )
    (cut,) = tee(cut, 1)  # read once, copied for each
    sha256 = "" if documents.is_streamed else documents.sha256
    texts: dict[str, ProbeText] = {}
    prepared: dict[tuple[bool, Identity, int], ProbeText] = {}
    with tempfile.TemporaryDirectory(prefix="embedgeo-") as name:
        folder = Path(name)
        lines: list[str] = []
        for model_name, checkpoints in models.items():
            model = _one_kind_of_model(model_name, checkpoints, settings, folder)
            for_encoder = model is not None and loading.is_encoder_model(model)
            fitted = settings if model is None else _with_positions(settings, model)
            if fitted.length < settings.length:
                lines.append(
                    f"{model_name} has {fitted.length} positions: seq_len is {fitted.length} in "
                    f"place of 512"
                )
            identity: Identity = ()
            if settings.tokens is not None:
                make = partial(_given_tokens, Path(settings.tokens).expanduser(), fitted)
            else:
                tokenizer, identity = find_tokenizer(checkpoints, settings, folder)
                make = partial(_tokenize, copy(cut), tokenizer, fitted, for_encoder, sha256)
            key = for_encoder, identity, fitted.length
            if key not in prepared:
                prepared[key] = make()
            text = prepared[key]
            texts[model_name] = text
            if for_encoder and text.mask_token_id is None:
                lines.append(
                    f"{model_name}: no loss is recorded, as that of an encoder needs a tokenizer "
                    "that names a mask token"
                )
            if model is not None:
                require_fit(model, text, fitted)
                inner = measured_model(model)
                if text.begins_with.endswith("no row") and not loading.has_causal_head(
                    getattr(inner, "config", None)
                ):
                    lines.append(
                        f"{model_name}: {type(inner).__name__} is taken as a decoder: sequences "
                        f"begin with {text.begins_with}. If it is an encoder, give "
                        "--special-tokens bos+eos"
                    )
    return texts, lines


def _by_model(plan: Sequence[Checkpoint]) -> dict[str, list[Checkpoint]]:
    models: dict[str, list[Checkpoint]] = {}
    for checkpoint in plan:
        models.setdefault(checkpoint.model, []).append(checkpoint)
    return models


def require_tokenizers(plan: Sequence[Checkpoint], settings: SweepSettings) -> None:
    """Raise ValueError if a model of the plan that is here needs a tokenizer, and none loads."""
    with tempfile.TemporaryDirectory(prefix="embedgeo-") as folder:
        for model, checkpoints in _by_model(plan).items():
            if settings.tokens is None and is_local(model):
                find_tokenizer(checkpoints, settings, Path(folder))


def _with_positions(settings: SweepSettings, model: nn.Module) -> SweepSettings:
    """The settings with sequences that a model has positions for: of the default length as much as
    it can take.

    A length that was asked for is refused here, unless it only limits texts, which may all be
    shorter.
    """
    most = loading.stated_positions(measured_model(model)) or settings.length
    if settings.length > most and settings.seq_len is None:
        return replace(settings, seq_len=most)
    if settings.length > most and settings.unit == "sequence":
        raise _too_long(most, settings)
    return settings


def _too_long(most: int, settings: SweepSettings) -> ValueError:
    return ValueError(
        f"seq_len must be at most the model's {most} positions; got {settings.length}. Give "
        f"--seq-len {most}."
    )


def _one_kind_of_model(
    name: str, plan: Sequence[Checkpoint], settings: SweepSettings, folder: Path
) -> nn.Module | None:
    """The first model of the plan; ValueError if another run of it needs other texts."""
    runs: dict[str, list[Checkpoint]] = {}
    for checkpoint in plan:
        runs.setdefault(checkpoint.position.series, []).append(checkpoint)
    models = [_first_model(of_run, settings, folder) for of_run in runs.values()]
    kinds = {
        (loading.is_encoder_model(model), loading.stated_positions(measured_model(model)))
        for model in models
        if model is not None
    }
    if len(kinds) > 1:
        raise ValueError(
            f"the runs of a model must take the same texts; {name} has {listed([*runs])}, of which "
            "some are encoders, or have other numbers of positions. Give each as a --model of its "
            "own."
        )
    return next((model for model in models if model is not None), None)


def _first_model(
    plan: Sequence[Checkpoint], settings: SweepSettings, folder: Path
) -> nn.Module | None:
    """The first model of the plan that loads, without weights if possible, if any."""
    trusted = settings.trust_remote_code
    for checkpoint in plan:
        with suppress(Exception):
            if checkpoint.path and checkpoint.path.is_file():
                return checkpoint.load(getattr(torch, settings.dtype))
            config = loading.load_config(
                small_files(checkpoint, ["config.json"], folder), trust_remote_code=trusted
            )
            require_one_side(config)
            return loading.empty_model(config, trust_remote_code=trusted)
    return None


def require_one_side(config: PreTrainedConfig) -> None:
    """Check that a model is of text alone, and not an encoder and a decoder."""
    loading.require_text(config)
    if config.is_encoder_decoder:
        raise ValueError(
            f"a model must be a decoder or an encoder of text; {config.model_type} is both. "
            "Measure it by hand: embedgeo.observe."
        )


def _tokenize(
    texts: Iterable[str],
    tokenizer: PreTrainedTokenizerBase,
    settings: SweepSettings,
    for_encoder: bool,
    sha256: str,
) -> ProbeText:
    flagged = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    special = sorted(flagged.union(tokenizer.all_special_ids))
    ignored = settings.ignore_token_ids
    if SPECIAL in ignored:
        ignored = special
        if not special:
            raise ValueError(
                "ignore_token_ids special needs a tokenizer that names special tokens; it names "
                "none. Give their ids."
            )
    digest = hashlib.sha256()
    tokenize: Callable[..., TokenizedText] = partial(tokenize_texts, max_length=settings.length)
    if settings.unit == "sequence":
        tokenize = partial(tokenize_joined, seq_len=settings.length, for_encoder=for_encoder)
    tokenized = tokenize(
        hashing(texts, digest),
        tokenizer,
        num_tokens=settings.num_tokens,
        special_tokens=settings.special_tokens,
        with_words=settings.rows == "words",
    )
    token_ids = tokenized.token_ids
    begins_with = ""
    num_context = 0
    if not for_encoder:
        before = token_ids[: tokenized.num_before].tolist()
        begins_with, num_context = _beginning(before, tokenizer, settings)
    types = None
    if settings.types == "string":
        types = string_types(token_ids, tokenizer, {*special, *ignored})
    masked = None
    if for_encoder and tokenizer.mask_token_id is not None:
        drawn = torch.rand(token_ids.shape, generator=torch.Generator().manual_seed(0)) < 0.15
        masked = drawn & ~torch.isin(token_ids, torch.tensor(special, dtype=token_ids.dtype))
    return ProbeText(
        token_ids,
        tokenized.lengths,
        masked=masked,
        mask_token_id=None if masked is None else tokenizer.mask_token_id,
        words=tokenized.words,
        types=types,
        token_texts=_token_texts(tokenized, tokenizer, without_marks=types is not None),
        num_cut=tokenized.num_cut,
        skip_first_positions=max(settings.skip_first_positions, num_context),
        ignore_token_ids=tuple(map(int, ignored)),
        begins_with=begins_with,
        special_token_ids=special,
        text_sha256=sha256 or digest.hexdigest(),
    )


def _beginning(
    before: list[int], tokenizer: PreTrainedTokenizerBase, settings: SweepSettings
) -> tuple[str, int]:
    """What each text of a decoder begins with, in words; how many of these tokens are no rows."""
    if before:
        is_context = settings.special_tokens == "default" and not settings.count_special
        row = "no row" if is_context else "a row"
        return f"{tokenizer.decode(before)}, {row}", is_context * len(before)
    usual = chosen_special_tokens(tokenizer, "default")[0]
    return (f"nothing, where the tokenizer puts {tokenizer.decode(usual)}" if usual else ""), 0


def _token_texts(
    tokenized: TokenizedText, tokenizer: PreTrainedTokenizerBase, *, without_marks: bool
) -> dict[int, str]:
    if tokenized.words is not None:
        return dict(enumerate(tokenized.words.spelled))
    texts = {i: str(tokenizer.decode([i])) for i in tokenized.token_ids.unique().tolist()}
    if without_marks:
        return {i: text.removeprefix("##").strip() or text for i, text in texts.items()}
    return texts


def _given_tokens(path: Path, settings: SweepSettings) -> ProbeText:
    """The text of a file of token ids in one row, cut into sequences."""
    rule = (
        "tokens must be a .npy file of token ids, whole numbers from 0 up in one row "
        "(ids.reshape(-1) of sequences without padding, whose length is seq_len)"
    )
    with loading.requiring(rule, str(path)):
        ids = np.load(path, mmap_mode="r", allow_pickle=False)
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise TypeError(f"it has numbers of {ids.dtype}, shape {ids.shape}")
        length = min(settings.length, len(ids))
        num_sequences = min(len(ids), settings.num_tokens) // max(1, length)
        ids = torch.from_numpy(ids[: num_sequences * length].astype(np.int64))
        if not ids.numel() or int(ids.min()) < 0:
            raise ValueError(f"{settings.num_tokens} tokens make no sequence, or one is negative")
    return ProbeText(
        ids,
        torch.full((num_sequences,), length),
        token_texts={i: str(i) for i in ids.unique().tolist()} if settings.token_tables else {},
        skip_first_positions=settings.skip_first_positions,
        ignore_token_ids=tuple(map(int, settings.ignore_token_ids)),
        text_sha256=hashed_file(path).digest,
    )


def string_types(
    token_ids: Tensor, tokenizer: PreTrainedTokenizerBase, apart: Collection[int]
) -> Tensor:
    """The type of each token, by its string without the tokenizer's mark: the least of the ids
    there that have it.

    Ids that are to stay ``apart`` are types of their own.
    """
    ids = token_ids.unique().tolist()
    types = torch.arange(int(token_ids.max()) + 1)
    first: dict[str, int] = {}
    for token_id, piece in zip(ids, tokenizer.convert_ids_to_tokens(ids), strict=True):
        if token_id not in apart:
            mark = next((mark for mark in _MARKS if piece.startswith(mark) and piece != mark), "")
            types[token_id] = first.setdefault(piece.removeprefix(mark), token_id)
    return types[token_ids]


def require_fit(model: nn.Module, text: ProbeText, settings: SweepSettings) -> None:
    """Raise ValueError unless a model has the layers, positions and embeddings that are to be
    measured.
    """
    resolve_layers(model, settings.layer_patterns)
    require_vocabulary(model, text.token_ids)
    network = measured_model(model)
    takes_mask = (
        isinstance(network, PreTrainedModel)
        and "attention_mask" in signature(network.forward).parameters
    )
    if settings.unit != "sequence" and not takes_mask:
        raise ValueError(
            f"unit must be 'sequence' for a model that takes no attention_mask, as texts of "
            f"several lengths need one; "
            f"{type(network).__name__} takes none, and unit is {settings.unit!r}."
        )
    needed = int(text.lengths.max())
    most = loading.stated_positions(network)
    if most is not None and needed > most:
        raise _too_long(most, settings)
    if not any(parameter.is_meta for parameter in network.parameters()):
        rule = (
            "a model must be one that can be run on sequences of seq_len tokens, of shape "
            "(sequences, positions), as on smaller ones it may be"
        )

        def require_order(module: nn.Module, args: tuple[Any, ...]) -> None:
            if args and args[0].shape[:2] == (1, needed):
                raise ValueError(
                    f"{type(module).__name__} takes (positions, sequences), batch_first=False: "
                    "transpose the embeddings in forward, and the logits back"
                )

        for module in network.modules():
            if isinstance(module, nn.MultiheadAttention | nn.RNNBase) and not module.batch_first:
                module.register_forward_pre_hook(require_order)
        with torch.inference_mode(), loading.requiring(rule, needed):
            network(text.token_ids[:needed][None])


def require_vocabulary(model: nn.Module, token_ids: Tensor) -> None:
    """Raise ValueError unless a model has an embedding of every token."""
    known = getattr(input_embedding(model), "num_embeddings", None)
    if known is not None and int(token_ids.max()) >= known:
        raise ValueError(
            f"tokenizer must give ids below the {known} that the model embeds; it gives "
            f"{int(token_ids.max())}. Name the model's own by --tokenizer."
        )


def find_tokenizer(
    plan: Sequence[Checkpoint], settings: SweepSettings, folder: Path
) -> tuple[PreTrainedTokenizerBase, Identity]:
    """The tokenizer asked for, else that of the first checkpoint that has one, else of ``main`` or
    of the folder.
    """
    model = plan[0].model
    sources: dict[str, str | Checkpoint] = {}
    if settings.tokenizer is not None:
        sources[settings.tokenizer] = settings.tokenizer
    else:
        owners = [each for each in plan if _has_vocabulary(_files(each))]
        for owner in owners[:1]:
            _require_one_tokenizer(owners)
            sources[owner.name] = owner
        if not is_local(model):
            sources[f"main of {model}"] = model
        elif _has_vocabulary(Path(model).expanduser().glob("*")):
            sources[model] = model
    tried: list[str] = []
    for name, source in sources.items():
        try:
            path = _tokenizer_path(source, folder, settings.trust_remote_code)
            tokenizer = loading.load_tokenizer(path, trust_remote_code=settings.trust_remote_code)
        except Exception as error:
            tried.append(f"{name} ({reason(error)})")
            continue
        candidates = [path] if path.is_file() else [path / name for name in sorted(TOKENIZER_FILES)]
        digests = (
            f"{file.name} {hashed_file(file).digest}" for file in candidates if file.is_file()
        )
        return tokenizer, (type(tokenizer).__name__, *digests)
    state = f"{model} has no files of one, nor have its checkpoints"
    if tried:
        state = f"none loads: {'; '.join(tried)}"
    raise ValueError(
        f"a tokenizer must come from --tokenizer, the checkpoints or main; {state}. Name a folder, "
        "a repository or a tokenizer.json by --tokenizer."
    )


def _require_one_tokenizer(owners: Sequence[Checkpoint]) -> None:
    """Check that the tokenizers of checkpoints are of the same files."""
    first, *others = (
        {file.name: file.digest for file in _files(each) if file.name in TOKENIZER_FILES}
        for each in owners
    )
    for owner, digests in zip(owners[1:], others, strict=True):
        if differing := sorted({name for name, _ in first.items() ^ digests.items()}):
            raise ValueError(
                "the checkpoints of a model must have one tokenizer; those of "
                f"{owners[0].name} and {owner.name} differ in {listed(differing)}. Name the one to "
                "take by --tokenizer."
            )


def _tokenizer_path(source: str | Checkpoint, folder: Path, trust_remote_code: bool | None) -> Path:
    """A local folder or file itself; the files of a checkpoint, or of a branch ``main``, fetched
    into ``folder``.
    """
    if isinstance(source, Checkpoint):
        return small_files(source, _TOKENIZER_FILES, folder)
    if is_local(source):
        return Path(source).expanduser()
    if (commit := hub.list_revisions(source).get("main")) is None:
        raise FileNotFoundError(f"{source} has no branch main")
    if not _has_vocabulary(hub.list_files(source, commit)):
        raise FileNotFoundError("it has no files of a tokenizer")
    return hub.fetch_small(source, commit, _TOKENIZER_FILES, folder, with_code=trust_remote_code)


def _has_vocabulary(files: Iterable[StoredFile | Path]) -> bool:
    return any(file.name in VOCABULARIES for file in files)


def _files(checkpoint: Checkpoint) -> Sequence[StoredFile]:
    """The files of a checkpoint that are no weights."""
    return checkpoint.contents.others if checkpoint.contents else ()


def small_files(checkpoint: Checkpoint, names: Sequence[str], folder: Path) -> Path:
    """The checkpoint's own folder or file; of one on the Hub, some of its files, and its code if
    trusted, fetched into ``folder``.
    """
    return checkpoint.path or hub.fetch_small(
        checkpoint.model,
        checkpoint.commit,
        names,
        folder,
        with_code=checkpoint.trust_remote_code,
    )
