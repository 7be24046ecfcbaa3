"""Moments of rows (Q, M and V: Yamagiwa & Shimodaira 2025, arXiv 2409.11253), and the one rule that
merges them.

All sums of squares are of differences from a mean, so that no two large numbers are subtracted.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from embedgeo.functional.distributed import NUM_PHASES, Found, State
from embedgeo.functional.precision import accumulator_dtype, row_norms

# elements worked on at a time, so that their float64 copies stay in the processor's cache
CHUNK_ELEMENTS = 1 << 18
# how many times as many where a launch costs more than a cache saves: on all but the CPU
_LAUNCH = 1 << 4

S = TypeVar("S", bound=State)


def chunk_length(width: int, device: torch.device) -> int:
    """Number of rows of so many numbers that are worked on at a time; at least 1."""
    most = CHUNK_ELEMENTS if device.type == "cpu" else _LAUNCH * CHUNK_ELEMENTS
    return max(1, most // max(1, width))


def row_chunks(x: Tensor) -> Iterator[slice]:
    """Slices over the rows of ``x``, shape (..., n, d), that are worked on one after the other."""
    step = chunk_length(x.shape[-1], x.device)
    return (slice(start, start + step) for start in range(0, x.shape[-2], step))


def merge_parts(parts: Sequence[Sequence[Tensor]]) -> tuple[Tensor, Tensor, Tensor]:
    """Merge counts, means and squared deviations of parts into those of the whole (Chan, Golub &
    LeVeque 1983).

    The mean is merged first; then the deviations from it are summed.

    Args:
        parts: (n, mean, m2) of each part. n is the number of rows, shape G; mean has shape G or
            (*G, d); m2 is the sum over rows of the squared deviations from it: per coordinate, in
            the shape of ``mean``; summed over coordinates, shape G; or as the scatter matrix of
            the coordinates, shape (*G, d, d).

    >>> merge_parts([torch.tensor([1.0, 2.0, 0.5]), torch.tensor([1.0, 4.0, 0.5])])
    (tensor(2.), tensor(3.), tensor(3.))
    """
    n = _summed([part[0] for part in parts])
    mean = mean_of(n, _summed([column(n, mean) * mean for n, mean, _ in parts]))
    return n, mean, _summed([squares_about(mean, *part) for part in parts])


def _summed(terms: Sequence[Tensor]) -> Tensor:
    return sum(terms[1:], terms[0])


def mean_of(n: Tensor, sums: Tensor) -> Tensor:
    """The mean of ``n`` rows, shape G, given their sums, shape G or (*G, d); 0 for no rows."""
    return sums / column(n.clamp(min=1), sums)


def squares_about(center: Tensor, n: Tensor, mean: Tensor, m2: Tensor) -> Tensor:
    """Squared deviations of rows from ``center``, given their number, their mean and the squared
    deviations from it, in any of the shapes of `merge_parts`.
    """
    shift = mean - center
    if m2.ndim > mean.ndim:
        # (1, 1): that of no rows, which takes any width
        if m2.shape in ((1, 1), shift.shape * 2):
            return m2.addr(n * shift, shift)
        return m2 + column(n, m2) * shift[..., :, None] * shift[..., None, :]
    between = column(n, shift) * shift.square()
    return m2 + (between if m2.ndim == mean.ndim else between.sum(-1))


def moment_reductions(
    phase: int, found: Found, n: Tensor, mean: Tensor, m2: Tensor
) -> dict[str, Tensor]:
    """What `merge_parts` takes over ranks, as the ``reductions`` of a state: ``found`` has ``n``,
    ``mean`` and ``m2`` of all of them in the end.
    """
    if phase == 1:
        return {"n": n, "sums": column(n, mean) * mean}
    if phase == 2:
        found["mean"] = mean_of(found["n"], found["sums"])
        return {"m2": squares_about(found["mean"], n, mean, m2)}
    return {}


def merged(parts: Sequence[S]) -> S:
    """The state of the rows of all parts, which are stacked, in one copy, and then reduced over the
    leading axis.
    """
    shapes = [field.shape for field in parts[0]]
    flat = torch.cat([field.reshape(-1) for part in parts for field in part]).view(len(parts), -1)
    fields = flat.split([shape.numel() for shape in shapes], dim=1)
    stacked = (each.view(len(parts), *shape) for each, shape in zip(fields, shapes, strict=True))
    return over_leading_axis(type(parts[0])(*stacked))


def over_leading_axis(stacked: S) -> S:
    """The state of the rows of parts that are stacked along a leading axis."""
    found = Found()
    for phase in range(NUM_PHASES):
        for name, tensor in stacked.reductions(phase, found).items():
            found[name] = tensor.sum(0) if phase else tensor.amax(0)
    return stacked.of_ranks(found)


def column(n: Tensor, like: Tensor) -> Tensor:
    """The numbers ``n`` of rows, or of parts, with trailing axes by which they are multiplied with
    ``like``.
    """
    return n.reshape(n.shape + (1,) * (like.ndim - n.ndim))


class Moments(NamedTuple):
    """Moments of some rows.

    Attributes:
        n: number of rows, scalar.
        mean: mean row, shape (d,).
        m2: squared deviations from it, summed over rows, shape (d,).
        norm_mean: mean of the rows' Euclidean norms, scalar.
        norm_m2: squared deviations of the norms from it, summed, scalar.
        norm_max: the largest norm, scalar.
        direction_n: number of rows that are not zero (a zero row has no direction), scalar.
        direction_sum: sum of the rows scaled to norm 1, shape (d,).
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
    def empty(cls, dim: int) -> "Moments":
        """The moments of no rows."""
        scalar = torch.zeros((), dtype=torch.float64)
        row = scalar.new_zeros(dim)
        return cls(scalar, row, row, scalar, scalar, scalar, scalar, row)

    def merge(self, other: "Moments") -> "Moments":
        """The moments of the rows of both."""
        return merged((self, other))

    def reductions(self, phase: int, found: Found) -> dict[str, Tensor]:
        """Norms are merged as one more coordinate."""
        if phase == 0:
            return {"norm_max": self.norm_max}
        if phase == 3:
            return {}
        means, squares = _beside(self.mean, self.norm_mean), _beside(self.m2, self.norm_m2)
        reduced = moment_reductions(phase, found, self.n, means, squares)
        if phase == 1:
            reduced["directions"] = _beside(self.direction_sum, self.direction_n)
        return reduced

    def of_ranks(self, found: Found) -> "Moments":
        """The moments of the rows of all ranks."""
        mean = found["mean"]
        m2 = found["m2"]
        directions = found["directions"]
        return Moments(
            n=found["n"],
            mean=mean[..., :-1],
            m2=m2[..., :-1],
            norm_mean=mean[..., -1],
            norm_m2=m2[..., -1],
            norm_max=found["norm_max"],
            direction_n=directions[..., -1],
            direction_sum=directions[..., :-1],
        )


