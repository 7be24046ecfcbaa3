"""Intrinsic dimension of the distinct rows: by TwoNN, or by any estimator of scikit-dimension.

Copies of a row are merged first, for their distances say nothing of the dimension: exact copies, and those that differ
by the rounding of a forward pass, about 3e-7 where one prompt is run in batches of several shapes.

Sources: Facco et al. 2017 (TwoNN); Razzhigaev et al. 2024 (arXiv 2311.05928) for its use on embeddings.
"""

import math
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from embedgeo.functional.duplicates import DUPLICATE_TOLERANCE, merge_duplicates
from embedgeo.functional.moments import ratio
from embedgeo.functional.neighbors import two_nearest_distances


class GlobalEstimator(Protocol):
    """A scikit-dimension global estimator, such as ``skdim.id.lPCA()``."""

    dimension_: float

    def fit(self, X: Any) -> object:
        """Estimate the dimension of the rows of ``X``, a NumPy array."""


class DimensionEstimate(NamedTuple):
    """Intrinsic dimension, and the number of distinct points that it was estimated from."""

    dimension: float
    num_points: int


def twonn_dimension(
    x: Tensor, *, discard_fraction: float = 0.1, duplicate_tolerance: float = DUPLICATE_TOLERANCE
) -> DimensionEstimate:
    """TwoNN intrinsic dimension of the distinct rows of ``x``.

    With μ_i the ratios of the distances to the second and the first neighbour, ascending, it is the slope of the
    least-squares line through the origin of -log(1 - i/N) on log μ_i, as in scikit-dimension 0.5.

    Args:
        x: shape (n, d), any floating dtype, finite.
        discard_fraction: share of the largest ratios that the fit leaves out, in (0, 1).
        duplicate_tolerance: see `merge_duplicates`.

    Returns:
        The estimate. It is NaN where fewer than three distinct rows, or fewer than two ratios to fit, are left, where
        all these ratios are 1 (rows on a grid), and where a squared distance overflows or vanishes.
    """
    points = merge_duplicates(x, duplicate_tolerance)
    num_fitted = int(len(points) * (1 - discard_fraction))
    first, second = two_nearest_distances(points).cpu().double().unbind(1)
    if num_fitted < 2 or not bool(second.isfinite().all() & (first > 0).all()):
        return DimensionEstimate(math.nan, len(points))
    log_mu = (second / first).sort().values[:num_fitted].log()
    log_rank = -torch.log1p(-torch.arange(1, num_fitted + 1, dtype=log_mu.dtype, device="cpu") / len(points))
    return DimensionEstimate(float(ratio(log_mu @ log_rank, log_mu @ log_mu)), len(points))


def estimated_dimension(
    x: Tensor, estimator: GlobalEstimator, *, duplicate_tolerance: float = DUPLICATE_TOLERANCE
) -> DimensionEstimate:
    """Intrinsic dimension of the distinct rows of ``x`` by any scikit-dimension global estimator.

    Returns:
        The estimate; NaN where fewer than three distinct rows are left or the estimator raises a ValueError.
    """
    points, dimension = merge_duplicates(x, duplicate_tolerance), math.nan
    if len(points) >= 3:
        with suppress(ValueError):
            estimator.fit(points.double().cpu().numpy())
            dimension = float(estimator.dimension_)
    return DimensionEstimate(dimension, len(points))
