"""Moments of rows (Q, M and V: Yamagiwa & Shimodaira 2025, arXiv 2409.11253), and the one rule that
merges them.

All sums of squares are of differences from a mean, so that no two large numbers are subtracted.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import reduce
from inspect import get_annotations
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from embedgeo.functional.distributed import ROUNDS_OF_SUMS, Ranks, Reduction, State, Tensors
from embedgeo.functional.precision import accumulator_dtype, row_norms

# elements worked on at a time, so that their float64 copies stay in the processor's cache
CHUNK_ELEMENTS = 1 << 18
# how many times as many where a launch costs more than a cache saves: on all but the CPU
_LAUNCH = 1 << 4


def chunk_length(width: int, device: torch.device) -> int:
    """Number of rows of so many numbers that are worked on at a time; at least 1."""
    most = CHUNK_ELEMENTS if device.type == "cpu" else _LAUNCH * CHUNK_ELEMENTS
    return max(1, most // max(1, width))


def row_chunks(x: Tensor) -> Iterator[slice]:
    """Slices over the rows of ``x``, shape (..., n, d), that are worked on one after the other."""
    step = chunk_length(x.shape[-1], x.device)
    return (slice(start, start + step) for start in range(0, x.shape[-2], step))


@dataclass(eq=False)
class PooledState(State):
    """A state that is moments of rows, of which the first field is the number of rows, shape G.

    What the following does not name is summed. Integers are pooled in float64.
    """

    powers: ClassVar[tuple[tuple[str, ...], ...]] = ()
    """Names of each mean, shape G or (*G, d), and of the squared deviations from it: see
    `squares_about`.
    """

    largest: ClassVar[tuple[str, ...]] = ()
    """Names of what the elementwise maximum is taken of."""

    not_pooled: ClassVar[tuple[str, ...]] = ()
    """Names of what stays as it is."""

    of_coordinates: ClassVar[tuple[str, ...]] = ()
    """Names of what has an entry for each coordinate, shape (d,); the others are scalars."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        known = {name for each in cls.__mro__ for name in get_annotations(each)}
        rules = {
            "powers": "of pairs of a mean and its squares, (('mean', 'm2'),) say,",
            **dict.fromkeys(("largest", "not_pooled", "of_coordinates"), "of"),
        }
        for attribute, rule in rules.items():
            given = getattr(cls, attribute)
            groups = given if attribute == "powers" else [given]
            are_names = all(isinstance(each, tuple) and known.issuperset(each) for each in groups)
            if not are_names or (attribute == "powers" and not {2}.issuperset(map(len, given))):
                raise TypeError(
                    f"{attribute} of {cls.__name__} must be a tuple {rule} names of its fields; "
                    f"got {given!r}."
                )

    @classmethod
    def empty(cls, dim: int = 0) -> Self:
        """The moments of no rows."""
        zero = torch.zeros((), dtype=torch.float64)
        names = (field.name for field in fields(cls))
        return cls(
            **{name: zero.new_zeros(dim) if name in cls.of_coordinates else zero for name in names}
        )

    def merge(self, other: Self) -> Self:
        """The moments of the rows of both, by the rounds in which ranks reduce them."""
        ways = Pooling(self), Pooling(other)
        tensors = _reduced([way.maxima() for way in ways], torch.maximum)
        for phase in ROUNDS_OF_SUMS:
            # squares are new tensors, and the largest
            add = Tensor.add_ if phase == "squares" else torch.add
            tensors = _reduced([getattr(way, phase)(tensors) for way in ways], add)
        whole: Self = ways[0].result(tensors)
        return whole

    def reduction(self, ranks: Ranks) -> Reduction:
        """Ranks pool their moments."""
        return Pooling(self)


def _reduced(tensors: Sequence[Tensors], by: Callable[[Tensor, Tensor], Tensor]) -> Tensors:
    return {name: reduce(by, (each[name] for each in tensors)) for name in tensors[0]}


class Pooling:
    """The `Reduction` of a `PooledState`: means are merged first, then the squared deviations
    from these are summed (Chan, Golub & LeVeque 1983).
    """

    def __init__(self, state: PooledState) -> None:
        self._state = state
        self._held = {
            name: each if each.is_floating_point() else each.double()
            for name, each in state.tensors().items()
            if name not in state.not_pooled
        }
        self._n = next(iter(self._held.values()))
        self._whole: dict[str, Tensor] = {}

    def maxima(self) -> Tensors:
        """The largest of each."""
        return {name: self._held[name] for name in self._state.largest}

    def counts(self, maxima: Tensors) -> Tensors:
        """Numbers of rows, and sums."""
        self._whole |= maxima
        counts = {name: each for name, each in self._held.items() if name not in maxima}
        for mean, squares in self._state.powers:
            counts[mean] = column(self._n, counts[mean]) * counts[mean]
            del counts[squares]
        return counts

    def sums(self, counts: Tensors) -> Tensors:
        """Nothing: the sums are known."""
        self._whole |= counts
        n = next(iter(counts.values()))
        for mean, _ in self._state.powers:
            self._whole[mean] = mean_of(n, counts[mean])
        return {}

    def squares(self, sums: Tensors) -> Tensors:
        """Squares about the means of all rows."""
        return {
            name: squares_about(self._whole[mean], self._n, self._held[mean], self._held[name])
            for mean, name in self._state.powers
        }

    def result(self, squares: Tensors) -> Any:
        """The state of all rows."""
        whole = {**self._whole, **squares}
        dtypes = {name: getattr(self._state, name).dtype for name in whole}
        return replace(self._state, **{name: each.to(dtypes[name]) for name, each in whole.items()})


