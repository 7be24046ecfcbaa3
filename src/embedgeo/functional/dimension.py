"""Intrinsic dimension of the distinct rows: by TwoNN, by GRIDE, or by any estimator of
scikit-dimension.

Sources: Facco et al. 2017 (TwoNN); Denti et al. 2022 (GRIDE); Razzhigaev et al. 2024 (arXiv
2311.05928) for embeddings.
"""

import math
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from embedgeo.functional.neighbors import (
    DUPLICATE_TOLERANCE,
    Nearest,
    Neighbors,
    merge_duplicates,
    same_label_shares,
)
from embedgeo.functional.precision import is_normal

DISCARD_FRACTIONS = {"fit": 0.1, "mle": 0.0}
"""By method of TwoNN: the share of the largest ratios that are not used, unless given."""

SCALES = (1, 2, 4, 8, 16, 32, 64)
"""The ranks n1 of neighbours, unless given."""

FAR_SIGHTED = 1024
"""Most rows whose third and fourth neighbours are used, too: enough for a dimension to 2 %."""

_FEWEST_OCCURRENCES = 8  # of a token type that is looked at alone
# a step of Newton's method, relative, after which less than the square of it is left of the error
_CONVERGED = 1e-6
# at most, of Newton's method, which starts within a factor of 1.5 and squares the relative error
_ITERATIONS = 12
_EQUAL = 1e-8  # mean log μ below which distances are equal but for rounding
_GOLDEN = (5**0.5 - 1) / 2  # multiples of it, modulo 1, are spread evenly


class GlobalEstimator(Protocol):
    """A scikit-dimension global estimator, such as ``skdim.id.lPCA()``."""

    dimension_: float

    def fit(self, X: Any) -> object:
        """Estimate the dimension of the rows of ``X``, a NumPy array."""


class DimensionEstimate(NamedTuple):
    """Intrinsic dimension, and what it was estimated from."""

    dimension: float  # NaN where it is undefined
    num_points: int  # number of distinct points
    # the estimates without the points of each group, shape (G,), float64
    left_out: Tensor | None = None
    # that of GRIDE from the neighbours of rank 2 and 4, of TwoNN alone
    next_scale: float = math.nan


def twonn_dimension(
    x: Tensor,
    *,
    method: str = "fit",
    discard_fraction: float | None = None,
    duplicate_tolerance: float = DUPLICATE_TOLERANCE,
    groups: Tensor | None = None,
    num_groups: int = 0,
) -> DimensionEstimate:
    """TwoNN intrinsic dimension of the distinct rows of ``x``.

    With μ_i the ratios of the distances to the second and the first neighbour, ascending, of which
    the m = ⌊N (1 - discard_fraction) + 1e-9⌋ smallest are used, it is, by ``method``:

    - ``"fit"``: the slope of the least-squares line through the origin of -log(1 - i/N) on log μ_i
      (Facco et al. 2017). scikit-dimension 0.5 has it, too, with one ratio fewer where rounding
      makes the product less than an integer.
    - ``"mle"``: (m - 1) / (Σ log μ_i + (N - m) log μ_m), the maximum-likelihood estimate without
      its bias, where of the others only is known that they are larger (Epstein & Sobel 1953). For m
      = N it is (N - 1) / Σ log μ_i, which is DADApy's ``algorithm="ml"`` (DADApy leaves out none
      there, whatever its ``mu_fraction``).

    Beside it stands GRIDE's dimension at scale 2, the next one, of at most 1,024 of the points:
    where some have near copies, TwoNN sees the distance to the copy, and is far lower: see
    `gride_dimensions`.

    Without a group only the fit is repeated, for the μ_i of the other points, those with copies in
    other groups among them: their neighbours are those among all points. If these were searched for
    again, the estimates would be those of a thinner sample, and copies of a point, or its absence,
    move nearest neighbours in a way that resampling does not reproduce (Abadie & Imbens 2008, on
    the bootstrap of matching estimators).

    Args:
        x: shape (n, d), any floating dtype, finite.
        method: ``"fit"`` or ``"mle"``.
        discard_fraction: share of the largest ratios that are not used: in (0, 1), and 0 for
            ``"mle"``. Default: 0.1 of the fit, none of the maximum likelihood.
        duplicate_tolerance: see `merge_duplicates`.
        groups: the group of each row, from 0, shape (n,); default: the rows are in no groups.
        num_groups: G, the number of groups.

    Returns:
        The estimate. It is NaN where fewer than three distinct rows, or fewer than two ratios to
        use, are left, where all these ratios are 1 (rows on a grid), and where a squared distance
        overflows or vanishes.
    """
    order = torch.arange(len(x), device=x.device) * _GOLDEN % 1
    nearest, place = _nearest_points(Neighbors(x), duplicate_tolerance, order)
    group = None if groups is None else point_groups(groups, place, len(nearest.distances))
    return _of_distances(nearest.distances, method, discard_fraction, group, num_groups)


