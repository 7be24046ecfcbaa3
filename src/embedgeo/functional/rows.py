"""From hidden states of any shape and dtype, with a mask, to the rows that count."""

from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from embedgeo.functional.precision import accumulator_dtype


class Part(NamedTuple):
    """A few rows that belong to consecutive runs.

    Attributes:
        rows: their places in the batch, run by run, shape (c,).
        runs: the runs that they belong to.
        run: which of these each row belongs to, shape (c,).
        first: which row of the part is the first one of each run, shape (k,).
        last: which is the last one, shape (k,).
        lengths: number of rows of each run in the part, shape (k,).
        num_before: number of rows of the first run that are in parts before.
        is_split: whether the first run has rows in other parts.
    """

    rows: Tensor
    runs: slice
    run: Tensor
    first: Tensor
    last: Tensor
    lengths: Tensor
    num_before: int
    is_split: bool


class Runs:
    """Rows that are alike, one run after the other.

    Args:
        rows: their places in the batch, run by run, shape (n,), int64.
        lengths: number of rows in each run, at least 1, shape (R,), int64.
        groups: what each run belongs to, ascending, shape (R,), int64.
    """

    def __init__(self, rows: Tensor, lengths: Tensor, groups: Tensor) -> None:
        self.rows, self.lengths, self.groups = rows, lengths, groups
        self._parts: dict[int, list[Part]] = {}

    def parts(self, num_rows: int) -> list[Part]:
        """The rows, at most ``num_rows`` at a time, so that only longer runs are split; those made are kept."""
        if num_rows not in self._parts:
            self._parts[num_rows] = list(self._divided(num_rows))
        return self._parts[num_rows]

    def _divided(self, num_rows: int) -> Iterator[Part]:
        numbers, all_lengths = torch.arange(len(self.lengths), device=self.rows.device), self.lengths.tolist()
        run = numbers.repeat_interleave(self.lengths, output_size=len(self.rows))
        for rows, runs, num_before in divided(all_lengths, num_rows):
            index = run[rows] - runs.start
            lengths = index.bincount(minlength=runs.stop - runs.start)
            ends = lengths.cumsum(0)
            is_split = all_lengths[runs.start] > num_rows
            yield Part(self.rows[rows], runs, index, ends - lengths, ends - 1, lengths, num_before, is_split)


class TokenOrder:
    """The rows of a batch in the order of their token types and sequences.

    Args:
        token_ids: shape (n,), int64.
        sequence_ids: shape (n,), int64; None: each row is a sequence of its own.

    Attributes:
        types: the token types, ascending, shape (T,).
        counts: number of rows of each, shape (T,).
        sequences: number of sequences that have such rows, shape (T,).
        squares: Σ_s n_s² over these, n_s being the number of rows in sequence s, shape (T,).
    """

    def __init__(self, token_ids: Tensor, sequence_ids: Tensor | None = None) -> None:
        if sequence_ids is None:
            self._order = token_ids.argsort(stable=True)
        else:
            self._order = sequence_ids.argsort(stable=True)
            self._order = self._order[token_ids[self._order].argsort(stable=True)]
        ids = token_ids[self._order]
        self.types, self._type, self.counts = ids.unique_consecutive(return_inverse=True, return_counts=True)
        self.sequences = self.squares = self.counts
        self._run_lengths: Tensor | None = None
        if sequence_ids is not None:
            begins = torch.ones_like(ids, dtype=torch.bool)
            begins[1:] = (ids.diff() != 0) | (sequence_ids[self._order].diff() != 0)
            first = begins.nonzero().flatten()
            self._run_lengths = torch.cat((first, first.new_full((1,), len(ids)))).diff()
            self._run_type = self._type[first]
            none = torch.zeros_like(self.counts)
            self.sequences = none.index_add(0, self._run_type, torch.ones_like(first))
            self.squares = none.index_add(0, self._run_type, self._run_lengths.square())

    @cached_property
    def single(self) -> tuple[Tensor, Tensor]:
        """The places of the rows whose type no other row has, and these types, of ``types``."""
        types = (self.counts == 1).nonzero().flatten()
        return self._order[(self.counts.cumsum(0) - 1)[types]], types

    @cached_property
    def repeated(self) -> Runs:
        """The rows of each type of two or more, which are the groups."""
        several = self.counts > 1
        return Runs(self._order[several[self._type]], self.counts[several], several.nonzero().flatten())

    @cached_property
    def repeated_in_sequences(self) -> Runs | None:
        """The rows of each type, which are the groups, that has several in one sequence, and others in another one.

        None where each row is a sequence of its own.
        """
        if self._run_lengths is None:
            return None
        kept = (self._run_lengths > 1) & (self.sequences > 1)[self._run_type]
        rows = self._order[kept.repeat_interleave(self._run_lengths, output_size=len(self._order))]
        return Runs(rows, self._run_lengths[kept], self._run_type[kept])


