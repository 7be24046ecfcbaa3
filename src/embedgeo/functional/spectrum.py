"""Anisotropy and other values of the covariance spectrum, from the scatter of the rows or from a
sketch of it.

Source of the anisotropy: Razzhigaev et al. 2024 (arXiv 2311.05928).
"""

import math
from functools import lru_cache, reduce
from typing import NamedTuple

import torch
from torch import Tensor

from embedgeo.functional.distributed import Found
from embedgeo.functional.lockstep import Computation, at_once, called, on_host, steps, stepwise
from embedgeo.functional.moments import (
    blocked,
    mean_of,
    merge_parts,
    ratio,
    row_chunks,
    squares_about,
    without_rounding,
)
from embedgeo.functional.precision import (
    accumulator_dtype,
    in_range,
    is_asynchronous,
    matmul_precision,
    power_of_two,
    scaled,
    sent,
)

# up to which all eigenvalues take less time than the largest one by iterations, and on a CPU
SMALL_DIM = 192
# the first and the last of the eigenvalues that α-ReQ is fitted to, counted from 1
ALPHA_WINDOW = (11, 99)
_FEWEST_FITTED = 3  # number of eigenvalues that a power law needs at least
# elements of rows whose products are summed in float32, before they are added in float64
_SCATTER_ELEMENTS = 1 << 22
_CENTRED_ROWS = 1024  # rows centred at a time, so that they stay in the processor's cache
# columns of the scatter computed at a time: only the blocks on and above the diagonal are
_GRAM_COLUMNS = 128
_TRACY_WIDOM_MEAN = -1.2065335745820
_LANCZOS_STEPS = 16  # Lanczos iterations between two looks at what has converged
_MAX_LANCZOS_STEPS = 160
# numbers of iterations after which those of all layers of a device are looked at
_LOOKS = (48, 96, 160)
_STACKED_BYTES = 1 << 28  # of matrices that are stacked, to be multiplied in one operation
_PENDING_BATCHES = 4  # batches of rows that are held at most rather than a device is waited for
_SKETCH_ELEMENTS = 1 << 23  # elements of rows that are sketched at a time
_TAIL = 0.002  # probability that one of a few bounds of a sketch does not hold
_NORMAL = 2.878  # the value that a standard normal number exceeds with that probability
_SPANNED = 1e-6  # directions of a smaller share than this are rounding errors of rows in float32
_ROUNDING = 1e-9  # an error of a smaller share than this is none: the sketch has all of the scatter


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
        """This scatter with a matrix of shape (d, d), also where no rows have been seen."""
        return self._replace(scatter=self.scatter.expand(len(self.mean), len(self.mean)))

    def merge(self, other: "Scatter") -> "Scatter":
        """The scatter of the rows of both about their common mean."""
        if self.scatter.shape != other.scatter.shape:  # that of no rows is the smaller one
            return max(self, other, key=lambda each: len(each.scatter))
        return Scatter(*merge_parts((self, other)))

    def reductions(self, phase: int, found: Found) -> dict[str, Tensor]:
        """The mean of all ranks, then the scatter about it."""
        if phase == 1:
            return {"n": self.n, "sums": self.n * self.mean}
        if phase == 2:
            found["mean"] = mean_of(found["n"], found["sums"])
            return {"scatter": squares_about(found["mean"], *self)}
        return {}

    def of_ranks(self, found: Found) -> "Scatter":
        """The scatter of the rows of all ranks about their common mean."""
        return Scatter(found["n"], found["mean"], found["scatter"])


def row_scatter(x: Tensor, weights: Tensor | None = None, *, small: bool = False) -> Scatter:
    """Mean and scatter of the rows of ``x``, shape (n, d).

    Products are taken of the centred rows, in float64 for float64 rows and else in float32,
    whatever the process's matmul-precision and autocast settings are; they are summed over chunks
    of rows in float64. Where ``small`` eigenvalues matter, too, which drown in the rounding of
    float32 (1e-7 of the largest), all are taken in float64. Half of the products are those of the
    other half: line "scatter" of ``benchmarks/estimators.py``.

    ``weights``, shape (n,), are 1, or 0 for rows that do not count, which are zeros; default: all
    count.
    """
    wide = accumulator_dtype(x.device)
    narrow = wide if small else torch.promote_types(x.dtype, torch.float32)
    if not len(x):
        zeros = x.new_zeros(x.shape[1], x.shape[1], dtype=wide)
        return Scatter(zeros.new_zeros(()), zeros[0], zeros)
    with matmul_precision(x.device):
        chunks = row_chunks(x, _SCATTER_ELEMENTS)
        parts = (
            _scatter_in(narrow, x[each], None if weights is None else weights[each])
            for each in chunks
        )
        return reduce(Scatter.merge, parts)


