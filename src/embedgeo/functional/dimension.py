"""Intrinsic dimension by TwoNN: exact neighbours, merged duplicates, scikit-dimension's fit.

Sources: Facco et al. 2017 (TwoNN); Razzhigaev et al. 2024 (arXiv 2311.05928) for its use on embeddings.
"""

import math
from typing import NamedTuple, Protocol

import numpy as np
import torch
from skdim.id import TwoNN
from torch import Tensor

from embedgeo.functional.neighbors import two_nearest_distances
from embedgeo.functional.precision import accumulator_dtype


class GlobalEstimator(Protocol):
    """A scikit-dimension global estimator, such as ``skdim.id.lPCA()``."""

    dimension_: float

    def fit(self, X: np.ndarray) -> object:
        """Estimate the dimension of the rows of ``X``."""


class DimensionEstimate(NamedTuple):
    """Intrinsic dimension of some points, and on how many distinct ones it rests."""

    dimension: float
    num_points: int


def merge_duplicates(x: Tensor) -> Tensor:
    """The distinct rows of ``x``, shape (n, d), each once, in any order.

    >>> merge_duplicates(torch.tensor([[0.0, 1.0], [2.0, 3.0], [0.0, 1.0]])).shape
    torch.Size([2, 2])
    """
    x = x.contiguous()  # so that each row is summed in the same order, and equal rows have equal sums
    sums, group = x.sum(1, dtype=accumulator_dtype(x.device)).unique(return_inverse=True)
    if not bool(sums.isnan().any()):
        if len(sums) == len(x):
            return x
        member = torch.empty_like(group[: len(sums)])
        member[group] = torch.arange(len(x), device=x.device)
        if x.equal(x[member[group]]):
            return x[member]
    return x.unique(dim=0)  # different rows have equal sums, or sums overflow: sort the rows themselves


def twonn_dimension(x: Tensor, *, discard_fraction: float = 0.1) -> DimensionEstimate:
    """TwoNN intrinsic dimension of the distinct rows of ``x``.

    Args:
        x: shape (n, d), any floating dtype, finite.
        discard_fraction: share of the largest distance ratios that the fit leaves out, in (0, 1).

    Returns:
        The estimate; NaN where fewer than three distinct rows, or a fit over fewer than two ratios, are left, or
        where all ratios that the fit uses are 1 (rows on a grid) or a squared distance overflows or vanishes.
    """
    points = merge_duplicates(x)
    num_fitted = int(len(points) * (1 - discard_fraction))
    if len(points) < 3 or num_fitted < 2:
        return DimensionEstimate(math.nan, len(points))
    distances = two_nearest_distances(points).cpu().numpy()
    in_range = np.isfinite(distances).all() and (distances > 0).all()
    if not in_range or (distances[:, 1] == distances[:, 0]).sum() >= num_fitted:
        return DimensionEstimate(math.nan, len(points))
    fit = TwoNN(dist=True, discard_fraction=discard_fraction).fit(distances)
    return DimensionEstimate(float(fit.dimension_), len(points))


def estimated_dimension(x: Tensor, estimator: GlobalEstimator) -> DimensionEstimate:
    """Intrinsic dimension of the distinct rows of ``x`` by any scikit-dimension global estimator.

    Returns:
        The estimate; NaN where fewer than three distinct rows are left or the estimator refuses them.
    """
    points = merge_duplicates(x)
    if len(points) < 3:
        return DimensionEstimate(math.nan, len(points))
    try:
        estimator.fit(points.double().cpu().numpy())
    except ValueError:
        return DimensionEstimate(math.nan, len(points))
    return DimensionEstimate(float(estimator.dimension_), len(points))