def divided(lengths: list[int], num_rows: int) -> Iterator[tuple[slice, slice, int]]:
    """Divide runs of rows into parts of at most ``num_rows``, so that only runs of more rows than that are split.

    Args:
        lengths: number of rows of each run.
        num_rows: at least 1.

    Yields:
        The rows of a part, the runs that they belong to, and how many rows of the first of these came before.

    >>> [(rows.stop, runs.start, runs.stop, num_before) for rows, runs, num_before in divided([2, 1, 6], 4)]
    [(3, 0, 2, 0), (7, 2, 3, 0), (9, 2, 3, 4)]
    """
    start, run, num_before = 0, 0, 0
    while run < len(lengths):
        length, end = lengths[run] - num_before, run + 1
        if length > num_rows:
            yield slice(start, start + num_rows), slice(run, end), num_before
            start, num_before = start + num_rows, num_before + num_rows
            continue
        while end < len(lengths) and length + lengths[end] <= num_rows:
            length, end = length + lengths[end], end + 1
        yield slice(start, start + length), slice(run, end), num_before
        start, run, num_before = start + length, end, 0


class WholeBatch:
    """The ids of all rows of a batch, also of those that do not count.

    Args:
        token_ids: shape (N,), int64; None: there are none.
        sequence_ids: shape (N,), int64; None: each row is a sequence of its own.
        kept: the places of the rows that count, shape (n,), int64; None: all do.
    """

    def __init__(self, token_ids: Tensor | None, sequence_ids: Tensor | None, kept: Tensor | None = None) -> None:
        self.token_ids, self.sequence_ids, self._kept = token_ids, sequence_ids, kept

    @cached_property
    def next_places(self) -> Tensor | None:
        """The place of each row's next one in its sequence, shape (N,), int64; None where each row is a sequence.

        The next one need not count. The place is -1 where no row that counts follows: the sequence ends there, or what
        pads it begins.
        """
        if self.sequence_ids is None:
            return None
        order = self.sequence_ids.argsort(stable=True)
        sequences, sequence = self.sequence_ids[order].unique_consecutive(return_inverse=True)
        place = torch.arange(len(order), device=order.device)
        counts = torch.ones_like(place)
        if self._kept is not None:
            counts = torch.zeros_like(place).index_fill(0, self._kept, 1)
        counted = torch.where(counts[order] > 0, place, -1)
        last = torch.full_like(sequences, -1).scatter_reduce(0, sequence, counted, "amax")
        has_next = (place < last[sequence]).nonzero().flatten()
        return torch.full_like(place, -1).index_copy(0, order[has_next], order[has_next + 1])


