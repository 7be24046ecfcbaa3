"""Intrinsic dimension of the distinct rows at several scales, by GRIDE.

TwoNN, at the scale of the two nearest neighbours, sees noise, and its number depends on that of the rows. With
neighbours of rank n1 and 2 n1, each doubling of n1 looks as far as half of the rows would at the scale before.

Source: Denti, Doimo, Laio & Mira 2022, *The generalized ratios intrinsic dimension estimator*, Scientific Reports 12.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from embedgeo.functional.dimension import point_groups
from embedgeo.functional.duplicates import DUPLICATE_TOLERANCE, distinct_rows
from embedgeo.functional.nearest import nearest_distances

SCALES = (1, 2, 4, 8, 16, 32, 64)
"""The ranks n1 of neighbours, unless told."""

_ITERATIONS = 12
"""Newton steps: they start within a factor of 2 and square the relative error, so that half of them would do."""


_EQUAL = 1e-8
"""Mean log μ below which distances are equal but for rounding."""


class ScaleEstimates(NamedTuple):
    """Intrinsic dimension at each scale; NaN where it is undefined.

    Attributes:
        dimensions: shape (S,), float64.
        errors: their standard errors, by the observed information, shape (S,).
        left_out: the estimates without the points of each group, shape (G, S); None if there are no groups.
    """

    dimensions: Tensor
    errors: Tensor
    left_out: Tensor | None = None


def gride_dimensions(
    x: Tensor,
    scales: Sequence[int] = SCALES,
    *,
    duplicate_tolerance: float = DUPLICATE_TOLERANCE,
    groups: Tensor | None = None,
    num_groups: int = 0,
) -> ScaleEstimates:
    """GRIDE intrinsic dimension of the distinct rows of ``x`` at each of some scales.

    At scale n1 it is the d that makes the ratios μ of the distances to the neighbours of rank 2 n1 and n1 most likely,
    if μ^-d has the law Beta(n1, n1), as it has where the density is constant up to the 2 n1-th neighbour; with N - 1 in
    place of N, which makes the estimate at scale 1 unbiased, and without the ratios above their median by more than 20
    times the distance from it to their 95th percentile, which are those of near copies. Both as in DADApy. (In one
    dimension 0.3 % of the ratios at scale 1 lie beyond, and the estimate is 1.6 % high; in two it is 0.2 %.)

    The standard error takes ratios of different rows as independent, but rows share neighbours. Simulated with Gaussian
    rows of 2 to 32 dimensions and spheres of 5 and 12, 200 samples of 1,000 rows each and 50 of 4,096, estimates vary
    by 0.75 to 1.4 of it up to scale 16 (1.5 in two dimensions), and by up to 1.9 at 64.

    Args:
        x: shape (n, d), any floating dtype, finite.
        scales: the ranks n1, each at least 1.
        duplicate_tolerance: see `embedgeo.functional.merge_duplicates`.
        groups: the group of each row, from 0, shape (n,); default: the rows are in no groups. As in
            `embedgeo.functional.twonn_dimension`, neighbours are those among all points.
        num_groups: G, the number of groups.

    Returns:
        The estimates, on the CPU. They are NaN at scales for which there are not 2 n1 + 1 distinct rows, where all
        ratios are 1 (a simplex), and where a squared distance overflows or vanishes.

    >>> x = torch.rand(2000, 2, generator=torch.Generator().manual_seed(0)) @ torch.ones(2, 3).triu()
    >>> gride_dimensions(x, (1, 4, 16)).dimensions.round()
    tensor([2., 2., 2.], dtype=torch.float64)
    """
    kept, place = distinct_rows(x, duplicate_tolerance)
    points = x if len(kept) == len(x) else x[kept]
    nearest = nearest_distances(points, 2 * max(scales)).cpu().double()
    group = None if groups is None else point_groups(groups, place, len(kept)).cpu()
    found, left_out = [], []
    for scale in scales:
        near, far = nearest[:, scale - 1], nearest[:, 2 * scale - 1]
        log_mu = (far / near).log()
        if not len(points) or not bool(far.isfinite().all() & (near > 0).all()):
            log_mu = log_mu[:0]
        found.append(most_likely_dimension(log_mu, scale))
        if group is not None:
            others = (log_mu[group[: len(log_mu)] != i] for i in range(num_groups))
            left_out.append(torch.stack([most_likely_dimension(each, scale)[0] for each in others]))
    dimensions, errors = torch.stack(found).unbind(1)
    return ScaleEstimates(dimensions, errors, torch.stack(left_out, dim=1) if left_out else None)


def most_likely_dimension(log_mu: Tensor, scale: int) -> Tensor:
    """The most likely dimension, given the log μ of points, shape (N,), and its standard error; shape (2,), float64.

    See `gride_dimensions`. The derivative of the log likelihood is (N - 1) / d + (n1 - 1) Σ share - (2 n1 - 1) Σ log μ,
    convex and falling in d. As 1/d < share < 1/d + log μ, it is positive where Newton's method starts, which so comes
    nearer from below.
    """
    if len(log_mu) < 2:
        return log_mu.new_full((2,), torch.nan)
    mu = log_mu.exp()
    middle, high = mu.quantile(mu.new_tensor([0.5, 0.95]))
    used = log_mu[mu < middle + 20 * (high - middle)]
    count, total = len(used), used.sum()
    if count < 2 or not bool(total > _EQUAL * count):
        return log_mu.new_full((2,), torch.nan)
    dimension = (scale * count - 1) / ((2 * scale - 1) * total)
    for _ in range(_ITERATIONS):
        share, information = _information(used, dimension, scale)
        slope = (count - 1) / dimension + (scale - 1) * share.sum() - (2 * scale - 1) * total
        dimension = dimension + slope / information
    return torch.stack((dimension, _information(log_mu, dimension, scale)[1].rsqrt()))


def _information(log_mu: Tensor, dimension: Tensor, scale: int) -> tuple[Tensor, Tensor]:
    """The share log μ / (1 - μ^-d), shape (N,), 1/d where μ is 1; and the observed information on d, a scalar."""
    scaled = dimension * log_mu
    share = torch.where(scaled > 0, log_mu / -torch.expm1(-scaled), 1 / dimension)
    return share, len(log_mu) / dimension**2 + (scale - 1) * (share.square() * (-scaled).exp()).sum()
