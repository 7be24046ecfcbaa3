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
"""Number of rows, the first ones, whose third and fourth neighbours are used, too: enough for a
dimension to 2 %.
"""

_FEWEST_OCCURRENCES = 8  # of a token type that is looked at alone
# a step of Newton's method, relative, after which less than the square of it is left of the error
_CONVERGED = 1e-5
# at most, of Newton's method, which is within a factor of 2 after its first step and squares the
# relative error
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
    # so that the first rows are spread evenly over all
    every = torch.arange(len(x), dtype=torch.float64, device="cpu")
    order = (every * _GOLDEN % 1).argsort().to(x.device)
    (found,) = labelled_dimensions(
        [x[order]],
        RowLabels(None, None),
        method=method,
        discard_fraction=discard_fraction,
        duplicate_tolerance=duplicate_tolerance,
        groups=None if groups is None else groups.to(x.device)[order],
        num_groups=num_groups,
    )
    estimate: DimensionEstimate = found.every
    return estimate


def _twonn_estimates(
    distances: Tensor, group: Tensor | None, method: str, discard_fraction: float, num_groups: int
) -> list[DimensionEstimate]:
    """TwoNN of each layer from the distances of points to their two nearest or more, shape (L, N,
    k), and the points' groups.
    """
    num_layers, num_points, k = distances.shape
    found = distances.new_full((2 + num_groups, num_layers), math.nan)
    if num_points > 2:
        first, second = distances[..., :2].unbind(-1)
        log_mu, order = (second / first).log().sort()
        found[0] = _rates_of_ratios(log_mu, method, discard_fraction)
        if k > 3:
            of_first = distances[:, :FAR_SIGHTED]
            log_next = (of_first[..., 3] / of_first[..., 1]).log()
            found[1] = most_likely_dimension(log_next, 2)
        if group is not None:
            in_order = group[order]
            for i in range(num_groups):
                others = log_mu[in_order != i].view(num_layers, -1)
                found[2 + i] = _rates_of_ratios(others, method, discard_fraction)
        extremes = torch.stack((first.amin(1), second.amax(1)))
        found.masked_fill_(~is_normal(extremes.square()).all(0), math.nan)
    return [
        DimensionEstimate(
            dimension, num_points, None if group is None else each[2:], next_scale=next_scale
        )
        for each, (dimension, next_scale) in zip(found.T, found[:2].T.tolist(), strict=True)
    ]


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


def _rates_of_ratios(log_mu: Tensor, method: str, discard_fraction: float) -> Tensor | float:
    """Rate of the exponential law of log μ_i, shape (L, N), ascending, by ``method``."""
    n = log_mu.shape[1]
    num_used = math.floor(n * (1 - discard_fraction) + 1e-9)
    if method == "fit":
        num_used = min(num_used, n - 1)  # the last one's rank has no logarithm
    if num_used < 2:
        return math.nan
    used = log_mu[:, :num_used]
    total = used.sum(1)
    if method == "fit":
        rates = used @ _log_ranks(n)[:num_used] / used.square().sum(1)
    else:
        rates = (num_used - 1) / (total + (n - num_used) * used[:, -1])
    return rates.where(total > _EQUAL * num_used, math.nan)


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
    (found,) = labelled_dimensions(
        [x],
        RowLabels(None, None),
        scales=scales,
        duplicate_tolerance=duplicate_tolerance,
        groups=groups,
        num_groups=num_groups,
    )
    estimate: ScaleEstimates = found.every
    return estimate


def _gride_estimates(
    nearest: Tensor, group: Tensor | None, scales: Sequence[int], num_groups: int
) -> ScaleEstimates:
    """GRIDE of a layer from the distances of points to their nearest, shape (N, k), and the points'
    groups.
    """
    found, left_out = [], []
    for scale in scales:
        near, far = nearest[:, scale - 1], nearest[:, 2 * scale - 1]
        log_mu = (far / near).log()[None]
        if not bool(is_normal(torch.stack((near, far)).square()).all()):
            log_mu = log_mu[:, :0]
        dimension = most_likely_dimension(log_mu, scale)
        _, squares = _share_sums(log_mu, torch.ones_like(log_mu), dimension)
        error = (log_mu.shape[1] / dimension.square() + (scale - 1) * squares) ** -0.5
        found.append(torch.cat((dimension, error)))
        if group is not None:
            others = (log_mu[:, group[: log_mu.shape[1]] != i] for i in range(num_groups))
            left_out.append(torch.cat([most_likely_dimension(each, scale) for each in others]))
    dimensions, errors = torch.stack(found).unbind(1)
    return ScaleEstimates(dimensions, errors, torch.stack(left_out, dim=1) if left_out else None)