class RowIds:
    """Which rows of a batch count, and what is known of them beside their embeddings.

    Everything that follows from it is made when it is first asked for, and kept.

    Args:
        token_ids: of the rows that count, shape (n,), int64; None: there are none.
        sequence_ids: of the rows that count, shape (n,), int64; None: each row is a sequence of its own.
        kept: their places in the batch, shape (n,), int64; None: all rows count.
        batch: the ids of all rows of the batch; default: those that count are all of it.
    """

    def __init__(
        self,
        token_ids: Tensor | None,
        sequence_ids: Tensor | None,
        kept: Tensor | None = None,
        batch: "WholeBatch | None" = None,
    ) -> None:
        self.token_ids, self.sequence_ids, self.kept = token_ids, sequence_ids, kept
        self.batch = WholeBatch(token_ids, sequence_ids) if batch is None else batch
        self._dealt: dict[tuple[int, int], tuple[Tensor, list[tuple[int, RowIds]]]] = {}

    def select(self, places: Tensor) -> "RowIds":
        """Those of only the rows at these places among the rows that count."""
        given = (self.token_ids, self.sequence_ids, self.kept)
        token_ids, sequence_ids, kept = (None if each is None else each[places] for each in given)
        return RowIds(token_ids, sequence_ids, places if kept is None else kept, self.batch)

    @cached_property
    def order(self) -> TokenOrder | None:
        """The order of their token types; None where there are no token ids."""
        return None if self.token_ids is None else TokenOrder(self.token_ids, self.sequence_ids)

    @cached_property
    def by_next_token(self) -> tuple[Tensor, "RowIds"] | None:
        """The rows that have a next token, and their ids with it in place of their own; None where there are no ids.

        The next token is that of the next row of the same sequence, whether that row counts or not; there is none where
        no row that counts follows: see `WholeBatch.next_places`.

        Returns:
            The places of these rows among the rows that count, and their ids.
        """
        if self.token_ids is None or self.batch.token_ids is None:
            return None
        following = self.batch.next_places
        if following is None or self.sequence_ids is None:
            none = self.token_ids[:0]
            return none, RowIds(none, None)
        following = following if self.kept is None else following[self.kept]
        places = (following >= 0).nonzero().flatten()
        return places, RowIds(self.batch.token_ids[following[places]], self.sequence_ids[places])

    @cached_property
    def num_sequences(self) -> int | None:
        """Number of sequences that have rows that count; None where each row is one."""
        return None if self.sequence_ids is None else len(self.sequence_ids.unique())

    @cached_property
    def is_first(self) -> Tensor | None:
        """Which rows are the first one of their sequence that counts, shape (n,); None where each row is one."""
        if self.sequence_ids is None:
            return None
        order = self.sequence_ids.argsort(stable=True)
        begins = torch.ones_like(order, dtype=torch.bool)
        begins[1:] = self.sequence_ids[order].diff() != 0
        return torch.empty_like(begins).index_copy_(0, order, begins)

    @cached_property
    def num_numbers(self) -> int:
        """The largest number of a sequence of the batch, plus one; 0 where there are none."""
        ids = self.batch.sequence_ids
        return int(ids.max()) + 1 if ids is not None and ids.numel() else 0

    def dealt(self, first: int, num_groups: int) -> tuple[Tensor, list[tuple[int, "RowIds"]]]:
        """Deal whole sequences into groups: sequence i into group first + i, modulo ``num_groups``.

        Returns:
            The group of each row that counts, shape (n,), and the groups that have such rows, each with its number.
        """
        assert self.sequence_ids is not None
        key = first % num_groups, num_groups
        if key not in self._dealt:
            groups = (key[0] + self.sequence_ids) % num_groups
            places = ((group, (groups == group).nonzero().flatten()) for group in groups.unique().tolist())
            self._dealt[key] = groups, [(group, self.select(each)) for group, each in places]
        return self._dealt[key]


