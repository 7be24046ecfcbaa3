"""Intrinsic dimension of the distinct rows: by TwoNN, or by any estimator of scikit-dimension.

Sources: Facco et al. 2017 (TwoNN); Razzhigaev et al. 2024 (arXiv 2311.05928) for embeddings.
"""

import math
from contextlib import suppress
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from embedgeo.functional.neighbors import (
    Neighbors,
    merge_duplicates,
    same_label_shares,
)

DISCARD_FRACTION = 0.1
"""Share of the largest ratios that TwoNN does not use, unless given."""

_FEWEST_OCCURRENCES = 8  # of a token type that is looked at alone
_EQUAL = 1e-8  # mean log μ below which distances are equal but for rounding


class GlobalEstimator(Protocol):
    """A scikit-dimension global estimator, such as ``skdim.id.lPCA()``."""

    dimension_: float

    def fit(self, X: Any) -> object:
        """Estimate the dimension of the rows of ``X``, a NumPy array."""


class DimensionEstimate(NamedTuple):
    """Intrinsic dimension, and what it was estimated from."""

    dimension: float  # NaN where it is undefined
    num_points: int  # number of distinct points
    # the estimates without the points of each group, shape (G,), float64; None if unknown
    left_out: Tensor | None = None


def twonn_dimension(
    x: Tensor,
    *,
    discard_fraction: float = DISCARD_FRACTION,
) -> DimensionEstimate:
    """TwoNN intrinsic dimension of the distinct rows of ``x``.

    With μ_i the ratios of the distances to the second and the first neighbour, ascending, of which
    the m = ⌊N (1 - discard_fraction) + 1e-9⌋ smallest are used, it is the slope of the
    least-squares line through the origin of -log(1 - i/N) on log μ_i (Facco et al. 2017).
    scikit-dimension 0.5 has it, too, with one ratio fewer where rounding makes the product less
    than an integer.

    Args:
        x: shape (n, d), any floating dtype, finite.
        discard_fraction: share of the largest ratios that are not used, in (0, 1).

    Returns:
        The estimate. It is NaN where fewer than three distinct rows, or fewer than two ratios to
        use, are left, where all these ratios are 1 (rows on a grid), and where a squared distance
        overflows or vanishes.
    """
    estimate = labelled_dimensions(
        x,
        RowLabels(),
        discard_fraction=discard_fraction,
    ).every
    assert estimate is not None
    return estimate


def _twonn_estimate(
    distances: Tensor, group: Tensor, num_groups: int, discard_fraction: float
) -> DimensionEstimate:
    """TwoNN from the distances of points to their two nearest, shape (N, 2), and their groups."""
    num_points = len(distances)
    first, second = distances.unbind(1)
    log_mu, order = (second / first).log().sort()
    is_known = num_points > 2 and bool((first > 0).all() & second.isfinite().all())
    if not is_known:
        log_mu = log_mu[:0]
        order = order[:0]
    in_order = group[order]
    left_out = [_rate_of_ratios(log_mu[in_order != i], discard_fraction) for i in range(num_groups)]
    return DimensionEstimate(
        _rate_of_ratios(log_mu, discard_fraction),
        num_points,
        distances.new_tensor(left_out),
    )


def point_groups(groups: Tensor, place: Tensor, num_points: int) -> Tensor:
    """The group that has all copies of each point, shape (num_points,), given those of the rows; -1
    if none has.
    """
    none = groups.new_zeros(num_points)
    least, most = (
        none.scatter_reduce(0, place, groups, by, include_self=False) for by in ("amin", "amax")
    )
    return torch.where(least == most, least, -1)


@lru_cache(maxsize=16)  # layers have as many points, most of them
def _log_ranks(n: int) -> Tensor:
    """-log(1 - i/n) of i = 1 … n - 1, float64."""
    return -torch.log1p(-torch.arange(1, n, dtype=torch.float64, device="cpu") / n)


def _rate_of_ratios(log_mu: Tensor, discard_fraction: float) -> float:
    """Rate of the exponential law of log μ_i, shape (N,), ascending."""
    n = len(log_mu)
    # the last one's rank has no logarithm
    num_used = min(math.floor(n * (1 - discard_fraction) + 1e-9), n - 1)
    if num_used < 2:
        return math.nan
    used = log_mu[:num_used]
    if not float(used.sum()) > _EQUAL * num_used:
        return math.nan
    return float(used @ _log_ranks(n)[:num_used] / used.square().sum())


def estimated_dimension(x: Tensor, estimator: GlobalEstimator) -> DimensionEstimate:
    """Intrinsic dimension of the distinct rows of ``x`` by any scikit-dimension global estimator.

    Returns:
        The estimate; NaN where fewer than three distinct rows are left or the estimator raises a
        ValueError.
    """
    points = merge_duplicates(x)
    dimension = math.nan
    if len(points) >= 3:
        with suppress(ValueError):
            estimator.fit(points.double().cpu().numpy())
            dimension = float(estimator.dimension_)
    return DimensionEstimate(dimension, len(points))


