"""The rows that count, tokens, sequences or words, of hidden states of any shape and dtype, with a
mask.
"""

import math
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from embedgeo.functional.moments import row_chunks
from embedgeo.functional.precision import row_norms, sent

T = TypeVar("T")

NO_TYPE = -100
"""The token id of rows that have no type: the one that losses ignore, in labels."""

MASSIVE = 4.0
"""Times the median norm of a forward pass beyond which a row is massive."""
FEWEST_ROWS = 100
"""Number of rows of a forward pass of which the median norm tells massive ones."""


class BatchIds(NamedTuple):
    """Ids of all rows of a batch, also of those that do not count; on the CPU."""

    token_ids: Tensor | None  # shape (N,), int64; None: there are none
    sequence_ids: Tensor | None  # shape (N,), int64; None: each row is a sequence of its own
    # the places of the rows that the mask keeps, shape (n,), int64; None: all of them
    kept: Tensor | None = None


@dataclass(eq=False)
class RowIds:
    """Places, token types and sequences of the rows of a batch that count.

    They are on the CPU, so that whatever follows from them alone is known without waiting for a
    device, and is made once for all layers and metrics: see `once`.
    """

    token_ids: Tensor | None  # shape (n,), int64; None: there are none
    sequence_ids: Tensor | None  # shape (n,), int64; None: each row is a sequence of its own
    kept: Tensor | None  # the rows' places in the batch, shape (n,), int64; None: all rows count
    batch: BatchIds  # the ids of all rows of the batch
    groups: Tensor | None = None  # of the jackknife, shape (n,), int64; None: there are none
    made: dict[Hashable, Any] = field(default_factory=dict, repr=False)  # by `once`

    @classmethod
    def of(cls, batch: BatchIds) -> "RowIds":
        """The ids of the rows that the mask keeps."""
        every = cls(batch.token_ids, batch.sequence_ids, None, batch)
        return every if batch.kept is None else every.select(batch.kept)

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """The value of ``make``, which depends on these ids and on ``key`` alone, made when first
        asked for.
        """
        if key not in self.made:
            self.made[key] = make()
        kept: T = self.made[key]
        return kept

    def on(
        self, device: torch.device, name: Literal["token_ids", "sequence_ids", "kept"]
    ) -> Tensor | None:
        """The ids of this name on a device."""
        ids: Tensor | None = getattr(self, name)
        return (
            ids
            if ids is None or ids.device == device
            else self.once((name, device), lambda: sent(ids, device))
        )

    def select(self, places: Tensor) -> "RowIds":
        """The ids of only the rows at these places among the rows that count."""
        token_ids, sequence_ids, groups = (
            None if each is None else each[places]
            for each in (self.token_ids, self.sequence_ids, self.groups)
        )
        kept = places if self.kept is None else self.kept[places]
        return RowIds(token_ids, sequence_ids, kept, self.batch, groups)

    @cached_property
    def sequences(self) -> tuple[Tensor, int] | None:
        """The number of the sequence of each row, (n,), counted from 0, and how many these are;
        None: all are one.
        """
        if self.sequence_ids is None:
            return None
        distinct, sequence = self.sequence_ids.unique(return_inverse=True)
        return sequence, len(distinct)

    @cached_property
    def first_places(self) -> Tensor | None:
        """Place of the first row of the sequence of each row, (n,), int64; None where each row is
        one.
        """
        if self.sequences is None:
            return None
        sequence, _ = self.sequences
        places = torch.arange(len(sequence), device="cpu")
        return torch.full_like(places, len(places)).scatter_reduce_(0, sequence, places, "amin")[
            sequence
        ]

    @cached_property
    def is_first(self) -> Tensor | None:
        """Marks of the rows that are the first one of their sequence that counts, (n,); None where
        each row is one.
        """
        places = self.first_places
        return None if places is None else places == torch.arange(len(places), device="cpu")

    @property
    def next_sequence_id(self) -> int:
        """The largest id of a sequence of the batch, plus one; 0 where there are none."""
        ids = self.batch.sequence_ids
        return int(ids.max()) + 1 if ids is not None and ids.numel() else 0

    def dealt(self, first: int, num_rows: int, num_groups: int) -> "RowIds":
        """These ids with the group ``first`` + i, modulo ``num_groups``, of each row of sequence i.

        Where each row is a sequence, these are the places among all rows of the batch, of which
        there are ``num_rows``.
        """

        def make() -> RowIds:
            places = torch.arange(num_rows, device="cpu") if self.kept is None else self.kept
            ids = replace(self, made={})
            ids.groups = (
                first + (places if self.sequence_ids is None else self.sequence_ids)
            ) % num_groups
            return ids

        return self.once(("dealt", first, num_groups), make)

    def by_group(self) -> list[tuple[int, "RowIds"]]:
        """The groups that have rows, and the ids of their rows."""
        groups = self.groups
        if groups is None:
            return []
        return self.once(
            "by_group",
            lambda: [
                (each, self.select((groups == each).nonzero()[:, 0]))
                for each in groups.unique().tolist()
            ],
        )


