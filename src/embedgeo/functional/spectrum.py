"""Anisotropy and other numbers of the covariance spectrum, from the mean and the scatter of the rows.

Sources: Razzhigaev et al. 2024 (arXiv 2311.05928) for the anisotropy; Johnstone 2001 and Ma 2012 for the Gaussian
baseline; `embedgeo.functional.eigenvalues` has those of the numbers of the whole spectrum.
"""

import math
from functools import partial, reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor

from embedgeo.functional.distributed import all_reduce_sum
from embedgeo.functional.eigenvalues import (
    ALPHA_WINDOW,
    entropy_rank,
    full_spectrum_values,
    scatter_eigenvalues,
    uncentred_eigenvalues,
)
from embedgeo.functional.moments import merge_parts, ratio, row_chunks, without_rounding
from embedgeo.functional.precision import accumulator_dtype, in_range, matmul_precision

_PRODUCT_ELEMENTS = 1 << 22
_CENTRED_ROWS = 1024
_GRAM_BLOCK = 128
_TRACY_WIDOM_MEAN = -1.2065335745820
_LANCZOS_STEPS = 16
_MAX_LANCZOS_STEPS = 10 * _LANCZOS_STEPS


class Scatter(NamedTuple):
    """Mean and scatter of rows.

    Attributes:
        n: number of rows, scalar.
        mean: mean row, shape (d,).
        scatter: sum over rows of (x - mean)(x - mean)ᵀ, shape (d, d).
    """

    n: Tensor
    mean: Tensor
    scatter: Tensor

    @classmethod
    def empty(cls, dim: int) -> "Scatter":
        """The scatter of no rows, in a matrix of shape (1, 1), which broadcasts: see `expanded`."""
        zero = torch.zeros((), dtype=torch.float64)
        return cls(zero, zero.new_zeros(dim), zero.new_zeros(1, 1))

    def expanded(self) -> "Scatter":
        """The same with a matrix of shape (d, d), also where no rows have been seen."""
        return self._replace(scatter=self.scatter.expand(len(self.mean), len(self.mean)))

    def merge(self, other: "Scatter") -> "Scatter":
        """The scatter of the rows of both about their common mean."""
        if self.scatter.shape != other.scatter.shape:  # that of no rows is the smaller one
            return max(self, other, key=lambda each: len(each.scatter))
        return Scatter(*merge_parts((self, other)))

    def all_reduce(self, group: Any = None) -> "Scatter":
        """The scatter of the rows of all ranks about their common mean."""
        return Scatter(*merge_parts((self,), partial(all_reduce_sum, group=group)))


def row_scatter(x: Tensor, *, small: bool = False) -> Scatter:
    """Mean and scatter of the rows of ``x``, shape (n, d).

    Products are taken of the centred rows, in float64 for float64 rows and else in float32, whatever the process's
    matmul-precision and autocast settings are; they are summed over chunks of rows in float64. Where ``small``
    eigenvalues matter, too, which drown in the rounding of float32 (1e-7 of the largest), all are taken in float64.
    """
    zero = x.new_zeros((), dtype=accumulator_dtype(x.device))
    narrow = zero.dtype if small else torch.promote_types(x.dtype, torch.float32)
    no_rows = Scatter(zero, zero.new_zeros(x.shape[1]), zero.new_zeros(1, 1))
    with matmul_precision(x.device):
        parts = (_scatter_in(narrow, x[chunk]) for chunk in row_chunks(x, _PRODUCT_ELEMENTS))
        return reduce(Scatter.merge, parts, no_rows).expanded()


def _scatter_in(dtype: torch.dtype, x: Tensor) -> Scatter:
    """Mean and scatter of a chunk of rows, centred twice; in float64 if the squares leave the range of ``dtype``."""
    wide, dim = accumulator_dtype(x.device), x.shape[1]
    center, gram = x.mean(0, dtype=dtype), x.new_zeros(dim, dim, dtype=dtype)
    total = torch.zeros_like(center)
    for part in x.split(_CENTRED_ROWS if x.device.type == "cpu" else len(x)):  # in the processor's cache
        rows = part.to(dtype) - center
        total += rows.sum(0)
        for start in range(0, dim, _GRAM_BLOCK):  # only the blocks on and above the diagonal
            gram[start : start + _GRAM_BLOCK, start:].addmm_(rows[:, start : start + _GRAM_BLOCK].T, rows[:, start:])
    for start in range(_GRAM_BLOCK, dim, _GRAM_BLOCK):
        gram[start:, start - _GRAM_BLOCK : start] = gram[start - _GRAM_BLOCK : start, start:].T
    if dtype != wide and not in_range(gram.diagonal()):
        return _scatter_in(wide, x)
    n = total.new_full((), len(x), dtype=wide)
    rounding = total.to(wide) / n
    return Scatter(n, center + rounding, gram.to(wide).addr_(n * rounding, rounding, alpha=-1))


