"""Copies of rows: exact ones, and those that differ by rounding."""

import math

import torch
from torch import Tensor

from embedgeo.functional.moments import blocked, row_chunks
from embedgeo.functional.neighbors import pair_distances
from embedgeo.functional.precision import accumulator_dtype, in_range, row_norms
from embedgeo.functional.products import CACHED_ELEMENTS

DUPLICATE_TOLERANCE = 1e-5
"""How near to each other rows are one and the same, relative to the median distance from the mean, unless told."""

_FEW = 16
"""Number of coordinates by which rows are first told apart."""

_DIRECTIONS = 4
"""Number of directions that rows are projected on, to find those near to each other."""


def merge_duplicates(x: Tensor, tolerance: float = DUPLICATE_TOLERANCE) -> Tensor:
    """The distinct rows of ``x``, in any order: one of each set of rows that chains of near pairs join.

    Two rows are near if their distance is at most ``tolerance`` times the median distance of the distinct rows from
    their mean. That scale neither changes with the origin nor with the order of the rows, it grows with the unit of
    the embeddings, and a few rows of huge norm (attention sinks), or many copies of one row, hardly move it.

    Args:
        x: shape (n, d), any floating dtype, finite.
        tolerance: at least 0; 0 merges rows that are equal in every coordinate only.

    Returns:
        Shape (number of distinct rows, d); ``x`` itself if all are.

    >>> merge_duplicates(torch.tensor([[0.0, 1.0], [2.0, 3.0], [0.0, 1.0], [2.0, 3.000001]])).shape
    torch.Size([2, 2])
    """
    kept, _ = distinct_rows(x, tolerance)
    return x if len(kept) == len(x) else x[kept]


def distinct_rows(x: Tensor, tolerance: float = DUPLICATE_TOLERANCE) -> tuple[Tensor, Tensor]:
    """The indices of the rows that `merge_duplicates` keeps, and which of them stands for each row.

    Returns:
        The indices, shape (number of distinct rows,), in any order; and for each row the place among them, shape (n,).
    """
    kept, place = _distinct_but_for_equal(x)
    if tolerance > 0 and len(kept) > 1:
        near, place_near = _distinct_but_for_near(x if len(kept) == len(x) else x[kept], tolerance)
        kept, place = kept[near], place_near[place]
    return kept, place


def look_distinct(x: Tensor, tolerance: float) -> bool:
    """Whether no two rows of ``x`` look like copies by a few of their coordinates; a guess, to be confirmed."""
    if len(x) < 3:
        return False
    few = x[:, :_FEW].to(accumulator_dtype(x.device))
    place = (few - few.mean(0)) @ _directions(few)
    place = place[place[:, 0].argsort()]
    return not bool((place.diff(dim=0).abs() <= tolerance * place.std(0)).all(1).any())


def longest_reach(x: Tensor, tolerance: float) -> float:
    """A distance beyond which no two rows are near: a median distance from the mean is at most √2 r.m.s. norms."""
    narrow, wide = torch.promote_types(x.dtype, torch.float32), accumulator_dtype(x.device)
    for dtype in (narrow, wide):  # a row at a time, for many squares do not fit into one sum in float32
        norms = torch.cat([torch.linalg.vector_norm(x[chunk], dim=1, dtype=dtype) for chunk in row_chunks(x)])
        if in_range(norms.square()):
            break
    return 1.5 * tolerance * float(torch.linalg.vector_norm(norms, dtype=wide)) / len(x) ** 0.5


def _distinct_but_for_equal(x: Tensor) -> tuple[Tensor, Tensor]:
    """As `distinct_rows`, for sets of equal rows of ``x``; all in order if there are no equal ones."""
    x = x.contiguous()  # so that each row is summed in the same order, and equal rows have equal sums
    every = torch.arange(len(x), device=x.device)
    sums = torch.empty(len(x), dtype=accumulator_dtype(x.device), device=x.device)
    for chunk in row_chunks(x):  # whose copies in that dtype stay in the processor's cache
        torch.sum(x[chunk], 1, dtype=sums.dtype, out=sums[chunk])
    sums, group = sums.unique(return_inverse=True)
    if not bool(sums.isnan().any()):
        if len(sums) == len(x):
            return every, every
        member = torch.empty_like(group[: len(sums)])
        member[group] = every
        if x.equal(x[member[group]]):
            return member, group
    rows, group = x.unique(dim=0, return_inverse=True)  # different rows have equal sums, or sums overflow
    if len(rows) == len(x):
        return every, every
    member = torch.empty_like(group[: len(rows)])
    member[group] = every
    return member, group


def _distinct_but_for_near(x: Tensor, tolerance: float) -> tuple[Tensor, Tensor]:
    """As `distinct_rows`, for sets of rows of ``x`` that chains of near pairs join; all in order if there are none.

    Near rows have near projections on any direction. So rows are sorted by their projections on one, and each is
    compared with those after it, as long as there are any within reach whose other projections are near, too.
    """
    norm, place = _projections(x)
    reach = tolerance * float(norm.median())
    every = torch.arange(len(x), device=x.device)
    if not 0 < reach < math.inf:
        return every, every
    order = place[:, 0].argsort()
    place = place[order]
    rounding = 8 * x.shape[1] ** 0.5 * torch.finfo(place.dtype).eps * norm[order, None].to(place.dtype)
    label = every  # by place in the order, the first row of those joined to it
    for lag in range(1, len(x)):
        within = (place[lag:] - place[:-lag]).abs() <= reach + rounding[lag:] + rounding[:-lag]
        if not bool(within[:, 0].any()):
            break
        first = (within.all(1) & (label[lag:] != label[:-lag])).nonzero().flatten()
        near = pair_distances(x, order[first], order[first + lag], place.dtype) <= reach
        label = _join(label, first[near], first[near] + lag)
    is_first = label == every
    if bool(is_first.all()):
        return every, every
    return order[is_first], torch.empty_like(every).scatter_(0, order, is_first.cumsum(0)[label] - 1)


def _projections(x: Tensor) -> tuple[Tensor, Tensor]:
    """Distances of the rows of ``x`` from their mean, shape (n,), and their places along some directions, (n, k)."""
    n, dim = x.shape
    wide = accumulator_dtype(x.device)
    center = x.to(torch.promote_types(x.dtype, torch.float32)).mean(0)
    directions = _directions(torch.empty(0, dim, dtype=wide, device=x.device))
    norm, place = (torch.empty(shape, dtype=wide, device=x.device) for shape in ((n,), (n, _DIRECTIONS)))
    for chunk in row_chunks(x, blocked(CACHED_ELEMENTS, x.device)):
        rows = x[chunk].to(wide) - center
        norm[chunk] = row_norms(rows)
        torch.mm(rows, directions, out=place[chunk])  # in float64 no setting matters
    return norm, place


def _directions(rows: Tensor) -> Tensor:
    """Unit vectors as columns in the space of rows, shape (n, d): generic, so that no layer is constant along one."""
    dim = rows.shape[1]
    angles = torch.arange(1, dim * _DIRECTIONS + 1, dtype=rows.dtype, device=rows.device)
    directions = angles.square().sin().view(_DIRECTIONS, dim)
    return (directions / torch.linalg.vector_norm(directions, dim=1, keepdim=True)).T


def _join(label: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """The smallest index in the same set as each index, once the sets of ``left`` and ``right`` are joined."""
    while bool((label[left] != label[right]).any()):
        least = torch.minimum(label[left], label[right])
        for side in (left, right):
            label = label.scatter_reduce(0, label[side], least, "amin")
        while not label.equal(jumped := label[label]):
            label = jumped
    return label
