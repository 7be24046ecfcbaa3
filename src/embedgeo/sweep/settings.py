"""The settings of a sweep. Imported by the command line: nothing heavy may be imported here."""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from embedgeo.extras import require_extra

SPECIAL = "special"  # in place of the ids of a tokenizer's special tokens
_DEFAULT_SEQ_LEN = 512
_LEAST = {
    **dict.fromkeys(("batch_size", "id_batches", "workers"), 1),
    **dict.fromkeys(("max_words", "min_words"), 0),
}
# that do not change the results; of the text, the hash is recorded
_RUN_OPTIONS = (
    "text",
    "tokens",
    "out",
    "evict",
    "dry_run",
    "device",
    "device_map",
    "on",
    "workers",
    "resources",
)


@dataclass(frozen=True)
class SweepSettings:
    """The options of ``embedgeo sweep``.

    Args:
        model: a repository on the Hub whose branches or tags name steps, or a list of
            repositories, which may name a step each, or a local folder of checkpoints
            (``step100/``, ``checkpoint-100/``, ``*.ckpt``, state dicts as ``step100.pt``, also
            ``.pth``). One without steps is one checkpoint, of step 0: the branch ``main``, or the
            folder itself.
        steps: ``all``; ``log``: the first, the last and those nearest to powers of two; steps, as
            ``0,1,512``; or ``final``: the branch ``main`` of a repository, also of one with steps,
            and a folder that is itself a model; of a folder of checkpoints the last step. A model
            without steps is always taken.
        revisions: take only the branches and tags that match this pattern.
        text: files of text, plain or ``.jsonl`` (field ``"text"``), also as ``.gz``, in UTF-8; or a
            dataset, ``hf://datasets/NAME[/CONFIG][:SPLIT][#COLUMN]``,
            where NAME is ``author/name``; default: Python's documentation. It is read as far as it
            is needed; a plain file is one document, or one every 16,777,216 letters.
        unit: what the model is run on: a ``sequence`` of ``seq_len`` tokens, cut from all documents
            in a row; or one text by itself, of at most ``seq_len`` tokens: a ``line``, a
            ``sentence`` or a ``document``.
        min_words: leave out texts of fewer words, which are separated by white space.
        max_words: leave out texts of more words; 0: none.
        sample: share of the texts to take, drawn at random and always the same ones; with
            ``sequence``, of documents.
        special_tokens: around each text or sequence: ``none``, ``bos``, ``bos+eos`` (an encoder's
            ``[CLS]`` and ``[SEP]``), or ``default``: as the tokenizer adds them, of which a
            decoder's sequences have those before a text, such as BOS.
        count_special: what ``default`` puts before a decoder's text or sequence is rows, too; else
            it only gives context.
        tokenizer: a folder, a ``tokenizer.json`` or a repository; default: that of the checkpoints,
            if they have one, the same files in all; else of ``main``.
        tokens: a ``.npy`` file of token ids in place of a text and a tokenizer: one row, which is
            cut into sequences.
        num_tokens: number of tokens to use, from the start of the text; of texts, as many whole
            ones as fit.
        seq_len: tokens in a sequence, at most those of a text; default: 512, or as many as a model
            has positions. Special tokens are within its length.
        batch_size: sequences in a batch; sampled metrics depend on it.
        layers: ``blocks``, ``hidden_states``, patterns of names, or several, with commas between
            them or as a list.
        rows: what a row is: one of the ``tokens``; the ``mean`` of a sequence's, its ``first`` or
            its ``last``; or one of the ``words``: the mean of a word's tokens.
        types: what a token type is: an ``id`` of the vocabulary; or a ``string``: tokens that
            differ in the tokenizer's mark of a word's start or continuation alone (``##``, ``Ġ``,
            ``▁``) are of one, apart from special tokens and those of ``ignore_token_ids``.
        metrics: makes the metrics of a layer, given its width: ``embedgeo.default_metrics``,
            ``embedgeo.streaming_metrics`` (no tables of token types), or ``package.function``,
            which may be in the working directory. Only its name is recorded: change that with what
            it makes.
        count_range: LO,HI: values of the whole are of the token types that occur LO to HI times.
        spectrum: also compute what needs all eigenvalues, such as the effective rank;
            ``save_samples`` keeps them.
        discard_fraction: share of the largest distance ratios that the fit of TwoNN leaves out.
        id_batches: number of samples that the intrinsic dimension is averaged over.
        anisotropy_batch: also average the anisotropy over batches of this many rows; 0: do not.
        dtype: data type of the weights.
        device: where each model runs: ``cpu`` or ``cuda``; default: ``cuda`` where there is one,
            else ``cpu``.
        device_map: spread each model over the devices of the machine: ``auto``, or a mapping of
            modules to devices as accelerate takes it; what is on ``disk`` is read when it is
            needed.
        skip_first_positions: number of positions to leave out at the start of every sequence.
        ignore_token_ids: tokens to leave out, by their ids; or ``special``: the tokenizer's special
            tokens.
        skip_massive: leave massive rows out of all numbers (true), or those beyond so many times
            the median norm; default: numbers without them have keys that end in
            ``_without_massive``.
        token_tables: also write ``tokens/<name>.parquet``: n, Q, M and V of each token type at each
            layer.
        jackknife: G, the number of groups of whole sequences for standard errors, such as 16; 0:
            there are none. Also writes ``jackknife/<name>.parquet``, from which the report has the
            errors of changes between checkpoints.
        save_samples: also write ``samples/<name>.safetensors``: the sampled rows, the mean and the
            eigenvalues at each layer, see `embedgeo.load_sample`.
        out: the folder; default: ``runs/sweep-<name>``. Sweeps of the same options into one folder
            share it.
        on: ``ray``: measure on the workers of a Ray cluster; this process chooses, copies
            duplicates and writes. Ray's variable ``RAY_ADDRESS`` names it: HOST:PORT of a cluster
            that this machine is a node of, ``auto``, or ``local``, one that is started on this
            machine; without it the cluster is the one that Ray finds, else a local one.
        workers: number of checkpoints that are measured at once on Ray.
        resources: of each worker, as ``{"GPU": 1}``, beside one CPU unless ``CPU`` says otherwise.
        evict: download into the folder of the sweep, and remove each checkpoint once it is
            measured; if false, download into the Hugging Face cache, and keep the files there.
        dry_run: only print the plan.
        model_class: the LightningModule of Lightning checkpoints, as ``package.module.Class``; of
            state dicts a function or class that makes the model, as ``package.module:make``. It is
            refused with folders and repositories.
        trust_remote_code: ``true`` runs code that comes with a repository or folder, ``false``
            takes transformers' own class in its place; default: what comes with code is refused.

    Raises:
        ValueError: an option of the wrong type or outside its range.
    """

    model: str | list[str]
    steps: str | int | list[int] = "all"
    revisions: str = "*"
    text: str | list[str] | tuple[()] = ()
    unit: Literal["sequence", "line", "sentence", "document"] = "sequence"
    min_words: int = 0
    max_words: int = 0
    sample: float = 1.0
    special_tokens: Literal["none", "bos", "bos+eos", "default"] = "default"
    count_special: bool = False
    tokenizer: str | None = None
    tokens: str | None = None
    num_tokens: int = 65536
    seq_len: int | None = None
    batch_size: int = 8
    layers: str | list[str] = "blocks"
    rows: Literal["tokens", "mean", "first", "last", "words"] = "tokens"
    types: Literal["id", "string"] = "id"
    metrics: str = "embedgeo.default_metrics"
    count_range: Sequence[int] = ()
    spectrum: bool = False
    discard_fraction: float = 0.1
    id_batches: int = 1
    anisotropy_batch: int = 0
    dtype: Literal["float32", "float64", "bfloat16", "float16"] = "float32"
    device: Literal["cpu", "cuda"] | None = None
    device_map: dict[str, Any] | str | None = None
    skip_first_positions: int = 0
    ignore_token_ids: Sequence[int] | str = ()
    skip_massive: bool | float = False
    token_tables: bool = False
    jackknife: int = 0
    save_samples: bool = False
    out: str | None = None
    on: Literal["ray"] | None = None
    workers: int = 1
    resources: dict[str, float] | None = None
    evict: bool = True
    dry_run: bool = False
    model_class: str | None = None
    trust_remote_code: bool | None = None

    def __post_init__(self) -> None:
        for name in ("model", "text", "layers"):
            value: Any = getattr(self, name)
            listed = value if isinstance(value, list | tuple) else [value]
            if not all(isinstance(each, str) for each in listed) or not (listed or name == "text"):
                raise ValueError(f"{name} must be a string or a list of strings; got {value!r}.")
        for option in fields(self):
            choices = choices_of(option.type)
            value = getattr(self, option.name)
            if choices and value not in (*choices, option.default):
                raise ValueError(
                    f"{option.name} must be one of {', '.join(choices)}; got {value!r}."
                )
        for name in ("ignore_token_ids", "count_range"):
            numbers: Any = getattr(self, name)
            if name == "ignore_token_ids" and numbers in (SPECIAL, [SPECIAL]):
                continue
            if not isinstance(numbers, list | tuple) or {*map(type, numbers)} - {int}:
                raise ValueError(f"{name} must be a list of whole numbers; got {numbers!r}.")
        for name, least in _LEAST.items():
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}; got {getattr(self, name)}.")
        skipped = self.skip_first_positions
        if not 0 <= skipped < max(1, self.length):
            raise ValueError(
                f"skip_first_positions must leave some of the {self.length} of seq_len; got "
                f"{skipped}."
            )
        self._require_texts()
        self._require_types()
        if self.on is None and (self.workers != 1 or self.resources):
            raise ValueError(
                "workers and resources say how to measure on Ray; give --on ray with them."
            )
        if self.device_map is not None:
            self._require_device_map()

    def _require_texts(self) -> None:
        """Check which texts are chosen."""
        others = ("text", "tokenizer", "unit", "sample", "special_tokens", "types")
        if self.tokens is not None and (
            any(getattr(self, name) != getattr(SweepSettings, name) for name in others)
            or self.rows == "words"
            or SPECIAL in self.ignore_token_ids
        ):
            raise ValueError(
                f"tokens are ids that need no text; leave out {', '.join(others)}, rows of words, "
                "and ignore_token_ids special."
            )
        if not 0 < self.sample <= 1:
            raise ValueError(
                f"sample must be a share above 0 and at most 1, such as 0.01; got {self.sample}."
            )
        if self.min_words > self.max_words > 0:
            raise ValueError(
                f"min_words must be at most max_words; got {self.min_words} and {self.max_words}."
            )
        if self.unit == "sequence" and (self.min_words or self.max_words):
            raise ValueError(
                "min_words and max_words are about texts; unit is 'sequence'. Take another unit."
            )

    def _require_types(self) -> None:
        """Check options about token types."""
        counts = self.count_range
        if counts and not (len(counts) == 2 and 1 <= counts[0] <= counts[1]):
            raise ValueError(
                f"count_range must be LO,HI with 1 <= LO <= HI occurrences; got {counts!r}."
            )
        if self.rows == "mean" and (counts or self.token_tables):
            raise ValueError(
                f"count_range and token_tables need token types; --rows {self.rows} has none. "
                "Take other rows."
            )
        if self.types == "string" and self.rows in ("mean", "words"):
            raise ValueError(
                f"types string needs rows that are tokens; got rows {self.rows}. Leave it out."
            )
        if self.anisotropy_batch < 0 or self.anisotropy_batch == 1:
            raise ValueError(
                f"anisotropy_batch must be 2 rows or more, or 0 for none; got "
                f"{self.anisotropy_batch}."
            )

    def _require_device_map(self) -> None:
        if not self.device_map or not (
            self.device_map == "auto" or isinstance(self.device_map, dict)
        ):
            raise ValueError(
                f"device_map must be auto, or a mapping of modules to devices; got "
                f"{self.device_map!r}."
            )
        for other in ("model_class", "device"):
            if (given := getattr(self, other)) is not None:
                raise ValueError(f"device_map must be left out with a {other}, here {given}.")
        require_extra("accelerate", "device_map")

    @property
    def models(self) -> Sequence[str]:
        """The models as a sequence, without slashes at their ends."""
        given = [self.model] if isinstance(self.model, str) else self.model
        return [name.rstrip("/") or name for name in given]

    @property
    def texts(self) -> Sequence[str]:
        """The files of text as a sequence."""
        return [self.text] if isinstance(self.text, str) else self.text

    @property
    def length(self) -> int:
        """Tokens in a sequence, or at most those of a text: what ``seq_len`` says, or its
        default.
        """
        return _DEFAULT_SEQ_LEN if self.seq_len is None else self.seq_len

    @property
    def tables(self) -> list[str]:
        """Kinds of the tables that each checkpoint has; other metrics than the default ones may
        have more of them.
        """
        kinds = ["tokens"] if self.token_tables else []
        return [*kinds, "jackknife"] if self.jackknife else kinds

    @property
    def layer_patterns(self) -> list[str]:
        """The entries of ``layers``; a comma in a pattern's brackets is part of it."""
        entries = [self.layers] if isinstance(self.layers, str) else self.layers
        return [
            pattern.strip() for entry in entries for pattern in re.split(r",(?![^[]*\])", entry)
        ]

    @property
    def folder(self) -> Path:
        """The sweep folder: ``out``, or ``runs/sweep-`` and the name of the first model."""
        return Path(self.out or f"runs/sweep-{Path(self.models[0]).name or 'model'}")

    def as_manifest(self, text_sha256: str) -> Mapping[str, Any]:
        """The settings that the results depend on, as recorded in ``manifest.json``."""
        from embedgeo.functional.rows import massive_times

        recorded = {name: value for name, value in asdict(self).items() if name not in _RUN_OPTIONS}
        recorded |= {
            "model": [_seen_from(self.folder, model) for model in self.models],
            "layers": ", ".join(self.layer_patterns),
        }
        recorded["seq_len"] = self.length
        skipped = self.skip_massive
        recorded["skip_massive"] = skipped is not False and massive_times(skipped)
        if SPECIAL in self.ignore_token_ids:
            recorded["ignore_token_ids"] = SPECIAL
        return {**recorded, "text_sha256": text_sha256}


def choices_of(annotation: Any) -> list[Any]:
    """The values that a type lists."""
    kinds = (annotation, *get_args(annotation))
    return [each for kind in kinds if get_origin(kind) is Literal for each in get_args(kind)]


def _seen_from(folder: Path, model: str) -> str:
    """Where a model is from the results, which may be moved with it, and where a link leads; a
    repository's name.
    """
    path = Path(model).expanduser()
    return os.path.relpath(path.resolve(), folder.resolve()) if path.exists() else model