def _scatter_in(dtype: torch.dtype, x: Tensor, weights: Tensor | None) -> Scatter:
    """Mean and scatter of a chunk of rows, also where the squares leave the range of ``dtype``.

    Rows are centred twice, and in float64 where squares are out of range. On a device that would be
    waited for to tell, they are centred in float64 and then divided by their largest magnitude.
    """
    wide, dim = accumulator_dtype(x.device), x.shape[1]
    is_ahead = is_asynchronous(x.device) and dtype != wide
    n = x.new_full((), len(x), dtype=wide) if weights is None else weights.sum()
    divisor = n.clamp(min=1)
    center = x.sum(0, dtype=wide if is_ahead else dtype) / divisor
    gram = x.new_empty(dim, dim, dtype=dtype)
    step = blocked(_GRAM_COLUMNS, x.device)
    totals, unit = list[Tensor](), None
    for number, part in enumerate(x.split(len(x) if is_asynchronous(x.device) else _CENTRED_ROWS)):
        rows = ((part if is_ahead else part.to(dtype)) - center).to(dtype)
        if weights is not None:
            rows.mul_(weights[:, None])
        if is_ahead:
            unit = _to_unit(rows)
        else:
            totals.append(rows.sum(0))
        for start in range(0, dim, step):
            columns = rows[:, start : start + step]
            gram[start : start + step, start:].addmm_(
                columns.T, rows[:, start:], beta=min(number, 1)
            )
    for start in range(step, dim, step):
        gram[start:, start - step : start] = gram[start - step : start, start:].T
    if unit is not None:
        return Scatter(n, center, gram.to(wide).mul_(unit.square()))
    if dtype != wide and not in_range(gram.diagonal()):
        return _scatter_in(wide, x, weights)
    rounding = sum(totals[1:], totals[0]).to(wide) / divisor
    return Scatter(n, center + rounding, gram.to(wide).addr_(n * rounding, rounding, alpha=-1))


def _to_unit(rows: Tensor) -> Tensor:
    """The largest magnitude of these rows, by which they are divided: a scalar of the accumulator's
    dtype.
    """
    unit = torch.linalg.vector_norm(rows, math.inf).clamp(min=torch.finfo(rows.dtype).tiny)
    rows.div_(unit)
    return unit.to(accumulator_dtype(rows.device))


@stepwise
def spectrum_values(
    scatter: Scatter, *, full: bool = False, alpha_window: tuple[int, int] = ALPHA_WINDOW
) -> Computation[dict[str, Tensor]]:
    """Values of the covariance spectrum λ₁ ≥ λ₂ ≥ …, the eigenvalues of the scatter.

    Args:
        scatter: mean and scatter of the rows.
        full: also compute what needs every eigenvalue (d³ operations).
        alpha_window: the first and the last of the eigenvalues that ``alpha_req`` is fitted to,
            counted from 1.

    Returns:
        ``anisotropy`` λ₁/Σλ; ``participation_ratio`` (Σλ)²/Σλ²; ``anisotropy_standardized``, the
        anisotropy of the rows with every coordinate scaled to variance 1 (constant ones left out);
        ``anisotropy_null``, the Gaussian baseline. With ``full``: ``effective_rank``, the
        exponential of the entropy of the normalised singular values; ``rankme``, the same of the
        rows as they are, not centred; ``effective_rank_eigenvalues``, the same of the λ;
        ``isoscore``; ``top1_share``, which is ``anisotropy`` again, and ``top5_share``, that of
        λ₁..λ₅ in Σλ; ``anisotropy_without_top5`` λ₆/Σ_{i>5}λᵢ; ``alpha_req`` and ``alpha_req_r2``,
        see `embedgeo.functional.power_law`. All but the baseline are NaN where the rows do not
        vary, and ``rankme`` only where they are 0, too.
    """
    dim = len(scatter.mean)
    if dim <= SMALL_DIM:
        (scatter,) = yield from on_host(scatter)
    if is_asynchronous(scatter.mean.device) and not full:
        return (yield from called(_values_without_waits, scatter))
    s = varying_scatter(scatter)
    variance = s.diagonal()
    norm = torch.linalg.matrix_norm(s / power_of_two(variance.sum()))
    scale = torch.where(variance > 0, variance.rsqrt(), 0)
    top_standardized = top_eigenvalue(s * scale[:, None] * scale)
    if not full:
        return _leading_values(scatter.n, variance, norm, top_eigenvalue(s), top_standardized)
    eigenvalues = scatter_eigenvalues(s, scatter.n)
    rankme = entropy_rank(uncentred_eigenvalues(s, scatter.n, scatter.mean, eigenvalues[0]).sqrt())
    return {
        **_leading_values(scatter.n, variance, norm, eigenvalues[0], top_standardized),
        "rankme": rankme,
        **full_spectrum_values(eigenvalues, alpha_window),
    }


def _leading_values(
    n: Tensor, variance: Tensor, norm: Tensor, top: Tensor, top_standardized: Tensor
) -> dict[str, Tensor]:
    """Values from the diagonal of the scatter matrix, its norm over the `power_of_two` of its
    trace, and its λ₁.
    """
    trace = variance.sum()
    return {
        "anisotropy": ratio(top, trace),
        "participation_ratio": ratio((trace / power_of_two(trace)).square(), norm.square()),
        "anisotropy_standardized": ratio(top_standardized, (variance > 0).sum()),
        "anisotropy_null": anisotropy_null(n, len(variance)),
    }


