"""Arithmetic that does not depend on autocast or on the process's matmul-precision setting."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from timeit import repeat
from typing import Any

import torch
from torch import Tensor

_MEASURED = (256, 512)  # rows, and their width, whose products tell what the processor is fast in
_ROUNDS = 3  # of these products
_LEAST_SQUARES = 2.0**-80  # beside such a sum of float32 it is nothing what squares underflow by


def has_float64(device: torch.device) -> bool:
    """Tell if ``device`` has float64; MPS has not."""
    return device.type != "mps"


def accumulator_dtype(device: torch.device) -> torch.dtype:
    """Dtype of sums over the rows of a batch on ``device``: float64, or float32 where the device
    has no float64.
    """
    return torch.float64 if has_float64(device) else torch.float32


def state_device(device: torch.device) -> torch.device:
    """Place of states over all batches, held in float64: ``device``, or the CPU where that has no
    float64.
    """
    return device if has_float64(device) else torch.device("cpu")


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on a device, which is not waited for if it is CUDA's: pageable memory is read
    before this returns.
    """
    return tensor.to(device, non_blocking=device.type == "cuda")


@cache
def search_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype in which rows are multiplied when their neighbours are searched.

    On a CPU it is the faster one of float32 and bfloat16, as one product of each tells the first
    time; elsewhere float32.
    """
    if device.type != "cpu":
        return torch.float32
    return min(torch.float32, torch.bfloat16, key=_seconds_of_product)


def _seconds_of_product(dtype: torch.dtype) -> float:
    rows = torch.ones(_MEASURED, dtype=dtype, device="cpu")
    products = rows.new_empty(len(rows), len(rows))
    # autocast leaves a product alone that has an out
    return min(repeat(lambda: torch.mm(rows, rows.T, out=products), repeat=_ROUNDS, number=1))


def in_range(squares: Tensor) -> bool:
    """Tell if the largest of these sums of squares has neither overflowed nor lost digits to
    underflow.
    """
    finfo = torch.finfo(squares.dtype)
    return finfo.tiny / finfo.eps < float(squares.max()) < math.inf


def row_norms(rows: Tensor) -> Tensor:
    """Euclidean norms of rows, shape (..., d), with the squares summed in the accumulator's dtype,
    or a wider one.
    """
    dtype = torch.promote_types(rows.dtype, accumulator_dtype(rows.device))
    return torch.linalg.vector_norm(rows, dim=-1, dtype=dtype)


def quick_row_norms(rows: Tensor) -> Tensor:
    """The `row_norms` to 1e-6 relative: squares of float32 are summed in float32, pairwise as torch
    does, which needs no copy of the rows in float64.
    """
    if rows.dtype != torch.float32:
        return row_norms(rows)
    return norms_of_squares(rows.square().sum(-1), lambda: row_norms(rows))


def norms_of_squares(squares: Tensor, norms: Callable[[], Tensor]) -> Tensor:
    """Norms from their squares; the ``norms`` themselves where such in float32 have lost digits."""
    if squares.dtype == torch.float32:
        least, most = torch.stack(squares.aminmax()).tolist()
        if not _LEAST_SQUARES < least <= most < math.inf:
            return norms()
    return squares.to(accumulator_dtype(squares.device)).sqrt_()


@contextmanager
def matmul_precision(device: torch.device) -> Iterator[None]:
    """Compute float32 products on ``device`` in full float32, whatever autocast and the process's
    settings are.

    The settings are left as they were. An inherited one is inherited again.
    """
    backend: Any = (
        torch.backends.cuda.matmul if device.type == "cuda" else torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    )
    before = backend.fp32_precision
    with torch.autocast(device.type, enabled=False):
        if before in ("ieee", "none"):  # full float32
            yield
            return
        own = "none" if _is_inherited(backend) else before
        try:
            backend.fp32_precision = "ieee"
            yield
        finally:
            backend.fp32_precision = own


def _is_inherited(backend: Any) -> bool:
    """Tell if a backend has the precision of a level above, and none of its own.

    What torch tells is the same in both cases, so a level is changed for a moment.
    """
    every = torch.backends
    cudnn = every.cudnn
    if _follows(backend, every):
        return True
    return not _follows(cudnn, every) and _follows(backend, cudnn)


def _follows(backend: Any, level: Any) -> bool:
    own = backend.fp32_precision
    before = level.fp32_precision
    try:
        level.fp32_precision = "tf32" if before == "ieee" else "ieee"
        return bool(backend.fp32_precision != own)
    finally:
        level.fp32_precision = before