def row_ids(
    embeddings: Tensor,
    token_ids: Tensor | None = None,
    mask: Tensor | None = None,
    sequence_ids: Tensor | None = None,
) -> RowIds:
    """Flatten the ids of a batch to those of the rows that count.

    Args:
        embeddings: shape (..., d): those of one of the layers that they are the ids of.
        token_ids: shape (...), any integer dtype.
        mask: shape (...), bool or 0/1; True = count this row.
        sequence_ids: shape (...), any integer dtype; default: each row is a sequence of its own.

    Raises:
        TypeError: token or sequence ids are not integers.
        ValueError: a shape that does not match, or a mask with other values than 0 and 1.
    """
    ids, sequences = (
        None if given is None else _integers(name, given, embeddings)
        for name, given in (("token_ids", token_ids), ("sequence_ids", sequence_ids))
    )
    if mask is None:
        return RowIds(ids, sequences)
    _require_shape("mask", mask, embeddings)
    if mask.dtype != torch.bool and not bool(((mask == 0) | (mask == 1)).all()):
        raise ValueError("mask must be bool or hold only 0 and 1 (1 = count this row); got other values.")
    kept = mask.bool().reshape(-1).to(embeddings.device).nonzero().flatten()
    ids_of_kept, of_kept = (None if each is None else each[kept] for each in (ids, sequences))
    return RowIds(ids_of_kept, of_kept, kept, WholeBatch(ids, sequences, kept))


def _integers(name: str, given: Tensor, embeddings: Tensor) -> Tensor:
    """Ids of the rows of ``embeddings``, shape (n,), int64."""
    _require_shape(name, given, embeddings)
    if given.is_floating_point() or given.is_complex() or given.dtype == torch.bool:
        raise TypeError(f"{name} must be an integer tensor; got {given.dtype}.")
    return given.detach().reshape(-1).to(device=embeddings.device, dtype=torch.int64)


def _require_shape(name: str, tensor: Tensor, embeddings: Tensor) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a tensor; got {type(tensor).__name__}.")
    if tensor.shape != embeddings.shape[:-1]:
        raise ValueError(
            f"{name} must have the shape of embeddings without the last dimension, "
            f"{tuple(embeddings.shape[:-1])}; got {tuple(tensor.shape)}."
        )


RowUnit = Literal["tokens", "mean", "max", "first", "last", "words"]
"""What a row is: a token; a sequence, as the mean or the maximum of its tokens, its first or its last; or a word."""


class Rows:
    """The rows of one batch that count, prepared once for all metrics of a layer.

    Args:
        embeddings: shape (n, d), floating point, finite, detached.
        ids: what is known of them beside their embeddings.
        num_nonfinite: number of rows that the mask kept but that had a NaN or Inf.
        finite: shape (n + num_nonfinite,), bool, which of the rows that the mask kept these are; None: all of them.
    """

    def __init__(self, embeddings: Tensor, ids: RowIds, num_nonfinite: int = 0, finite: Tensor | None = None) -> None:
        self.embeddings, self.ids, self.num_nonfinite, self.finite = embeddings, ids, num_nonfinite, finite

    @classmethod
    def of(cls, embeddings: Tensor, ids: RowIds) -> "Rows":
        """The rows of a batch that ``ids`` say count, without those with a NaN or Inf.

        Args:
            embeddings: shape (..., d), any floating dtype.
            ids: of the batch.
        """
        x, kept = embeddings.detach(), ids.kept
        if kept is None or x.is_contiguous() or x.ndim == 1:
            x = x.reshape(-1, x.shape[-1])
            x = x if kept is None else x.index_select(0, kept)
        else:  # not all of them are copied
            x = x[torch.unravel_index(kept, x.shape[:-1])]
        if x.dtype.itemsize == 1:  # float8 has no arithmetic
            x = x.float()
        finite = _finite(x)
        if finite is None:
            return cls(x, ids)
        places = finite.nonzero().flatten()
        return cls(x.index_select(0, places), ids.select(places), len(x) - len(places), finite)

    @property
    def token_ids(self) -> Tensor | None:
        """Shape (n,), int64, or None where none were given."""
        return self.ids.token_ids

    @property
    def sequence_ids(self) -> Tensor | None:
        """Shape (n,), int64, or None where each row is a sequence of its own."""
        return self.ids.sequence_ids

    @property
    def num_sequences(self) -> int:
        """Number of sequences that have rows that count."""
        found = self.ids.num_sequences
        return len(self.embeddings) if found is None else found

    def relabelled(self, sequence_ids: Tensor) -> "Rows":
        """The same rows with other sequence ids, which those with a NaN or Inf have, too."""
        ids = RowIds(self.token_ids, sequence_ids if self.finite is None else sequence_ids[self.finite])
        return Rows(self.embeddings, ids, self.num_nonfinite, self.finite)