def _nearest_points(
    rows: Neighbors, duplicate_tolerance: float, order: Tensor, apart: Tensor | None = None
) -> tuple[Nearest, Tensor]:
    """Find the nearest distinct rows of each distinct row, and for each row the place of its copy.

    Only the `FAR_SIGHTED` distinct rows with the smallest ``order`` of a copy, shape (n,), have a
    third and fourth neighbour.
    """
    kept, place = rows.distinct(duplicate_tolerance)
    points = None if len(kept) == len(place) else kept
    if len(kept) <= FAR_SIGHTED:
        return rows.nearest(4, points, apart), place
    least = torch.full_like(order[: len(kept)], torch.inf).scatter_reduce_(0, place, order, "amin")
    is_far_sighted = torch.zeros_like(least, dtype=torch.bool)
    is_far_sighted[least.argsort()[:FAR_SIGHTED]] = True
    nearest = rows.nearest(4, points, apart, far=is_far_sighted)
    nearest.distances[~is_far_sighted, 2:] = torch.nan
    return nearest, place


def _of_distances(
    distances: Tensor,
    method: str,
    discard_fraction: float | None,
    group: Tensor | None,
    num_groups: int,
) -> DimensionEstimate:
    """TwoNN from the distances of points to their two nearest or more, shape (N, k), and the
    points' groups.
    """
    discarded = DISCARD_FRACTIONS[method] if discard_fraction is None else discard_fraction
    distances = distances.cpu().double()
    first, second = distances[:, :2].unbind(1)
    left_out = None if group is None else first.new_full((num_groups,), math.nan)
    if not bool(is_normal(distances[:, :2].square()).all()):
        return DimensionEstimate(math.nan, len(first), left_out)
    next_scale = math.nan
    if distances.shape[1] > 3:
        log_next = (distances[:, 3] / second).log()
        next_scale = most_likely_dimension(log_next[~log_next.isnan()], 2)
    log_mu, order = (second / first).log().sort()
    if group is not None:
        in_order = group.cpu()[order]
        others = (log_mu[in_order != i] for i in range(num_groups))
        left_out = log_mu.new_tensor([_rate_of_ratios(each, method, discarded) for each in others])
    dimension = _rate_of_ratios(log_mu, method, discarded)
    return DimensionEstimate(dimension, len(first), left_out, next_scale)


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
    """-log(1 - i/n) of i = 1 … n, float64."""
    return -torch.log1p(-torch.arange(1, n + 1, dtype=torch.float64, device="cpu") / n)


def _rate_of_ratios(log_mu: Tensor, method: str, discard_fraction: float) -> float:
    """Rate of the exponential law of log μ_i, shape (N,), ascending, by ``method``."""
    num_used = math.floor(len(log_mu) * (1 - discard_fraction) + 1e-9)
    if method == "fit":
        num_used = min(num_used, len(log_mu) - 1)  # the last one's rank has no logarithm
    used = log_mu[: max(0, num_used)]
    total = float(used.sum())
    if num_used < 2 or not total > _EQUAL * num_used:
        return math.nan
    if method == "fit":
        return float(used @ _log_ranks(len(log_mu))[:num_used]) / float(used @ used)
    return (num_used - 1) / (total + (len(log_mu) - num_used) * float(used[-1]))


