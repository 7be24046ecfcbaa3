"""Token tables: count, mean and squared deviations of each token type, and of each within single sequences.

Source: Yamagiwa & Shimodaira 2025 (arXiv 2409.11253), Algorithm 1, for the moments of a token type.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from embedgeo.functional.distributed import all_gather_cat, all_reduce_sum
from embedgeo.functional.moments import chunk_length, merge_parts, row_chunks, without_rounding
from embedgeo.functional.precision import accumulator_dtype, row_norms

_MERGED_ELEMENTS = 1 << 17
"""Elements merged at a time: a merge takes several times their memory."""

_CENTRED_ELEMENTS = 1 << 18
"""Elements centred at a time, so that they and their intermediate results stay in the processor's cache."""

_SUMMED_ROWS = 1024
"""Most rows centred at a time, so that the rounding of a float32 sum over them is small beside their spread."""


class TokenTable(NamedTuple):
    """Count, mean and squared deviations of the embeddings of each token type.

    Tables of rows that share no sequence merge exactly.

    Attributes:
        token_ids: the token types, ascending, shape (T,), int64.
        n: number of rows of each, shape (T,).
        mean: their mean, shape (T, d).
        m2: squared deviations from it, summed over rows and coordinates, shape (T,).
        sequences: number of sequences that have such rows, shape (T,).
        sequence_n2: Σ_s n_s² over these, n_s being the number of rows in sequence s, shape (T,).
        sequence_m2: Σ_s n_s m2_s over these, m2_s being the squared deviations from the mean in s, shape (T,).
    """

    token_ids: Tensor
    n: Tensor
    mean: Tensor
    m2: Tensor
    sequences: Tensor
    sequence_n2: Tensor
    sequence_m2: Tensor

    @classmethod
    def empty(cls, dim: int) -> "TokenTable":
        """The table of no rows."""
        n = torch.zeros(0, dtype=torch.float64)
        return cls(torch.zeros(0, dtype=torch.int64), n, n.new_zeros(0, dim), n, n, n, n)

    def merge(self, other: "TokenTable") -> "TokenTable":
        """The table of the rows of both; only the token types in ``other`` are worked on."""
        if not len(self.token_ids) or not len(other.token_ids):
            return self if len(self.token_ids) else other
        types = torch.cat((self.token_ids, other.token_ids)).unique()
        place = torch.searchsorted(types, other.token_ids)
        whole = self.reindex(types)
        for chunk in row_chunks(other.mean, _MERGED_ELEMENTS):
            held = [state.index_select(0, place[chunk]) for state in whole[1:4]]
            merged = merge_parts([held, [state[chunk] for state in other[1:4]]])
            for state, new in zip(whole[1:4], merged, strict=True):
                state.index_copy_(0, place[chunk], new)
        for state, more in zip(whole[4:], other[4:], strict=True):
            state.index_add_(0, place, more)
        return whole

    def all_reduce(self, group: Any = None) -> "TokenTable":
        """The table of the rows of all ranks, with every token type that any of them has."""
        types = all_gather_cat(self.token_ids, group).unique()
        here, summed = self.reindex(types), partial(all_reduce_sum, group=group)
        return TokenTable(types, *merge_parts([here[1:4]], summed), *summed(torch.stack(here[4:])))

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
        n, mean, m2 = merge_parts([self[1:4]], partial(torch.sum, dim=0))
        return n, mean, without_rounding(m2, n, torch.linalg.vector_norm(mean))


def token_table(x: Tensor, token_ids: Tensor, sequence_ids: Tensor | None = None) -> TokenTable:
    """The table of the rows of each token type: the paper's Algorithm 1, batched.

    Rows are taken in the order of their token ids and sequences, as many at a time as the processor's cache holds.
    Those of a token type in a sequence are centred on one of them (the last one: the first one of a text may be an
    outlier), then on the mean of the differences, and what is left of the mean corrects it. So float32 rows need no
    float64 copy, and identical rows have a variance of exactly 0. Then the sequences of a token type are merged.

    Args:
        x: shape (n, d), any floating dtype.
        token_ids: shape (n,), int64.
        sequence_ids: shape (n,), int64; default: each row is a sequence of its own.

    >>> table = token_table(torch.tensor([[1.0], [3.0], [7.0]]), torch.tensor([5, 5, 2]))
    >>> table.token_ids.tolist(), table.mean.flatten().tolist(), table.m2.tolist()
    ([2, 5], [7.0, 2.0], [0.0, 2.0])
    """
    order, run, run_types = _runs(token_ids, sequence_ids)
    types, group = run_types.unique_consecutive(return_inverse=True)
    mean = torch.zeros(len(types), x.shape[1], dtype=accumulator_dtype(x.device), device=x.device)
    table = TokenTable(types, mean.new_zeros(len(types)), mean, *mean.new_zeros(4, len(types)))
    num_rows = min(chunk_length(x.shape[1], _CENTRED_ELEMENTS), _SUMMED_ROWS)
    ends, open_run = run.bincount().cumsum(0).tolist(), None
    for rows, runs, is_continued in _parts(ends, num_rows):
        parts = _moments_of_runs(x, order[rows], run[rows] - runs.start)
        if is_continued:
            _merge_into([state[0] for state in parts], open_run)
        open_run = [state[-1].clone() for state in parts]
        whole = slice(len(parts[0]) - (ends[runs.stop - 1] > rows.stop))
        if sequence_ids is not None:
            _add_runs(table, group[runs][whole], *(state[whole] for state in parts))
        else:  # a run is a token type
            for state, new in zip(table[1:4], parts, strict=True):
                state[runs][whole] = new[whole]
    return table if sequence_ids is not None else table._replace(sequences=table.n, sequence_n2=table.n)