def select_rows(
    embeddings: Tensor | Rows,
    token_ids: Tensor | None = None,
    mask: Tensor | None = None,
    sequence_ids: Tensor | None = None,
    *,
    dim: int,
) -> Rows:
    """Flatten a batch to rows, and drop masked rows and rows with a NaN or Inf.

    Args:
        embeddings: shape (..., d), any floating dtype; or rows that are selected already, which are returned.
        token_ids: shape (...), any integer dtype.
        mask: shape (...), bool or 0/1; True = count this row.
        sequence_ids: shape (...), any integer dtype; default: each index of the leading axis of three or more is a
            sequence, and each row of an (n, d) input is one of its own.
        dim: the expected d.

    Raises:
        TypeError: embeddings are not floating point, or token or sequence ids not integers.
        ValueError: a shape that does not match, a mask with other values than 0 and 1, or more than `Rows`.

    >>> select_rows(torch.eye(3), mask=torch.tensor([1, 0, 1]), dim=3).embeddings.shape
    torch.Size([2, 3])
    """
    given = embeddings.embeddings if isinstance(embeddings, Rows) else embeddings
    if not isinstance(given, Tensor) or not given.is_floating_point():
        got = given.dtype if isinstance(given, Tensor) else type(given).__name__
        raise TypeError(f"embeddings must be a floating-point tensor; got {got}. Pass hidden states, not ids.")
    if given.ndim == 0 or given.shape[-1] != dim:
        raise ValueError(
            f"embeddings must have shape (..., {dim}); got {tuple(given.shape)}. "
            f"Build the metric with dim= the last dimension of the embeddings."
        )
    if isinstance(embeddings, Rows):
        if not token_ids is mask is sequence_ids is None:
            raise ValueError("Rows have their ids and no mask; got some beside them. Pass the rows alone.")
        return embeddings
    if sequence_ids is None and embeddings.ndim > 2:
        sequence_ids = sequence_numbers(embeddings.shape[:-1])
    return Rows.of(embeddings, row_ids(embeddings, token_ids, mask, sequence_ids))


def sequence_positions(real: Tensor, position_ids: Tensor | None = None) -> Tensor:
    """Number the real positions of each sequence 1, 2, 3, …; padding gets the number of the last one before it.

    Args:
        real: shape (batch, positions), bool; False = padding.
        position_ids: shape (batch or 1, positions); where they do not increase, another sequence packed into the same
            row starts.

    >>> sequence_positions(torch.tensor([[False, True, True, True, True]]), torch.tensor([[0, 0, 1, 0, 1]])).tolist()
    [[0, 1, 2, 1, 2]]
    """
    number = real.cumsum(1)
    if position_ids is None:
        return number
    before = torch.where(sequence_starts(real.shape, position_ids).to(real.device), number - real.to(number.dtype), 0)
    return number - before.cummax(1).values


