"""Coordinates that stand out, and massive activations, by power moments of each coordinate.

Sources: Pébay 2008 (SAND2008-6212) for the merge; Timkey & van Schijndel 2021 (arXiv 2109.04404)
for the share of the mean cosine; Sun et al. 2024 (arXiv 2402.17762) for massive activations, and
for those of first positions.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from embedgeo.functional.moments import (
    PooledState,
    ratio,
    row_chunks,
    without_rounding,
)
from embedgeo.functional.precision import (
    accumulator_dtype,
    row_norms,
    state_device,
)

_MASSIVE = 100.0
_TIMES = 1000.0  # the median: over that, and over 100, is massive


@dataclass(eq=False)
class CoordinateMoments(PooledState):
    """Power moments of each coordinate, and massive activations; of first positions and of the rest
    apart.

    The leading axis of all of them, of length 2, is over these two groups of rows.

    Attributes:
        n: number of rows, shape (2,).
        mean: shape (2, d).
        m2: squared deviations from it, summed over rows, shape (2, d).
        m3: their third powers.
        m4: their fourth powers.
        max_abs: the largest magnitude, shape (2, d).
        massive: number of rows with an entry of a magnitude over 100 that is over 1000 times the
            median one of its row, shape (2,).
        direction_sum: sum of the rows scaled to norm 1, shape (2, d).
    """

    n: Tensor
    mean: Tensor
    m2: Tensor
    m3: Tensor
    m4: Tensor
    max_abs: Tensor
    massive: Tensor
    direction_sum: Tensor

    powers = (("mean", "m2", "m3", "m4"),)
    largest = ("max_abs",)

    @classmethod
    def empty(cls, dim: int = 0, *, device: torch.device | None = None) -> "CoordinateMoments":
        """The moments of no rows."""
        n = torch.zeros(2, dtype=torch.float64, device=device)
        row = n.new_zeros(2, dim)
        return cls(n, row, row, row, row, row, n, row)

    def pooled(self) -> "CoordinateMoments":
        """The moments of the rows of both groups together, without the leading axis."""
        return self.of_group(0).merge(self.of_group(1))

    def of_group(self, group: int) -> "CoordinateMoments":
        """The moments of first positions (0) or of the rest (1), without the leading axis."""
        return self.map(lambda each: each[group])


def row_coordinates(x: Tensor, is_first: Tensor | None = None) -> CoordinateMoments:
    """The moments of the coordinates of ``x``, shape (n, d), of any floating dtype, in float64.

    Args:
        x: the rows.
        is_first: which of them are the first one of their sequence, shape (n,), bool; None: all of
            them.
    """
    moments = CoordinateMoments.empty(x.shape[1], device=state_device(x.device))
    for chunk in row_chunks(x):
        rows = x[chunk].to(accumulator_dtype(x.device))
        first = rows.new_ones(len(rows), dtype=torch.bool)
        first = first if is_first is None else is_first[chunk].to(x.device)
        groups = [_group_moments(rows[of], x.dtype).tensors() for of in (first, ~first)]
        stacked = {name: torch.stack([group[name] for group in groups]) for name in groups[0]}
        moments = moments.merge(CoordinateMoments(**stacked))
    return moments


def _group_moments(rows: Tensor, dtype: torch.dtype) -> CoordinateMoments:
    """The moments of rows, once of ``dtype``, in the accumulator's, without the leading axis; they
    may be none.
    """
    n, dim = rows.shape
    device = state_device(rows.device)
    if not n:
        return CoordinateMoments.empty(dim, device=device).of_group(0)
    near = rows.mean(0)
    centred = rows - near
    residual = centred.mean(0)  # float32 cannot hold the mean to a small part of the spread
    centred = centred - residual
    squares, magnitude = centred.square(), rows.abs()
    norm = row_norms(rows)
    direction_sum = torch.where(norm > 0, 1 / norm, 0) @ rows
    powers = squares.sum(0), (squares * centred).sum(0), squares.square().sum(0)
    sums = (near, residual, *powers, magnitude.amax(0), _massive(magnitude, dtype), direction_sum)
    near, residual, *others = (each.to(device).double() for each in sums)
    return CoordinateMoments(near.new_full((), n), near + residual, *others)


def _massive(magnitude: Tensor, dtype: torch.dtype) -> Tensor:
    """Number of rows with a massive entry, given the magnitudes, once of ``dtype``."""
    dim = magnitude.shape[1]
    largest = magnitude.amax(1)
    # the median is below a bound only where over half of the entries are: it is needed of few rows
    bound = (largest / _TIMES * (1 + 1e-6))[:, None]
    places = ((magnitude <= bound).sum(1) > (dim - 1) // 2).nonzero().flatten()
    largest, magnitude = largest[places], magnitude[places]
    middle = magnitude.to(dtype).topk(dim // 2 + 1).values[:, (dim - 1) // 2 :]
    median = middle.to(largest.dtype).mean(1)
    return ((largest > _MASSIVE) & (largest > _TIMES * median)).sum()


def excess_kurtosis(moments: CoordinateMoments) -> Tensor:
    """Excess kurtosis n Σ(x − mean)⁴ / (Σ(x − mean)²)² − 3 of each coordinate, without the leading
    axis: shape (d,).

    That of the population seen: −6 / (n + 1) in expectation for Gaussian rows. NaN where a
    coordinate does not vary.
    """
    m2 = without_rounding(moments.m2, moments.n, moments.mean)
    return ratio(moments.n * moments.m4, m2.square()) - 3


def coordinate_table(moments: CoordinateMoments) -> dict[str, Tensor]:
    """Moments of each coordinate over all rows, and its shares in the rows' geometry.

    A coordinate's share of the mean cosine is the plug-in one, of all pairs of rows, a row with
    itself among them: the square of its mean over the unit rows, over the sum of these squares
    (Timkey & van Schijndel 2021, equation 3, who draw pairs). It is high by about 1/n of what is
    not common to the rows: read it where the mean cosine is well over 1/n.

    Returns:
        ``mean`` (embedding units) and ``variance`` (population, squared ones); ``share_of_M``,
        ``share_of_V`` and ``share_of_cosine``, each of which sums to 1; the `excess_kurtosis` as
        ``kurtosis``, and the largest magnitude ``max_abs``; shape (d,), NaN where undefined: no
        rows, or a sum of 0.

    >>> table = coordinate_table(row_coordinates(torch.tensor([[3.0, 0.0], [3.0, 4.0]])))
    >>> [table[key].tolist() for key in ("mean", "variance", "share_of_V")]
    [[3.0, 2.0], [0.0, 4.0], [0.0, 1.0]]
    """
    whole = moments.pooled()
    n, mean = whole.n, whole.mean
    m2 = without_rounding(whole.m2, n, mean)
    squares, directions = mean.square(), whole.direction_sum.square()
    return {
        "mean": torch.where(n > 0, mean, torch.nan),
        "variance": ratio(m2, n),
        "share_of_M": ratio(squares, squares.sum()),
        "share_of_V": ratio(m2, m2.sum()),
        "share_of_cosine": ratio(directions, directions.sum()),
        "kurtosis": excess_kurtosis(whole),
        "max_abs": torch.where(n > 0, whole.max_abs, torch.nan),
    }


def outlier_values(moments: CoordinateMoments) -> dict[str, Tensor]:
    """Values that say whether coordinates and rows stand out, of all rows, first positions and the
    rest.

    Returns:
        ``kurtosis``, the mean over the coordinates that vary of their `excess_kurtosis`, and
        ``kurtosis_median``, the median, which one coordinate does not move (the mean of the two in
        the middle); ``max_abs``, the largest magnitude; ``massive_fraction``, the share of the rows
        with a massive activation: an entry of a magnitude over 100 that is over 1000 times the
        median magnitude of its row (the mean of the two in the middle, where d is even); and each
        of these with ``_first`` and ``_rest``. What too few rows leave undefined is NaN. Sun et al.
        take the median over a sequence; that of a row is known whatever else is in a batch, and at
        a massive row it is about the same.
    """
    groups = {"": moments.pooled(), "_first": moments.of_group(0), "_rest": moments.of_group(1)}
    values: dict[str, Tensor] = {}
    for suffix, group in groups.items():
        kurtosis = excess_kurtosis(group)
        of_group = {
            "kurtosis": kurtosis.nanmean(),
            "kurtosis_median": kurtosis.nanquantile(0.5),
            "max_abs": torch.where(group.n > 0, group.max_abs.max(), torch.nan),
            "massive_fraction": ratio(group.massive, group.n),
        }
        values |= {key + suffix: value for key, value in of_group.items()}
    return values
