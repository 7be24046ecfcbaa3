"""Anisotropy and other values of the covariance spectrum, from the scatter of the rows or from a
sample of them.

Source of the anisotropy: Razzhigaev et al. 2024 (arXiv 2311.05928).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, reduce

import torch
from torch import Tensor

from embedgeo.functional.distributed import Ranks, Tensors
from embedgeo.functional.moments import (
    PooledState,
    Pooling,
    ratio,
    without_rounding,
)
from embedgeo.functional.precision import (
    accumulator_dtype,
    in_range,
    matmul_precision,
)

# up to which all eigenvalues take less time than the largest one by iterations, and on a CPU
SMALL_DIM = 128
# elements of rows whose products are summed in float32, before they are added in float64
_SCATTER_ELEMENTS = 1 << 22
_CENTRED_ROWS = 1024  # rows centred at a time, so that they stay in the processor's cache
# columns of the scatter computed at a time: only the blocks on and above the diagonal are
_GRAM_COLUMNS = 128
_TRACY_WIDOM_MEAN = -1.2065335745820
_LANCZOS_STEPS = 16  # Lanczos iterations between two looks at what has converged
_MAX_LANCZOS_STEPS = 160


@dataclass(eq=False)
class Scatter(PooledState):
    """Mean and scatter of rows.

    Attributes:
        n: number of rows, scalar.
        mean: mean row, shape (d,).
        scatter: sum over rows of (x - mean)(x - mean)ᵀ, shape (d, d).
        eps: relative spacing of numbers of the rows' dtype, the largest of all rows, scalar.
    """

    n: Tensor
    mean: Tensor
    scatter: Tensor
    eps: Tensor

    powers = (("mean", "scatter"),)
    largest = ("eps",)

    @classmethod
    def empty(cls, dim: int = 0) -> "Scatter":
        """The scatter of no rows, in a matrix of shape (1, 1), which broadcasts: see `expanded`."""
        zero = torch.zeros((), dtype=torch.float64)
        return cls(zero, zero.new_zeros(dim), zero.new_zeros(1, 1), zero)

    def expanded(self) -> "Scatter":
        """This scatter with a matrix of shape (d, d), also where no rows have been seen."""
        return replace(self, scatter=self.scatter.expand(len(self.mean), len(self.mean)))

    def merge(self, other: "Scatter") -> "Scatter":
        """The scatter of the rows of both about their common mean."""
        if self.scatter.shape != other.scatter.shape:  # that of no rows is the smaller one
            return max(self, other, key=lambda each: len(each.scatter))
        return super().merge(other)

    def num_bytes(self, num_rows: int, num_types: int) -> int:
        """Bytes with a matrix of shape (d, d)."""
        return PooledState.num_bytes(self.expanded(), num_rows, num_types)

    def tells(self) -> Tensor:
        """Marks of the coordinates whose variance the dtype of the rows can tell, shape (d,).

        It must exceed the rounding of the coordinate's mean, and its squares must be in the range
        of what products are taken in: float64 of float64 rows, else float32.
        """
        wide = torch.finfo(torch.float64)
        tiny = torch.where(self.eps > wide.eps, torch.finfo(torch.float32).tiny, wide.tiny)
        rounding = (self.eps * self.mean).square()
        return self.scatter.diagonal() > self.n * torch.maximum(rounding, tiny)


def row_scatter(x: Tensor, *, small: bool = False) -> Scatter:
    """Mean and scatter of the rows of ``x``, shape (n, d).

    Products are taken of the centred rows, in float64 for float64 rows and else in float32,
    whatever the process's matmul-precision and autocast settings are; they are summed over chunks
    of rows in float64. Where ``small`` eigenvalues matter, too, which drown in the rounding of
    float32 (1e-7 of the largest), all are taken in float64. The squares of each coordinate are
    summed in float64. Half of the products are those of the other half.
    """
    wide = accumulator_dtype(x.device)
    narrow = wide if small else torch.promote_types(x.dtype, torch.float32)
    if not len(x):
        zeros = x.new_zeros(x.shape[1], x.shape[1], dtype=wide)
        return Scatter(zeros.new_zeros(()), zeros[0], zeros, zeros.new_zeros(()))
    with matmul_precision(x.device):
        chunks = x.split(max(1, _SCATTER_ELEMENTS // x.shape[1]))
        return reduce(Scatter.merge, (_scatter_in(narrow, chunk) for chunk in chunks))


def _scatter_in(dtype: torch.dtype, x: Tensor) -> Scatter:
    """Mean and scatter of a chunk of rows, centred twice; in float64 where squares leave the range
    of ``dtype``.
    """
    wide = accumulator_dtype(x.device)
    (n, dim) = x.shape
    center = x.sum(0, dtype=dtype) / n
    gram = x.new_empty(dim, dim, dtype=dtype)
    rounding = x.new_zeros(dim, dtype=dtype)
    squares = x.new_zeros(dim, dtype=wide)
    step = _GRAM_COLUMNS
    for number, part in enumerate(x.split(_CENTRED_ROWS)):
        rows = part.to(dtype) - center
        rounding += rows.sum(0)
        squares += rows.to(wide, copy=True).square_().sum(0)
        for start in range(0, dim, step):
            columns = rows[:, start : start + step]
            gram[start : start + step, start:].addmm_(
                columns.T, rows[:, start:], beta=min(number, 1)
            )
    for start in range(step, dim, step):
        gram[start:, start - step : start] = gram[start - step : start, start:].T
    if dtype != wide and not in_range(gram.diagonal()):
        return _scatter_in(wide, x)
    rounding = rounding.to(wide) / n
    scatter = gram.to(wide)
    scatter.diagonal().copy_(squares)
    scatter.addr_(n * rounding, rounding, alpha=-1)
    eps = rounding.new_full((), torch.finfo(x.dtype).eps)
    return Scatter(rounding.new_full((), n), center + rounding, scatter, eps)


def spectrum_values(scatter: Scatter, *, full: bool = False) -> dict[str, Tensor]:
    """Values of the covariance spectrum λ₁ ≥ λ₂ ≥ …, the eigenvalues of the scatter.

    Args:
        scatter: mean and scatter of the rows.
        full: also compute what needs every eigenvalue (d³ operations).

    Returns:
        ``anisotropy`` λ₁/Σλ; ``anisotropy_without_top_dim``, that without the coordinate of the
        largest second moment; ``participation_ratio`` (Σλ)²/Σλ²; ``anisotropy_standardized``, the
        anisotropy of the rows with every coordinate scaled to variance 1; ``constant_dims``, the
        number of coordinates that it leaves out: see `Scatter.tells`; ``anisotropy_null``, the
        Gaussian baseline. With ``full``: ``effective_rank``, the exponential of the entropy of the
        normalised singular values; ``rankme``, the same of the rows as they are, not centred;
        ``effective_rank_eigenvalues``, the same of the λ; ``isoscore``; ``top5_share``, that of
        λ₁..λ₅ in Σλ; ``anisotropy_without_top5`` λ₆/Σ_{i>5}λᵢ. All but the baseline and the number
        are NaN where the rows do not vary, and ``rankme`` only where they are 0, too.
    """
    s = varying_scatter(scatter)
    variance = s.diagonal()
    scale = _reciprocal_root(variance, scatter.tells())
    top = (variance + scatter.n * scatter.mean.square()).argmax()[None]
    matrices = (
        s,
        lambda: s.index_fill(0, top, 0).index_fill_(1, top, 0),
        lambda: (s * scale).mul_(scale[:, None]),
    )
    leading = _leading_values(scatter.n, variance, scale, top, *matrices)
    if not full:
        return leading
    eigenvalues = scatter_eigenvalues(s, scatter.n)
    uncentred = uncentred_eigenvalues(s, scatter.n, scatter.mean, eigenvalues[0])
    return {
        **leading,
        "rankme": entropy_rank(uncentred.sqrt()),
        **full_spectrum_values(eigenvalues),
    }


def _leading_values(
    n: Tensor,
    variance: Tensor,
    scale: Tensor,
    top: Tensor,
    s: Tensor,
    others: Callable[[], Tensor],
    standardized: Callable[[], Tensor],
) -> dict[str, Tensor]:
    """Values from the diagonal of the scatter, and from three matrices, which have the eigenvalues
    of the scatter, of that of the rows without their largest coordinate, ``top``, and of that of
    standardized rows; ``scale`` is 0 in coordinates that these do not have. One of the latter two
    is made when the other has gone.
    """
    trace = variance.sum()
    num_scaled = (scale > 0).sum()
    return {
        "anisotropy": ratio(top_eigenvalue(s), trace),
        "anisotropy_without_top_dim": ratio(
            top_eigenvalue(others()), variance.index_fill(0, top, 0).sum()
        ),
        "participation_ratio": ratio(trace.square(), torch.linalg.vector_norm(s).square()),
        "anisotropy_standardized": ratio(top_eigenvalue(standardized()), num_scaled),
        "constant_dims": (len(variance) - num_scaled).to(trace).where(n > 0, torch.nan),
        "anisotropy_null": anisotropy_null(n, len(variance)),
    }


def _reciprocal_root(variance: Tensor, tells: Tensor) -> Tensor:
    return torch.where(tells & (variance > 0), variance.rsqrt(), 0)


def sampled_spectrum_values(x: Tensor) -> dict[str, Tensor]:
    """The `spectrum_values` of a sample of rows, from the products of each two of them.

    The n × n matrix of the products of centred rows has the eigenvalues of their scatter, which is
    larger where there are fewer rows than coordinates.

    Args:
        x: shape (n, d), any floating dtype, finite.

    Returns:
        What `spectrum_values` returns without ``full``, all of the n rows: with few of them the
        anisotropy is high by about ``anisotropy_null``.
    """
    n = torch.tensor(len(x), dtype=accumulator_dtype(x.device), device=x.device)
    rows = x.to(n.dtype) if len(x) else n.new_zeros(1, x.shape[1])
    mean = rows.sum(0) / n.clamp(min=1)
    top = rows.square().sum(0).argmax()[None]
    rows = rows - mean
    m2 = without_rounding(rows.square().sum(0), n, mean)
    rows = rows * (m2 > 0)
    eps = n.new_full((), torch.finfo(x.dtype).eps)
    scale = _reciprocal_root(m2, Scatter(n, mean, m2.diag(), eps).tells())
    products = (
        _products(rows),
        lambda: _products(rows.index_fill(1, top, 0)),
        lambda: _products(rows * scale),
    )
    return _leading_values(n, m2, scale, top, *products)


def _products(rows: Tensor) -> Tensor:
    return rows @ rows.T


@lru_cache(maxsize=8)
def _first_vector(dim: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A unit vector, the same for equal arguments, that Lanczos iterations start from."""
    vector = torch.randn(dim, generator=torch.Generator().manual_seed(0), dtype=dtype, device="cpu")
    return (vector / torch.linalg.vector_norm(vector)).to(device)


