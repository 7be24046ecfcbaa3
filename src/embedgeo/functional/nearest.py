"""Distances to the k nearest neighbours: from products of all pairs of rows, or differences where these do not do."""

import torch
from torch import Tensor

from embedgeo.functional.moments import blocked, chunk_length
from embedgeo.functional.neighbors import pair_distances
from embedgeo.functional.precision import accumulator_dtype
from embedgeo.functional.products import BLOCK_BYTES, Operand

_TOLERANCE = 1e-9
"""Relative error of a distance up to which it is taken from a product."""


def nearest_distances(x: Tensor, k: int) -> Tensor:
    """Euclidean distances of every row to its k nearest other rows.

    Squared distances ‖a‖² + ‖b‖² - 2ab of the centred rows are taken in float64, a block of rows at a time. Where the
    bound of their error is small enough, the k smallest are those of the neighbours, for a change of all values by at
    most ε changes the k-th smallest by at most ε. In the other rows, those with a neighbour at less than some
    hundredths of their norm, the distances that the bound leaves among the k smallest are taken from differences.
    Exact duplicates have distance 0. No setting of the process is changed, and none matters.

    Args:
        x: shape (n, d), any floating dtype, finite.
        k: number of neighbours.

    Returns:
        Shape (n, k), float64 (float32 on a device without), ascending, within 1e-6 relative of a float64 brute force;
        NaN where there is no such neighbour. Beyond ``x`` and a copy of it in float64, the memory needed is bounded by
        k numbers a row.

    >>> nearest_distances(torch.tensor([[0.0], [1.0], [3.0]]), 2)
    tensor([[1., 3.],
            [1., 2.],
            [2., 3.]], dtype=torch.float64)
    """
    x, n = x.detach(), x.shape[0]
    wide = accumulator_dtype(x.device)
    nearest = torch.full((n, k), torch.nan, dtype=wide, device=x.device)
    found = min(k, n - 1)
    if found < 1:
        return nearest
    operand = Operand.of(x, x.to(torch.promote_types(x.dtype, torch.float32)).mean(0), wide, rounded=False)
    length = len(operand.rows)
    step = chunk_length(length * wide.itemsize, blocked(BLOCK_BYTES, x.device))
    buffer = operand.rows.new_empty(min(step, n), length)
    for rows in torch.arange(n, device=x.device).split(step):
        squared = operand.squared(operand.left(rows), rows, slice(0, length), buffer, mirrored=False)[:, :n]
        least = squared.topk(found, largest=False).values
        distances = least.clamp(min=0).sqrt()
        farthest = operand.farthest(rows.unsqueeze(1), least)
        is_exact = (farthest <= (1 + _TOLERANCE) * distances).all(1)  # not where a square has overflowed
        if not bool(is_exact.all()):
            blurred = (~is_exact).nonzero().flatten()
            limit = operand.limit(rows[blurred], farthest[blurred, -1])
            distances[blurred] = _measured(x, rows[blurred], squared[blurred], limit, found)
        nearest[rows, :found] = distances
    return nearest


def _measured(x: Tensor, rows: Tensor, squared: Tensor, limit: Tensor, k: int) -> Tensor:
    """The k smallest distances of the rows, shape (m,), to others whose product, shape (m, n), is not above a limit."""
    i, j = (~(squared > limit.unsqueeze(1))).nonzero(as_tuple=True)
    squared.fill_(torch.inf)
    squared[i, j] = pair_distances(x, rows[i], j, squared.dtype)
    squared[torch.arange(len(rows), device=x.device), rows] = torch.inf
    return squared.topk(k, largest=False).values
