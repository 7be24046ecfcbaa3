"""Anisotropy and other numbers of the covariance spectrum, from the mean and the scatter of the rows.

Sources: Razzhigaev et al. 2024 (arXiv 2311.05928) for the anisotropy; Roy & Vetterli 2007 for the effective rank;
Rudman et al. 2022 for IsoScore; Johnstone 2001 and Ma 2012 for the null.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from embedgeo.functional.moments import ratio, row_chunks, without_rounding
from embedgeo.functional.precision import accumulator_dtype, in_range, matmul_precision

_PRODUCT_ELEMENTS = 1 << 22
_GRAM_BLOCK = 128
_TRACY_WIDOM_MEAN = -1.2065335745820
_LANCZOS_STEPS = 16
_MAX_LANCZOS_STEPS = 10 * _LANCZOS_STEPS


class Scatter(NamedTuple):
    """Mean and scatter of rows, as mergeable as the moments.

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
        """That of no rows; the scatter of shape (1, 1), for broadcasting."""
        zero = torch.zeros((), dtype=torch.float64)
        return cls(zero, zero.new_zeros(dim), zero.new_zeros(1, 1))


def pool_scatter(
    parts: Sequence[Scatter], total: Callable[[Sequence[Tensor]], Tensor] = lambda terms: sum(terms[1:], terms[0])
) -> Scatter:
    """Merge parts (Chan, Golub & LeVeque 1983): the mean first, then each scatter about that mean.

    Args:
        parts: those held here.
        total: sums over them, and over the ranks where the parts are spread over ranks.
    """
    n = total([part.n for part in parts])
    mean = total([part.n * part.mean for part in parts]) / n.clamp(min=1)
    shifts = [part.mean - mean for part in parts]
    scatter = [p.scatter.addr(p.n * shift, shift) for p, shift in zip(parts, shifts, strict=True)]
    return Scatter(n, mean, total(scatter))


def row_scatter(x: Tensor) -> Scatter:
    """Mean and scatter of the rows of ``x``, shape (n, d).

    Products of float64 rows are taken in float64, others in float32 of the centred rows, whatever the process's
    matmul-precision and autocast settings; the sums are kept in float64.
    """
    wide = accumulator_dtype(x.device)
    narrow = torch.promote_types(x.dtype, torch.float32)
    dim = x.shape[1]
    whole = Scatter(*(torch.zeros(shape, dtype=wide, device=x.device) for shape in ((), (dim,), (dim, dim))))
    with matmul_precision(x.device):
        for chunk in row_chunks(x, _PRODUCT_ELEMENTS):
            part = _scatter_in(narrow, x[chunk])
            whole = pool_scatter([whole, part]) if chunk.start else part
    return whole


def _scatter_in(dtype: torch.dtype, x: Tensor) -> Scatter:
    """Mean and scatter of a few rows, centred twice in ``dtype``; in float64 where that does not hold the squares."""
    wide = accumulator_dtype(x.device)
    rows = x.to(dtype)
    center = rows.mean(0)
    rows = rows - center
    rounding = rows.mean(0).to(wide)
    gram = _gram(rows)
    if dtype != wide and not in_range(gram.diagonal()):
        return _scatter_in(wide, x)
    n = rounding.new_tensor(float(len(x)))
    return Scatter(n, center + rounding, gram.to(wide).addr_(n * rounding, rounding, alpha=-1))


def _gram(rows: Tensor) -> Tensor:
    """``rows.T @ rows``, of which only the blocks on and above the diagonal are multiplied out."""
    dim = rows.shape[1]
    gram = rows.new_empty(dim, dim)
    for start in range(0, dim, _GRAM_BLOCK):
        block = slice(start, start + _GRAM_BLOCK)
        product = rows[:, block].T @ rows[:, start:]
        gram[block, start:], gram[start:, block] = product, product.T
    return gram