def _values_without_waits(scatters: list[Scatter]) -> Computation[list[dict[str, Tensor]]]:
    """The `spectrum_values` of the scatters of all layers, on the CPU; those of one width in one
    batch.
    """
    dims = [len(each.mean) for each in scatters]
    by_dim = {dim: [each for each in scatters if len(each.mean) == dim] for dim in dims}
    found = yield from at_once(*map(_values_of_width, by_dim.values()))
    values = {dim: iter(of_dim) for dim, of_dim in zip(by_dim, found, strict=True)}
    return [next(values[dim]) for dim in dims]


def _values_of_width(scatters: list[Scatter]) -> Computation[list[dict[str, Tensor]]]:
    """The `spectrum_values` of L scatters of one width, in a few looks from the host at all of
    them.

    λ₁ of each matrix, and of it with every coordinate scaled to variance 1, are found and certified
    as by `top_eigenvalue`. Beyond the scatters, and a copy of them where they are 256 MiB or less,
    the memory is that of two of them.
    """
    n, mean = (torch.stack(each) for each in list(zip(*scatters, strict=True))[:2])
    squares = torch.stack([each.scatter.diagonal() for each in scatters])
    variance = without_rounding(squares, n[:, None], mean)
    varies = torch.where(variance == 0, 0, variance / variance)
    variance = squares * varies
    unit, root = power_of_two(variance.sum(-1)), power_of_two(variance.amax(-1).sqrt())
    norms = torch.stack(
        [
            torch.linalg.matrix_norm(each.scatter * (marks / power)[:, None] * marks)
            for each, marks, power in zip(scatters, varies, unit, strict=True)
        ]
    )
    scale = torch.stack(
        (varies / root[:, None], torch.where(variance > 0, variance.rsqrt(), 0)), -1
    )
    scale = torch.where(norms.isfinite()[:, None, None], scale, 0)
    tops, (n, variance, norms, root) = yield from at_once(
        _top_eigenvalues([each.scatter for each in scatters], scale),
        on_host(n, variance, norms, root),
    )
    tops = torch.where(norms.isfinite()[:, None], tops, torch.nan) * torch.stack(
        (root.square(), torch.ones_like(root)), 1
    )
    of_layers = zip(n, variance, norms, *tops.unbind(1), strict=True)
    return [_leading_values(*of_layer) for of_layer in of_layers]


def _top_eigenvalues(matrices: list[Tensor], scale: Tensor) -> Computation[Tensor]:
    """λ₁ of diag(c) S diag(c) for L matrices S on a device and k columns c of each, ``scale``,
    shape (L, d, k).

    All take the same number of Lanczos iterations between two looks. The result is on the CPU,
    shape (L, k). A matrix that is not finite has columns 0, and λ₁ 0.
    """
    num_matrices, dim, num_columns = scale.shape
    finfo = torch.finfo(scale.dtype)
    rtol = max(1e-10, 16 * dim * finfo.eps)
    stacked = (
        torch.stack(matrices) if sum(each.nbytes for each in matrices) <= _STACKED_BYTES else None
    )
    vector = _first_vector(dim, scale.dtype, scale.device)[:, None].expand(scale.shape)
    previous, beta = torch.zeros_like(vector), scale.new_zeros(num_matrices, 1, num_columns)
    alphas, betas = list[Tensor](), list[Tensor]()
    found = torch.full((num_matrices, num_columns), torch.nan, dtype=scale.dtype, device="cpu")
    is_looked_at = (scale != 0).any(1, keepdim=True)
    for step in range(1, _MAX_LANCZOS_STEPS + 1):
        given = scale * vector
        if stacked is not None:
            image = torch.bmm(stacked, given)
        else:
            image = torch.stack([s @ x for s, x in zip(matrices, given, strict=True)])
        image = torch.where(is_looked_at, image * scale, 0) - beta * previous
        alpha = (image * vector).sum(1, keepdim=True)
        image -= alpha * vector
        beta = torch.linalg.vector_norm(image, dim=1, keepdim=True)
        previous, vector = vector, image / beta.clamp(min=finfo.tiny)
        alphas.append(alpha)
        betas.append(beta)
        if step in _LOOKS:
            diagonal, beside = yield from on_host(torch.cat(alphas, 1), torch.cat(betas, 1))
            lower, residual = _largest_of_tridiagonal(
                diagonal.transpose(1, 2), beside.transpose(1, 2)
            )
            found[found.isnan() & (lower <= 0)] = 0
            places = (found.isnan() & (residual <= 1e-6 * lower)).nonzero().tolist()
            bounds = (lower * (1 + rtol)).to(scale.device, non_blocking=True)
            fails = [_exceeds(matrices[i], scale[i, :, j], bounds[i, j]) for i, j in places]
            for (i, j), fail in zip(places, (yield from on_host(*fails)), strict=True):
                if not int(fail):
                    found[i, j] = lower[i, j]
            if not bool(found.isnan().any()):
                return found
    for i, j in found.isnan().nonzero().tolist():
        column = scale[i, :, j]
        found[i, j] = torch.linalg.eigvalsh(matrices[i] * column[:, None] * column)[-1]
    return found


def _exceeds(s: Tensor, scale: Tensor, bound: Tensor) -> Tensor:
    """Mark, not 0, of an eigenvalue of diag(c) S diag(c) that exceeds a bound; scalar."""
    difference = s * -scale[:, None] * scale
    difference.diagonal().add_(bound)
    return torch.linalg.cholesky_ex(difference).info