def row_ids(
    embeddings: Tensor,
    token_ids: Tensor | None = None,
    mask: Tensor | None = None,
    sequence_ids: Tensor | None = None,
) -> RowIds:
    """Ids of the rows of a batch that count; without ``sequence_ids`` each row is a sequence of its
    own.

    For those that are on another device than the CPU it is waited.
    """
    for name, each in (("token_ids", token_ids), ("sequence_ids", sequence_ids)):
        if each is not None:
            _require_shape(name, each, embeddings)
            require_integers(each, name)
    if mask is not None:
        _require_shape("mask", mask, embeddings)
    ids, sequences, marks = on_cpu(token_ids, sequence_ids, mask)
    kept = None
    if marks is not None:
        kept = require_marks(marks).reshape(-1).nonzero().flatten()
        kept = None if len(kept) == marks.numel() else kept
    ids, sequences = (
        None if each is None else each.reshape(-1).to(torch.int64) for each in (ids, sequences)
    )
    return RowIds.of(BatchIds(ids, sequences, kept))


def require_marks(mask: Tensor) -> Tensor:
    """A mask; ValueError if it has other values than 0 and 1."""
    if mask.dtype != torch.bool and not bool(((mask == 0) | (mask == 1)).all()):
        raise ValueError(
            "mask must be bool or hold only 0 and 1 (1 = count this row); got other values."
        )
    return mask


def on_cpu(*tensors: Tensor | None) -> list[Any]:
    """The tensors on the CPU, detached."""
    return [None if each is None else each.detach().cpu() for each in tensors]


def is_integer(ids: Tensor) -> bool:
    """Tell a tensor of whole numbers, which marks are not."""
    return not (ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool)


def require_integers(ids: Tensor, name: str) -> Tensor:
    """Ids; TypeError if they are no whole numbers."""
    if not is_integer(ids):
        raise TypeError(f"{name} must be an integer tensor; got {ids.dtype}.")
    return ids


def has_rows_without_type(token_ids: Tensor, counts: Tensor | None = None) -> bool:
    """Tell whether a row that counts has the id -100; both are on the CPU.

    Raises:
        ValueError: one has another negative id.
    """
    is_negative = token_ids < 0 if counts is None else (token_ids < 0) & counts
    if not bool(is_negative.any()):
        return False
    wrong = token_ids[is_negative & (token_ids != NO_TYPE)]
    if len(wrong):
        raise ValueError(
            f"token_ids must not be negative, but for {NO_TYPE}, which is of no token type; got "
            f"{int(wrong[0])}. Mask these rows, or give them ids of their own."
        )
    return True


def rows_without_type(name: str) -> str:
    """The warning of rows with the id -100, which begins with a name."""
    return (
        f"{name}: rows with the token id {NO_TYPE}, which labels have where nothing is to be "
        f"predicted, have no token "
        "type; they are left out of all values by type, and count in the others."
    )


def _require_shape(name: str, tensor: Tensor, embeddings: Tensor) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a tensor; got {type(tensor).__name__}.")
    if tensor.shape != embeddings.shape[:-1]:
        raise ValueError(
            f"{name} must have the shape of embeddings without the last dimension, "
            f"{tuple(embeddings.shape[:-1])}; got {tuple(tensor.shape)}."
        )


def require_arithmetic(x: Tensor) -> None:
    """Raise TypeError for numbers of 8 bits or less, which are stored without their scale."""
    if x.dtype.itemsize == 1:
        raise TypeError(
            f"embeddings must be of a dtype that torch computes with; got {x.dtype}, whose numbers "
            "are stored without their scale. Pass embeddings.float() * scale."
        )