def full_spectrum_values(eigenvalues: Tensor) -> dict[str, Tensor]:
    """Values that `spectrum_values` adds with ``full``, apart from RankMe, from the eigenvalues of
    the scatter.
    """
    dim = len(eigenvalues)
    total = eigenvalues.sum()
    participation = ratio(total.square(), eigenvalues.square().sum())
    rest = eigenvalues[5:]
    return {
        "effective_rank": entropy_rank(eigenvalues.sqrt()),
        "effective_rank_eigenvalues": entropy_rank(eigenvalues),
        # to which the steps of Rudman et al. 2022 reduce
        "isoscore": (participation - 1) / (dim - 1) if dim > 1 else total * torch.nan,
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
    """The largest eigenvalue of a symmetric positive semi-definite matrix, to a relative 1e-10.

    Lanczos iterations from a fixed start vector bound it from below (without reorthogonalisation:
    repeated copies of a converged eigenvalue do not affect the largest one, Paige 1980). If (1 +
    1e-10) · bound · I - s has a Cholesky factor, no eigenvalue is larger. Where this takes too many
    iterations (nearly equal top eigenvalues), and of small matrices, all eigenvalues are computed
    instead. Beside that alone: lines "top eigenvalue" of ``benchmarks/estimators.py``.

    Args:
        s: shape (d, d), float64; for float32 the tolerance is wider.

    Returns:
        Scalar; NaN for a matrix that is not finite.

    >>> top_eigenvalue(torch.diag(torch.tensor([1.0, 3.0, 2.0], dtype=torch.float64)))
    tensor(3., dtype=torch.float64)
    """
    dim = len(s)
    if not bool(s.sum().isfinite()):
        return s.new_full((), torch.nan)
    if dim <= SMALL_DIM or not bool(s.diagonal().any()):
        return torch.linalg.eigvalsh(s)[-1]
    rtol = max(1e-10, 16 * dim * torch.finfo(s.dtype).eps)
    vector = _first_vector(dim, s.dtype, s.device)
    previous = torch.zeros_like(vector)
    beta = vector.new_zeros(())
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
            lower = values[-1]
            residual = beta * vectors[-1, -1].abs()
            if bool(residual <= 1e-6 * lower):
                # then the squares of the other eigenvalues sum to less than that of this one
                if bool(lower.square() > 0.51 * torch.linalg.vector_norm(s).square()):
                    return lower
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
    """The scatter matrix, shape (d, d), 0 in the coordinates that do not vary."""
    varies = without_rounding(scatter.scatter.diagonal(), scatter.n, scatter.mean) != 0
    return (scatter.scatter * varies).mul_(varies[:, None])


@dataclass(eq=False)
class AnisotropyBatches(PooledState):
    """Moments of the anisotropies of consecutive batches of rows, and the rows that do not fill a
    batch yet.
    """

    n: Tensor  # number of batches, scalar
    mean: Tensor  # mean of their anisotropies, scalar
    m2: Tensor  # squared deviations from it, summed, scalar
    pending: Tensor  # the rows seen since, shape (m, d)
    size: int  # rows in a batch

    powers = (("mean", "m2"),)
    not_pooled = ("pending",)

    @classmethod
    def of_size(cls, dim: int, size: int) -> "AnisotropyBatches":
        """The state before any rows."""
        zero = torch.zeros((), dtype=torch.float64)
        return cls(zero, zero, zero, torch.zeros(0, dim), size)

    def extend(self, x: Tensor) -> "AnisotropyBatches":
        """The state after the next rows, ``x``, shape (n, d)."""
        device = self.pending.device
        dtype = torch.promote_types(torch.promote_types(self.pending.dtype, x.dtype), torch.float32)
        rows = torch.cat((self.pending.to(dtype), x.to(device, dtype)))
        num_whole = len(rows) // self.size
        batches = replace(self, pending=rows[num_whole * self.size :].clone())
        for batch in rows.split(self.size)[:num_whole]:
            value = anisotropy(batch).to(self.mean)
            one = replace(self, n=torch.ones_like(value), mean=value, m2=torch.zeros_like(value))
            batches = PooledState.merge(batches, one)
        return batches

    def merge(self, other: "AnisotropyBatches") -> "AnisotropyBatches":
        """The batches of both; rows pending in ``other`` follow those pending here."""
        return super().merge(other).extend(other.pending)

    def reduction(self, ranks: Ranks) -> "_BatchesOfRanks":
        """Ranks pool their batches, and make some of the rows that fill none on one of them."""
        return _BatchesOfRanks(self, ranks)

    def num_bytes(self, num_rows: int, num_types: int) -> int:
        """Bytes with the rows that do not fill a batch."""
        moments = self.n.nbytes + self.mean.nbytes + self.m2.nbytes
        return moments + num_rows % self.size * self.pending.shape[1] * self.pending.itemsize


class _BatchesOfRanks:
    """The `Reduction` of `AnisotropyBatches`: the pending rows of all ranks follow the pooled
    batches.
    """

    def __init__(self, state: AnisotropyBatches, ranks: Ranks) -> None:
        self._pooling = Pooling(state)
        self._rows = state.pending.to(state.n.dtype)
        self._ranks = ranks

    def maxima(self) -> Tensors:
        """Nothing."""
        return {}

    def counts(self, maxima: Tensors) -> Tensors:
        """Also the number of pending rows of each rank."""
        length = self._rows.new_tensor(len(self._rows))
        return {**self._pooling.counts(maxima), "lengths": self._ranks.placed(length)}

    def sums(self, counts: Tensors) -> Tensors:
        """The pending rows."""
        *own, lengths = counts.items()
        self._pooling.sums(dict(own))
        return {"rows": self._ranks.placed(self._rows, lengths[1].long().tolist())}

    def squares(self, sums: Tensors) -> Tensors:
        """Squares about the mean of all batches."""
        self._rows = sums["rows"]
        return self._pooling.squares(sums)

    def result(self, squares: Tensors) -> AnisotropyBatches:
        """The batches of all ranks, and the rows that still fill none."""
        pooled: AnisotropyBatches = self._pooling.result(squares)
        return replace(pooled, pending=pooled.pending[:0]).extend(self._rows)


def batch_values(batches: AnisotropyBatches) -> dict[str, Tensor]:
    """``anisotropy_batch_mean`` and ``anisotropy_batch_std``, NaN for no batch, and for fewer than
    two batches.
    """
    n = batches.n
    return {
        "anisotropy_batch_mean": torch.where(n > 0, batches.mean, torch.nan),
        "anisotropy_batch_std": torch.where(n > 1, ratio(batches.m2, n - 1), torch.nan).sqrt(),
    }