def _largest_of_tridiagonal(diagonal: Tensor, beside: Tensor) -> tuple[Tensor, Tensor]:
    """The largest eigenvalue found by m Lanczos iterations, and its residual, from their
    coefficients, (..., m).
    """
    inner = beside[..., :-1]
    values, vectors = torch.linalg.eigh(
        diagonal.diag_embed() + inner.diag_embed(1) + inner.diag_embed(-1)
    )
    return values[..., -1], beside[..., -1] * vectors[..., -1, -1].abs()


@lru_cache(maxsize=8)
def _first_vector(dim: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A unit vector, the same for equal arguments, that Lanczos iterations start from."""
    vector = torch.randn(dim, generator=torch.Generator().manual_seed(0), dtype=dtype, device="cpu")
    return (vector / torch.linalg.vector_norm(vector)).to(device)


def full_spectrum_values(
    eigenvalues: Tensor, alpha_window: tuple[int, int] = ALPHA_WINDOW
) -> dict[str, Tensor]:
    """Values that `spectrum_values` adds with ``full``, apart from RankMe, from the eigenvalues of
    the scatter.
    """
    dim, total = len(eigenvalues), eigenvalues.sum()
    small, unit = scaled(eigenvalues)
    participation = ratio(total / unit, torch.linalg.vector_norm(small)).square()
    rest = eigenvalues[5:]
    alpha, r2 = power_law(eigenvalues, alpha_window)
    return {
        "effective_rank": entropy_rank(eigenvalues.sqrt()),
        "effective_rank_eigenvalues": entropy_rank(eigenvalues),
        # to which the steps of Rudman et al. 2022 reduce
        "isoscore": (participation - 1) / (dim - 1) if dim > 1 else total * torch.nan,
        "top1_share": ratio(eigenvalues[0], total),
        "top5_share": ratio(eigenvalues[:5].sum(), total),
        "anisotropy_without_top5": ratio(rest[0], rest.sum()) if len(rest) else total * torch.nan,
        "alpha_req": alpha,
        "alpha_req_r2": r2,
    }


@stepwise
def anisotropy(x: Tensor) -> Computation[Tensor]:
    """Anisotropy σ₁²/Σσ² of the centred rows of ``x``, shape (n, d); NaN where they do not vary.

    >>> anisotropy(torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 0.5], [0.0, -0.5]])).item()
    0.8
    """
    scatter = row_scatter(x)
    if is_asynchronous(x.device):
        return (yield from steps(spectrum_values, scatter))["anisotropy"]
    s = varying_scatter(scatter)
    return ratio(top_eigenvalue(s), s.trace())


def anisotropy_null(n: Tensor, dim: int) -> Tensor:
    """Expected anisotropy of n rows of an isotropic Gaussian in ``dim`` dimensions; NaN for n < 2.

    This is the Gaussian baseline of the anisotropy: the expected top eigenvalue of a Wishart matrix
    in the Tracy-Widom approximation (Johnstone 2001, centred as in Ma 2012), divided by the
    expected trace. The expected ratio equals this ratio of expectations because ratio and trace are
    independent.

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
    return torch.where(
        freedom >= 1, share.clamp(min=1 / freedom.clamp(1, dim), max=torch.ones_like(n)), torch.nan
    )


def top_eigenvalue(s: Tensor) -> Tensor:
    """The largest eigenvalue of a symmetric positive semi-definite matrix, certified to a relative
    1e-10.

    Lanczos iterations from a fixed start vector bound it from below (without reorthogonalisation:
    repeated copies of a converged eigenvalue do not affect the largest one, Paige 1980). If (1 +
    1e-10) · bound · I - s has a Cholesky factor, no eigenvalue is larger. Where this takes too many
    iterations (nearly equal top eigenvalues), and of a small matrix, the full decomposition is
    computed instead. Beside that alone: lines "top eigenvalue" of ``benchmarks/estimators.py``.

    Args:
        s: shape (d, d), float64; for float32 the tolerance is wider. If it is not finite, the
            result is NaN.

    >>> top_eigenvalue(torch.diag(torch.tensor([1.0, 3.0, 2.0], dtype=torch.float64)))
    tensor(3., dtype=torch.float64)
    """
    dim = s.shape[0]
    if not bool(s.sum().isfinite()):
        return s.new_tensor(torch.nan)
    if dim <= SMALL_DIM:
        return torch.linalg.eigvalsh(s)[-1]
    scale, small = s.diagonal().max(), torch.finfo(s.dtype).tiny ** 0.25
    if not bool(scale > 0):
        return torch.zeros_like(scale)
    if not small < float(scale) < 1 / small:  # so that no product over- or underflows
        return top_eigenvalue(s / scale) * scale
    rtol = max(1e-10, 16 * dim * torch.finfo(s.dtype).eps)
    vector = _first_vector(dim, s.dtype, s.device)
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
            if bool(residual <= 1e-6 * lower):
                difference = s.neg()
                difference.diagonal().add_(lower * (1 + rtol))
                if int(torch.linalg.cholesky_ex(difference).info) == 0:
                    return lower
    return torch.linalg.eigvalsh(s)[-1]