def mean_of(n: Tensor, sums: Tensor) -> Tensor:
    """The mean of ``n`` rows, shape G, given their sums, shape G or (*G, d); 0 for no rows."""
    return sums / column(n.clamp(min=1), sums)


def squares_about(center: Tensor, n: Tensor, mean: Tensor, m2: Tensor) -> Tensor:
    """Squared deviations of rows from ``center``, given their number, their mean and the squared
    deviations from the mean.

    The number ``n`` has shape G, the mean has shape G or (*G, d). The squares ``m2`` are summed
    over rows: per coordinate, in the shape of the mean; summed over coordinates, shape G; or as the
    scatter matrix, shape (*G, d, d).
    """
    shift = mean - center
    if m2.ndim > mean.ndim:
        # (1, 1): that of no rows, which takes any width
        if m2.shape in ((1, 1), shift.shape * 2):
            return m2.addr(n * shift, shift)
        return m2 + column(n, m2) * shift[..., :, None] * shift[..., None, :]
    between = column(n, shift) * shift.square()
    return m2 + (between if m2.ndim == mean.ndim else between.sum(-1))


def column(n: Tensor, like: Tensor) -> Tensor:
    """The numbers ``n`` of rows, or of parts, with trailing axes by which they are multiplied with
    ``like``.
    """
    return n.reshape(n.shape + (1,) * (like.ndim - n.ndim))


@dataclass(eq=False)
class Moments(PooledState):
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

    powers = ("mean", "m2"), ("norm_mean", "norm_m2")
    largest = ("norm_max",)
    of_coordinates = "mean", "m2", "direction_sum"


def row_moments(x: Tensor) -> Moments:
    """Moments of the rows of ``x``, shape (n, d), of any floating dtype; all zero for n = 0."""
    parts = [_chunk_moments(x[chunk]) for chunk in row_chunks(x)]
    if parts:
        return reduce(Moments.merge, parts)
    none = x.new_zeros(0, dtype=accumulator_dtype(x.device))
    return Moments.empty(x.shape[1]).map(lambda state: state.to(none))


def _chunk_moments(x: Tensor) -> Moments:
    dtype = accumulator_dtype(x.device)
    (n, dim) = x.shape
    rows = torch.empty(n, dim + 1, dtype=dtype, device=x.device)  # the norms are one more column
    rows[:, :dim] = x
    norm = row_norms(rows[:, :dim])
    rows[:, dim] = norm
    mean = rows.mean(0)
    direction_n, direction_sum = directions(rows[:, :dim], norm)
    m2 = rows.sub_(mean).square_().sum(0)
    return Moments(
        n=rows.new_full((), n),
        mean=mean[:dim],
        m2=m2[:dim],
        norm_mean=mean[dim],
        norm_m2=m2[dim],
        norm_max=norm.max(),
        direction_n=direction_n,
        direction_sum=direction_sum,
    )


def directions(rows: Tensor, norm: Tensor) -> tuple[Tensor, Tensor]:
    """The number of rows, shape (n, d), that are not zero, and the sum of these scaled to norm 1,
    shape (d,), given their norms.
    """
    return norm.count_nonzero().to(norm), norm.reciprocal().nan_to_num_(posinf=0) @ rows


def mean_cosine(n: Tensor, direction_sum: Tensor) -> Tensor:
    """The mean cosine of two distinct rows, of n, from what `directions` gives."""
    return ratio(direction_sum.square().sum() - n, n * (n - 1))


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
    total = m2.sum()
    top = (m2 + n * moments.mean.square()).argmax()[None]
    others = sizes(n, moments.mean.index_fill(0, top, 0), m2.index_fill(0, top, 0).sum())
    return {
        **variance_values(n, moments.mean, total),
        "mean_cosine": mean_cosine(moments.direction_n, moments.direction_sum),
        "norm_cv": ratio(ratio(norm_m2, n).sqrt(), norm_mean),
        "top_dim_share": ratio(m2.max(), total),
        "V_without_top_dim": others["V"],
        "M_over_Q_without_top_dim": ratio(others["M"], others["Q"]),
        "norm_mean": norm_mean,
        "norm_max": moments.norm_max.where(n > 0, torch.nan),
    }
