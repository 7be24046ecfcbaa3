"""From hidden states of any shape and dtype, with a mask, to the rows that count."""

from collections.abc import Iterable
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from embedgeo.functional.precision import accumulator_dtype, matmul_precision

RowUnit = Literal["tokens", "mean", "first", "last", "words"]
"""What a row is: a token; a sequence, as the mean of its tokens, its first token or its last one; or a word."""


class Rows(NamedTuple):
    """The rows of one batch that count.

    Attributes:
        embeddings: shape (n, d), floating point, finite, detached.
        token_ids: shape (n,), int64, or None where none were given.
        sequence_ids: shape (n,), int64, or None where each row is a sequence of its own.
        num_nonfinite: number of rows that the mask kept but that had a NaN or Inf.
        finite: shape (n + num_nonfinite,), bool, which of the rows that the mask kept these are; None: all of them.
    """

    embeddings: Tensor
    token_ids: Tensor | None
    sequence_ids: Tensor | None
    num_nonfinite: int
    finite: Tensor | None = None

    def select(self, keep: Tensor) -> "Rows":
        """The rows for which ``keep``, shape (n,), is true."""
        ids, sequences = (None if t is None else t[keep] for t in (self.token_ids, self.sequence_ids))
        return Rows(self.embeddings[keep], ids, sequences, self.num_nonfinite)

    @property
    def num_sequences(self) -> int:
        """Number of sequences that have rows that count."""
        return len(self.embeddings if self.sequence_ids is None else self.sequence_ids.unique())


def select_rows(
    embeddings: Tensor,
    token_ids: Tensor | None = None,
    mask: Tensor | None = None,
    sequence_ids: Tensor | None = None,
    *,
    dim: int,
) -> Rows:
    """Flatten a batch to rows, and drop masked rows and rows with a NaN or Inf.

    Args:
        embeddings: shape (..., d), any floating dtype.
        token_ids: shape (...), any integer dtype.
        mask: shape (...), bool or 0/1; True = count this row.
        sequence_ids: shape (...), any integer dtype; default: each index of the leading axis of three or more is a
            sequence, and each row of an (n, d) input is one of its own.
        dim: the expected d.

    Raises:
        TypeError: embeddings are not floating point, or token or sequence ids not integers.
        ValueError: a shape that does not match, or a mask with other values than 0 and 1.

    >>> select_rows(torch.eye(3), mask=torch.tensor([1, 0, 1]), dim=3).embeddings.shape
    torch.Size([2, 3])
    """
    if not isinstance(embeddings, Tensor) or not embeddings.is_floating_point():
        got = embeddings.dtype if isinstance(embeddings, Tensor) else type(embeddings).__name__
        raise TypeError(f"embeddings must be a floating-point tensor; got {got}. Pass hidden states, not ids.")
    if embeddings.ndim == 0 or embeddings.shape[-1] != dim:
        raise ValueError(
            f"embeddings must have shape (..., {dim}); got {tuple(embeddings.shape)}. "
            f"Build the metric with dim= the last dimension of the embeddings."
        )
    rows = embeddings.detach().reshape(-1, dim)
    if rows.dtype.itemsize == 1:  # float8 has no arithmetic
        rows = rows.float()
    if sequence_ids is None and embeddings.ndim > 2:
        sequence_ids = sequence_numbers(embeddings.shape[:-1])
    ids, sequences = (
        None if given is None else _integers(name, given, embeddings)
        for name, given in (("token_ids", token_ids), ("sequence_ids", sequence_ids))
    )
    kept = Rows(rows, ids, sequences, 0)
    if mask is not None:
        _require_shape("mask", mask, embeddings)
        if mask.dtype != torch.bool and not bool(((mask == 0) | (mask == 1)).all()):
            raise ValueError("mask must be bool or hold only 0 and 1 (1 = count this row); got other values.")
        keep = mask.bool().reshape(-1).to(rows.device)
        kept = kept.select(keep)
    finite = _finite(kept.embeddings)
    if finite is None:
        return kept
    return kept.select(finite)._replace(num_nonfinite=int((~finite).sum()), finite=finite)


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
    hidden: Tensor, token_ids: Tensor | None, mask: Tensor | None, rows: Literal["tokens", "mean", "first", "last"]
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Reduce each sequence to one row: the mean of the tokens that count, or the first or last of them.

    For words see `embedgeo.functional.words.pool_words`.

    Args:
        hidden: shape (batch, positions, d), any floating dtype; (..., d) for ``"tokens"``.
        token_ids: shape (batch, positions), or None.
        mask: shape (batch, positions), bool, True = this token counts; None if all do.
        rows: the row unit; ``"tokens"`` returns the arguments as they are.

    Returns:
        Hidden states, shape (batch, d), where means are summed in float64 and are float32 at least; the ids of the
        tokens, shape (batch,), None for means; and a mask, shape (batch,), False for sequences in which no token
        counts, or None if there are none.

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
    place = counts.int().argmax(1) if rows == "first" else hidden.shape[1] - 1 - counts.int().flip(1).argmax(1)
    sequence = torch.arange(len(hidden), device=hidden.device)
    ids = None if token_ids is None else token_ids.to(hidden.device)[sequence, place]
    return hidden[sequence, place], ids, kept


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


def _finite(rows: Tensor) -> Tensor | None:
    """Which rows are finite, or None where all are: one matrix-vector product in the usual case."""
    with matmul_precision(rows.device):
        total = rows @ rows.new_ones(rows.shape[1])
    if bool(torch.isfinite(total).all()):
        return None
    finite = torch.isfinite(rows).all(dim=1)  # a sum may overflow although every term is finite
    return None if bool(finite.all()) else finite