def _beside(of_rows: Tensor, of_norms: Tensor) -> Tensor:
    return torch.cat((of_rows, of_norms[..., None]), -1)


def row_moments(x: Tensor) -> Moments:
    """Moments of the rows of ``x``, shape (n, d), of any floating dtype; all zero for n = 0."""
    whole: Moments | None = None
    for chunk in row_chunks(x):
        part = _chunk_moments(x[chunk])
        whole = part if whole is None else whole.merge(part)
    if whole is None:
        none = x.new_zeros(0, dtype=accumulator_dtype(x.device))
        return Moments(*(state.to(none) for state in Moments.empty(x.shape[1])))
    return whole


def _chunk_moments(x: Tensor) -> Moments:
    dtype, (n, dim) = accumulator_dtype(x.device), x.shape
    rows = torch.empty(n, dim + 1, dtype=dtype, device=x.device)  # the norms are one more column
    rows[:, :dim] = x
    norm = row_norms(rows[:, :dim])
    rows[:, dim] = norm
    mean = rows.mean(0)
    direction_sum = norm.reciprocal().nan_to_num_(posinf=0) @ rows[:, :dim]
    m2 = rows.sub_(mean).square_().sum(0)
    return Moments(
        n=rows.new_full((), n),
        mean=mean[:dim],
        m2=m2[:dim],
        norm_mean=mean[dim],
        norm_m2=m2[dim],
        norm_max=norm.max(),
        direction_n=torch.count_nonzero(norm).to(dtype),
        direction_sum=direction_sum,
    )


