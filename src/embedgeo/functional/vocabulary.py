"""Rows of an embedding matrix that are copies of each other, and those that training has not moved."""

import torch
from torch import Tensor

from embedgeo.functional.moments import row_chunks
from embedgeo.functional.neighbors import DUPLICATE_TOLERANCE, distinct_rows
from embedgeo.functional.precision import accumulator_dtype, row_norms

_SLACK, _DEVIATIONS = 0.1, 4.0
"""How much farther than the median of the rows that no token uses an untrained one may be: a tenth, and as many
standard deviations, relative to the mean, of the norm of Gaussian rows."""


def copies(x: Tensor, tolerance: float = DUPLICATE_TOLERANCE) -> Tensor:
    """For each row the first row that is the same, but for rounding: see `embedgeo.functional.merge_duplicates`.

    A row with a NaN or Inf is the same as no other one.

    Args:
        x: shape (n, d), any floating dtype.
        tolerance: see `embedgeo.functional.merge_duplicates`.

    Returns:
        Indices, shape (n,): a row's own if there is none before it.

    >>> copies(torch.tensor([[0.0, 1.0], [2.0, 3.0], [0.0, 1.0], [4.0, 3.0]])).tolist()
    [0, 1, 0, 3]
    """
    first = torch.arange(len(x), device=x.device)
    finite = x.isfinite().all(1).nonzero().flatten()
    if len(finite) > 1:
        _, place = distinct_rows(x if len(finite) == len(x) else x[finite], tolerance)
        least = torch.full_like(place, len(x)).scatter_reduce(0, place, finite, "amin")
        first[finite] = least[place]
    return first


def untrained_rows(x: Tensor, unused: Tensor) -> Tensor | None:
    """The rows of an embedding matrix that look like those which no token uses, and so no training has moved apart.

    These rows all have had the same treatment: decay, and at the output a push away from the hidden states, without
    any example of their own. The rows that lie as near to their mean as they do have seen no more than they: within
    1.1 + 4 / √(2d) times the median distance of an unused row to the mean of the others. (Norms of Gaussian rows have
    the C.V. 1 / √(2d).) Known unused tokens as the reference are those of Land & Bartolo 2024 ("Fishing for Magikarp"),
    who rank by norm or by cosine to their mean; the limit is not theirs.

    Args:
        x: shape (n, d), any floating dtype.
        unused: indices of rows that no token uses, shape (m,).

    Returns:
        Shape (n,), bool; None where it cannot be told: fewer than two unused rows are finite, or more than half of the
        other rows are as near as they, as before the training.

    >>> x = torch.tensor([[0.1, 0.0], [0.0, 0.1], [-0.1, 0.0], [3.0, 0.0], [0.0, 2.0], [-5.0, 1.0]])
    >>> untrained_rows(x, torch.tensor([0, 1])).tolist()
    [True, True, True, False, False, False]
    """
    wide = accumulator_dtype(x.device)
    known = x[unused].to(wide)
    is_finite = known.isfinite().all(1)
    unused, known = unused[is_finite], known[is_finite]
    m = len(unused)
    if m < 2:
        return None
    center = known.mean(0)
    of_known = row_norms(known - center) * m / (m - 1)  # from the mean of the others
    distance = torch.empty(len(x), dtype=wide, device=x.device)
    for chunk in row_chunks(x):
        distance[chunk] = row_norms(x[chunk].to(wide) - center)
    distance[unused] = of_known
    rounding = 4 * torch.finfo(x.dtype).eps * torch.linalg.vector_norm(center)
    limit = (1 + _SLACK + _DEVIATIONS / (2 * x.shape[1]) ** 0.5) * of_known.median()
    is_near = distance <= limit + rounding
    num_others = len(x) - m
    if 2 * int(is_near.sum() - is_near[unused].sum()) > num_others:
        return None
    return is_near