def sequence_starts(shape: torch.Size, position_ids: Tensor | None = None) -> Tensor:
    """Which positions begin a sequence, in the given shape, (batch, positions), bool.

    These are the first of each index of the batch, and those where ``position_ids``, shape (batch or 1, positions), do
    not increase.
    """
    starts = torch.zeros(shape, dtype=torch.bool, device="cpu" if position_ids is None else position_ids.device)
    starts[:, :1] = True
    if position_ids is not None:
        starts[:, 1:] = position_ids.diff(dim=1) <= 0
    return starts


def sequence_numbers(shape: torch.Size, position_ids: Tensor | None = None, token_ids: Iterable[Tensor] = ()) -> Tensor:
    """Number the sequences 0, 1, 2, …: one for each index of the batch, or several that are packed into it.

    Args:
        shape: of the rows, (batch, positions, …), or (n,) where the rows of all sequences follow each other.
        position_ids: shape (batch or 1, positions); where they do not increase, another packed sequence starts.
            Ignored if they do not fit.
        token_ids: of any shapes; with ``position_ids`` they tell (batch, positions) of n rows. Where none of them is of
            as many rows, each row is a sequence of its own.

    Returns:
        The number of each row's sequence, in the given shape, int64.

    >>> sequence_numbers(torch.Size([2, 3]), torch.tensor([[0, 1, 0]])).tolist()
    [[0, 0, 1], [2, 2, 3]]
    """
    grid = shape
    if len(shape) == 1:
        inputs = (ids for ids in (position_ids, *token_ids) if ids is not None and ids.ndim == 2)
        grid = next((ids.shape for ids in inputs if ids.numel() == shape[0]), torch.Size((shape[0], 1)))
    if position_ids is not None and position_ids.shape not in (grid[:2], (1, grid[1])):
        position_ids = None
    numbers = sequence_starts(grid[:2], position_ids).flatten().cumsum(0) - 1
    return numbers.view(*grid[:2], *(1 for _ in grid[2:])).expand(grid).reshape(shape)


def require_row_unit(rows: str) -> None:
    """Raise ValueError unless ``rows`` is a `RowUnit`."""
    if rows not in get_args(RowUnit):
        raise ValueError(f"rows must be one of {', '.join(map(repr, get_args(RowUnit)))}; got {rows!r}.")


def require_word_ids(rows: str, word_ids: object) -> None:
    """Raise ValueError unless ``rows`` is a `RowUnit` and ``word_ids`` are given, that is not None, just for words."""
    require_row_unit(rows)
    if rows == "words" and word_ids is None:
        raise ValueError(
            "rows=\"words\" needs word_ids; got none. Give word_ids=, the number of each token's word (a tokenizer's "
            "word_ids()), with -1 for tokens of no word."
        )
    if rows != "words" and word_ids is not None:
        raise ValueError(f'word_ids go with rows="words"; got rows={rows!r}. Leave them out.')


