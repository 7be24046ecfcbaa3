"""From what a model hands over (any shape, dtype, mask) to the rows that count."""

from typing import NamedTuple

import torch
from torch import Tensor

from embedgeo.functional.precision import matmul_precision


class Rows(NamedTuple):
    """The rows of one batch that count.

    Attributes:
        embeddings: shape (n, d), floating point, finite, detached.
        token_ids: shape (n,), int64, or None where none were given.
        num_nonfinite: how many rows the mask kept but a NaN or Inf ruled out.
    """

    embeddings: Tensor
    token_ids: Tensor | None
    num_nonfinite: int


def select_rows(embeddings: Tensor, token_ids: Tensor | None = None, mask: Tensor | None = None, *, dim: int) -> Rows:
    """Flatten a batch to rows, and leave out masked rows and rows with a NaN or Inf.

    Args:
        embeddings: shape (..., d), any floating dtype.
        token_ids: shape (...), any integer dtype.
        mask: shape (...), bool or 0/1; True = count this row.
        dim: the d that is expected.

    Raises:
        TypeError: a dtype that is not one of these.
        ValueError: a shape that does not match, or a mask with other values than 0 and 1.

    >>> select_rows(torch.eye(3), mask=torch.tensor([1, 0, 1]), dim=3).embeddings.shape
    torch.Size([2, 3])
    """
    if not isinstance(embeddings, Tensor) or not embeddings.is_floating_point():
        got = embeddings.dtype if isinstance(embeddings, Tensor) else type(embeddings).__name__
        raise TypeError(f"embeddings must be a floating-point tensor; got {got}. Pass hidden states, not ids.")
    if embeddings.ndim == 0 or embeddings.shape[-1] != dim:
        raise ValueError(
            f"embeddings must have shape (..., {dim}); got {tuple(embeddings.shape)}. "
            f"Build the metric with dim= the last dimension of the embeddings."
        )
    rows = embeddings.detach().reshape(-1, dim)
    if rows.dtype.itemsize == 1:  # float8 has no arithmetic
        rows = rows.float()
    ids = None
    if token_ids is not None:
        _require_shape("token_ids", token_ids, embeddings)
        if token_ids.is_floating_point() or token_ids.is_complex() or token_ids.dtype == torch.bool:
            raise TypeError(f"token_ids must be an integer tensor; got {token_ids.dtype}.")
        ids = token_ids.detach().reshape(-1).to(device=rows.device, dtype=torch.int64)
    if mask is not None:
        _require_shape("mask", mask, embeddings)
        keep = _as_bool(mask).reshape(-1).to(rows.device)
        rows, ids = rows[keep], None if ids is None else ids[keep]
    finite = _finite(rows)
    if finite is None:
        return Rows(rows, ids, 0)
    return Rows(rows[finite], None if ids is None else ids[finite], int((~finite).sum()))


def sequence_positions(real: Tensor, position_ids: Tensor | None = None) -> Tensor:
    """Number the real positions of each sequence: 1, 2, 3 …; padding has the number of the last one before it.

    Args:
        real: shape (batch, positions), bool; False = padding.
        position_ids: shape (batch or 1, positions): where they do not grow, another sequence packed into the same
            row starts.

    >>> sequence_positions(torch.tensor([[False, True, True, True, True]]), torch.tensor([[0, 0, 1, 0, 1]])).tolist()
    [[0, 1, 2, 1, 2]]
    """
    number = real.cumsum(1)
    if position_ids is None:
        return number
    starts = torch.ones_like(real)
    starts[:, 1:] = position_ids.diff(dim=1).to(real.device) <= 0
    before = torch.where(starts, number - real.to(number.dtype), 0)
    return number - before.cummax(1).values


def _require_shape(name: str, tensor: Tensor, embeddings: Tensor) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a tensor; got {type(tensor).__name__}.")
    if tensor.shape != embeddings.shape[:-1]:
        raise ValueError(
            f"{name} must have the shape of embeddings without the last dimension, "
            f"{tuple(embeddings.shape[:-1])}; got {tuple(tensor.shape)}."
        )


def _as_bool(mask: Tensor) -> Tensor:
    if mask.dtype != torch.bool and not bool(((mask == 0) | (mask == 1)).all()):
        raise ValueError("mask must be bool or hold only 0 and 1 (1 = count this row); got other values.")
    return mask.bool()


def _finite(rows: Tensor) -> Tensor | None:
    """Which rows are finite, or None where all are: one matrix-vector product in the usual case."""
    with matmul_precision(rows.device):
        total = rows @ rows.new_ones(rows.shape[1])
    if bool(torch.isfinite(total).all()):
        return None
    finite = torch.isfinite(rows).all(dim=1)  # a sum may overflow although every term is finite
    return None if bool(finite.all()) else finite