def entropy_rank(values: Tensor) -> Tensor:
    """exp(-Σ p log p), p = values / Σ values: how many equal values have that entropy; NaN where
    all are 0.

    Of singular values it is the effective rank of Roy & Vetterli 2007, and RankMe where rows were
    not centred, without the 1e-7 that Garrido et al. 2023 add to each p so that its logarithm is
    finite: here 0 log 0 is 0.

    Args:
        values: shape (k,), at least 0.

    >>> round(entropy_rank(torch.tensor([2.0, 2.0, 2.0, 0.0])).item(), 6)
    3.0
    """
    return torch.special.entr(ratio(values, values.sum())).sum().exp()


def power_law(eigenvalues: Tensor, window: tuple[int, int] = ALPHA_WINDOW) -> tuple[Tensor, Tensor]:
    """The exponent α of λᵢ ∝ i^-α, and the R² of its fit.

    Least squares of log λᵢ on -log i with an intercept and weights 1/i, which make up for how dense
    log i gets; R² has the same weights. Eigenvalues of the window that are 0 are left out; of fewer
    than three both are NaN, and R² is where all λᵢ are equal.

    Args:
        eigenvalues: shape (d,), in descending order.
        window: the first and the last i, both of them fitted, counted from 1.

    >>> alpha, r2 = power_law(torch.arange(1, 201, dtype=torch.float64) ** -0.7)
    >>> round(alpha.item(), 6), round(r2.item(), 6)
    (0.7, 1.0)
    """
    i = torch.arange(1, len(eigenvalues) + 1, dtype=eigenvalues.dtype, device=eigenvalues.device)
    used = (i >= window[0]) & (i <= window[1]) & (eigenvalues > 0)
    weights = ratio(used / i, (used / i).sum())
    x, y = -i.log(), torch.where(used, eigenvalues, 1).log()
    x, y = (values - torch.dot(weights, values) for values in (x, y))
    xx, xy, yy = (torch.dot(weights, product) for product in (x * x, x * y, y * y))
    enough = used.sum() >= _FEWEST_FITTED
    return torch.where(enough, ratio(xy, xx), torch.nan), torch.where(
        enough, ratio(xy.square(), xx * yy), torch.nan
    )


def covariance_eigenvalues(scatter: Scatter) -> Tensor:
    """Eigenvalues of the covariance, shape (d,), descending, at least 0, that sum to its trace; NaN
    for no rows.
    """
    s = varying_scatter(scatter)
    values = scatter_eigenvalues(s, scatter.n)
    rest = values[1:].sum()  # rounding that was put to 0 is taken from all but the largest
    values[1:] *= torch.where(rest > 0, (s.trace() - values[0]).clamp(min=0) / rest, 1)
    return ratio(values, scatter.n)


def scatter_eigenvalues(s: Tensor, n: Tensor, largest: Tensor | None = None) -> Tensor:
    """Eigenvalues of the scatter matrix of n rows, in descending order, at least 0; NaN if it is
    not finite.

    They are 0 from the n-th on, and where they are only rounding beside ``largest`` or λ₁: many of
    these would add up.
    """
    if not bool(s.isfinite().all()):
        return s.diagonal() * torch.nan
    values = torch.linalg.eigvalsh(s).flip(0)
    rounding = (
        len(s) * torch.finfo(s.dtype).eps * (values[0] if largest is None else largest).clamp(min=0)
    )
    is_spanned = torch.arange(len(s), device=s.device) < n - 1
    return torch.where(is_spanned & (values > rounding), values, 0)


def uncentred_eigenvalues(s: Tensor, n: Tensor, mean: Tensor, largest: Tensor) -> Tensor:
    """Eigenvalues of Σ x xᵀ = S + n μμᵀ, given the scatter of n rows, their mean, and the λ₁ of
    S.
    """
    length = torch.linalg.vector_norm(mean)
    # of a mirror that puts the mean on the first axis: else its rounding drowns small values
    normal = mean.clone()
    normal[0] += torch.copysign(length, mean[0])
    normal /= torch.linalg.vector_norm(normal).clamp(min=torch.finfo(s.dtype).tiny)
    reflected = s - 2 * torch.outer(normal, normal @ s)
    reflected -= 2 * torch.outer(reflected @ normal, normal)
    reflected[0, 0] += n * length.square()
    return scatter_eigenvalues(reflected, n + 1, largest)


def varying_scatter(scatter: Scatter) -> Tensor:
    """The scatter matrix, shape (d, d), 0 in the coordinates that do not vary; NaN where squares
    are out of range.
    """
    variance = without_rounding(scatter.scatter.diagonal(), scatter.n, scatter.mean)
    varies = torch.where(variance == 0, 0, variance / variance)
    return scatter.scatter * varies[:, None] * varies