def pool_tokens(
    hidden: Tensor,
    token_ids: Tensor | None,
    mask: Tensor | None,
    rows: Literal["tokens", "mean", "max", "first", "last"],
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Reduce each sequence to one row of the tokens that count: their mean or maximum, or the first or last of them.

    A maximum is taken in each coordinate (Conneau et al. 2017). For words see `embedgeo.functional.rows.pool_words`.

    Args:
        hidden: shape (batch, positions, d), any floating dtype; (..., d) for ``"tokens"``.
        token_ids: shape (batch, positions), or None.
        mask: shape (batch, positions), bool, True = this token counts; None if all do.
        rows: the row unit; ``"tokens"`` returns the arguments as they are.

    Returns:
        Hidden states, shape (batch, d), where means are summed in float64 and are float32 at least; the ids of the
        tokens, shape (batch,), None for means and maxima; and a mask, shape (batch,), False for sequences in which no
        token counts, or None if there are none.

    Raises:
        ValueError: hidden states do not have three dimensions.

    >>> hidden = torch.tensor([[[1.0], [3.0], [9.0]]])
    >>> pool_tokens(hidden, torch.tensor([[5, 6, 0]]), torch.tensor([[True, True, False]]), "last")
    (tensor([[3.]]), tensor([6]), None)
    """
    if rows == "tokens":
        return hidden, token_ids, mask
    if hidden.ndim != 3:
        raise ValueError(
            f"rows={rows!r} needs hidden states of shape (batch, positions, d); got {tuple(hidden.shape)}. "
            'Leave the layer out, or take rows="tokens".'
        )
    counts = hidden.new_ones(hidden.shape[:2], dtype=torch.bool) if mask is None else mask.to(hidden.device)
    some = counts.any(1)
    kept = None if bool(some.all()) else some
    if rows == "mean":
        total = hidden.masked_fill(~counts[..., None], 0).sum(1, dtype=accumulator_dtype(hidden.device))
        mean = total / counts.sum(1, keepdim=True).clamp(min=1)
        return mean.to(torch.promote_types(hidden.dtype, torch.float32)), None, kept
    if hidden.shape[1] == 0:
        return hidden.new_zeros(len(hidden), hidden.shape[2]), None, kept
    if rows == "max":
        return hidden.masked_fill(~counts[..., None], -torch.inf).amax(1), None, kept
    place = counts.int().argmax(1) if rows == "first" else hidden.shape[1] - 1 - counts.int().flip(1).argmax(1)
    sequence = torch.arange(len(hidden), device=hidden.device)
    ids = None if token_ids is None else token_ids.to(hidden.device)[sequence, place]
    return hidden[sequence, place], ids, kept


def _finite(rows: Tensor) -> Tensor | None:
    """Which rows are finite, or None where all are: one sum in the usual case."""
    total = rows @ rows.new_ones(rows.shape[1]) if rows.dtype == torch.float16 else rows.sum()
    if bool(total.isfinite().all()):
        return None
    finite = torch.isfinite(rows).all(dim=1)  # a sum may overflow although every term is finite
    return None if bool(finite.all()) else finite


_BASE = 0x5851F42D4C957F2D
"""Of the polynomial in `spellings`: a multiplier of random number generators."""


class Words(NamedTuple):
    """The words of a batch that have a token that counts, by sequence and number: the same at every layer.

    Attributes:
        places: of the tokens that count and are of a word, among all tokens of the batch, shape (m,).
        words: the word of each of these tokens, shape (m,).
        num_tokens: number of these tokens in each word, shape (n,).
        ids: the words' types, None where there are neither token ids nor types, and sequences.
    """

    places: Tensor
    words: Tensor
    num_tokens: Tensor
    ids: RowIds

    def means(self, hidden: Tensor) -> Tensor:
        """The mean of each word's tokens, shape (n, d), summed in float64 and float32 at least.

        Args:
            hidden: shape (..., d), any floating dtype.
        """
        rows = hidden.reshape(-1, hidden.shape[-1])
        rows = rows.float() if rows.dtype.itemsize == 1 else rows  # float8 has no arithmetic
        total = rows.new_zeros(len(self.num_tokens), rows.shape[1], dtype=accumulator_dtype(rows.device))
        total.index_add_(0, self.words, rows[self.places].to(total.dtype))
        return (total / self.num_tokens[:, None]).to(torch.promote_types(rows.dtype, torch.float32))


def pool_words(
    hidden: Tensor,
    word_ids: Tensor,
    sequence_ids: Tensor,
    *,
    token_ids: Tensor | None = None,
    types: Tensor | None = None,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Reduce the tokens of each word to one row: their mean, as in Yamagiwa & Shimodaira 2025, appendix J.

    A mean over several tokens is shorter than they are: norms of words depend on how many tokens a word has.

    Args:
        hidden: shape (..., d), any floating dtype.
        word_ids: shape (...), integer: tokens of a sequence with the same number are one word; those with a negative
            one are of no word.
        sequence_ids: shape (...), integer, not negative.
        token_ids: shape (...), integer, or None; a word's type is its spelling in these, masked ones among them: see
            `spellings`.
        types: shape (...), integer, or None; used instead: a word's type is that of its first token.
        mask: shape (...), bool, True = this token counts; None if all do.

    Returns:
        For each word with a token that counts, by sequence and number: the mean of these tokens, shape (n, d), summed
        in float64 and float32 at least; its type, shape (n,), int64, or None where there are neither ids nor types; and
        its sequence, shape (n,), int64.

    >>> hidden, sequence_ids = torch.tensor([[1.0], [3.0], [9.0]]), torch.zeros(3, dtype=torch.int64)
    >>> word_ids, types = torch.tensor([0, 0, 1]), torch.tensor([7, 7, 5])
    >>> pool_words(hidden, word_ids, sequence_ids, types=types)
    (tensor([[2.],
            [9.]]), tensor([7, 5]), tensor([0, 0]))
    """
    words = find_words(hidden.device, word_ids, sequence_ids, token_ids=token_ids, types=types, mask=mask)
    assert words.ids.sequence_ids is not None
    return words.means(hidden), words.ids.token_ids, words.ids.sequence_ids


def find_words(
    device: torch.device,
    word_ids: Tensor,
    sequence_ids: Tensor,
    *,
    token_ids: Tensor | None = None,
    types: Tensor | None = None,
    mask: Tensor | None = None,
) -> Words:
    """Find the tokens of each word, for hidden states on ``device``; the other arguments are those of `pool_words`."""
    words, sequences = (ids.reshape(-1).to(device, torch.int64) for ids in (word_ids, sequence_ids))
    place = (words >= 0).nonzero().flatten()
    numbers, number = words[place].unique(return_inverse=True)
    keys, word = (sequences[place] * len(numbers) + number).unique(return_inverse=True)
    counts = slice(None) if mask is None else mask.reshape(-1).to(device)[place]
    num_tokens = word[counts].bincount(minlength=len(keys))
    kept = num_tokens > 0
    row = (kept.cumsum(0) - 1)[word[counts]]
    sequence_of_word = keys.div(max(1, len(numbers)), rounding_mode="floor")
    of_words = None
    if (given := token_ids if types is None else types) is not None:
        order = word.argsort(stable=True)
        ids, lengths = given.reshape(-1).to(device, torch.int64)[place[order]], word.bincount()
        of_words = (spellings(ids, lengths) if types is None else ids[lengths.cumsum(0) - lengths])[kept]
    return Words(place[counts], row, num_tokens[kept], RowIds(of_words, sequence_of_word[kept]))


def spellings(token_ids: Tensor, lengths: Tensor) -> Tensor:
    """A number for each sequence of token ids, the same for the same ids in the same order: a polynomial in these.

    That of a single id is the id. Different ones of up to two ids, below 2 ** 18, never have the same number; that any
    two of T longer ones do has a probability of about T² / 2 ** 64: 5e-8 for a million.

    Args:
        token_ids: shape (n,), int64, those of one word after those of the other.
        lengths: shape (T,), int64, at least 1 each, n in total.

    Returns:
        Shape (T,), int64, not negative.

    >>> spellings(torch.tensor([5, 8, 5, 5]), torch.tensor([1, 2, 1]))[[0, 2]]
    tensor([5, 5])
    """
    if not len(lengths):
        return lengths
    word = torch.arange(len(lengths), device=token_ids.device).repeat_interleave(lengths)
    position = torch.arange(len(token_ids), device=token_ids.device) - (lengths.cumsum(0) - lengths)[word]
    powers = torch.full((int(lengths.max()),), _BASE, device=token_ids.device)
    powers[0] = 1
    terms = (token_ids + (position > 0)) * powers.cumprod(0)[position]  # a word that goes on, with id 0, is another one
    return torch.zeros_like(lengths).index_add_(0, word, terms) & torch.iinfo(torch.int64).max