def estimated_dimension(
    x: Tensor, estimator: GlobalEstimator, *, duplicate_tolerance: float = DUPLICATE_TOLERANCE
) -> DimensionEstimate:
    """Intrinsic dimension of the distinct rows of ``x`` by any scikit-dimension global estimator.

    Returns:
        The estimate; NaN where fewer than three distinct rows are left or the estimator raises a
        ValueError.
    """
    points = merge_duplicates(x, duplicate_tolerance)
    dimension = math.nan
    if len(points) >= 3:
        with suppress(ValueError):
            estimator.fit(points.double().cpu().numpy())
            dimension = float(estimator.dimension_)
    return DimensionEstimate(dimension, len(points))


class ScaleEstimates(NamedTuple):
    """Intrinsic dimension at each scale; NaN where it is undefined."""

    dimensions: Tensor  # shape (S,), float64
    errors: Tensor  # their standard errors, by the observed information, shape (S,)
    left_out: Tensor | None = None  # the estimates without the points of each group, shape (G, S)


def gride_dimensions(
    x: Tensor,
    scales: Sequence[int] = SCALES,
    *,
    duplicate_tolerance: float = DUPLICATE_TOLERANCE,
    groups: Tensor | None = None,
    num_groups: int = 0,
) -> ScaleEstimates:
    """GRIDE intrinsic dimension of the distinct rows of ``x`` at each of some scales.

    At scale n1 it is the d that makes the ratios μ of the distances to the neighbours of rank 2 n1
    and n1 most likely, if μ^-d has the law Beta(n1, n1), as it has where the density is constant up
    to the 2 n1-th neighbour; with N - 1 in place of N, which makes the estimate at scale 1
    unbiased, and without the ratios above their median by more than 20 times the distance from it
    to their 95th percentile, which are those of near copies. Both as in DADApy. (In one dimension
    0.3 % of the ratios at scale 1 lie beyond, and the estimate is 1.6 % high; in two it is 0.2 %.)

    The standard error takes ratios of different rows as independent, but rows share neighbours:
    simulated estimates vary by 0.75 to 1.4 of it up to scale 16, and by up to 1.9 at 64.

    Args:
        x: shape (n, d), any floating dtype, finite.
        scales: the ranks n1, each at least 1.
        duplicate_tolerance: see `embedgeo.functional.merge_duplicates`.
        groups: the group of each row, from 0, shape (n,); default: the rows are in no groups. As in
            `embedgeo.functional.twonn_dimension`, neighbours are those among all points.
        num_groups: G, the number of groups.

    Returns:
        The estimates, on the CPU. They are NaN at scales for which there are not 2 n1 + 1 distinct
        rows, where all ratios are 1 (a simplex), and where a squared distance overflows or
        vanishes.

    >>> x = (
    ...     torch.rand(2000, 2, generator=torch.Generator().manual_seed(0))
    ...     @ torch.ones(2, 3).triu()
    ... )
    >>> gride_dimensions(x, (1, 4, 16)).dimensions.round()
    tensor([2., 2., 2.], dtype=torch.float64)
    """
    rows = Neighbors(x)
    kept, place = rows.distinct(duplicate_tolerance)
    nearest = rows.nearest(2 * max(scales), kept)
    group = None if groups is None else point_groups(groups, place, len(kept))
    return _at_scales(nearest.distances, scales, group, num_groups)


def _at_scales(
    distances: Tensor, scales: Sequence[int], group: Tensor | None, num_groups: int
) -> ScaleEstimates:
    """The estimates from the distances of points to their nearest, shape (N, k), and the points'
    groups.
    """
    nearest = distances.cpu().double()
    group = None if group is None else group.cpu()
    found, left_out = [], []
    for scale in scales:
        near, far = nearest[:, scale - 1], nearest[:, 2 * scale - 1]
        log_mu = (far / near).log()
        if not len(nearest) or not bool(is_normal(torch.stack((near, far)).square()).all()):
            log_mu = log_mu[:0]
        dimension = most_likely_dimension(log_mu, scale)
        _, squares = _share_sums(log_mu, dimension)
        error = (len(log_mu) / dimension**2 + (scale - 1) * squares) ** -0.5
        found.append(log_mu.new_tensor((dimension, error)))
        if group is not None:
            others = (log_mu[group[: len(log_mu)] != i] for i in range(num_groups))
            left_out.append(
                log_mu.new_tensor([most_likely_dimension(each, scale) for each in others])
            )
    dimensions, errors = torch.stack(found).unbind(1)
    return ScaleEstimates(dimensions, errors, torch.stack(left_out, dim=1) if left_out else None)


