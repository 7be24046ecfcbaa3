"""Arithmetic that does not depend on autocast or on the process's matmul-precision setting."""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


def accumulator_dtype(device: torch.device) -> torch.dtype:
    """Dtype in which sums are kept on ``device``: float64, or float32 where the device has no float64 (MPS)."""
    return torch.float32 if device.type == "mps" else torch.float64


def in_range(squares: Tensor) -> bool:
    """Whether the largest of some sums of squares has neither overflowed nor lost digits to underflow."""
    finfo = torch.finfo(squares.dtype)
    return finfo.tiny / finfo.eps < float(squares.max()) < math.inf


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
