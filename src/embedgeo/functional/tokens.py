"""Token tables: count, mean and squared deviations of each token type.

Source: Yamagiwa & Shimodaira 2025 (arXiv 2409.11253), Algorithm 1.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag, pad

from embedgeo.functional.distributed import all_gather_cat, all_reduce_sum
from embedgeo.functional.moments import chunk_length, merge_parts, row_chunks, without_rounding
from embedgeo.functional.precision import accumulator_dtype, matmul_precision, row_norms
from embedgeo.functional.processing import principal_axes
from embedgeo.functional.spectrum import Scatter

_MERGED_ELEMENTS = 1 << 17
"""Elements merged at a time: a merge takes several times their memory."""

_CENTRED_ELEMENTS = 1 << 18
"""Elements centred at a time, so that they and their intermediate results stay in the processor's cache."""

_SUMMED_ROWS = 1024
"""Most rows centred at a time, so that the rounding of a float32 sum over them is small beside their spread."""


class TokenTable(NamedTuple):
    """Count, mean and squared deviations of the embeddings of each token type.

    Attributes:
        token_ids: the token types, ascending, shape (T,), int64.
        n: number of rows of each, shape (T,).
        mean: their mean, shape (T, d).
        m2: squared deviations from it, summed over rows and coordinates, shape (T,).
    """

    token_ids: Tensor
    n: Tensor
    mean: Tensor
    m2: Tensor

    @classmethod
    def empty(cls, dim: int) -> "TokenTable":
        """The table of no rows."""
        n = torch.zeros(0, dtype=torch.float64)
        return cls(torch.zeros(0, dtype=torch.int64), n, n.new_zeros(0, dim), n)

    def merge(self, other: "TokenTable") -> "TokenTable":
        """The table of the rows of both; only the token types in ``other`` are worked on."""
        if not len(self.token_ids) or not len(other.token_ids):
            return self if len(self.token_ids) else other
        types = torch.cat((self.token_ids, other.token_ids)).unique()
        place = torch.searchsorted(types, other.token_ids)
        whole = self.reindex(types)
        for chunk in row_chunks(other.mean, _MERGED_ELEMENTS):
            held = [state.index_select(0, place[chunk]) for state in whole[1:]]
            merged = merge_parts([held, [state[chunk] for state in other[1:]]])
            for state, new in zip(whole[1:], merged, strict=True):
                state.index_copy_(0, place[chunk], new)
        return whole

    def all_reduce(self, group: Any = None) -> "TokenTable":
        """The table of the rows of all ranks, with every token type that any of them has."""
        types = all_gather_cat(self.token_ids, group).unique()
        return TokenTable(types, *merge_parts([self.reindex(types)[1:]], partial(all_reduce_sum, group=group)))

    def reindex(self, types: Tensor) -> "TokenTable":
        """A copy with the token types ``types``, ascending, a superset of its own; n is 0 for the new ones."""
        place = torch.searchsorted(types, self.token_ids)
        states = (state.new_zeros(len(types), *state.shape[1:]).index_copy_(0, place, state) for state in self[1:])
        return TokenTable(types, *states)

    def select(self, keep: Tensor) -> "TokenTable":
        """The token types for which ``keep``, shape (T,), is true."""
        return TokenTable(*(state[keep] for state in self))

    def without_rounding(self) -> "TokenTable":
        """The same table with an m2 of exactly 0 where it is no more than rounding: see `moments.without_rounding`."""
        norm = torch.linalg.vector_norm(self.mean, dim=1)
        return self._replace(m2=without_rounding(self.m2, self.n, norm))

    def pooled(self) -> tuple[Tensor, Tensor, Tensor]:
        """n, mean, shape (d,), and m2 of the rows of all token types together."""
        n, mean, m2 = merge_parts([self[1:]], partial(torch.sum, dim=0))
        return n, mean, without_rounding(m2, n, torch.linalg.vector_norm(mean))


