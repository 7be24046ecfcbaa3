"""Moments of rows, and the one rule by which batches, ranks and token types are merged.

Sources: Yamagiwa & Shimodaira 2025 (arXiv 2409.11253), equations 1-4, for Q, M and V; Chan, Golub & LeVeque
1983 for the merge; Ethayarajh 2019 for the mean cosine. All sums are centred: nothing here subtracts two
large numbers.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from embedgeo.functional.precision import accumulator_dtype

CHUNK_ELEMENTS = 1 << 19
"""Elements handled at a time, so that the float64 copies stay in the processor's cache."""

Reduction = Callable[[Tensor], Tensor]


def row_chunks(x: Tensor, elements: int = CHUNK_ELEMENTS) -> Iterator[slice]:
    """Slices over the rows of ``x``, each of at most ``elements`` elements (but at least one row)."""
    step = max(1, elements // max(1, x.shape[1]))
    return (slice(start, start + step) for start in range(0, x.shape[0], step))


def pool(n: Tensor, mean: Tensor, m2: Tensor, total: Reduction) -> tuple[Tensor, Tensor, Tensor]:
    """Merge the moments of parts into those of the whole (Chan, Golub & LeVeque 1983).

    A part is whatever ``total`` sums over: the leading axis of stacked parts, or the ranks of a process group.

    Args:
        n: rows in each part, shape (...).
        mean: their mean, shape (...) or (..., d).
        m2: their squared deviations from it, summed; the shape of ``mean``, or that without the coordinates.
        total: sums a tensor over the parts.
    """
    coordinates = (1,) * (mean.ndim - n.ndim)
    weight = n.reshape(n.shape + coordinates)
    whole_n = total(n)
    whole_mean = total(weight * mean) / whole_n.clamp(min=1).reshape(whole_n.shape + coordinates)
    between = weight * (mean - whole_mean).square()
    return whole_n, whole_mean, total(m2 + (between if m2.ndim == mean.ndim else between.sum(-1)))


class Moments(NamedTuple):
    """Moments of some rows, or of several groups of rows (a leading axis, shape G, on every tensor).

    Attributes:
        n: number of rows, shape G.
        mean: mean row, shape (*G, d).
        m2: squared deviations from it, summed per coordinate, shape (*G, d).
        norm_mean: mean of the Euclidean norms, shape G.
        norm_m2: their squared deviations, summed, shape G.
        norm_max: the largest norm, shape G.
        direction_n: number of rows that are not zero (a zero row has no direction), shape G.
        direction_sum: sum of the rows scaled to norm 1, shape (*G, d).
    """

    n: Tensor
    mean: Tensor
    m2: Tensor
    norm_mean: Tensor
    norm_m2: Tensor
    norm_max: Tensor
    direction_n: Tensor
    direction_sum: Tensor

    @classmethod
    def zeros(
        cls,
        dim: int,
        groups: tuple[int, ...] = (),
        *,
        dtype: torch.dtype = torch.float64,
        device: torch.device | None = None,
    ) -> "Moments":
        """The moments of no rows."""
        scalar = torch.zeros(groups, dtype=dtype, device=device)
        wide = torch.zeros((*groups, dim), dtype=dtype, device=device)
        return cls(scalar, wide, wide, scalar, scalar, scalar, scalar, wide)

    def pool(self, total: Reduction, largest: Reduction) -> "Moments":
        """Merge the parts over which ``total`` sums and ``largest`` takes the maximum."""
        return Moments(
            *pool(self.n, self.mean, self.m2, total),
            *pool(self.n, self.norm_mean, self.norm_m2, total)[1:],
            largest(self.norm_max),
            total(self.direction_n),
            total(self.direction_sum),
        )


class VarianceMoments(NamedTuple):
    """The part of `Moments` that the variance of each group needs: with a leading axis, shape G.

    Attributes:
        n: number of rows, shape G.
        mean: mean row, shape (*G, d).
        m2: squared deviations from it, summed over rows and coordinates, shape G.
    """

    n: Tensor
    mean: Tensor
    m2: Tensor

    def pool(self, total: Reduction, largest: Reduction) -> "VarianceMoments":
        """Merge the parts over which ``total`` sums."""
        return VarianceMoments(*pool(self.n, self.mean, self.m2, total))


def variance_moments(moments: "Moments | VarianceMoments") -> VarianceMoments:
    """The part that the variance needs, exactly 0 where equal rows left no more than rounding."""
    m2 = moments.m2.sum(-1) if isinstance(moments, Moments) else moments.m2
    norm = torch.linalg.vector_norm(moments.mean, dim=-1)
    return VarianceMoments(moments.n, moments.mean, without_rounding(m2, moments.n, norm))


AnyMoments = TypeVar("AnyMoments", Moments, VarianceMoments)


def pool_groups(moments: AnyMoments) -> AnyMoments:
    """Merge the groups of the leading axis."""
    return moments.pool(lambda t: t.sum(0), lambda t: t.amax(0) if len(t) else t.sum(0))


def merge(a: AnyMoments, b: AnyMoments) -> AnyMoments:
    """The moments of both sets of rows, group by group."""
    return pool_groups(per_state(lambda *pair: torch.stack(pair), a, b))


def per_state(function: Callable[..., Tensor], first: AnyMoments, *others: AnyMoments) -> AnyMoments:
    """The moments whose every tensor is ``function`` of the corresponding ones."""
    return type(first)(*map(function, first, *others))


def row_moments(x: Tensor) -> Moments:
    """Moments of the rows of ``x``, shape (n, d), of any floating dtype; n = 0 gives zeros."""
    dtype = accumulator_dtype(x.device)
    moments = Moments.zeros(x.shape[1], dtype=dtype, device=x.device)
    for chunk in row_chunks(x):
        rows = x[chunk].to(dtype)
        norm = torch.linalg.vector_norm(rows, dim=1)
        mean, norm_mean = rows.mean(0), norm.mean()
        part = Moments(
            n=rows.new_tensor(rows.shape[0]),
            mean=mean,
            m2=(rows - mean).square_().sum(0),
            norm_mean=norm_mean,
            norm_m2=(norm - norm_mean).square().sum(),
            norm_max=norm.max(),
            direction_n=(norm > 0).sum().to(dtype),
            direction_sum=reciprocal_norm(norm) @ rows,
        )
        moments = merge(moments, part)
    return moments


def reciprocal_norm(norm: Tensor) -> Tensor:
    """1 / norm, 0 for rows of norm 0."""
    return torch.where(norm > 0, 1 / norm, 0)


def without_rounding(m2: Tensor, n: Tensor, mean: Tensor) -> Tensor:
    """Squared deviations ``m2`` of n values, exactly 0 where the rounding of their mean can account for them.

    Values that are all equal differ from their mean in the last digit; no more is known of their variance.
    """
    rounding = n * (64 * torch.finfo(mean.dtype).eps * mean).square()
    return torch.where(m2 <= rounding, 0, m2)


def ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """``numerator / denominator``, NaN where that is undefined (a denominator of zero)."""
    return torch.where(denominator != 0, numerator / denominator, torch.nan)


def moment_values(moments: Moments) -> dict[str, Tensor]:
    """The numbers that moments (of one group) give.

    Returns:
        ``n``; ``Q``, ``M``, ``V`` (squared embedding units; Q = M + V) and their ratios; ``mean_cosine``, the
        mean cosine of two distinct rows (zero rows left out; Ethayarajh 2019); ``norm_mean``, ``norm_cv``
        (standard deviation / mean), ``norm_max``; ``top_dim_share``, the largest share of V in one coordinate.
        What too few rows leave undefined is NaN.

    >>> values = moment_values(row_moments(torch.tensor([[0.0, 1.0], [0.0, 3.0]])))
    >>> [values[key].item() for key in ("Q", "M", "V")]
    [5.0, 4.0, 1.0]
    """
    n, m2_by_dim = moments.n, without_rounding(moments.m2, moments.n, moments.mean)
    m2 = m2_by_dim.sum()
    some = ratio(n, n)  # 1, or NaN where there are no rows
    variance = ratio(m2, n)
    mean_norm2 = moments.mean.square().sum() * some
    norm_mean = moments.norm_mean * some
    norm_m2 = without_rounding(moments.norm_m2, n, moments.norm_mean)
    directions = moments.direction_n
    return {
        "n": n,
        "Q": mean_norm2 + variance,
        "M": mean_norm2,
        "V": variance,
        "M_over_V": ratio(mean_norm2, variance),
        "M_over_Q": ratio(mean_norm2, mean_norm2 + variance),
        "mean_cosine": ratio(moments.direction_sum.square().sum() - directions, directions * (directions - 1)),
        "norm_mean": norm_mean,
        "norm_cv": ratio(ratio(norm_m2, n).sqrt(), norm_mean),
        "norm_max": moments.norm_max * some,
        "top_dim_share": ratio(m2_by_dim.max(), m2),
    }
