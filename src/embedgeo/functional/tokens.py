"""Token tables (Yamagiwa & Shimodaira 2025, arXiv 2409.11253, Algorithm 1), and the variance within
token types.
"""

import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from embedgeo.functional.distributed import Ranks, State, Tensors
from embedgeo.functional.moments import (
    PooledState,
    chunk_length,
    ratio,
    row_chunks,
    sizes,
    squares_about,
    without_rounding,
)
from embedgeo.functional.precision import (
    accumulator_dtype,
    row_norms,
    sent,
)
from embedgeo.functional.rows import NO_TYPE, Rows, on_cpu
from embedgeo.functional.sampling import Sample

# token types seen in two sequences up to this many stand for those seen in one only
_FEW_SEQUENCES = 3
_NOT_LISTED = NO_TYPE - 1  # fills lists of token types up
_MANY_SEQUENCES = 1024  # types seen in more are few, and alike
REGRESSION_COUNT_RANGE = (10, 100_000)
"""Fewest and most occurrences of the token types that `type_regressions` are taken over, unless
others are given.
"""


@dataclass(eq=False)
class _TypeMoments(PooledState):
    """The moments of some token types of a `TokenTable`."""

    n: Tensor
    mean: Tensor
    m2: Tensor

    powers = (("mean", "m2"),)


@dataclass(eq=False)
class TokenTable(State):
    """Count, mean and squared deviations of the embeddings of each token type.

    Tables of rows that share no sequence merge exactly.

    Attributes:
        token_ids: the token types, ascending, shape (T,), int64; -100 is that of rows that have
            none. They are on the CPU, so that tables merge without waiting for a device; of `typed`
            they are where the others are.
        n: number of rows of each, shape (T,); 0 of types that other tables have.
        mean: their mean, shape (T, d).
        m2: squared deviations from it, summed over rows and coordinates, shape (T,).
        sequences: number of sequences that have such rows, shape (T,).
        sequence_n2: Σ_s n_s² over these, n_s being the number of rows in sequence s, shape (T,).
        sequence_m2: Σ_s n_s m2_s over these, m2_s being the squared deviations from the mean in s,
            shape (T,).
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
        types, place_of_own, place = _united(self.token_ids, other.token_ids, self.n.device)
        states = {
            name: state.new_zeros(len(types), *state.shape[1:]).index_copy_(0, place_of_own, state)
            for name, state in self.tensors().items()
            if name != "token_ids"
        }
        whole = TokenTable(token_ids=types, **states)
        for chunk in row_chunks(other.mean):
            at = place[chunk]
            held = (each.index_select(0, at) for each in (whole.n, whole.mean, whole.m2))
            further = _TypeMoments(other.n[chunk], other.mean[chunk], other.m2[chunk])
            merged = _TypeMoments(*held).merge(further)
            for name, of_types in merged.tensors().items():
                getattr(whole, name).index_copy_(0, at, of_types)
        for name in ("sequences", "sequence_n2", "sequence_m2"):
            getattr(whole, name).index_add_(0, place, getattr(other, name))
        return whole

    def reduction(self, ranks: Ranks) -> "_UnitedTables":
        """Ranks pool what they have of each token type that any of them has."""
        return _UnitedTables(self, ranks)

    def num_bytes(self, num_rows: int, num_types: int) -> int:
        """Bytes of so many token types."""
        columns = self.tensors().values()
        return num_types * sum(each.itemsize * each.shape[1:].numel() for each in columns)

    def select(self, keep: Tensor) -> "TokenTable":
        """The token types for which ``keep``, shape (T,), is true."""
        return self.map(lambda state: state[keep])

    def typed(self) -> "TokenTable":
        """The table without the rows that have no type, all of it on the device of the means."""
        table = replace(self, token_ids=self.token_ids.to(self.n.device))
        has_rows = (table.n > 0) & (table.token_ids != NO_TYPE)
        return table if bool(has_rows.all()) else table.select(has_rows)

    @property
    def num_untyped(self) -> int:
        """Number of entries, all at the front, that are no type's: 0 or 1."""
        return int((self.token_ids[:1] == NO_TYPE).sum())

    def without_rounding(self) -> "TokenTable":
        """This table with an m2 of exactly 0 where it is no more than rounding: see
        `moments.without_rounding`.
        """
        return replace(self, m2=without_rounding(self.m2, self.n, self.norms()))

    def norms(self) -> Tensor:
        """The norm of the mean of each token type, shape (T,)."""
        return row_norms(self.mean)

    def center(self) -> Tensor:
        """The mean of the rows of all token types together, shape (d,)."""
        return self.n @ self.mean / self.n.sum().clamp(min=1)

    def distances(self, center: Tensor) -> Tensor:
        """The squared distance of the mean of each token type from a row, shape (T,)."""
        chunks = ((self.mean[chunk] - center).square().sum(1) for chunk in row_chunks(self.mean))
        return torch.cat([self.m2[:0], *chunks])

    def pooled(self) -> tuple[Tensor, Tensor, Tensor]:
        """n, mean, shape (d,), and m2 of the rows of all token types together."""
        n, center = self.n.sum(), self.center()
        m2 = (self.m2 + self.n * self.distances(center)).sum()
        return n, center, without_rounding(m2, n, row_norms(center))

    def means_pooled(self) -> tuple[Tensor, Tensor, Tensor]:
        """The `pooled` of rows each of which is the mean of its token type."""
        return replace(self, m2=torch.zeros_like(self.m2)).pooled()


