"""Arithmetic that does not depend on autocast or on the process's matmul-precision setting."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

Sums = TypeVar("Sums", bound=NamedTuple)


def has_float64(device: torch.device) -> bool:
    """Whether ``device`` has float64 numbers: MPS has none."""
    return device.type != "mps"


def accumulator_dtype(device: torch.device) -> torch.dtype:
    """Dtype of sums over the rows of a batch on ``device``: float64, or float32 where the device has no float64.

    Sums in float32 are taken of centred rows, a part of the batch at a time, and go where `kept` says.
    """
    return torch.float64 if has_float64(device) else torch.float32


def state_device(device: torch.device) -> torch.device:
    """Where the sums over all batches are kept, in float64: ``device``, or the CPU where that has no float64."""
    return device if has_float64(device) else torch.device("cpu")


def to_state(sums: Sums) -> Sums:
    """The sums over a batch, in float64 and where they are kept."""
    return type(sums)(*(t.to(state_device(t.device)).to(torch.float64) for t in sums))


def in_range(squares: Tensor) -> bool:
    """Whether the largest of some sums of squares has neither overflowed nor lost digits to underflow."""
    finfo = torch.finfo(squares.dtype)
    return finfo.tiny / finfo.eps < float(squares.max()) < math.inf


def row_norms(rows: Tensor) -> Tensor:
    """Norms of the rows, their squares summed in the accumulator's dtype."""
    return torch.linalg.vector_norm(rows, dim=-1, dtype=accumulator_dtype(rows.device))


@contextmanager
def matmul_precision(device: torch.device, *, reduced: bool = False) -> Iterator[None]:
    """Fix how float32 products are computed on ``device``: in full float32, or in the matrix units' fast mode.

    ``torch.set_float32_matmul_precision`` also degrades the CPU, and autocast is active inside forward hooks;
    both are set aside here and put back on leaving.

    Args:
        device: where the products run.
        reduced: allow bfloat16 (CPU) or TF32 (CUDA) multiplication. Operands that are representable in
            bfloat16 are still multiplied exactly; only the order of the float32 sums differs.
    """
    backends = torch.backends.mkldnn.matmul, torch.backends.cuda.matmul  # type: ignore[attr-defined]
    before = [backend.fp32_precision for backend in backends]
    wanted = ("bf16", "tf32") if reduced else ("ieee", "ieee")
    try:
        for backend, precision in zip(backends, wanted, strict=True):
            backend.fp32_precision = precision
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        for backend, precision in zip(backends, before, strict=True):
            backend.fp32_precision = precision