def _runs(token_ids: Tensor, sequence_ids: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Sort rows into runs of one token type, in one sequence where there are ids of them.

    Returns:
        The rows' order, the run (0, 1, 2, …) of each in that order, both of shape (n,), and the runs' token types.
    """
    if sequence_ids is None:
        order = token_ids.argsort(stable=True)
    else:
        order = sequence_ids.argsort(stable=True)
        order = order[token_ids[order].argsort(stable=True)]
    keys = torch.stack([ids[order] for ids in (token_ids, sequence_ids) if ids is not None])
    begins = torch.ones_like(order, dtype=torch.bool)
    begins[1:] = (keys[:, 1:] != keys[:, :-1]).any(0)
    return order, begins.cumsum(0) - 1, keys[0][begins]


def _add_runs(table: TokenTable, group: Tensor, n: Tensor, mean: Tensor, m2: Tensor) -> None:
    """Merge what token types have in single sequences into the entries ``group``, ascending, of the table, in place.

    ``n``, ``mean`` and ``m2``, shape (R,) and (R, d), are those of the rows in each sequence; ``mean`` is overwritten.
    """
    if not len(group):
        return
    into = slice(int(group[0]), int(group[-1]) + 1)
    index, count = group - into.start, group.bincount()[into]
    total, held, held_m2, sequences, sequence_n2, sequence_m2 = (state[into] for state in table[1:])
    sequences += count
    sequence_n2.index_add_(0, index, n.square())
    sequence_m2.index_add_(0, index, n * m2)
    place, last = torch.arange(len(n), device=n.device), count.cumsum(0) - 1
    origin = mean[last]  # so that equal means are merged without rounding
    mean -= origin.index_select(0, index)
    shift = embedding_bag(place, mean, last + 1 - count, mode="sum", per_sample_weights=n)
    before = held - origin
    shift.addcmul_(total[:, None], before).div_((total + total.new_zeros(len(total)).index_add_(0, index, n))[:, None])
    held_m2 += total * row_norms(before.sub_(shift)).square()
    held_m2.index_add_(0, index, m2 + n * row_norms(mean.sub_(shift.index_select(0, index))).square())
    total.index_add_(0, index, n)
    held.copy_(origin.add_(shift))


def _merge_into(run: Sequence[Tensor], before: Any) -> None:
    """Merge n, mean and m2 of the rows of a run before ``run`` into it, in place."""
    origin = before[1]  # so that equal means are merged without rounding
    n, shift, m2 = merge_parts([(n, center - origin, m2) for n, center, m2 in (before, run)])
    for state, new in zip(run, (n, origin + shift, m2), strict=True):
        state.copy_(new)


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


def _moments_of_runs(x: Tensor, order: Tensor, index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """n, mean and m2 of each run of equal values in ``index`` (0, 0, 1, …), of x[order]."""
    rows = x.index_select(0, order).to(torch.promote_types(x.dtype, torch.float32))
    count = torch.bincount(index)
    first = count.cumsum(0) - count
    place = torch.arange(len(rows), device=rows.device)
    origin = rows.index_select(0, first + count - 1)
    rows.sub_(origin.index_select(0, index))
    offset = embedding_bag(place, rows, first, mode="sum").div_(count[:, None])
    rows.sub_(offset.index_select(0, index))
    rest = embedding_bag(place, rows, first, mode="sum").div_(count[:, None])
    norm, wide = row_norms(rows), accumulator_dtype(x.device)
    if rows.dtype != wide and not bool(norm.isfinite().all()):  # the differences exceed the range of float32
        return _moments_of_runs(x.index_select(0, order).to(wide), place, index)
    n = count.to(wide)
    return n, origin.to(wide).add_(offset).add_(rest), torch.zeros_like(n).index_add_(0, index, norm.square())
