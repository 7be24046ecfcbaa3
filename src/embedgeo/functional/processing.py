"""After-processing of embeddings by affine maps, and planes to draw rows in, from mean and scatter.

Sources: Mu & Viswanath 2018 for the removal of the top directions; Kessy, Lewin & Strimmer 2018 for
the whitenings.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from embedgeo.functional.moments import ratio, row_chunks
from embedgeo.functional.precision import accumulator_dtype
from embedgeo.functional.spectrum import Scatter, varying_scatter

# smallest variance of a direction, relative to the largest one, that is not taken for rounding of
# float32 rows
_RTOL = 1e-7


class Affine(NamedTuple):
    """The map of rows x to (x - center) @ matrix.

    Attributes:
        center: shape (d,).
        matrix: shape (d, d).
    """

    center: Tensor
    matrix: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """Map the rows of ``x``, shape (..., d), in float64; the result is float32 unless they are
        float64.
        """
        wide = accumulator_dtype(x.device)
        narrow = torch.float64 if x.dtype == torch.float64 else torch.float32
        center, matrix = (tensor.to(x.device, wide) for tensor in self)
        rows = x.reshape(-1, x.shape[-1])
        mapped = rows.new_empty(rows.shape, dtype=narrow)
        for chunk in row_chunks(rows):
            mapped[chunk] = ((rows[chunk].to(wide) - center) @ matrix).to(narrow)
        return mapped.reshape(x.shape)

    def scatter(self, scatter: Scatter) -> Scatter:
        """Mean and scatter of the mapped rows, given those of the rows."""
        mapped = self.matrix.T @ scatter.scatter @ self.matrix
        return Scatter(
            scatter.n,
            (scatter.mean - self.center) @ self.matrix,
            (mapped + mapped.T) / 2,
            scatter.eps,
        )


def z_scoring(fitted: Scatter) -> Affine:
    """The map that centres every coordinate and scales it to variance 1 (n, not n - 1, below).

    Coordinates that do not vary become 0. All NaN for n = 0.

    >>> from embedgeo.functional import row_scatter
    >>> x = torch.tensor([[1.0, 10.0, 3.0], [3.0, 30.0, 3.0]])
    >>> z_scoring(row_scatter(x))(x)
    tensor([[-1., -1.,  0.],
            [ 1.,  1.,  0.]])
    """
    variance = ratio(varying_scatter(fitted).diagonal(), fitted.n)
    return Affine(
        fitted.mean, torch.diag(torch.where(variance == 0, 0, variance.sqrt() / variance))
    )


class PrincipalAxes(NamedTuple):
    """Directions of the rows' variance, by descending variance.

    Attributes:
        mean: mean row, shape (d,).
        variance: along each axis (n, not n - 1, below), shape (d,).
        axes: unit vectors, the columns of shape (d, d); the largest coordinate of each is positive.
        rank: number of axes whose variance is more than rounding, scalar int64; the others come
            last.
    """

    mean: Tensor
    variance: Tensor
    axes: Tensor
    rank: Tensor


def principal_axes(fitted: Scatter) -> PrincipalAxes:
    """Principal axes of the rows, from their mean and scatter; all NaN for n = 0.

    Variances of at most 1e-7 of the largest one are taken for rounding, as are all from the n-th
    on.
    """
    covariance = ratio(varying_scatter(fitted), fitted.n)
    if not bool(covariance.isfinite().all()):
        rank = torch.zeros((), dtype=torch.int64, device=covariance.device)
        return PrincipalAxes(fitted.mean, covariance[0] * torch.nan, covariance * torch.nan, rank)
    variance, axes = (tensor.flip(-1) for tensor in torch.linalg.eigh(covariance))
    largest = axes.gather(0, axes.abs().argmax(0, keepdim=True))
    rank = torch.minimum((variance > _RTOL * variance[0]).sum(), (fitted.n - 1).to(torch.int64))
    return PrincipalAxes(fitted.mean, variance.clamp(min=0), axes * largest.sign(), rank)


def pca_whitening(fitted: PrincipalAxes) -> Affine:
    """The map to coordinates along the principal axes, each scaled to variance 1 (n, not n - 1,
    below).

    Coordinates beyond the rank become 0 (a pseudo-inverse). All NaN for n = 0.
    """
    beyond = torch.arange(len(fitted.variance), device=fitted.variance.device) >= fitted.rank
    scale = fitted.variance.rsqrt().masked_fill(beyond & ~fitted.variance.isnan(), 0)
    return Affine(fitted.mean, fitted.axes * scale)


def top_removal(fitted: PrincipalAxes, top: int) -> Affine:
    """The map that centres the rows and removes their projection on the ``top`` principal axes; all
    NaN for n = 0.

    Source: Mu & Viswanath 2018, who take about d / 100 of them.
    """
    kept = fitted.axes[:, top:]
    return Affine(fitted.mean, kept @ kept.T)
