"""Groups of rows among all rows: massive ones, and the first one of each sequence."""

from dataclasses import dataclass

import torch
from torch import Tensor

from embedgeo.functional.moments import (
    Moments,
    PooledState,
    mean_of,
    ratio,
    squares_about,
)
from embedgeo.functional.precision import accumulator_dtype, sent
from embedgeo.functional.rows import RowIds, Rows


@dataclass(eq=False)
class RowGroup(PooledState):
    """Moments of a group of rows.

    Attributes:
        n: number of rows, scalar.
        mean: mean row, shape (d,).
        m2: squared deviations from it, summed over rows, shape (d,).
        num_first: number of these rows that are the first one of a sequence of two or more, scalar.
    """

    n: Tensor
    mean: Tensor
    m2: Tensor
    num_first: Tensor

    powers = (("mean", "m2"),)
    of_coordinates = "mean", "m2"

    def share_of_variance(self, mean: Tensor, m2: Tensor) -> Tensor:
        """Share of the squared deviations of all rows, ``m2``, shape (d,), about their ``mean``,
        shape (d,), that the group's rows have; NaN where the rows do not vary.
        """
        squares = squares_about(mean, self.n, self.mean, self.m2)
        return ratio(squares.sum(), m2.sum())


def row_group(x: Tensor, num_first: int) -> RowGroup:
    """The group of the rows ``x``, shape (k, d), ``num_first`` of which are first positions."""
    rows = x.to(accumulator_dtype(x.device))
    n = rows.new_tensor(float(len(rows)))
    mean = mean_of(n, rows.sum(0))
    return RowGroup(n, mean, (rows - mean).square_().sum(0), n.new_tensor(float(num_first)))


def first_positions(rows: Rows) -> RowGroup:
    """The group of the first row of each sequence of two or more."""
    x = rows.embeddings
    ids = rows.ids
    places = ids.once(("first rows", x.device), lambda: sent(first_rows(ids), x.device))
    return row_group(x.index_select(0, places), len(places))


def first_rows(ids: RowIds) -> Tensor:
    """Places of the rows that are the first one of a sequence of two or more that counts, on the
    CPU.
    """
    if ids.sequences is None or ids.is_first is None:
        return torch.zeros(0, dtype=torch.int64, device="cpu")
    sequence, _ = ids.sequences
    return (ids.is_first & (sequence.bincount()[sequence] > 1)).nonzero().flatten()


def first_share(first: RowGroup, moments: Moments) -> Tensor:
    """Share of V of the first positions; NaN where there are none."""
    share = first.share_of_variance(moments.mean, moments.m2)
    return share.where(first.n > 0, torch.nan)