def most_likely_dimension(log_mu: Tensor, scale: int) -> Tensor:
    """The most likely dimension of each layer, given the log μ of points, shape (L, N).

    The derivative of the log likelihood, times d, is (N - 1) + (n1 - 1) Σ d share - (2 n1 - 1) d Σ
    log μ. It is positive at 0, convex in d, and falls by n1 Σ log μ to 1.5 times that for each 1 of
    d. So Newton's method, which starts at the d of which Σ log μ is the expected one, has a
    positive d after its first step, and from then on comes nearer from below.
    """
    if log_mu.shape[1] < 2:
        return log_mu.new_full((len(log_mu),), math.nan)
    mu = log_mu.exp()
    ascending = mu.sort(1).values
    middle, high = (_quantile(ascending, share) for share in (0.5, 0.95))
    is_used = mu <= ((middle + 20 * (high - middle)) * (1 + _EQUAL))[:, None]
    used = log_mu.where(is_used, 0)
    counts, totals = is_used.sum(1).tolist(), used.sum(1).tolist()
    expected = sum(1 / k for k in range(scale, 2 * scale))
    dimensions = [
        count * expected / total if count > 1 and total > _EQUAL * count else math.nan
        for count, total in zip(counts, totals, strict=True)
    ]
    for _ in range(_ITERATIONS):
        sums = _share_sums(used, is_used, used.new_tensor(dimensions)).tolist()
        steps = list[float]()
        for d, n, total, share, square in zip(dimensions, counts, totals, *sums, strict=True):
            slope = (scale - 1) * (share - d * square) - (2 * scale - 1) * total
            excess = n - 1 + d * ((scale - 1) * share - (2 * scale - 1) * total)
            steps.append(excess / slope)
        dimensions = [d - step for d, step in zip(dimensions, steps, strict=True)]
        if not any(abs(s) >= _CONVERGED * d for d, s in zip(dimensions, steps, strict=True)):
            break
    return used.new_tensor(dimensions)


def _quantile(ascending: Tensor, share: float) -> Tensor:
    """That of each row of numbers, shape (L, N), as `torch.quantile` has it, which takes longer."""
    place = share * (ascending.shape[1] - 1)
    low, high = ascending[:, math.floor(place)], ascending[:, math.ceil(place)]
    return low.lerp(high, place % 1)


def _share_sums(log_mu: Tensor, is_used: Tensor, dimension: Tensor) -> Tensor:
    """Sums of the shares log μ / (1 - μ^-d), 1/d where μ is 1, and of share² μ^-d, of the points
    that are used, shape (L, N); the result has shape (2, L).
    """
    dimension = dimension[:, None]
    negative = torch.expm1(-dimension * log_mu)  # μ^-d - 1
    share = torch.where(negative < 0, log_mu / -negative, 1 / dimension) * is_used
    return torch.stack((share.sum(1), (share.square() * (1 + negative)).sum(1)))


class RowLabels(NamedTuple):
    """Token types and sequences of rows."""

    # shape (n,), int64; a row with a negative one has none; None: no row has one
    types: Tensor | None
    sequences: Tensor | None  # shape (n,), int64; None: each row is one


class LabelledEstimates(NamedTuple):
    """Dimensions of rows in all, between and within token types, and who their neighbours are; None
    if unknown.
    """

    every: Any  # a DimensionEstimate of TwoNN, ScaleEstimates of GRIDE
    between: Any = None
    within: Any = None
    same_type: Tensor | None = None  # shape (2,): see `same_label_shares`
    same_sequence: Tensor | None = None


def labelled_dimensions(
    layers: Sequence[Tensor],
    labels: RowLabels,
    *,
    scales: Sequence[int] = (),
    method: str = "fit",
    discard_fraction: float | None = None,
    duplicate_tolerance: float = DUPLICATE_TOLERANCE,
    groups: Tensor | None = None,
    num_groups: int = 0,
    apart: bool = False,
) -> list[LabelledEstimates]:
    """Intrinsic dimension of the distinct rows of each layer, of rows between token types, and of
    those within them.

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
        layers: the rows of each in random order, shape (n, d), any floating dtype, finite: what is
            drawn of a type, or of copies, is the first of them. Layers of few rows, none of which
            are copies, are searched in the same operations.
        labels: of the rows, the same in all layers, on any device.
        scales: of GRIDE: see `gride_dimensions`; default: TwoNN.
        method: of TwoNN: see `twonn_dimension`.
        discard_fraction: of TwoNN.
        duplicate_tolerance: rows as near as this are merged first, in all three; of copies within a
            type, one counts.
        groups: the group of each row, from 0, shape (n,); default: the rows are in no groups.
        num_groups: G, the number of groups.
        apart: rows of one sequence are not neighbours, also of all rows (Theiler 1986, of times).

    Returns:
        The estimates of each layer, and the shares of rows whose nearest distinct row is of their
        type and sequence.
    """
    device = layers[0].device
    types, sequences, groups = (
        None if each is None else each.to(device) for each in (*labels, groups)
    )
    labels = RowLabels(types, sequences)
    estimator = _Estimator(scales, method, discard_fraction, num_groups)
    searched = [Neighbors(x) for x in layers]
    alike = [i for i, rows in enumerate(searched) if not rows.may_have_copies(duplicate_tolerance)]
    found = dict[int, LabelledEstimates]()
    for part in [alike, *([i] for i in range(len(layers)) if i not in alike)]:
        if part:
            rows = Neighbors.stacked([searched[i] for i in part])
            copies = rows.every, rows.every
            if part is not alike:
                copies = rows.distinct(duplicate_tolerance)
            estimates = _estimates(rows, copies, labels, groups, estimator, apart=apart)
            found |= zip(part, estimates, strict=True)
    return [found[i] for i in range(len(layers))]


