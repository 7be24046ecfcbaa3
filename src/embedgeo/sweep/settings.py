"""The settings of a sweep. Imported by the command line: nothing heavy may be imported here."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

_RUN_OPTIONS = ("text", "out", "shard", "evict", "dry_run", "trainer")
"""Options that do not change the results; of the text, the hash is recorded."""

_DTYPES = ("float32", "float64", "bfloat16", "float16")


@dataclass(frozen=True)
class SweepSettings:
    """The options of ``embedgeo sweep``.

    Args:
        model: a repository on the Hub whose branches or tags name steps, a pattern (``author/name-step_*``) or a list
            of repositories, or a local folder of checkpoints (``step100/``, ``checkpoint-100/``, ``*.ckpt``).
        steps: ``all``; ``log``: the first, the last and those nearest to powers of two; or steps, as ``0,1,512``.
        revisions: take only the branches and tags that match this pattern.
        text: files of text, plain or ``.jsonl`` (field ``text``), also as ``.gz``, in UTF-8 or as a byte order mark
            says; default: Python's documentation.
        tokenizer: a folder, a ``tokenizer.json`` or a repository; default: that of the checkpoint, else of ``main``.
        num_tokens: number of tokens to use, from the start of the text.
        seq_len: tokens in a sequence. Special tokens are added as the tokenizer does by default: to each document,
            or, for an encoder, to each sequence, within its length.
        batch_size: sequences in a batch; sampled metrics depend on it.
        layers: ``blocks``, ``hidden_states``, patterns of names, or several, with commas between them or as a list.
        dtype: data type of the weights.
        skip_first_positions: number of positions to leave out at the start of every sequence.
        ignore_token_ids: tokens to leave out.
        token_tables: also write ``tokens/<name>.parquet``: n, Q, M and V of each token type at each layer; and
            ``projections/<name>.parquet``: the most frequent ones in the plane of their principal axes.
        after_processing: also measure anisotropy and mean cosine after z-scoring, whitening and removal of the top
            directions (`embedgeo.AfterProcessing`).
        jackknife: G, the number of groups of whole sequences for standard errors, such as 16; 0: there are none.
        out: the folder; default: ``runs/sweep-<name>``.
        shard: take part i of n, as ``0/4``; i counts from 0 or from 1. Sweeps of one part into one folder share it.
        evict: download into the folder of the sweep, and remove each checkpoint once it is measured; if false, download
            into the Hugging Face cache, and keep the files there.
        dry_run: only print the plan.
        model_class: the LightningModule of Lightning checkpoints, as ``package.module.Class``.
        trust_remote_code: run code that comes with a repository.
        trainer: options of lightning's Fabric: accelerator, devices, num_nodes, plugins, precision, and strategy, which
            must be auto or ddp.

    Raises:
        ValueError: an option of the wrong type or outside its range.
    """

    model: str | list[str]
    steps: str | int | list[int] = "all"
    revisions: str = "*"
    text: str | list[str] | tuple[()] = ()
    tokenizer: str | None = None
    num_tokens: int = 65536
    seq_len: int = 512
    batch_size: int = 8
    layers: str | list[str] = "blocks"
    dtype: Literal["float32", "float64", "bfloat16", "float16"] = "float32"
    skip_first_positions: int = 0
    ignore_token_ids: Sequence[int] = ()
    token_tables: bool = False
    after_processing: bool = False
    jackknife: int = 0
    out: str | None = None
    shard: str = "0/1"
    evict: bool = True
    dry_run: bool = False
    model_class: str | None = None
    trust_remote_code: bool = False
    trainer: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        for name in ("model", "text", "layers"):
            value: Any = getattr(self, name)
            listed = value if isinstance(value, list | tuple) else [value]
            if not all(isinstance(each, str) for each in listed) or not (listed or name == "text"):
                raise ValueError(f"{name} must be a string or a list of strings; got {value!r}.")
        ignored: Any = self.ignore_token_ids
        if not isinstance(ignored, list | tuple) or not all(isinstance(each, int) for each in ignored):
            raise ValueError(f"ignore_token_ids must be a list of token ids; got {ignored!r}.")
        if self.batch_size < 1:
            raise ValueError(f"batch_size must be at least 1 sequence; got {self.batch_size}.")
        if self.jackknife < 0 or self.jackknife == 1:
            raise ValueError(f"jackknife must be a number of groups, 2 or more, or 0 for none; got {self.jackknife}.")
        skipped = self.skip_first_positions
        if not 0 <= skipped < max(1, self.seq_len):
            raise ValueError(f"skip_first_positions must leave some of the {self.seq_len} of seq_len; got {skipped}.")
        if self.dtype not in _DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(_DTYPES)}; got {self.dtype!r}.")

    @property
    def models(self) -> Sequence[str]:
        """The models as a sequence."""
        return [self.model] if isinstance(self.model, str) else self.model

    @property
    def texts(self) -> Sequence[str]:
        """The files of text as a sequence."""
        return [self.text] if isinstance(self.text, str) else self.text

    @property
    def layer_patterns(self) -> str | list[str]:
        """What ``layers`` names, in a list if there are several; a comma in the brackets of a pattern is part of it."""
        given = [self.layers] if isinstance(self.layers, str) else self.layers
        patterns = [pattern.strip() for each in given for pattern in re.split(r",(?![^[]*\])", each)]
        return patterns if len(patterns) > 1 else patterns[0]

    @property
    def folder(self) -> Path:
        """The sweep folder: ``out``, or ``runs/sweep-`` and the name of the first model."""
        return Path(self.out or f"runs/sweep-{Path(self.models[0]).name.replace('*', '') or 'model'}")

    def as_manifest(self, text_sha256: str) -> Mapping[str, Any]:
        """The settings that the results depend on, as recorded in ``manifest.json``."""
        asked = {name: value for name, value in asdict(self).items() if name not in _RUN_OPTIONS}
        asked["model"] = list(self.models)
        asked["layers"] = self.layer_patterns
        return {**asked, "precision": (self.trainer or {}).get("precision"), "text_sha256": text_sha256}
