"""Similarity of two representations of one set of rows: at two steps of a training, or at two
layers.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from embedgeo.functional.moments import ratio
from embedgeo.functional.precision import state_device

NEIGHBORS = 30  # nearest neighbours of a row that are compared
_ROUNDING = 1e-13  # a smaller share of what it was computed from cannot be told from rounding
_BLOCK = 1 << 20  # squared distances held at a time


def debiased_cka(x: Tensor, y: Tensor) -> Tensor:
    """Linear CKA from unbiased estimates of HSIC: near 0 for independent rows, 1 for rotated and
    scaled copies.

    With K = XXᵀ and L = YYᵀ, their diagonals set to 0, HSIC(K, L) = (tr KL + 1ᵀK1 1ᵀL1 / ((n - 1)(n
    - 2)) - 2 1ᵀKL1 / (n - 2)) / (n (n - 3)), and CKA = HSIC(K, L) / √(HSIC(K, K) HSIC(L, L)), in
    [-1, 1].

    Sources: Song et al. 2012 (equation 5) for HSIC; Kornblith et al. 2019 for CKA; Murphy et al.
    2024 for their union.

    Args:
        x: shape (n, d1), any floating dtype; rows with a NaN or Inf, here or in ``y``, are left
            out.
        y: the same rows as ``x``, shape (n, d2).

    Returns:
        Scalar, float64; NaN for n < 4, and where the rows of ``x`` or of ``y`` do not differ.

    Raises:
        ValueError: they are not two matrices of as many rows.

    >>> x = torch.tensor([[0.0], [1.0], [2.0], [4.0], [8.0]])
    >>> round(float(debiased_cka(x, 3 * x - 1)), 6)
    1.0
    """
    return cka_matrix(_rows(x, y))[0, 1]


def biased_cka(x: Tensor, y: Tensor) -> Tensor:
    """Linear CKA as first published: ‖XᵀY‖² / (‖XᵀX‖ ‖YᵀY‖) of the centred rows, Frobenius norms.

    Independent rows do not have 0: isotropic Gaussian ones have (d/n) / (1 + d/n), which is 0.33 at
    n = 1024, d = 512.

    Source: Kornblith et al. 2019 (equation 3 and section 3). Arguments, result and errors as of
    `debiased_cka`.
    """
    x, y = _pair(x, y)
    return ratio(_product(x, y), (_product(x, x) * _product(y, y)).sqrt())


def cka_matrix(representations: Sequence[Tensor]) -> Tensor:
    """`debiased_cka` of each of these with each, shape (m, m), from one n × n matrix of each.

    Args:
        representations: of the same rows, shapes (n, d_i), finite.
    """
    if not representations or not len(representations[0]):
        return torch.full(
            (len(representations), len(representations)), torch.nan, dtype=torch.float64
        )
    grams = torch.stack([_u_centered(_centered(x)) for x in representations])
    return grams @ grams.T


def procrustes_distance(x: Tensor, y: Tensor) -> Tensor:
    """Squared distance of the centred rows, scaled to a Frobenius norm of 1, after the best
    rotation of one of them.

    min ‖X - YR‖² = 2 - 2 ‖XᵀY‖_* over orthogonal R, the sum of singular values: 0 for rotated and
    scaled copies, 2 at most; its root is a metric. Of two widths the narrower one is filled up with
    zeros.

    Source: Ding, Denain & Steinhardt 2021 (section 2). Arguments, result, errors: as of
    `debiased_cka`; NaN for n < 2.
    """
    x, y = _pair(x, y)
    # decompositions of NaN are an error
    if len(x) < 2 or not bool((x.sum() + y.sum()).isfinite()):
        return x.new_full((), torch.nan)
    x, y = (
        torch.linalg.qr(each.T, mode="r").R.T if each.shape[1] > each.shape[0] else each
        for each in (x, y)
    )
    return (2 - 2 * torch.linalg.svdvals(x.T @ y).sum()).clamp(min=0)


def neighbor_overlap(x: Tensor, y: Tensor, k: int = NEIGHBORS) -> Tensor:
    """Share of the ``k`` nearest neighbours of a row that are its neighbours in the other, too;
    mean over rows.

    Neighbours are those by Euclidean distance. All that are as near as the k-th one count, and the
    share is of the larger of the two sets, so that the order of equal rows does not matter.
    Unrelated rows have k / (n - 1).

    Arguments, result and errors as of `debiased_cka`; NaN unless there are more than ``k`` other
    rows, and a ValueError for ``k`` less than 1.
    """
    if k < 1:
        raise ValueError(f"k must be at least 1; got {k}.")
    pair = _pair(x, y)
    n = len(pair[0])
    if n <= k + 1:
        return pair[0].new_full((), torch.nan)

    def near(x: Tensor, start: int, stop: int) -> Tensor:
        """Marks of the ``k`` rows nearest to each of these, shape (rows, n)."""
        squares = x.square().sum(1)
        distances = squares + squares[start:stop, None] - 2 * x[start:stop] @ x.T
        distances.diagonal(start).fill_(torch.inf)
        limit = distances.kthvalue(k, dim=1, keepdim=True).values
        return distances <= limit + _ROUNDING * (squares[start:stop, None] + limit)

    shares, step = [], max(1, _BLOCK // n)
    for start in range(0, n, step):
        a, b = (near(each, start, start + step) for each in pair)
        shares.append((a & b).sum(1) / torch.maximum(a.sum(1), b.sum(1)))
    is_known = (pair[0].sum() + pair[1].sum()).isfinite()
    return torch.where(is_known, torch.cat(shares).to(torch.float64).mean(), torch.nan)


def drift_values(x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """``cka`` (debiased), ``procrustes`` and ``neighbor_overlap`` of two representations of the
    same rows.

    Arguments and errors as of `debiased_cka`.
    """
    return {
        "cka": debiased_cka(x, y),
        "procrustes": procrustes_distance(x, y),
        "neighbor_overlap": neighbor_overlap(x, y),
    }


def linearity(x: Tensor, y: Tensor, adjusted: bool = True, residual: bool = True) -> Tensor:
    """Share of ``y`` that is an affine function of ``x``: 1 - min ‖XA - Y‖² of centred rows, Y of
    Frobenius norm 1.

    This is R² of all coordinates at once. Unadjusted, that of independent rows is r / (n - 1), r
    the rank of ``x``: 0.25 at d/n = 0.25. Adjusted for degrees of freedom, 1 - (1 - R²)(n - 1) / (n
    - 1 - r), it is 0 on average.

    Source: Razzhigaev et al. 2024, "Your Transformer is Secretly Linear" (the linearity score;
    unadjusted).

    Args:
        x: a layer, shape (n, d1), any floating dtype; rows with a NaN or Inf, here or in ``y``, are
            left out.
        y: the layer above, shape (n, d2).
        adjusted: for degrees of freedom.
        residual: of ``y`` as it is, with the residual stream; False: of ``y - x``, what the layer
            adds to it.

    Returns:
        Scalar, float64; NaN where its rows do not differ or, adjusted, for n ≤ r + 1; so, too,
        without the residual where the widths differ.

    Raises:
        ValueError: they are not two matrices of as many rows.
    """
    return _Fit.of(x, y).score(adjusted, residual)


def linearity_values(lower: Tensor, upper: Tensor) -> dict[str, Tensor]:
    """``linearity`` and ``linearity_without_residual``, both adjusted, of a layer given the one
    below.
    """
    fit = _Fit.of(lower, upper)
    return {
        "linearity": fit.score(True, True),
        "linearity_without_residual": fit.score(True, False),
    }


class _Fit(NamedTuple):
    """The best affine fit of a layer, or of what it adds to the one below, given the latter: they
    leave the same.
    """

    n: int
    rank: int  # of the lower layer
    left: Tensor  # sum of squares that the fit leaves
    upper: Tensor  # that of the upper layer
    added: Tensor  # that of what it adds; NaN where the widths differ

    @classmethod
    def of(cls, lower: Tensor, upper: Tensor) -> "_Fit":
        # where the fit knows the rank
        x, y = (each.cpu() for each in _rows(lower, upper))
        n, nan = len(x), torch.tensor(torch.nan, dtype=torch.float64)
        added = _center(y - x).square().sum() if x.shape == y.shape and n else nan
        if n < 2:
            return cls(n, 0, nan, nan, nan)
        x, y = _center(x), _center(y)
        norms = torch.linalg.vector_norm(x, dim=0)
        x = (x / norms)[:, norms > 0]
        if not x.shape[1]:
            return cls(n, 0, y.square().sum(), y.square().sum(), added)
        fit = torch.linalg.lstsq(x, y, driver="gelsy")
        return cls(n, int(fit.rank), (y - x @ fit.solution).square().sum(), y.square().sum(), added)

    def score(self, adjusted: bool, residual: bool) -> Tensor:
        freedom = (self.n - 1) / (self.n - 1 - self.rank) if self.n - 1 > self.rank else torch.nan
        return 1 - ratio(self.left, self.upper if residual else self.added) * (
            freedom if adjusted else 1
        )


def _rows(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The rows that are finite in both, in float64."""
    if x.ndim != 2 or y.ndim != 2 or len(x) != len(y):
        raise ValueError(
            "x and y must be the same rows, shapes (n, d1) and (n, d2); got "
            f"{tuple(x.shape)} and {tuple(y.shape)}. Take the rows that both have."
        )
    x, y = (each.detach().to(state_device(each.device)).to(torch.float64) for each in (x, y))
    finite = x.isfinite().all(1) & y.isfinite().all(1)
    return (x, y) if bool(finite.all()) else (x[finite], y[finite])