def massive_times(skip_massive: bool | float) -> float:
    """How many times the median norm of its pass a row must exceed to be massive: ``skip_massive``
    where that is a number, else 4.

    Raises:
        ValueError: ``skip_massive`` is neither a bool nor a number above 1.
    """
    times = MASSIVE if isinstance(skip_massive, bool) else skip_massive
    if not isinstance(times, int | float) or not 1 < times < math.inf:
        raise ValueError(
            "skip_massive must be True, False, or a number above 1, by which the median norm is "
            f"multiplied; got {times!r}."
        )
    return float(times)


@dataclass(eq=False)
class Rows:
    """The rows of one batch that count, prepared once for all metrics of a layer.

    The rows that the mask leaves out are cut, and so are those with a NaN or Inf. Each row keeps
    the number that it had among the rows that the mask kept, so that all layers draw the same
    sample.
    """

    embeddings: Tensor  # shape (n, d), floating point, finite, detached
    ids: RowIds
    num_nonfinite: int = 0  # number of rows that the mask kept but that have a NaN or Inf
    num_left_out: int = 0  # number of rows that a group of these rows does not have
    # the numbers of these rows among those that the mask kept, shape (n,), int64, on the CPU; None
    # where none was cut
    numbers: Tensor | None = None
    largest: float = math.inf  # norm beyond which a row is massive
    massive: Tensor | None = None  # marks of the massive rows, shape (n,); None where none is

    @classmethod
    def of(
        cls, embeddings: Tensor, ids: RowIds, times: float = 0, largest: float | None = None
    ) -> "Rows":
        """The rows of a batch, shape (..., d), any floating dtype but float8, that count, without
        those with a NaN or Inf.

        Rows of a norm beyond ``times`` the median of all of them, or beyond ``largest``, are marked
        as massive; with ``times`` 0 and of fewer than 100 rows none is. A device is waited for
        once, to tell whether there are any of either kind.
        """
        require_arithmetic(embeddings)
        x = embeddings.detach()
        kept = ids.on(x.device, "kept")
        x = x.reshape(-1, x.shape[-1])
        x = x if kept is None else x.index_select(0, kept)

        def limit(norms: Tensor) -> Tensor:
            if largest is not None:
                return norms.new_tensor(largest)
            has_enough = times and len(norms) >= FEWEST_ROWS
            return times * norms.median() if has_enough else norms.new_tensor(math.inf)

        # without a copy of all rows in float64
        norms = torch.cat([row_norms(x[:0]), *(row_norms(x[chunk]) for chunk in row_chunks(x))])
        rows = cls(x, ids)
        most = limit(norms)
        facts = torch.stack((norms.sum(), (norms > most).sum().to(norms), most))
        sum_of_all, num_massive, rows.largest = facts.tolist()  # the one wait
        if not math.isfinite(sum_of_all):
            rows, counts = cls._finite(x, ids)
            norms = norms[counts]
            most = limit(norms)
            num_massive = int((norms > most).sum())
            rows.largest = float(most)
        rows.massive = norms > most if num_massive else None
        return rows

    @classmethod
    def _finite(cls, x: Tensor, ids: RowIds) -> "tuple[Rows, Tensor]":
        """The rows without those with a NaN or Inf, and marks of these among all, shape (n,).

        A sum may overflow although every term is finite.
        """
        counts = x.isfinite().all(dim=1)
        every = cls(x, ids)
        if bool(counts.all()):
            return every, counts
        rows = every.select(counts)
        rows.num_nonfinite = rows.num_left_out
        rows.num_left_out = 0
        return rows, counts

    def select(self, marks: Tensor) -> "Rows":
        """The group of the rows that are marked, shape (n,); waits for a device."""
        places = marks.nonzero().flatten()
        on_cpu = places.cpu()
        return Rows(
            self.embeddings.index_select(0, places),
            self.ids.select(on_cpu),
            self.num_nonfinite,
            self.num_left_out + len(marks) - len(places),
            on_cpu if self.numbers is None else self.numbers[on_cpu],
        )

    @property
    def num_kept(self) -> int:
        """Number of rows that the mask kept."""
        return len(self.embeddings) + self.num_nonfinite + self.num_left_out

    @property
    def num_sequences(self) -> int:
        """Number of sequences that have rows that count."""
        return len(self.embeddings) if self.ids.sequences is None else self.ids.sequences[1]

    @property
    def token_ids(self) -> Tensor | None:
        """Shape (n,), int64, or None where none were given."""
        return self.ids.on(self.embeddings.device, "token_ids")

    @property
    def sequence_ids(self) -> Tensor | None:
        """Shape (n,), int64, or None where each row is a sequence of its own."""
        return self.ids.on(self.embeddings.device, "sequence_ids")


