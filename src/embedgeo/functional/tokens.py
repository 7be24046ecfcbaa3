"""Token tables: count, mean and squared deviations of each token type, and of each within single sequences.

Source: Yamagiwa & Shimodaira 2025 (arXiv 2409.11253), Algorithm 1, for the moments of a token type.
"""

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from embedgeo.functional.distributed import all_gather_cat, all_reduce_sum
from embedgeo.functional.moments import blocked, chunk_length, merge_parts, row_chunks, without_rounding
from embedgeo.functional.order import Part, Runs, TokenOrder
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
        for chunk in row_chunks(other.mean, blocked(_MERGED_ELEMENTS, other.mean.device)):
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


def token_table(
    x: Tensor, token_ids: Tensor, sequence_ids: Tensor | None = None, *, order: TokenOrder | None = None
) -> TokenTable:
    """The table of the rows of each token type: the paper's Algorithm 1, batched.

    Rows are taken in the order of their token ids, as many at a time as the processor's cache holds. Those of a token
    type are centred on one of them (the last one: the first one of a text may be an outlier), then on the mean of the
    differences, and what is left of the mean corrects it. So float32 rows need no float64 copy, and identical rows have
    a variance of exactly 0. Within single sequences the same is done again, of the token types that have several rows
    in a sequence and others in another one: where there are no others it gives what it gave before, and a row alone
    does not deviate from itself.

    Args:
        x: shape (n, d), any floating dtype.
        token_ids: shape (n,), int64.
        sequence_ids: shape (n,), int64; default: each row is a sequence of its own.
        order: that of these ids, where it is known already.

    >>> table = token_table(torch.tensor([[1.0], [3.0], [7.0]]), torch.tensor([5, 5, 2]))
    >>> table.token_ids.tolist(), table.mean.flatten().tolist(), table.m2.tolist()
    ([2, 5], [7.0, 2.0], [0.0, 2.0])
    """
    order = TokenOrder(token_ids, sequence_ids) if order is None else order
    table = _table_in(torch.promote_types(x.dtype, torch.float32), x, order)
    wide = accumulator_dtype(x.device)
    if x.dtype == wide or bool((table.m2.sum() + table.sequence_m2.sum()).isfinite()):
        return table
    return _table_in(wide, x, order)  # differences exceed the range of float32


def _table_in(dtype: torch.dtype, x: Tensor, order: TokenOrder) -> TokenTable:
    """The table of rows that are centred in ``dtype``."""
    mean = torch.empty(len(order.types), x.shape[1], dtype=accumulator_dtype(x.device), device=x.device)
    n, sequences, sequence_n2 = (each.to(mean.dtype) for each in (order.counts, order.sequences, order.squares))
    m2 = torch.zeros_like(n)
    _add_runs(m2, x, order.repeated, dtype, mean)
    rows, types = order.single
    for chunk in row_chunks(mean[: len(rows)], blocked(_CENTRED_ELEMENTS, x.device)):
        mean.index_copy_(0, types[chunk], x.index_select(0, rows[chunk]).to(mean.dtype))
    sequence_m2 = torch.zeros_like(m2)
    if (runs := order.repeated_in_sequences) is not None:
        sequence_m2 = torch.where(order.sequences > 1, sequence_m2, n * m2)
        _add_runs(sequence_m2, x, runs, dtype, weights=runs.lengths.to(n.dtype))
    return TokenTable(order.types, n, mean, m2, sequences, sequence_n2, sequence_m2)


def _add_runs(
    m2: Tensor, x: Tensor, runs: Runs, dtype: torch.dtype, mean: Tensor | None = None, weights: Tensor | None = None
) -> None:
    """Add the squared deviations of the rows of each run to the entry of ``m2`` that it belongs to, in place.

    Their means are put into ``mean``, shape (T, d), if it is given; the deviations are multiplied by ``weights``, one
    for each run, if these are.
    """
    num_rows, held = min(chunk_length(x.shape[1], blocked(_CENTRED_ELEMENTS, x.device)), _SUMMED_ROWS), m2
    for part in runs.parts(num_rows):
        rows = x.index_select(0, part.rows).to(dtype)
        origin = rows.index_select(0, part.last)
        rows.sub_(origin.index_select(0, part.run))
        offset = _means(rows, part)
        rows.sub_(offset.index_select(0, part.run))
        squares = m2.new_zeros(len(part.lengths)).index_add_(0, part.run, row_norms(rows).square())
        groups = runs.groups[part.runs]
        if mean is not None or part.is_split:
            center = origin.to(m2.dtype).add_(offset).add_(_means(rows, part))
            if part.num_before:  # merged with the part before, exactly where the means are equal
                shift, n = center[0] - held, part.lengths[0].to(m2.dtype)
                squares[0] += row_norms(shift).square() * (n * part.num_before / (n + part.num_before))
                center[0] = held + shift * (n / (n + part.num_before))
            held = center[-1]
            if mean is not None:
                mean.index_copy_(0, groups, center)
        m2.index_add_(0, groups, squares if weights is None else squares.mul_(weights[part.runs]))


def _means(rows: Tensor, part: Part) -> Tensor:
    """The mean of the rows of each run."""
    places = torch.arange(len(rows), device=rows.device)
    return embedding_bag(places, rows, part.first, mode="sum").div_(part.lengths[:, None])