class _UnitedTables:
    """The `Reduction` of a `TokenTable`."""

    def __init__(self, table: TokenTable, ranks: Ranks) -> None:
        self._table = table
        self._ranks = ranks

    def maxima(self) -> Tensors:
        """The number of token types, and the largest id."""
        ids = self._table.token_ids
        largest = torch.cat((ids, ids.new_full((1,), NO_TYPE))).max()
        return {"sizes": torch.stack((ids.new_tensor(len(ids)), largest)).double()}

    def counts(self, maxima: Tensors) -> Tensors:
        """Marks of the token types among all up to the largest id, or a list of them where that is
        shorter, for words may have any ids.
        """
        types = self._table.token_ids
        num_types, largest = map(int, maxima["sizes"].tolist())
        if largest <= self._ranks.num_ranks * num_types:
            marks = self._table.n.new_zeros(max(largest, 0) + 2)
            marks[torch.where(types == NO_TYPE, 0, types + 1)] = 1
            return {"marks": marks}
        none = types.new_full((num_types - len(types),), _NOT_LISTED)
        return {"lists": self._ranks.placed(torch.cat((types, none)))}

    def sums(self, counts: Tensors) -> Tensors:
        """Counts, and sums of rows, of the token types of all ranks."""
        if "marks" in counts:
            places = counts["marks"].nonzero().flatten()
            self._types = torch.where(places == 0, NO_TYPE, places - 1)
        else:
            every = counts["lists"].unique()
            self._types = every[every != _NOT_LISTED]
        table = self._table
        num_types = len(self._types)
        self._place = torch.searchsorted(self._types, table.token_ids)
        held = torch.stack((table.n, table.sequences, table.sequence_n2, table.sequence_m2))
        sums = table.mean.new_zeros(num_types, table.mean.shape[1])
        return {
            "counts": table.n.new_zeros(len(held), num_types).index_copy_(1, self._place, held),
            "sums": sums.index_copy_(0, self._place, table.n[:, None] * table.mean),
        }

    def squares(self, sums: Tensors) -> Tensors:
        """Squared deviations from the mean of each."""
        table = self._table
        self._counts = sums["counts"]
        self._mean = sums["sums"].div_(self._counts[0].clamp(min=1)[:, None])
        m2 = table.m2.new_zeros(len(self._types))
        for chunk in row_chunks(table.mean):
            place = self._place[chunk]
            center = self._mean.index_select(0, place)
            own = table.n[chunk], table.mean[chunk], table.m2[chunk]
            m2.index_copy_(0, place, squares_about(center, *own))
        return {"m2": m2}

    def result(self, squares: Tensors) -> TokenTable:
        """The table of the rows of all ranks, with every token type that any of them has."""
        n, *of_sequences = self._counts
        return TokenTable(self._types, n, self._mean, squares["m2"], *of_sequences)