class RowLabels(NamedTuple):
    """Token types and sequences of rows."""

    # shape (n,), int64; a row with a negative one has none; None: no row has one
    types: Tensor | None = None
    sequences: Tensor | None = None  # shape (n,), int64; None: each row is one


class LabelledEstimates(NamedTuple):
    """Dimensions of rows in all, between and within token types, and who their neighbours are; None
    if unknown.
    """

    every: DimensionEstimate | None
    between: DimensionEstimate | None = None
    within: DimensionEstimate | None = None
    same_type: Tensor | None = None  # shape (2,): see `same_label_shares`
    same_sequence: Tensor | None = None


def labelled_dimensions(
    x: Tensor,
    labels: RowLabels,
    *,
    discard_fraction: float = DISCARD_FRACTION,
    groups: Tensor | None = None,
    num_groups: int = 0,
    apart: bool = False,
    between_alone: bool = False,
) -> LabelledEstimates:
    """Intrinsic dimension of the distinct rows of ``x``, of rows between token types, and of those
    within them.

    TwoNN takes rows for independent draws from one density. But occurrences of one token
    type are near each other, and so are rows of one text: where the nearest row is of the same type
    and the next one is not, the ratio of their distances says nothing of a dimension, and the
    estimate for all rows is low. So there are, too:

    - between: that of one occurrence of each token type, drawn at random, so that types weigh
      equally. It is of rows of different types, each in its context, and not of the means of types.
    - within: that of the distances of rows to the nearest occurrences of their own type in other
      sequences, of all types with 8 distinct rows or more; rows weigh equally. The fewer
      occurrences a type has, the farther are a row's neighbours, and the lower is the estimate.

    Without a group only the fit is repeated, for the other points, those with copies in other
    groups among them: their neighbours are those among all points. If these were searched for
    again, the estimates would be those of a thinner sample, and copies of a point, or its absence,
    move nearest neighbours in a way that resampling does not reproduce (Abadie & Imbens 2008, on
    the bootstrap of matching estimators).

    Args:
        x: the rows in random order, shape (n, d), any floating dtype, finite: what is drawn of a
            type, or of copies, is the first of them. Copies are merged first, see
            `merge_duplicates`; of those within a type, one counts.
        labels: of the rows, on any device.
        discard_fraction: see `twonn_dimension`.
        groups: the group of each row, from 0, shape (n,); default: the rows are in no groups.
        num_groups: G, the number of groups.
        apart: rows of one sequence are not neighbours, also of all rows (Theiler 1986, of times).
        between_alone: estimate the dimension between token types alone.

    Returns:
        The estimates, and the shares of rows whose nearest distinct row is of their type and
        sequence.
    """
    types, sequences = (None if each is None else each.to(x.device) for each in labels)
    group = torch.zeros(len(x), dtype=torch.int64, device=x.device)
    group = group if groups is None else groups.to(x.device)

    def estimated(distances: Tensor, of_points: Tensor) -> DimensionEstimate:
        """The estimate from the distances of points to their nearest, and the points' groups."""
        points = distances.cpu().double(), of_points.cpu()
        return _twonn_estimate(*points, num_groups, discard_fraction)

    rows = Neighbors(x)
    points, place = rows.distinct()
    between = None
    if types is not None:
        chosen = _one_of_each_type(types, place)
        between = estimated(rows.nearest(chosen).distances, group[chosen])
    if between_alone:
        return LabelledEstimates(None, between)
    others = sequences if apart else None
    every = rows.nearest(points, others)
    of_all = estimated(every.distances, point_groups(group, place, len(points)))
    within = None
    if types is not None and sequences is not None:
        chosen = _repeated(types, place)
        distances = rows.nearest(chosen, sequences, types).distances
        has_all = distances.isfinite().all(1)
        within = estimated(distances[has_all], group[chosen[has_all]])
    same_type, same_sequence = (
        None if each is None else same_label_shares(every, place, each)
        for each in (types, sequences)
    )
    return LabelledEstimates(of_all, between, within, same_type, same_sequence)


def _first_of_each(labels: Tensor) -> Tensor:
    """Indices, ascending, of the first row of each label, shape (n,)."""
    ascending, at = labels.sort(stable=True)
    is_first = torch.ones_like(at, dtype=torch.bool)
    is_first[1:] = ascending.diff() != 0
    return at[is_first].sort().values


def _one_of_each_type(types: Tensor, place: Tensor) -> Tensor:
    """Indices of an occurrence of each token type; of those that are copies of each other, one."""
    rows = _first_of_each(types)
    rows = rows[types[rows] >= 0]
    return rows[_first_of_each(place[rows])]


def _repeated(types: Tensor, place: Tensor) -> Tensor:
    """Indices of the rows of token types with enough of them; of a type's copies of a row, one."""
    of_type = types.unique(return_inverse=True)[1]
    rows = _first_of_each(place * (len(of_type) + 1) + of_type)
    counts = of_type[rows].bincount(minlength=1)
    return rows[counts[of_type[rows]] >= _FEWEST_OCCURRENCES]