def without_rounding(m2: Tensor, n: Tensor, mean: Tensor) -> Tensor:
    """Squared deviations ``m2`` of n values, exactly 0 where the rounding of their mean accounts
    for them.
    """
    finfo = torch.finfo(mean.dtype)
    rounding = n * (64 * finfo.eps * mean).square()
    return m2.masked_fill(m2 <= rounding.clamp(max=finfo.max), 0)


def ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """``numerator / denominator``, NaN where the denominator is zero."""
    return (numerator / denominator).where(denominator != 0, torch.nan)


def sizes(n: Tensor, mean: Tensor, m2: Tensor) -> dict[str, Tensor]:
    """``n``, Q, M and V, of the rows or of those of several groups, G, with means of shape (*G,
    d).
    """
    mean_norm2 = mean.square().sum(-1).where(n > 0, torch.nan)
    variance = ratio(m2, n)
    return {"n": n, "Q": mean_norm2 + variance, "M": mean_norm2, "V": variance}


def variance_values(n: Tensor, mean: Tensor, m2: Tensor) -> dict[str, Tensor]:
    """The `sizes` and their ratios."""
    values = sizes(n, mean, m2)
    return {
        **values,
        "M_over_V": ratio(values["M"], values["V"]),
        "M_over_Q": ratio(values["M"], values["Q"]),
    }


def moment_values(moments: Moments) -> dict[str, Tensor]:
    """Values that follow from the moments of rows.

    Returns:
        The `variance_values`; ``mean_cosine``, the mean cosine of two distinct rows (zero rows left
        out; Ethayarajh 2019); ``norm_mean``, ``norm_cv`` (standard deviation / mean) and
        ``norm_max``; ``top_dim_share``, the largest share of V in one coordinate; and without the
        coordinate of the largest second moment ``V_without_top_dim`` and
        ``M_over_Q_without_top_dim``. What too few rows leave undefined is NaN.

    >>> values = moment_values(row_moments(torch.tensor([[0.0, 1.0], [0.0, 3.0]])))
    >>> [values[key].item() for key in ("Q", "M", "V")]
    [5.0, 4.0, 1.0]
    """
    n = moments.n
    m2 = without_rounding(moments.m2, n, moments.mean)
    norm_m2 = without_rounding(moments.norm_m2, n, moments.norm_mean)
    norm_mean = moments.norm_mean.where(n > 0, torch.nan)
    directions = moments.direction_n
    cosines = moments.direction_sum.square().sum() - directions
    total = m2.sum()
    top = (m2 + n * moments.mean.square()).argmax()[None]
    others = sizes(n, moments.mean.index_fill(0, top, 0), m2.index_fill(0, top, 0).sum())
    return {
        **variance_values(n, moments.mean, total),
        "mean_cosine": ratio(cosines, directions * (directions - 1)),
        "norm_cv": ratio(ratio(norm_m2, n).sqrt(), norm_mean),
        "top_dim_share": ratio(m2.max(), total),
        "V_without_top_dim": others["V"],
        "M_over_Q_without_top_dim": ratio(others["M"], others["Q"]),
        "norm_mean": norm_mean,
        "norm_max": moments.norm_max.where(n > 0, torch.nan),
    }