@lru_cache(maxsize=8)  # a further batch meets the same types in the tables of all layers
def _united(own: Tensor, others: Tensor, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """The token types of two tables, ascending, and on ``device`` the places of both tables' among
    them.
    """
    types = torch.cat((own, others)).unique()
    return types, *(sent(torch.searchsorted(types, each), device) for each in (own, others))


def token_table(x: Tensor, token_ids: Tensor, sequence_ids: Tensor | None = None) -> TokenTable:
    """The table of the rows of each token type: the paper's Algorithm 1, batched.

    Args:
        x: shape (n, d), any floating dtype.
        token_ids: shape (n,), int64; for those on another device than the CPU it is waited.
        sequence_ids: shape (n,), int64; default: each row is a sequence of its own.

    Returns:
        The table; identical rows have a variance of exactly 0.

    >>> table = token_table(torch.tensor([[1.0], [3.0], [7.0]]), torch.tensor([5, 5, 2]))
    >>> table.token_ids.tolist(), table.mean.flatten().tolist(), table.m2.tolist()
    ([2, 5], [7.0, 2.0], [0.0, 2.0])
    """
    ids, sequences = on_cpu(token_ids, sequence_ids)
    assert ids is not None
    return TypeRuns(ids, sequences, x.shape[1], x.device).table(x)


def table_working_bytes(dim: int, num_types: int, device: torch.device) -> int:
    """Bytes that moments and a table of so many token types take at most, beside the rows."""
    return 8 * dim * (num_types + 4 * chunk_length(dim, device))


def type_table(rows: Rows) -> TokenTable | None:
    """The `token_table` of rows, whose order is found once for all layers; None where they have no
    token ids.
    """
    ids = rows.ids
    device = rows.embeddings.device
    token_ids = ids.token_ids
    if token_ids is None:
        return None
    width = rows.embeddings.shape[1]
    runs = ids.once(
        ("type runs", width, device), lambda: TypeRuns(token_ids, ids.sequence_ids, width, device)
    )
    return runs.table(rows.embeddings)


class _Runs(NamedTuple):
    """Consecutive runs of rows whose moments are computed together."""

    numbers: slice  # among all runs
    places: Tensor  # of their rows, run by run, shape (m,)
    every: Tensor  # 0, 1, …, m - 1
    run: Tensor  # of each of these rows, counted from 0, shape (m,)
    first: Tensor  # the first row of each run among these rows, shape (r,)
    last: Tensor
    lengths: Tensor  # number of rows of each, shape (r,)


class TypeRuns:
    """Rows of a batch in runs of one token type, and of one type and sequence, which depend on no
    value of the rows.

    They are found on the CPU, so that all shapes are known, and are then held on the device of the
    rows. A row that is alone of its type and sequence does not deviate from itself, and is in no
    run of these.

    Args:
        token_ids: shape (n,), int64, on the CPU.
        sequence_ids: shape (n,), int64, on the CPU; None: each row is a sequence of its own.
        width: of the rows, which are worked on in chunks.
        device: of the rows.
    """

    def __init__(
        self,
        token_ids: Tensor,
        sequence_ids: Tensor | None,
        width: int,
        device: torch.device,
    ) -> None:
        if sequence_ids is None:
            sequence_ids = torch.arange(len(token_ids), device="cpu")
        by_sequence = sequence_ids.argsort(stable=True)
        order = by_sequence[token_ids[by_sequence].argsort(stable=True)]
        self.token_ids, lengths = token_ids[order].unique_consecutive(return_counts=True)
        n = lengths.to(accumulator_dtype(device))
        # another type or sequence than that of the row before
        is_other = torch.ones_like(order, dtype=torch.bool)
        is_other[1:] = (token_ids[order].diff() != 0) | (sequence_ids[order].diff() != 0)
        first = is_other.nonzero().flatten()
        sizes = torch.cat((first, first.new_tensor([len(order)]))).diff()
        type_of_run = torch.searchsorted(lengths.cumsum(0), first, right=True)
        sequences = type_of_run.bincount(minlength=len(n)).to(n.dtype)
        sequence_n2 = torch.zeros_like(n).index_add_(0, type_of_run, sizes.to(n.dtype).square())
        # rows of the type and sequence of each in this order
        paired = order[sizes.repeat_interleave(sizes) > 1]
        is_run = sizes > 1
        run_lengths = sizes[is_run]
        type_of_run = type_of_run[is_run]
        self._device = device
        self._order = torch.cat((order, paired))
        self._lengths = torch.cat((lengths, run_lengths))
        self._chunks = [*self._split(chunk_length(width, device))]
        held = n, sequences, sequence_n2, type_of_run, run_lengths.to(n.dtype)
        self._n, self._sequences, self._sequence_n2, self._type_of_run, self._run_lengths = (
            sent(each, device) for each in held
        )

    def table(self, x: Tensor) -> TokenTable:
        """The table of rows, shape (n, d), of these types and sequences."""
        wide = accumulator_dtype(x.device)
        dtype = torch.promote_types(x.dtype, torch.float32)
        table = self._table_in(dtype, x)
        if dtype == wide or math.isfinite(float(table.m2.sum() + table.sequence_m2.sum())):
            return table
        return self._table_in(wide, x)  # differences exceed the range of float32

    def _table_in(self, dtype: torch.dtype, x: Tensor) -> TokenTable:
        """The table of rows that are centred in ``dtype``."""
        n, num_types = self._n, len(self.token_ids)
        mean = n.new_empty(num_types, x.shape[1])
        m2 = n.new_zeros(len(self._lengths))  # of types, and then of those in a sequence
        for runs in self._chunks:
            own = mean[runs.numbers]
            own[:], m2[runs.numbers] = _run_moments(dtype, x, runs, len(own))
        m2, of_runs = m2[:num_types], m2[num_types:]
        return TokenTable(
            token_ids=self.token_ids,
            n=n,
            mean=mean,
            m2=m2,
            sequences=self._sequences,
            sequence_n2=self._sequence_n2,
            sequence_m2=torch.zeros_like(m2).index_add_(
                0, self._type_of_run, of_runs * self._run_lengths
            ),
        )

    def _split(self, step: int) -> Iterator[_Runs]:
        """The runs, those of types first, in chunks of at most so many rows, or of one run."""
        ends = self._lengths.cumsum(0)
        _, runs = (
            ends.sub(1).div(step, rounding_mode="floor").unique_consecutive(return_counts=True)
        )
        num_rows = ends[runs.cumsum(0) - 1].diff(prepend=ends.new_zeros(1))
        number = 0
        sizes = self._lengths.split(runs.tolist())
        places = self._order.split(num_rows.tolist())
        for size, place in zip(sizes, places, strict=True):
            every = torch.arange(len(place), device="cpu")
            run = every[: len(size)].repeat_interleave(size, output_size=len(place))
            end = size.cumsum(0)
            held = (
                sent(each, self._device) for each in (place, every, run, end - size, end - 1, size)
            )
            yield _Runs(slice(number, number + len(size)), *held)
            number += len(size)


def _run_moments(
    dtype: torch.dtype, x: Tensor, runs: _Runs, num_means: int
) -> tuple[Tensor, Tensor]:
    """The means of the first ``num_means`` of these runs of rows of ``x``, shape (n, d), and m2 of
    all of them.

    Rows are centred in ``dtype`` on the last of their run, then on the mean of the differences; the
    rest of a narrow dtype's mean corrects both: so float32 rows need no float64 copy, and identical
    rows vary by exactly 0.
    """
    wide = accumulator_dtype(x.device)
    rows = x.index_select(0, runs.places).to(dtype)
    divisor = runs.lengths[:, None]

    def means() -> Tensor:
        return embedding_bag(runs.every, rows, runs.first, mode="sum").div_(divisor)

    origin = rows.index_select(0, runs.last)
    rows.sub_(origin.index_select(0, runs.run))
    offset = means()
    rows.sub_(offset.index_select(0, runs.run))
    squares = row_norms(rows).square()
    m2 = squares.new_zeros(len(runs.last)).index_add_(0, runs.run, squares)
    mean = origin[:num_means].to(wide).add_(offset[:num_means])
    if dtype != wide:
        rest = means()
        m2.sub_(runs.lengths * rest.square().sum(1))
        mean.add_(rest[:num_means])
    return mean, m2


@dataclass(eq=False)
class Count(PooledState):
    """A number of rows or sequences, scalar."""

    number: Tensor

    @classmethod
    def of(cls, number: int, rows: Rows) -> "Count":
        """A number of a batch."""
        x = rows.embeddings
        return cls(x.new_full((), number, dtype=accumulator_dtype(x.device)))


def sampled_within_variance(sample: Sample) -> Tensor:
    """The `within_variance` of a sample's rows that have a token type; NaN where none
    has, or no type occurs in two sequences.
    """
    types, sequences = sample.types_and_sequences()
    none = torch.full((), torch.nan, dtype=torch.float64, device=sample.rows.device)
    if types is None:
        return none
    typed = (types >= 0).nonzero().flatten()
    sequences = None if sequences is None else sequences[typed]
    table = token_table(sample.rows[typed.to(sample.rows.device)], types[typed], sequences)
    return within_variance(table.without_rounding(), none.new_full((), 2))


def within_variance(types: TokenTable, num_sequences: Tensor) -> Tensor:
    """The within-token variance V_W, estimated from pairs of occurrences in different sequences.

    That of a token type is half the mean squared distance of such pairs, so that neither few
    occurrences nor those that are alike because they are of one sequence make it too low: (n m2 -
    Σ_s n_s m2_s) / (n² - Σ_s n_s²), with m2 the squared deviations from the mean, of all n rows and
    of the n_s rows in sequence s. It is unbiased for each token type, however their variances
    differ. Token types seen in one sequence only get the pooled value (sum of numerators over sum
    of denominators) of those seen in two or three, or, where there are none, of all that have
    pairs.

    Args:
        types: the token table.
        num_sequences: number of sequences that its rows came from, scalar. In a single one rows
            count as independent.

    Returns:
        Mean over rows, in squared embedding units, scalar; NaN where no token type occurs twice (in
        different sequences, where there are several).

    >>> from embedgeo.functional import token_table
    >>> table = token_table(
    ...     torch.tensor([[1.0], [3.0], [7.0]]), torch.tensor([5, 5, 2]), torch.tensor([0, 1, 1])
    ... )
    >>> within_variance(table, torch.tensor(2)).item()
    2.0
    """
    squares = types.n * types.m2 - torch.where(num_sequences <= 1, 0, types.sequence_m2)
    weights = _within_weights(types.n, types.sequences, types.sequence_n2, num_sequences)
    return ratio((weights * squares.clamp(min=0)).sum(), types.n.sum())


def _within_weights(
    n: Tensor, sequences: Tensor, sequence_n2: Tensor, num_sequences: Tensor
) -> Tensor:
    """Weights with which the squared differences of pairs enter the `within_variance`, given the
    counts of each type.

    Returns:
        Those of n m2 - Σ_s n_s m2_s of each token type, shape (T,), whose sum is V_W times the
        number of rows; NaN where no token type has a pair and there are rows.
    """
    is_single = num_sequences <= 1
    sequences = torch.where(is_single, n, sequences)
    pairs = n.square() - torch.where(is_single, n, sequence_n2)
    has_pairs = sequences > 1
    few = has_pairs & (sequences <= _FEW_SEQUENCES)
    donors = torch.where(few.any(), few, has_pairs)
    without = torch.where(has_pairs, 0, n).sum()
    pooled = torch.where(without > 0, ratio(without, (donors * pairs).sum()), 0)
    return torch.where(has_pairs, ratio(n, pairs), 0) + donors * pooled


def local_variance(types: TokenTable, sequences: Tensor | None = None) -> Tensor:
    """The variance within token types and within sequences, estimated from pairs of occurrences in
    one sequence.

    That of a token type is half the mean squared distance of such pairs, Σ_s n_s m2_s / Σ_s n_s
    (n_s - 1), with m2_s the squared deviations from the mean of its n_s rows in sequence s. Token
    types without such a pair, which are many, get the pooled value (sum of numerators over sum of
    denominators) of those seen in as many sequences (1,024 and more count as 1,024); where none of
    these has pairs, in the next fewer, or else the next more sequences.

    Args:
        types: the token table.
        sequences: number of sequences by which types are alike, shape (T,); default: those of the
            table.

    Returns:
        Mean over rows, in squared embedding units, scalar; NaN where no token type occurs twice in
        one sequence.

    >>> from embedgeo.functional import token_table
    >>> table = token_table(
    ...     torch.tensor([[1.0], [3.0], [7.0]]), torch.tensor([5, 5, 2]), torch.tensor([0, 0, 1])
    ... )
    >>> local_variance(table).item()
    2.0
    """
    squares = without_rounding(types.sequence_m2, types.sequence_n2, types.norms())
    pairs = types.sequence_n2 - types.n
    sequences = (
        (types.sequences if sequences is None else sequences).clamp(max=_MANY_SEQUENCES).long()
    )
    sums, num_pairs = (
        pairs.new_zeros(_MANY_SEQUENCES + 1).index_add_(0, sequences, each)
        for each in (squares, pairs)
    )
    has_pairs = num_pairs > 0
    fewer = (
        torch.where(has_pairs, torch.arange(len(has_pairs), device=pairs.device), -1)
        .cummax(0)
        .values
    )
    donors = torch.where(fewer < 0, has_pairs.byte().argmax(), fewer)[sequences]
    variance = torch.where(pairs > 0, ratio(squares, pairs), ratio(sums[donors], num_pairs[donors]))
    return ratio((types.n * variance).sum(), types.n.sum())


def variance_split(types: TokenTable) -> dict[str, Tensor]:
    """Split the variance of all rows into within and between token types.

    Returns:
        ``V_W``, ``V_B`` and ``V_W_over_V`` of exactly the rows seen (the paper's figures 6 and 20).
    """
    n, _, between_m2 = types.means_pooled()
    within = ratio(types.m2.sum(), n)
    between = ratio(between_m2, n)
    return {"V_W": within, "V_B": between, "V_W_over_V": ratio(within, within + between)}


def unbiased_split(n: Tensor, variance: Tensor, within: Tensor) -> dict[str, Tensor]:
    """Split the variance by an estimate of the one within token types.

    Args:
        n: number of rows, scalar.
        variance: V of the rows, scalar.
        within: see `within_variance`, scalar.

    Returns:
        ``V_W_unbiased``; ``V_B_unbiased``, which is V - V_W_unbiased (n - 1) / n; and
        ``V_W_over_V_unbiased``, the first over the sum of both.

    >>> split = unbiased_split(*torch.tensor([4.0, 2.0, 1.0]))
    >>> {key: value.item() for key, value in split.items()}
    {'V_W_unbiased': 1.0, 'V_B_unbiased': 1.25, 'V_W_over_V_unbiased': 0.4444444477558136}
    """
    between = variance - within * ratio(n - 1, n)
    return {
        "V_W_unbiased": within,
        "V_B_unbiased": between,
        "V_W_over_V_unbiased": ratio(within, within + between),
    }


def context_split(within: Tensor, local: Tensor, num_sequences: Tensor) -> dict[str, Tensor]:
    """Split the variance within token types into that within sequences and what different sequences
    add.

    Args:
        within: see `within_variance`, scalar.
        local: see `local_variance`, scalar.
        num_sequences: number of sequences that the rows came from, scalar.

    Returns:
        ``V_W_local``; ``V_W_text``, V_W_unbiased - V_W_local, NaN for a single sequence; and
        ``V_W_text_over_V_W``, its share of V_W_unbiased.

    >>> split = context_split(*torch.tensor([4.0, 3.0, 8.0]))
    >>> {key: value.item() for key, value in split.items()}
    {'V_W_local': 3.0, 'V_W_text': 1.0, 'V_W_text_over_V_W': 0.25}
    """
    text = torch.where(num_sequences > 1, within - local, torch.nan)
    return {"V_W_local": local, "V_W_text": text, "V_W_text_over_V_W": ratio(text, within)}


def type_values(types: TokenTable) -> dict[str, Tensor]:
    """``n``, ``Q``, ``M`` and ``V`` of each token type, shape (T,)."""
    return sizes(types.n, types.norms()[..., None], types.m2)


def type_regressions(values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Values over token types: the spread of Q, and regressions of V on M, and of Q, M and V on
    frequency.

    Args:
        values: ``n``, ``Q``, ``M`` and ``V`` of each token type, shape (T,): see `type_values`.

    Returns:
        ``token_types_regressed``, the number of token types; ``Q_t_cv``, the coefficient of
        variation of Q, NaN for none; ``V_on_M_slope`` and ``V_on_M_r2`` of the least-squares line
        of V on M; ``Q_freq_slope``, ``Q_freq_r2`` and the same of M and V, of log10(1 + value) on
        log10(n), NaN for fewer than two distinct abscissae.
    """
    log_n = values["n"].log10()
    values_of_types = {
        "token_types_regressed": log_n.new_tensor(len(log_n)),
        "Q_t_cv": coefficient_of_variation(values["Q"]),
    }
    for key in "QMV":
        slope, r2 = least_squares(log_n, values[key].log1p() / math.log(10))
        values_of_types |= {f"{key}_freq_slope": slope, f"{key}_freq_r2": r2}
    slope, r2 = least_squares(values["M"], values["V"])
    return values_of_types | {"V_on_M_slope": slope, "V_on_M_r2": r2}


def coefficient_of_variation(x: Tensor) -> Tensor:
    """Standard deviation (n, not n - 1, below) over mean of the values of ``x``, shape (n,); NaN
    for none.
    """
    if not len(x):
        return x.new_full((), torch.nan)
    return ratio(x.std(correction=0), x.mean())


def least_squares(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Slope and R² of the least-squares line of ``y`` on ``x``, both of shape (n,).

    The slope is NaN where ``x`` does not vary, R² where ``x`` or ``y`` does not.

    >>> least_squares(torch.tensor([0.0, 1.0, 2.0]), torch.tensor([1.0, 3.0, 5.0]))
    (tensor(2.), tensor(1.))
    """
    if not len(x):
        return (y.new_full((), torch.nan),) * 2
    n = x.new_tensor(len(x))
    x_mean = x.mean()
    y_mean = y.mean()
    x = x - x_mean
    y = y - y_mean
    xx = without_rounding(x.square().sum(), n, x_mean)
    yy = without_rounding(y.square().sum(), n, y_mean)
    xy = (x * y).sum()
    return ratio(xy, xx), ratio(xy.square(), xx * yy)


def has_token_values(n: Tensor, n_with_ids: Tensor) -> bool:
    """Tell whether there are values that need token ids: unless there were rows and none had one.

    They are NaN where only some rows had one, of which a warning tells.
    """
    if 0 < n_with_ids < n:
        warnings.warn(
            "token ids must come with all rows, on every rank, or with none; some rows came "
            "without, so values over token types are NaN. Give token_ids=.",
            stacklevel=2,
        )
    return bool((n_with_ids > 0) | (n == 0))