def most_likely_dimension(log_mu: Tensor, scale: int) -> float:
    """The most likely dimension, given the log μ of points, shape (N,).

    The derivative of the log likelihood, times d, is (N - 1) + (n1 - 1) Σ d share - (2 n1 - 1) d Σ
    log μ. It is convex in d, falls, and is nearly a line. As d share ≥ 1 + d log μ / 2, it is not
    negative where Newton's method starts, which so comes nearer from below.
    """
    if len(log_mu) < 2:
        return math.nan
    mu = log_mu.exp()
    middle, high = mu.quantile(mu.new_tensor([0.5, 0.95]))
    used = log_mu[mu <= (middle + 20 * (high - middle)) * (1 + _EQUAL)]
    count, total = len(used), float(used.sum())
    if count < 2 or not total > _EQUAL * count:
        return math.nan
    dimension = (scale * count - 1) / ((1.5 * scale - 0.5) * total)
    for _ in range(_ITERATIONS):
        shares, squares = _share_sums(used, dimension)
        slope = (scale - 1) * (shares - dimension * squares) - (2 * scale - 1) * total
        excess = count - 1 + dimension * ((scale - 1) * shares - (2 * scale - 1) * total)
        step = excess / slope
        dimension -= step
        if abs(step) < _CONVERGED * dimension:
            break
    return dimension


def _share_sums(log_mu: Tensor, dimension: float) -> tuple[float, float]:
    """Sums of the shares log μ / (1 - μ^-d), 1/d where μ is 1, and of share² μ^-d."""
    negative = torch.expm1(-dimension * log_mu)  # μ^-d - 1
    share = torch.where(negative < 0, log_mu / -negative, 1 / dimension)
    return float(share.sum()), float((share.square() * (1 + negative)).sum())


class RowLabels(NamedTuple):
    """Token types and sequences of rows."""

    # shape (n,), int64; a row with a negative one has none; None: no row has one
    types: Tensor | None
    sequences: Tensor | None  # shape (n,), int64; None: each row is one
    # random numbers, shape (n,), all different: of rows with equal labels, that with the least is
    # drawn
    order: Tensor


class LabelledEstimates(NamedTuple):
    """Dimensions of rows in all, between and within token types, and who their neighbours are; None
    if unknown.
    """

    every: DimensionEstimate | ScaleEstimates
    between: DimensionEstimate | ScaleEstimates | None = None
    within: DimensionEstimate | ScaleEstimates | None = None
    same_type: Tensor | None = None  # shape (2,): see `same_label_shares`
    same_sequence: Tensor | None = None


