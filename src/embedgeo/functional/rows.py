"""The rows that count, tokens, sequences or words, of hidden states of any shape and dtype, with a
mask.
"""

import math
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple, TypeVar, get_args

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from embedgeo.functional.precision import accumulator_dtype, sent

T = TypeVar("T")

RowUnit = Literal["tokens", "mean", "max", "first", "last", "words"]
"""Units that are rows: a token; a sequence, as the mean or maximum of its tokens, its first or
last; or a word.
"""

NO_TYPE = -100
"""The token id of rows that have no type: the one that losses ignore, in labels."""

# of the polynomial in `spellings`: a multiplier of random number generators
_BASE = 0x5851F42D4C957F2D


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
        token_ids, sequence_ids, kept = batch
        if kept is not None:
            token_ids = None if token_ids is None else token_ids[kept]
            sequence_ids = None if sequence_ids is None else sequence_ids[kept]
        return cls(token_ids, sequence_ids, kept, batch)

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """The value of ``make``, which depends on these ids and on ``key`` alone, made when first
        asked for.
        """
        if key not in self.made:
            self.made[key] = make()
        found: T = self.made[key]
        return found

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
        return RowIds(
            None if self.token_ids is None else self.token_ids[places],
            None if self.sequence_ids is None else self.sequence_ids[places],
            places if self.kept is None else self.kept[places],
            self.batch,
            None if self.groups is None else self.groups[places],
        )

    @cached_property
    def sequences(self) -> tuple[Tensor, int] | None:
        """The number of the sequence of each row, (n,), counted from 0, and how many these are;
        None: all are one.
        """
        if self.sequence_ids is None:
            return None
        found, sequence = self.sequence_ids.unique(return_inverse=True)
        return sequence, len(found)

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
        found = groups.unique().tolist()
        return self.once(
            "by_group",
            lambda: [(each, self.select((groups == each).nonzero()[:, 0])) for each in found],
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
    if token_ids is not None:
        _require_integers("token_ids", token_ids, embeddings)
    if sequence_ids is not None:
        _require_integers("sequence_ids", sequence_ids, embeddings)
    if mask is not None:
        _require_shape("mask", mask, embeddings)
    ids, sequences, marks = on_cpu(token_ids, sequence_ids, mask)
    kept = None
    if marks is not None:
        if marks.dtype != torch.bool and not bool(((marks == 0) | (marks == 1)).all()):
            raise ValueError(
                "mask must be bool or hold only 0 and 1 (1 = count this row); got other values."
            )
        kept = marks.reshape(-1).nonzero().flatten()
        kept = None if len(kept) == marks.numel() else kept
    ids, sequences = (
        None if each is None else each.reshape(-1).to(torch.int64) for each in (ids, sequences)
    )
    return RowIds.of(BatchIds(ids, sequences, kept))


def on_cpu(*tensors: Tensor | None) -> list[Any]:
    """The tensors on the CPU, detached."""
    return [None if each is None else each.detach().cpu() for each in tensors]


def _require_integers(name: str, ids: Tensor, embeddings: Tensor) -> None:
    _require_shape(name, ids, embeddings)
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise TypeError(f"{name} must be an integer tensor; got {ids.dtype}.")


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
    # the numbers of these rows among those that the mask kept, shape (n,), int64, on the CPU; None
    # where none was cut
    numbers: Tensor | None = None
    # the number of the first kept row among those of all ranks, where it is known
    first: int | None = None

    @classmethod
    def of(cls, embeddings: Tensor, ids: RowIds) -> "Rows":
        """The rows of a batch, shape (..., d), any floating dtype, that count, without those with a
        NaN or Inf.

        A device is waited for once, to tell whether there are any of these.
        """
        x = embeddings.detach()
        kept = ids.on(x.device, "kept")
        if kept is None or x.is_contiguous() or x.ndim == 1:
            x = x.reshape(-1, x.shape[-1])
            x = x if kept is None else x.index_select(0, kept)
        else:  # not all of them are copied
            x = x[torch.unravel_index(kept, x.shape[:-1])]
        if x.dtype.itemsize == 1:  # float8 has no arithmetic
            x = x.float()
        total = x.sum(dtype=torch.float32 if x.dtype == torch.float16 else None)
        if math.isfinite(float(total)):  # one sum in the usual case
            return cls(x, ids)
        # a sum may overflow although every term is finite
        numbers = torch.isfinite(x).all(dim=1).nonzero().flatten()
        if len(numbers) == len(x):
            return cls(x, ids)
        on_cpu = numbers.cpu()
        num_nonfinite = len(x) - len(numbers)
        return cls(x.index_select(0, numbers), ids.select(on_cpu), num_nonfinite, on_cpu)

    @property
    def num_kept(self) -> int:
        """Number of rows that the mask kept."""
        return len(self.embeddings) + self.num_nonfinite

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
        if not token_ids is mask is sequence_ids is None:
            raise ValueError(
                "Rows have their ids and no mask; got some beside them. Pass the rows alone."
            )
        return embeddings
    if sequence_ids is None and x.ndim > 2:
        sequence_ids = sequence_numbers(x.shape[:-1])
    return Rows.of(x, row_ids(x, token_ids, mask, sequence_ids))


def sequence_positions(real: Tensor, position_ids: Tensor | None = None) -> Tensor:
    """Number the real positions of each sequence 1, 2, 3, …; padding gets the number of the last
    one before it.

    Both have shape (batch, positions); where position ids do not increase, another sequence packed
    into the row starts.
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

    Position ids, shape (batch or 1, positions), start another one where they do not increase, and
    are ignored if they do not fit. For rows of shape (n,), (batch, positions) are those of the
    first ids with n elements; else each row is a sequence.
    """
    grid = shape
    if len(shape) == 1:
        inputs = (ids for ids in (position_ids, *token_ids) if ids is not None and ids.ndim == 2)
        grid = next(
            (ids.shape for ids in inputs if ids.numel() == shape[0]), torch.Size((shape[0], 1))
        )
    if position_ids is not None and position_ids.shape not in (grid[:2], (1, grid[1])):
        position_ids = None
    numbers = _sequence_starts(grid[:2], position_ids).flatten().cumsum(0) - 1
    return numbers.view(*grid[:2], *(1 for _ in grid[2:])).expand(grid).reshape(shape)


def _sequence_starts(shape: torch.Size, position_ids: Tensor | None) -> Tensor:
    """Marks of the positions that begin a sequence: the first of each row, and where position ids
    do not increase.
    """
    starts = torch.zeros(
        shape, dtype=torch.bool, device="cpu" if position_ids is None else position_ids.device
    )
    starts[:, :1] = True
    if position_ids is not None:
        starts[:, 1:] = position_ids.diff(dim=1) <= 0
    return starts


def require_row_unit(rows: str) -> None:
    """Raise ValueError unless ``rows`` is a `RowUnit`."""
    if rows not in get_args(RowUnit):
        raise ValueError(
            f"rows must be one of {', '.join(map(repr, get_args(RowUnit)))}; got {rows!r}."
        )


def require_word_ids(rows: str, word_ids: object) -> None:
    """Raise ValueError unless ``rows`` is a `RowUnit` and ``word_ids`` are given, that is not None,
    just for words.
    """
    require_row_unit(rows)
    if rows == "words" and word_ids is None:
        raise ValueError(
            'rows="words" needs word_ids; got none. Give word_ids=, the number of each token\'s '
            "word (a tokenizer's word_ids()), with -1 for tokens of no word."
        )
    if rows != "words" and word_ids is not None:
        raise ValueError(f'word_ids go with rows="words"; got rows={rows!r}. Leave them out.')


def one_text_a_row(
    hidden: Tensor, token_ids: Tensor | None, mask: Tensor | None, sequence_ids: Tensor
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Put texts that are packed into one row of the batch, by ascending ``sequence_ids``, into rows
    of their own, with padding behind that does not count; what is not packed stays as it is.
    """
    counts = sequence_ids.flatten().bincount()
    if hidden.ndim != 3 or len(counts) <= len(hidden):
        return hidden, token_ids, mask
    lengths = counts.tolist()
    mask = torch.ones(hidden.shape[:2], dtype=torch.bool, device="cpu") if mask is None else mask

    def padded(values: Tensor) -> Tensor:
        return pad_sequence([*values.flatten(0, 1).split(lengths)], batch_first=True)

    return padded(hidden), None if token_ids is None else padded(token_ids), padded(mask)


def pool_tokens(
    hidden: Tensor,
    token_ids: Tensor | None,
    mask: Tensor | None,
    rows: Literal["tokens", "mean", "max", "first", "last"],
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Reduce each sequence to one row of the tokens that count: their mean or maximum, or the first
    or last of them.

    Means are summed in float64 and are float32 at least. States (batch, positions, d), ids and mask
    become those of the sequences: no ids for means and maxima; a mask, False where no token counts,
    or None. All is kept for ``"tokens"``. Ids and masks are best on the CPU: no device is then
    waited for.
    """
    if rows == "tokens":
        return hidden, token_ids, mask
    if hidden.ndim != 3:
        raise ValueError(
            f"rows={rows!r} needs hidden states of shape (batch, positions, d); got "
            f"{tuple(hidden.shape)}. "
            'Leave the layer out, or take rows="tokens".'
        )
    token_ids, mask = on_cpu(token_ids, mask)
    counts = torch.ones(hidden.shape[:2], dtype=torch.bool, device="cpu") if mask is None else mask
    some = counts.any(1)
    kept = None if bool(some.all()) else some
    if hidden.shape[1] == 0 and rows != "mean":
        return hidden.new_zeros(len(hidden), hidden.shape[2]), None, kept
    if rows in ("mean", "max"):
        left_out = ~counts[..., None].to(hidden.device)
        if rows == "max":
            return hidden.masked_fill(left_out, -torch.inf).amax(1), None, kept
        total = hidden.masked_fill(left_out, 0).sum(1, dtype=accumulator_dtype(hidden.device))
        mean = total / counts.sum(1, keepdim=True).clamp(min=1).to(hidden.device)
        return mean.to(torch.promote_types(hidden.dtype, torch.float32)), None, kept
    place = (
        counts.int().argmax(1)
        if rows == "first"
        else hidden.shape[1] - 1 - counts.int().flip(1).argmax(1)
    )
    sequence = torch.arange(len(hidden), device="cpu")
    ids = None if token_ids is None else token_ids[sequence, place]
    return hidden[sequence.to(hidden.device), place.to(hidden.device)], ids, kept


class Words(NamedTuple):
    """The words of a batch that have a token that counts, by sequence and number."""

    # of the tokens that count and are of a word, among all tokens of the batch, shape (m,)
    places: Tensor
    words: Tensor  # the word of each of these tokens, shape (m,)
    num_tokens: Tensor  # number of these tokens in each word, shape (n,)
    ids: RowIds  # the words' types, None where there are neither token ids nor types, and sequences

    def means(self, hidden: Tensor) -> Tensor:
        """The mean of each word's tokens, shape (n, d), summed in float64 and float32 at least."""
        rows = hidden.reshape(-1, hidden.shape[-1])
        rows = rows.float() if rows.dtype.itemsize == 1 else rows  # float8 has no arithmetic
        total = rows.new_zeros(
            len(self.num_tokens), rows.shape[1], dtype=accumulator_dtype(rows.device)
        )
        total.index_add_(0, self.words, rows[self.places].to(total.dtype))
        return (total / self.num_tokens[:, None]).to(torch.promote_types(rows.dtype, torch.float32))


def find_words(
    device: torch.device,
    word_ids: Tensor,
    sequence_ids: Tensor,
    *,
    token_ids: Tensor | None = None,
    types: Tensor | None = None,
    mask: Tensor | None = None,
) -> Words:
    """Find the tokens of each word, whose mean is a row, as in Yamagiwa & Shimodaira 2025, appendix
    J.

    A word's type is that of its first token in ``types`` or, without, its spelling in
    ``token_ids``, masked ones among them. Tokens with negative word ids are of none; sequence ids
    are not negative.
    """
    of_tokens = token_ids if types is None else types
    found = on_cpu(word_ids, sequence_ids, mask, of_tokens)
    words, sequences, marks, ids_of_tokens = (
        None if each is None else each.reshape(-1) for each in found
    )
    assert words is not None
    assert sequences is not None
    words, sequences = words.to(torch.int64), sequences.to(torch.int64)
    place = (words >= 0).nonzero().flatten()
    numbers, number = words[place].unique(return_inverse=True)
    keys, word = (sequences[place] * len(numbers) + number).unique(return_inverse=True)
    counts = slice(None) if marks is None else marks[place]
    num_tokens = word[counts].bincount(minlength=len(keys))
    kept = num_tokens > 0
    row = (kept.cumsum(0) - 1)[word[counts]]
    sequence_of_word = keys.div(max(1, len(numbers)), rounding_mode="floor")
    type_of_word = None
    if ids_of_tokens is not None:
        order = word.argsort(stable=True)
        ids, lengths = ids_of_tokens[place[order]].to(torch.int64), word.bincount()
        type_of_word = (
            spellings(ids, lengths) if types is None else ids[lengths.cumsum(0) - lengths]
        )[kept]
    ids_of_words = RowIds.of(BatchIds(type_of_word, sequence_of_word[kept]))
    return Words(
        place[counts].to(device), row.to(device), num_tokens[kept].to(device), ids_of_words
    )


def spellings(token_ids: Tensor, lengths: Tensor) -> Tensor:
    """A number for each word, equal for equal ids in equal order: a polynomial in its token ids,
    word after word.

    The number of a single id is the id. Different words of up to two ids below 2 ** 18 never have
    equal numbers; that any two of T longer ones do has a probability of about T² / 2 ** 64. Lengths
    are at least 1.
    """
    if not len(lengths):
        return lengths
    word = torch.arange(len(lengths), device=token_ids.device).repeat_interleave(lengths)
    position = (
        torch.arange(len(token_ids), device=token_ids.device) - (lengths.cumsum(0) - lengths)[word]
    )
    powers = torch.full((int(lengths.max()),), _BASE, device=token_ids.device)
    powers[0] = 1
    # a word that goes on, with id 0, is another one
    terms = (token_ids + (position > 0)) * powers.cumprod(0)[position]
    return torch.zeros_like(lengths).index_add_(0, word, terms) & torch.iinfo(torch.int64).max