class _Estimator(NamedTuple):
    """TwoNN or, with scales, GRIDE: see `labelled_dimensions`."""

    scales: Sequence[int]
    method: str
    discard_fraction: float | None
    num_groups: int

    @property
    def num_neighbors(self) -> int:
        return 2 * max(self.scales, default=1)

    def of(self, distances: Tensor, group: Tensor | None) -> list[Any]:
        """The estimates of each layer, given the distances of points to their nearest, shape (L, N,
        k), and the points' groups.
        """
        nearest = distances.cpu().double()
        in_group = None if group is None else group.cpu()
        if self.scales:
            return [
                _gride_estimates(each, in_group, self.scales, self.num_groups) for each in nearest
            ]
        usual = DISCARD_FRACTIONS[self.method]
        discarded = usual if self.discard_fraction is None else self.discard_fraction
        return _twonn_estimates(nearest, in_group, self.method, discarded, self.num_groups)


def _estimates(
    rows: Neighbors,
    copies: tuple[Tensor, Tensor],
    labels: RowLabels,
    groups: Tensor | None,
    estimator: _Estimator,
    *,
    apart: bool,
) -> list[LabelledEstimates]:
    """The estimates of each layer of the rows, given which rows are distinct, and the place of each
    row's copy among these.
    """
    (points, place), (types, sequences) = copies, labels
    k = estimator.num_neighbors
    is_twonn = not estimator.scales
    has_copies = len(points) < len(place)  # else the points are the rows
    chosen = points if has_copies else None
    num_neighbors, far_sighted = (4, FAR_SIGHTED) if is_twonn else (k, None)
    others = sequences if apart else None
    every = rows.nearest(num_neighbors, chosen, others, far_sighted=far_sighted).by_layer()
    group = None if groups is None else point_groups(groups, place, len(points))
    of_all = estimator.of(every.distances, group)
    between: Sequence[Any] = [None] * len(of_all)
    within = between
    if types is not None:
        chosen = _one_of_each_type(types, place, has_copies=has_copies)
        distances = rows.nearest(k, chosen).by_layer().distances
        between = estimator.of(distances, None if groups is None else groups[chosen])
    if types is not None and sequences is not None:
        chosen = _repeated(types, place, has_copies=has_copies)
        distances = rows.nearest(k, chosen, sequences, types).by_layer().distances
        has_all = distances[0].isfinite().all(1)  # layers have the same labels
        chosen = chosen[has_all]
        within = estimator.of(distances[:, has_all], None if groups is None else groups[chosen])
    shares = same_label_shares(every, place, (types, sequences) if is_twonn else (None, None))
    same_type, same_sequence = ([None] * len(of_all) if each is None else each for each in shares)
    columns = of_all, between, within, same_type, same_sequence
    return [LabelledEstimates(*each) for each in zip(*columns, strict=True)]


def _first_of_each(labels: Tensor) -> Tensor:
    """Indices, ascending, of the first row of each label, shape (n,)."""
    ascending, at = labels.sort(stable=True)
    is_first = torch.ones_like(at, dtype=torch.bool)
    is_first[1:] = ascending.diff() != 0
    return at[is_first].sort().values


def _one_of_each_type(types: Tensor, place: Tensor, *, has_copies: bool) -> Tensor:
    """Indices of an occurrence of each token type; of those that are copies of each other, one."""
    rows = _first_of_each(types)
    rows = rows[types[rows] >= 0]
    return rows[_first_of_each(place[rows])] if has_copies else rows


def _repeated(types: Tensor, place: Tensor, *, has_copies: bool) -> Tensor:
    """Indices of the rows of token types with enough of them; of a type's copies of a row, one."""
    of_type = types.unique(return_inverse=True)[1]
    rows = place
    if has_copies:
        rows = _first_of_each(place * (len(of_type) + 1) + of_type)
    counts = of_type[rows].bincount(minlength=1)
    return rows[counts[of_type[rows]] >= _FEWEST_OCCURRENCES]