def top_eigenvalue(s: Tensor) -> Tensor:
    """The largest eigenvalue of a symmetric positive semi-definite matrix, certified to a relative 1e-10.

    Lanczos from a fixed start vector bounds it from below (without reorthogonalisation: copies of an eigenvalue
    that has converged do no harm to the largest, Paige 1980); that (1 + 1e-10) times the bound less ``s`` has a
    Cholesky factor proves that it is nowhere above. Where that proof is slow to come (a spectrum with a flat top),
    the full decomposition is taken instead.

    Args:
        s: shape (d, d), float64 (float32: the tolerance is widened to what that can show); NaN if it is not finite.

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
    with matmul_precision(s.device):
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

    The top eigenvalue of a Wishart matrix in the Tracy-Widom approximation (Johnstone 2001, centred as in Ma 2012)
    over its expected trace; the two ratios' expectations agree because ratio and trace are independent.

    >>> round(anisotropy_null(torch.tensor(4096.0, dtype=torch.float64), 768).item(), 5)
    0.00266
    """
    freedom = n - 1
    a, b = (freedom - 0.5).clamp(min=0.5).sqrt(), math.sqrt(dim - 0.5)
    top = (a + b).square() + _TRACY_WIDOM_MEAN * (a + b) * (1 / a + 1 / b) ** (1 / 3)
    share = ratio(top, freedom * dim)
    return torch.where(freedom >= 1, share.clamp(min=1 / freedom.clamp(1, dim), max=torch.ones_like(n)), torch.nan)


def spectrum_values(scatter: Scatter, *, full: bool = False) -> dict[str, Tensor]:
    """Numbers of the covariance spectrum; λ are the eigenvalues of the scatter, in descending order.

    Args:
        scatter: of the rows.
        full: also those that need every eigenvalue (d³ operations).

    Returns:
        ``anisotropy`` λ₁/Σλ; ``participation_ratio`` (Σλ)²/Σλ²; ``anisotropy_standardized``, the anisotropy of the
        rows with every coordinate scaled to variance 1 (constant ones left out); ``anisotropy_null``. With
        ``full``: ``effective_rank``, the exponential of the entropy of the normalised singular values;
        ``isoscore``; ``top5_share`` of λ₁..λ₅ in Σλ; ``anisotropy_without_top5`` λ₆/Σ_{i>5}λᵢ. All are NaN where
        the rows do not vary.
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
    finite = bool(s.isfinite().all())
    spanned = torch.arange(len(variance), device=s.device) < scatter.n - 1  # the others hold nothing but rounding
    eigenvalues = torch.linalg.eigvalsh(s).clamp(min=0).flip(0) * spanned if finite else variance * torch.nan
    return {"anisotropy": ratio(eigenvalues[0], trace), **values, **full_spectrum_values(eigenvalues)}


def varying_scatter(scatter: Scatter) -> Tensor:
    """The scatter, shape (d, d), exactly 0 in the coordinates that do not vary."""
    variance = without_rounding(scatter.scatter.diagonal(), scatter.n, scatter.mean)
    varies = (variance != 0).to(variance.dtype)
    return scatter.scatter * varies[:, None] * varies


def full_spectrum_values(eigenvalues: Tensor) -> dict[str, Tensor]:
    """What `spectrum_values` adds with ``full``, given the eigenvalues of the scatter, descending, shape (d,)."""
    dim, total = len(eigenvalues), eigenvalues.sum()
    share = ratio(eigenvalues.sqrt(), eigenvalues.sqrt().sum())
    direction = ratio(eigenvalues, torch.linalg.vector_norm(eigenvalues)) * math.sqrt(dim)
    free = dim - math.sqrt(dim)
    defect2 = (direction - 1).square().sum() / (2 * free) if free else direction.new_tensor(torch.nan)
    dims_used = (dim - defect2 * free) ** 2 / dim
    rest = eigenvalues[5:]
    return {
        "effective_rank": torch.special.entr(share).sum().exp(),
        "isoscore": (dims_used - 1) / (dim - 1) if dim > 1 else dims_used * torch.nan,
        "top5_share": ratio(eigenvalues[:5].sum(), total),
        "anisotropy_without_top5": ratio(rest[0], rest.sum()) if len(rest) else total * torch.nan,
    }


def anisotropy(x: Tensor) -> Tensor:
    """Anisotropy σ₁²/Σσ² of the centred rows of ``x``, shape (n, d); NaN where they do not vary.

    >>> anisotropy(torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 0.5], [0.0, -0.5]])).item()
    0.8
    """
    s = varying_scatter(row_scatter(x))
    return ratio(top_eigenvalue(s), s.trace())