def labelled_dimensions(
    x: Tensor,
    labels: RowLabels,
    *,
    scales: Sequence[int] = (),
    method: str = "fit",
    discard_fraction: float | None = None,
    duplicate_tolerance: float = DUPLICATE_TOLERANCE,
    groups: Tensor | None = None,
    num_groups: int = 0,
    apart: bool = False,
) -> LabelledEstimates:
    """Intrinsic dimension of the distinct rows of ``x``, of rows between token types, and of those
    within them.

    Both estimators take rows for independent draws from one density. But occurrences of one token
    type are near each other, and so are rows of one text: where the nearest row is of the same type
    and the next one is not, the ratio of their distances says nothing of a dimension, and the
    estimate for all rows is low. So there are, too:

    - between: that of one occurrence of each token type, drawn at random, so that types weigh
      equally. It is of rows of different types, each in its context, and not of the means of types.
    - within: that of the distances of rows to the nearest occurrences of their own type in other
      sequences, of all types with 8 distinct rows or more; rows weigh equally. The fewer
      occurrences a type has, the farther are a row's neighbours, and the lower is the estimate.

    Args:
        x: shape (n, d), any floating dtype, finite.
        labels: of the rows, on any device.
        scales: of GRIDE: see `gride_dimensions`; default: TwoNN.
        method: of TwoNN: see `twonn_dimension`.
        discard_fraction: of TwoNN.
        duplicate_tolerance: rows as near as this are merged first, in all three; of copies within a
            type, one counts.
        groups: the group of each row, from 0, shape (n,); default: the rows are in no groups.
        num_groups: G, the number of groups.
        apart: rows of one sequence are not neighbours, also of all rows (Theiler 1986, of times).

    Returns:
        The estimates, and the shares of rows whose nearest distinct row is of their type and
        sequence.
    """
    types, sequences = (
        None if each is None else each.to(x.device) for each in (labels.types, labels.sequences)
    )
    labels = RowLabels(types, sequences, labels.order.to(x.device))
    groups = None if groups is None else groups.to(x.device)
    others = sequences if apart else None
    searched = Neighbors(x)
    if scales:
        kept, place = searched.distinct(duplicate_tolerance)
        every = searched.nearest(2 * max(scales), kept, others)
    else:
        every, place = _nearest_points(searched, duplicate_tolerance, labels.order, others)

    def estimate(distances: Tensor, group: Tensor | None) -> DimensionEstimate | ScaleEstimates:
        if scales:
            return _at_scales(distances, scales, group, num_groups)
        return _of_distances(distances, method, discard_fraction, group, num_groups)

    def among(rows: Tensor, *of_neighbors: Tensor) -> DimensionEstimate | ScaleEstimates:
        """Of these rows, those that have all neighbours with the right labels."""
        distances = searched.nearest(2 * max(scales, default=1), rows, *of_neighbors).distances
        has_all = distances.isfinite().all(1) if of_neighbors else slice(None)
        return estimate(distances[has_all], None if groups is None else groups[rows][has_all])

    between = None
    within = None
    if types is not None:
        between = among(_one_of_each_type(labels, place))
    if types is not None and sequences is not None:
        within = among(_repeated(labels, place), sequences, types)
    group = None if groups is None else point_groups(groups, place, len(every.distances))
    kinds = (None, None) if scales else (types, sequences)
    return LabelledEstimates(
        estimate(every.distances, group),
        between,
        within,
        *same_label_shares(every, place, kinds),
    )


def first_of_each(labels: Tensor, order: Tensor) -> Tensor:
    """Indices of the rows with the least ``order`` of each label, both of shape (n,), by ascending
    label.
    """
    by_order = order.argsort(stable=True)
    ascending, at = labels[by_order].sort(stable=True)
    is_first = torch.ones_like(at, dtype=torch.bool)
    is_first[1:] = ascending.diff() != 0
    return by_order[at[is_first]]


def _has_no_copies(place: Tensor) -> bool:
    return len(place) > 0 and int(place.amax()) == len(place) - 1


def _one_of_each_type(labels: RowLabels, place: Tensor) -> Tensor:
    """Indices of an occurrence of each token type; of those that are copies of each other, one."""
    assert labels.types is not None
    rows = first_of_each(labels.types, labels.order)
    rows = rows[labels.types[rows] >= 0]
    return rows if _has_no_copies(place) else rows[first_of_each(place[rows], labels.order[rows])]


def _repeated(labels: RowLabels, place: Tensor) -> Tensor:
    """Indices of the rows of token types with enough of them; of a type's copies of a row, one."""
    assert labels.types is not None
    of_type = labels.types.unique(return_inverse=True)[1]
    if _has_no_copies(place):
        rows = torch.arange(len(place), device=place.device)
    else:
        rows = first_of_each(place * (len(of_type) + 1) + of_type, labels.order)
    counts = of_type[rows].bincount(minlength=1)
    return rows[counts[of_type[rows]] >= _FEWEST_OCCURRENCES]