class AnisotropyBatches(NamedTuple):
    """Moments of the anisotropies of consecutive batches of rows, and the rows that are in none of
    these yet.

    On a CPU these do not fill a batch. Of other devices, which would have to be waited for, they
    are up to four batches until the values are asked for; those of them that have a NaN or Inf are
    zeros, and are left out then.
    """

    n: Tensor  # number of batches, scalar
    mean: Tensor  # mean of their anisotropies, scalar
    m2: Tensor  # squared deviations from it, summed, scalar
    pending: Tensor  # the rows seen since, shape (m, d)
    counts: Tensor  # marks of those of them that count, shape (m,)
    size: int  # rows in a batch

    @classmethod
    def empty(cls, dim: int, size: int) -> "AnisotropyBatches":
        """The state before any rows."""
        zero = torch.zeros((), dtype=torch.float64)
        return cls(zero, zero, zero, torch.zeros(0, dim), torch.zeros(0, dtype=torch.bool), size)

    def extend(self, x: Tensor, counts: Tensor | None = None) -> "AnisotropyBatches":
        """The state after the next rows, ``x``, shape (n, d), of which those count that are marked;
        default: all.
        """
        device = self.pending.device
        dtype = torch.promote_types(torch.promote_types(self.pending.dtype, x.dtype), torch.float32)
        counts = x.new_ones(len(x), dtype=torch.bool) if counts is None else counts
        pending = torch.cat((self.pending.to(dtype), x.to(device, dtype)))
        whole = self._replace(pending=pending, counts=torch.cat((self.counts, counts.to(device))))
        if is_asynchronous(device) and len(pending) < _PENDING_BATCHES * self.size:
            return whole
        done = whole.completed()
        n, mean, m2 = (sent(each, device) for each in done[:3])
        return done._replace(n=n, mean=mean, m2=m2)

    @stepwise
    def completed(self) -> Computation["AnisotropyBatches"]:
        """This state with all whole batches among the moments, which are on the CPU."""
        counts, *moments = yield from on_host(self.counts, self.n, self.mean, self.m2)
        rows = self.pending
        if not bool(counts.all()):
            rows = rows.index_select(0, sent(counts.nonzero().flatten(), rows.device))
        *whole, rest = rows.split(self.size)
        if len(rest) == self.size:
            whole, rest = [*whole, rest], rest[:0]
        at_a_time = max(1, _STACKED_BYTES // (rows.shape[1] ** 2 * torch.float64.itemsize))
        for start in range(0, len(whole), at_a_time):
            some = whole[start : start + at_a_time]
            for value in (yield from at_once(*(steps(anisotropy, batch) for batch in some))):
                moments = [
                    *merge_parts(
                        [moments, (torch.ones_like(value), value, torch.zeros_like(value))]
                    )
                ]
        n, mean, m2 = moments
        return AnisotropyBatches(
            n, mean, m2, rest.clone(), rest.new_ones(len(rest), dtype=torch.bool), self.size
        )

    def merge(self, other: "AnisotropyBatches") -> "AnisotropyBatches":
        """The batches of both; rows pending in ``other`` follow those pending here."""
        moments = merge_parts([self[:3], other[:3]])
        return AnisotropyBatches(*moments, *self[3:]).extend(other.pending, other.counts)

    def reductions(self, phase: int, found: Found) -> dict[str, Tensor]:
        """The moments of the batches of each rank, for no batch spans two ranks."""
        if phase == 0:
            found["done"] = self.completed()
            return {}
        n, mean, m2 = (
            sent(each, self.pending.device)
            for each in (found["done"].n, found["done"].mean, found["done"].m2)
        )
        if phase == 1:
            return {"n": n, "sums": n * mean}
        if phase == 2:
            found["mean"] = mean_of(found["n"], found["sums"])
            return {"m2": squares_about(found["mean"], n, mean, m2)}
        return {}

    def of_ranks(self, found: Found) -> "AnisotropyBatches":
        """The batches of all ranks."""
        return found["done"]._replace(n=found["n"], mean=found["mean"], m2=found["m2"])


def batch_values(n: Tensor, mean: Tensor, m2: Tensor) -> dict[str, Tensor]:
    """``anisotropy_batch_mean`` and ``anisotropy_batch_std``, from the moments of n batches'
    values.

    NaN for no batch, and for fewer than two batches.
    """
    return {
        "anisotropy_batch_mean": torch.where(n > 0, mean, torch.nan),
        "anisotropy_batch_std": torch.where(n > 1, ratio(m2, n - 1), torch.nan).sqrt(),
    }


class ScatterSketch(NamedTuple):
    """Mean, variances and sketched scatter S of rows, whose anisotropy is known with its error.

    The scatter S, shape (d, d), is seen through Z = S Ω alone, Ω a fixed Gaussian matrix of k
    columns: one pass over the rows, and 8 d k bytes instead of 8 d²: line "sketch" of
    ``benchmarks/estimators.py``. Half of the columns give an approximation of S (Nyström); the
    other half, which that does not depend on, shows what it has missed, and so bounds the largest
    eigenvalue from both sides. No linear sketch tells the largest eigenvalue of a flat spectrum
    more closely than by a factor of about (d / k)^¼ (Li, Nguyen & Woodruff 2014): there the error
    is as large as the value, a small multiple of 1 / d.

    Sources: Tropp, Yurtsever, Udell & Cevher 2017 (arXiv 1706.05736) for the approximation from one
    pass; Meyer, Musco, Musco & Woodruff 2021 (arXiv 2010.09649) for the trace, here of S², from
    both halves; Laurent & Massart 2000 (lemma 1) for tails of weighted sums of chi-squared numbers.

    Attributes:
        n: number of rows, scalar.
        mean: mean row, shape (d,).
        m2: squared deviations from it, summed over rows, the diagonal of S, shape (d,).
        product: S Ω, shape (d, k); Ω is that of `gaussian_columns`.
    """

    n: Tensor
    mean: Tensor
    m2: Tensor
    product: Tensor

    @classmethod
    def empty(cls, dim: int, columns: int) -> "ScatterSketch":
        """The sketch of no rows, with a product of shape (1, k), which broadcasts."""
        zero = torch.zeros((), dtype=torch.float64)
        return cls(zero, zero.new_zeros(dim), zero.new_zeros(dim), zero.new_zeros(1, columns))

    def merge(self, other: "ScatterSketch") -> "ScatterSketch":
        """The sketch of the rows of both about their common mean."""
        n, mean, m2 = merge_parts([(each.n, each.mean, each.m2) for each in (self, other)])
        product = self._product_about(mean) + other._product_about(mean)
        return ScatterSketch(n, mean, m2, product)

    def reductions(self, phase: int, found: Found) -> dict[str, Tensor]:
        """The mean of all ranks, then the sketch about it."""
        if phase == 1:
            return {"n": self.n, "sums": self.n * self.mean}
        if phase == 2:
            found["mean"] = mean_of(found["n"], found["sums"])
            m2 = squares_about(found["mean"], self.n, self.mean, self.m2)
            return {"m2": m2, "product": self._product_about(found["mean"])}
        return {}

    def of_ranks(self, found: Found) -> "ScatterSketch":
        """The sketch of the rows of all ranks about their common mean."""
        return ScatterSketch(*(found[name] for name in ("n", "mean", "m2", "product")))

    def _product_about(self, center: Tensor) -> Tensor:
        dim, columns = len(center), self.product.shape[1]
        omega = gaussian_columns(dim, columns, center.device).to(center.dtype)
        shift = self.mean - center
        return self.product.expand(dim, columns).addr(self.n * shift, shift @ omega)


@lru_cache(maxsize=2)
def gaussian_columns(dim: int, columns: int, device: torch.device) -> Tensor:
    """Ω: independent standard normal numbers, shape (d, k), float32, equal for equal shapes."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(dim, columns, generator=generator, dtype=torch.float32, device="cpu").to(
        device
    )


def row_sketch(x: Tensor, columns: int, weights: Tensor | None = None) -> ScatterSketch:
    """Mean, variances and sketched scatter of the rows of ``x``, shape (n, d), in O(n d k)
    operations.

    Products are taken of the centred rows, in float64 for float64 rows and else in float32,
    whatever the process's matmul-precision and autocast settings are; they are summed over chunks
    of rows in float64. ``weights`` are as in `row_scatter`.
    """
    with matmul_precision(x.device):
        return _sketch_in(torch.promote_types(x.dtype, torch.float32), x, columns, weights)


def _sketch_in(
    dtype: torch.dtype, x: Tensor, columns: int, weights: Tensor | None
) -> ScatterSketch:
    """The sketch of rows, centred twice, also where its products leave the range of ``dtype``: see
    `_scatter_in`.
    """
    wide, dim = accumulator_dtype(x.device), x.shape[1]
    center = torch.zeros(dim, dtype=wide, device=x.device)
    omega = gaussian_columns(dim, columns, x.device)
    n = center.new_full((), len(x)) if weights is None else weights.sum()
    m2, rest = torch.zeros_like(center), torch.zeros_like(center)
    product = center.new_zeros(dim, columns)
    has_unit = dtype != wide and is_asynchronous(x.device)
    for chunk in row_chunks(x):
        center += x[chunk].to(wide).sum(0)
    center = (center / n.clamp(min=1)).to(dtype)
    for chunk in row_chunks(x, _SKETCH_ELEMENTS):
        rows = x[chunk].to(dtype) - center
        if weights is not None:
            rows.mul_(weights[chunk, None])
        unit = _to_unit(rows) if has_unit else 1.0
        rest += rows.sum(0) * unit
        m2 += rows.square().sum(0) * unit**2
        of_rows = rows.T @ (rows @ omega.to(dtype))
        product += of_rows.to(wide) * unit**2 if has_unit else of_rows
    if len(x) and not has_unit and dtype != wide and not in_range(product.abs().to(dtype)):
        return _sketch_in(wide, x, columns, weights)
    rest /= n.clamp(min=1)
    product.addr_(n * rest, rest @ omega.to(wide), alpha=-1)
    return ScatterSketch(n, center + rest, m2.addcmul_(n * rest, rest, value=-1), product)


def sketch_values(sketch: ScatterSketch) -> dict[str, Tensor]:
    """Values of the covariance spectrum that a sketch tells, with their errors.

    Beside rounding, the exact values are within the errors in at least 95 of 100 cases, the
    anisotropy nearly always: simulated for power laws, spiked, flat and rank-deficient spectra,
    from 32 columns on. The errors are 0 (but for rounding, of rows in float32 or less) where the
    rank of the scatter is well below k / 2.

    Returns:
        ``anisotropy``, an estimate of λ₁/Σλ, and ``anisotropy_error``; ``participation_ratio``, one
        of (Σλ)²/Σλ², and ``participation_ratio_error``; ``anisotropy_null``, the Gaussian baseline.
        All but the baseline are NaN where the rows do not vary.
    """
    m2 = without_rounding(sketch.m2, sketch.n, sketch.mean)
    trace, varies = m2.sum(), (m2 != 0).to(m2.dtype)[:, None]
    z = ratio(sketch.product, trace) * varies
    omega = gaussian_columns(*z.shape, z.device).to(z.dtype) * varies
    values = (
        _estimates(z, omega) if bool(z.isfinite().all() & (trace > 0)) else [trace * torch.nan] * 4
    )
    keys = ("anisotropy", "anisotropy_error", "participation_ratio", "participation_ratio_error")
    return {
        **dict(zip(keys, values, strict=True)),
        "anisotropy_null": anisotropy_null(sketch.n, len(m2)),
    }


def _estimates(z: Tensor, omega: Tensor) -> list[Tensor]:
    """Largest eigenvalue λ of S and participation ratio, each with its error, from Z = S Ω; S has
    trace 1.
    """
    half = z.shape[1] // 2
    probes = omega[:, half:]
    factor = _nystrom(z[:, :half], omega[:, :half])
    eigenvalues, axes = torch.linalg.eigh(factor.T @ factor)
    top = eigenvalues[-1]
    second = eigenvalues[-2] if len(eigenvalues) > 1 else torch.zeros_like(top)
    u = factor @ axes[:, -1] / top.sqrt()  # of norm 1, near the first axis of S
    seen = factor @ (factor.T @ probes)
    missed = z[:, half:] - seen  # of a remainder E of S that is positive semi-definite
    num_probes = probes.shape[1]

    # S u = (top + more) u + r with r orthogonal to u: `more` is the slope of uᵀ E Ω on uᵀ Ω, ‖r‖²
    # its residual variance
    along, response = u @ probes, u @ missed
    more = (response @ along) / along.square().sum()
    residuals = (response - more * along).square().sum()
    freedom = num_probes - 1
    r = (residuals / freedom).sqrt()
    r_high, r_low = ((residuals / _chi2(freedom, sign)).sqrt() for sign in (-1, 1))
    noise = _NORMAL * r_high / torch.linalg.vector_norm(along)
    quotient, quotient_high = top + more.clamp(min=0), top + (more + noise).clamp(min=0)
    quotient_low = top + (more - noise).clamp(min=0)

    high = _largest(quotient_high, second + _norm_bound(missed), r_high)
    # S - factor factorᵀ has no λ < 0
    high = torch.maximum(torch.minimum(high, _norm_bound(z)), top).clamp(max=1)
    low = torch.maximum(quotient_low, r_low)
    low = torch.minimum(low + r_low.square() / low, high)  # λ uᵀSu is at least ‖Su‖²
    value = torch.minimum(torch.maximum(_largest(quotient, second, r), low), high)
    error = torch.maximum(high - value, value - low)

    squares = z[:, half:].square().sum(0) - seen.square().sum(0)
    frobenius = eigenvalues.square().sum() + squares.mean()
    spread = _student(freedom) * squares.std() / math.sqrt(num_probes)
    pairs = (value, error), (ratio(torch.ones_like(value), frobenius), spread / frobenius.square())
    return [
        each for found, e in pairs for each in (found, torch.where(e > _ROUNDING * found, e, 0))
    ]


def _nystrom(z: Tensor, omega: Tensor) -> Tensor:
    """B of the Nyström approximation B Bᵀ = Z (Ωᵀ Z)⁺ Zᵀ, shape (d, at most k)."""
    core = omega.T @ z
    values, vectors = torch.linalg.eigh((core + core.T) / 2)
    spanned = values > _SPANNED * values[-1]
    return z @ (vectors[:, spanned] / values[spanned].sqrt())


def _largest(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """The larger eigenvalue of [[a, c], [c, b]]."""
    return (a + b) / 2 + torch.hypot((a - b) / 2, c)


def _norm_bound(e: Tensor) -> Tensor:
    """An upper bound of the norm λ of a symmetric E, from E Ω with the k columns of Ω independent
    of E.

    The largest eigenvalue of (E Ω)ᵀ E Ω is at least λ² χ²ₖ, and more than that by about the rest of
    ‖E‖².
    """
    gram = e.T @ e
    k, x = len(gram), -math.log(_TAIL)
    top, norm2 = torch.linalg.eigvalsh(gram)[-1], gram.trace() / k
    quantile = _chi2(k, -1)
    a, b = quantile - 1 - 2 * x / k, math.sqrt(x) * (1 + k**-0.5) * norm2.sqrt()
    plain = (top / quantile).clamp(min=0).sqrt()
    return (
        torch.minimum(plain, (b + (b.square() + a * (top - norm2).clamp(min=0)).sqrt()) / a)
        if a > 0
        else plain
    )


def _student(freedom: int) -> float:
    """The value that a Student's t number exceeds with probability `_TAIL` (Cornish & Fisher)."""
    x, n = _NORMAL, freedom
    return x + (x**3 + x) / (4 * n) + (5 * x**5 + 16 * x**3 + 3 * x) / (96 * n**2)


def _chi2(freedom: int, sign: int) -> float:
    """The value a chi-squared number exceeds (sign 1), or not (-1), with probability `_TAIL`
    (Wilson & Hilferty).
    """
    variance = 2 / (9 * freedom)
    return float(freedom * (1 - variance + sign * _NORMAL * math.sqrt(variance)) ** 3)