def top_eigenvalue(s: Tensor) -> Tensor:
    """The largest eigenvalue of a symmetric positive semi-definite matrix, certified to a relative 1e-10.

    Lanczos iterations from a fixed start vector bound it from below (without reorthogonalisation: repeated copies of a
    converged eigenvalue do not affect the largest one, Paige 1980). If (1 + 1e-10) · bound · I - s has a Cholesky
    factor, no eigenvalue is larger. Where this takes too many iterations (nearly equal top eigenvalues), the full
    decomposition is computed instead.

    Args:
        s: shape (d, d), float64; for float32 the tolerance is wider. If it is not finite, the result is NaN.

    >>> top_eigenvalue(torch.diag(torch.tensor([1.0, 3.0, 2.0], dtype=torch.float64)))
    tensor(3., dtype=torch.float64)
    """
    dim = s.shape[0]
    if not bool(s.sum().isfinite()):
        return s.new_tensor(torch.nan)
    if dim <= 2 * _LANCZOS_STEPS:
        return torch.linalg.eigvalsh(s)[-1]
    scale, small = s.diagonal().max(), torch.finfo(s.dtype).tiny ** 0.25
    if not bool(scale > 0):
        return torch.zeros_like(scale)
    if not small < float(scale) < 1 / small:  # so that no product over- or underflows
        return top_eigenvalue(s / scale) * scale
    rtol = max(1e-10, 16 * dim * torch.finfo(s.dtype).eps)
    generator = torch.Generator().manual_seed(0)
    vector = torch.randn(dim, generator=generator, dtype=s.dtype, device="cpu").to(s.device)
    vector /= torch.linalg.vector_norm(vector)
    previous, beta = torch.zeros_like(vector), vector.new_zeros(())
    tridiagonal = s.new_zeros(_MAX_LANCZOS_STEPS + 1, _MAX_LANCZOS_STEPS + 1)
    for step in range(1, _MAX_LANCZOS_STEPS + 1):
        image = torch.mv(s, vector).sub_(beta * previous)
        alpha = torch.dot(image, vector)
        image.sub_(alpha * vector)
        beta = torch.linalg.vector_norm(image)
        tridiagonal[step - 1, step - 1], tridiagonal[step, step - 1] = alpha, beta
        previous, vector = vector, image / beta.clamp(min=torch.finfo(s.dtype).tiny)
        if step % _LANCZOS_STEPS == 0:
            values, vectors = torch.linalg.eigh(tridiagonal[:step, :step])
            lower, residual = values[-1], beta * vectors[-1, -1].abs()
            if bool(residual <= 1e-6 * lower) and _bounded_by(s, lower * (1 + rtol)):
                return lower
    return torch.linalg.eigvalsh(s)[-1]


def _bounded_by(s: Tensor, bound: Tensor) -> bool:
    """Whether every eigenvalue of ``s`` is below ``bound``."""
    difference = s.neg()
    difference.diagonal().add_(bound)
    return int(torch.linalg.cholesky_ex(difference).info) == 0


def anisotropy_null(n: Tensor, dim: int) -> Tensor:
    """Expected anisotropy of n rows of an isotropic Gaussian in ``dim`` dimensions; NaN for n < 2.

    This is the Gaussian baseline of the anisotropy: the expected top eigenvalue of a Wishart matrix in the Tracy-Widom
    approximation (Johnstone 2001, centred as in Ma 2012), divided by the expected trace. The expected ratio equals
    this ratio of expectations because ratio and trace are independent.

    Args:
        n: number of rows, scalar.
        dim: d, the width of the rows.

    >>> round(anisotropy_null(torch.tensor(4096.0, dtype=torch.float64), 768).item(), 5)
    0.00266
    """
    freedom = n - 1
    a, b = (freedom - 0.5).clamp(min=0.5).sqrt(), math.sqrt(dim - 0.5)
    top = (a + b).square() + _TRACY_WIDOM_MEAN * (a + b) * (1 / a + 1 / b) ** (1 / 3)
    share = ratio(top, freedom * dim)
    return torch.where(freedom >= 1, share.clamp(min=1 / freedom.clamp(1, dim), max=torch.ones_like(n)), torch.nan)


