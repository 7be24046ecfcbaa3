"""What a sweep is asked for."""

import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from embedgeo.checkpoints import Steps

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Settings:
    """The arguments of `embedgeo.sweep.sweep` that the results depend on; documented there."""

    model: tuple[str, ...]
    revisions: str
    steps: Steps
    tokenizer: str | None
    num_tokens: int
    seq_len: int
    batch_size: int
    layers: str | Sequence[str]
    dtype: str
    skip_first_positions: int
    ignore_token_ids: Sequence[int]
    model_class: str | None
    trust_remote_code: bool
    token_tables: bool
    after_processing: bool
    precision: str | int | None
    text_sha256: str = field(default="")

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"batch_size must be at least 1 sequence; got {self.batch_size}.")
        skipped = self.skip_first_positions
        if not 0 <= skipped < max(1, self.seq_len):
            raise ValueError(f"skip_first_positions must leave some of the {self.seq_len} of seq_len; got {skipped}.")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}; got {self.dtype!r}.")

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of the weights."""
        return DTYPES[self.dtype]

    def as_manifest(self) -> dict[str, Any]:
        """The settings, as they are written down."""
        return asdict(self)


def versions() -> dict[str, str]:
    """Of what the numbers come from."""
    packages = ("embedgeo", "huggingface_hub", "lightning", "torch", "torchmetrics", "transformers")
    return {"python": platform.python_version(), **{name: version(name) for name in packages}}


def default_out(model: Sequence[str]) -> Path:
    """Where a sweep goes unless told otherwise: ``runs/sweep-`` and the name of the (first) model."""
    return Path("runs") / f"sweep-{Path(model[0]).name.replace('*', '') or 'model'}"