def select_rows(
    embeddings: Tensor | Rows,
    token_ids: Tensor | None = None,
    mask: Tensor | None = None,
    sequence_ids: Tensor | None = None,
    *,
    dim: int,
) -> Rows:
    """Flatten a batch to rows of width ``dim``, and drop masked rows and rows with a NaN or Inf.

    Without ``sequence_ids`` each index of the leading axis of three or more is a sequence, and each
    row of an (n, d) input.
    """
    x = embeddings.embeddings if isinstance(embeddings, Rows) else embeddings
    if not isinstance(x, Tensor) or not x.is_floating_point():
        got = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(
            f"embeddings must be a floating-point tensor; got {got}. Pass hidden states, not ids."
        )
    if x.ndim == 0 or x.shape[-1] != dim:
        raise ValueError(
            f"embeddings must have shape (..., {dim}); got {tuple(x.shape)}. "
            f"Build the metric with dim= the last dimension of the embeddings."
        )
    if isinstance(embeddings, Rows):
        return embeddings
    if sequence_ids is None and x.ndim > 2:
        sequence_ids = sequence_numbers(x.shape[:-1])
    return Rows.of(x, row_ids(x, token_ids, mask, sequence_ids))


def sequence_positions(real: Tensor, position_ids: Tensor | None = None) -> Tensor:
    """Number the real positions of each sequence 1, 2, 3, …; padding gets the number of the last
    one before it.

    Both have shape (batch, positions); where position ids begin anew, another sequence packed into
    the row starts.
    """
    number = real.cumsum(1)
    if position_ids is None:
        return number
    before = torch.where(
        _sequence_starts(real.shape, position_ids).to(real.device),
        number - real.to(number.dtype),
        0,
    )
    return number - before.cummax(1).values


def sequence_numbers(
    shape: torch.Size, position_ids: Tensor | None = None, token_ids: Iterable[Tensor] = ()
) -> Tensor:
    """Number the sequences 0, 1, 2, …: one for each index of the batch, or several that are packed
    into it.

    Position ids, shape (batch or 1, positions), start another one where they begin anew. For rows
    of shape (n,), (batch, positions) are those of the first ids with n elements, one sequence if
    these have shape (n,), too; else each row is a sequence. ValueError if position ids do not fit.
    """
    grid = shape
    if len(shape) == 1:
        inputs = (
            torch.atleast_2d(ids)
            for ids in (position_ids, *token_ids)
            if ids is not None and ids.ndim < 3
        )
        grid = next(
            (ids.shape for ids in inputs if ids.numel() == shape[0]), torch.Size((shape[0], 1))
        )
    if position_ids is not None and position_ids.shape not in (grid[:2], (1, grid[1])):
        raise ValueError(
            f"rows, {tuple(shape)}, must be those of {position_ids.shape[1]} position ids, which "
            "are given, or told by the ends of packed texts. Give position_ids for each token, or "
            "texts that end where the one row ends."
        )
    numbers = _sequence_starts(grid[:2], position_ids).flatten().cumsum(0) - 1
    return numbers.view(*grid[:2], *(1 for _ in grid[2:])).expand(grid).reshape(shape)


def _sequence_starts(shape: torch.Size, position_ids: Tensor | None) -> Tensor:
    """Marks of the positions that begin a sequence: the first of each row, and, unless its ids grow
    all along, those with the smallest position id from which ids grow by one. Ids that never do,
    as zeros, mark none.
    """
    starts = torch.zeros(
        shape, dtype=torch.bool, device="cpu" if position_ids is None else position_ids.device
    )
    starts[:, :1] = True
    if position_ids is not None and shape[1] > 1:
        before = position_ids[:, :-1]
        after = position_ids[:, 1:]
        first = torch.where(after - before == 1, before, torch.iinfo(torch.int32).max).amin()
        starts[:, 1:] = (after == first) & (after <= before).any(1, keepdim=True)
    return starts