def spectrum_values(
    scatter: Scatter, *, full: bool = False, alpha_window: tuple[int, int] = ALPHA_WINDOW
) -> dict[str, Tensor]:
    """Values of the covariance spectrum λ₁ ≥ λ₂ ≥ …, the eigenvalues of the scatter.

    Args:
        scatter: mean and scatter of the rows.
        full: also compute what needs every eigenvalue (d³ operations).
        alpha_window: the first and the last of the eigenvalues that ``alpha_req`` is fitted to, counted from 1.

    Returns:
        ``anisotropy`` λ₁/Σλ; ``participation_ratio`` (Σλ)²/Σλ²; ``anisotropy_standardized``, the anisotropy of the
        rows with every coordinate scaled to variance 1 (constant ones left out); ``anisotropy_null``, the Gaussian
        baseline. With ``full``: ``effective_rank``, the exponential of the entropy of the normalised singular values;
        ``rankme``, the same of the rows as they are, not centred; ``effective_rank_eigenvalues``, the same of the λ;
        ``isoscore``; ``top1_share``, which is ``anisotropy`` again, and ``top5_share``, that of λ₁..λ₅ in Σλ;
        ``anisotropy_without_top5`` λ₆/Σ_{i>5}λᵢ; ``alpha_req`` and ``alpha_req_r2``, see
        `embedgeo.functional.power_law`. All but the baseline are NaN where the rows do not vary, and ``rankme`` only
        where they are 0, too.
    """
    s = varying_scatter(scatter)
    variance = s.diagonal()
    trace = variance.sum()
    scale = torch.where(variance > 0, variance.rsqrt(), 0)
    values = {
        "participation_ratio": ratio(trace.square(), torch.linalg.matrix_norm(s).square()),
        "anisotropy_standardized": ratio(top_eigenvalue(s * scale[:, None] * scale), (variance > 0).sum()),
        "anisotropy_null": anisotropy_null(scatter.n, len(variance)),
    }
    if not full:
        return {"anisotropy": ratio(top_eigenvalue(s), trace), **values}
    eigenvalues = scatter_eigenvalues(s, scatter.n)
    values["rankme"] = entropy_rank(uncentred_eigenvalues(s, scatter.n, scatter.mean, eigenvalues[0]).sqrt())
    return {"anisotropy": ratio(eigenvalues[0], trace), **values, **full_spectrum_values(eigenvalues, alpha_window)}


def covariance_eigenvalues(scatter: Scatter) -> Tensor:
    """Eigenvalues of the covariance, shape (d,), descending, at least 0, that sum to its trace; NaN for no rows."""
    s = varying_scatter(scatter)
    values = scatter_eigenvalues(s, scatter.n)
    rest = values[1:].sum()  # what rounding has put below 0 is taken from all but the largest
    values[1:] *= torch.where(rest > 0, (s.trace() - values[0]).clamp(min=0) / rest, 1)
    return ratio(values, scatter.n)


def varying_scatter(scatter: Scatter) -> Tensor:
    """The scatter matrix, shape (d, d), exactly 0 in the coordinates that do not vary."""
    variance = without_rounding(scatter.scatter.diagonal(), scatter.n, scatter.mean)
    varies = (variance != 0).to(variance.dtype)
    return scatter.scatter * varies[:, None] * varies


def anisotropy(x: Tensor) -> Tensor:
    """Anisotropy σ₁²/Σσ² of the centred rows of ``x``, shape (n, d); NaN where they do not vary.

    >>> anisotropy(torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 0.5], [0.0, -0.5]])).item()
    0.8
    """
    s = varying_scatter(row_scatter(x))
    return ratio(top_eigenvalue(s), s.trace())