def _center(x: Tensor) -> Tensor:
    """Centred rows; 0 in coordinates that differ by no more than rounding does."""
    centered = x - x.mean(0)
    return centered.masked_fill_(centered.abs().amax(0) <= _ROUNDING * x.abs().amax(0), 0)


def _centered(x: Tensor) -> Tensor:
    """Centred rows in float64, scaled to a Frobenius norm of 1; NaN where they do not differ."""
    x = x.detach().to(state_device(x.device)).to(torch.float64)
    if not x.numel():
        return x.new_full((len(x), 1), torch.nan)
    centered = _center(x)
    centered = centered / centered.abs().max()  # or squares may overflow
    return centered / torch.linalg.matrix_norm(centered)


def _pair(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    x, y = _rows(x, y)
    return _centered(x), _centered(y)


def _product(x: Tensor, y: Tensor) -> Tensor:
    """‖XᵀY‖² = tr XXᵀYYᵀ, from whichever matrices are smaller."""
    if x.shape[1] * y.shape[1] <= len(x) * len(x):
        return (x.T @ y).square().sum()
    return ((x @ x.T) * (y @ y.T)).sum()


def _u_centered(x: Tensor) -> Tensor:
    """Products of centred rows, whose scalar product with those of others is HSIC; flat, of norm 1,
    NaN for n < 4.
    """
    n = len(x)
    gram = (x @ x.T).fill_diagonal_(0)
    sums = gram.sum(0) / (n - 2)
    gram = (gram - sums - sums[:, None] + sums.sum() / (n - 1)).fill_diagonal_(0)
    norm = torch.linalg.vector_norm(gram)
    return (gram / torch.where(norm > _ROUNDING, norm, torch.nan)).flatten()