def token_table(x: Tensor, token_ids: Tensor) -> TokenTable:
    """Count, mean and squared deviations of the rows of each token type: the paper's Algorithm 1, batched.

    Rows are taken in the order of their token ids, as many at a time as the processor's cache holds. Those of a token
    type are centred on one of them (the last one: the first one of a text may be an outlier), then on the mean of the
    differences, and what is left of the mean corrects it. So float32 rows need no float64 copy, and identical rows
    have a variance of exactly 0.

    Args:
        x: shape (n, d), any floating dtype.
        token_ids: shape (n,), int64.

    >>> table = token_table(torch.tensor([[1.0], [3.0], [7.0]]), torch.tensor([5, 5, 2]))
    >>> table.token_ids.tolist(), table.mean.flatten().tolist(), table.m2.tolist()
    ([2, 5], [7.0, 2.0], [0.0, 2.0])
    """
    order = token_ids.argsort(stable=True)
    types, group, count = token_ids[order].unique_consecutive(return_inverse=True, return_counts=True)
    mean = torch.empty(len(types), x.shape[1], dtype=accumulator_dtype(x.device), device=x.device)
    table = TokenTable(types, mean.new_empty(len(types)), mean, mean.new_empty(len(types)))
    num_rows = min(chunk_length(x.shape[1], _CENTRED_ELEMENTS), _SUMMED_ROWS)
    for rows, runs, is_continued in _parts(count.cumsum(0).tolist(), num_rows):
        first = [state[runs.start] for state in table[1:]]
        before = [state.clone() for state in first] if is_continued else None
        _moments_of_runs(x, order[rows], group[rows] - runs.start, *(state[runs] for state in table[1:]))
        if before is not None:
            origin = before[1]  # so that equal means are merged without rounding
            n, shift, m2 = merge_parts([(n, center - origin, m2) for n, center, m2 in (before, first)])
            for state, new in zip(first, (n, origin + shift, m2), strict=True):
                state.copy_(new)
    return table


def _parts(ends: Sequence[int], num_rows: int) -> Iterator[tuple[slice, slice, bool]]:
    """Divide rows into parts of at most ``num_rows``, so that only runs of more rows than that are split.

    Args:
        ends: where each run of rows ends.
        num_rows: at least 1.

    Yields:
        The rows of a part, the runs that they belong to, and whether the first of these began in the part before.

    >>> [(rows.stop, runs.start, runs.stop, is_continued) for rows, runs, is_continued in _parts([2, 3, 9], 4)]
    [(3, 0, 2, False), (7, 2, 3, False), (9, 2, 3, True)]
    """
    start, run = 0, 0
    while run < len(ends):
        whole = bisect_right(ends, start + num_rows)  # runs before this one end within the part
        stop = ends[whole - 1] if whole > run else start + num_rows
        yield slice(start, stop), slice(run, max(whole, run + 1)), start > (ends[run - 1] if run else 0)
        start, run = stop, whole


def _moments_of_runs(x: Tensor, order: Tensor, index: Tensor, n: Tensor, mean: Tensor, m2: Tensor) -> None:
    """Write to ``n``, ``mean`` and ``m2`` those of each run of equal values in ``index`` (0, 0, 1, …), of x[order]."""
    rows = x.index_select(0, order).to(torch.promote_types(x.dtype, torch.float32))
    count = torch.bincount(index)
    first = count.cumsum(0) - count
    place = torch.arange(len(rows), device=rows.device)
    origin = rows.index_select(0, first + count - 1)
    rows.sub_(origin.index_select(0, index))
    offset = embedding_bag(place, rows, first, mode="sum").div_(count[:, None])
    rows.sub_(offset.index_select(0, index))
    rest = embedding_bag(place, rows, first, mode="sum").div_(count[:, None])
    norm = row_norms(rows)
    if x.dtype != mean.dtype and not bool(norm.isfinite().all()):  # the differences exceed the range of float32
        _moments_of_runs(x.index_select(0, order).to(mean.dtype), place, index, n, mean, m2)
        return
    n.copy_(count)
    mean.copy_(origin).add_(offset).add_(rest)
    m2.zero_().index_add_(0, index, norm.square())


def type_plane(types: TokenTable) -> tuple[Tensor, Tensor]:
    """Project the means of token types, and the zero vector, onto the plane in which the means vary most.

    The axes are the first two principal axes of the means, weighted by the number of rows; the largest coordinate of
    each is positive. Distances are in embedding units, and (0, 0) is the mean of all rows.

    Args:
        types: count and mean of each token type.

    Returns:
        The means, shape (T, 2), and the zero vector, shape (2,). The second coordinate is 0 where d = 1; all are NaN
        where there are no rows.

    >>> n, mean = torch.tensor([3.0, 1.0]), torch.tensor([[1.0, 5.0], [5.0, 5.0]])
    >>> type_plane(TokenTable(torch.tensor([7, 9]), n, mean, torch.zeros(2)))
    (tensor([[-1.,  0.],
            [ 3.,  0.]]), tensor([-2., -5.]))
    """
    n, center, _ = types.pooled()
    offset = types.mean - center
    with matmul_precision(offset.device):
        between = offset.T @ (types.n[:, None] * offset)
        axes = principal_axes(Scatter(n, center, (between + between.T) / 2)).axes[:, :2]
        axes = pad(axes, (0, 2 - axes.shape[1]))
        return offset @ axes, -center @ axes
