"""What depends on the ids and the mask of rows alone, and not on their embeddings: the same at every layer."""

from functools import cached_property

import torch
from torch import Tensor

from embedgeo.functional.order import TokenOrder


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
