"""From hidden states of any shape and dtype, with a mask, to the rows that count."""

from collections.abc import Iterable
from typing import Literal, get_args

import torch
from torch import Tensor

from embedgeo.functional.precision import accumulator_dtype
from embedgeo.functional.row_ids import RowIds, row_ids

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

    A maximum is taken in each coordinate (Conneau et al. 2017). For words see `embedgeo.functional.words.pool_words`.

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
