"""What a model was given in a forward pass: token ids and masks, in the order of the rows of a hidden state."""

import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from embedgeo.capture.layers import Layer
from embedgeo.capture.structure import contains_any, enclosing_modules, measured_model, submodels, token_tables
from embedgeo.functional.rows import sequence_numbers, sequence_positions

_PADDING_MASKS = ("src_key_padding_mask", "tgt_key_padding_mask")
"""Arguments of torch's own transformer modules; True, or minus infinity in an additive mask, is padding."""


class _RunningCall(NamedTuple):
    """A call of an enclosing module that has not returned yet, and what its arguments say about the rows."""

    module: nn.Module
    mask: Tensor | None
    position_ids: Tensor | None


class ForwardInputs:
    """Token ids and masks of the current forward pass, read from the arguments of module calls.

    Token ids are what an embedding table is called with. The mask and the position ids are arguments of the outermost
    module called (in an encoder-decoder model: of the encoder and of the decoder), or else of a module inside it.

    Args:
        model: any module.
        skip_first_positions: leave out this many real positions at the start of every sequence.
        ignore_token_ids: leave out these token ids.

    Attributes:
        tables: the embedding tables, whose calls `record_token_ids` records.
        enclosing_modules: the modules around the blocks, whose calls `begin_call` and `end_call` record.

    Raises:
        TypeError, ValueError: as `require_exclusions` does.
    """

    def __init__(self, model: nn.Module, skip_first_positions: int = 0, ignore_token_ids: Sequence[int] = ()) -> None:
        require_exclusions(skip_first_positions, ignore_token_ids)
        self._skip_first_positions = skip_first_positions
        self._ignore_token_ids = list(ignore_token_ids)
        self._is_hugging_face = isinstance(measured_model(model), PreTrainedModel)
        parts = submodels(model).values()
        self.tables = list(dict.fromkeys(table for part in parts for table in token_tables(part)))
        self.enclosing_modules = list(dict.fromkeys(module for part in parts for module in enclosing_modules(part)))
        self._embedding_modules = {module for module in self.enclosing_modules if contains_any(module, self.tables)}
        self.reset()

    def reset(self) -> None:
        """Forget the current forward pass."""
        self._running: list[_RunningCall] = []  # the outermost call first
        self._token_ids: dict[tuple[nn.Module, torch.Size], Tensor] = {}
        self._begin_forward()

    def _begin_forward(self) -> None:
        """Keep only what the running calls are given."""
        self._mask = next((call.mask for call in self._running if call.mask is not None), None)
        self._position_ids = next((call.position_ids for call in self._running if call.position_ids is not None), None)
        self._called = {call.module for call in self._running}
        self._aligned: dict[tuple[torch.Size, bool], tuple[Tensor | None, Tensor | None]] = {}

    def begin_call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Record the arguments of a call of an enclosing module; returns whether a forward pass begins with it.

        One begins with the outermost call, and where a module inside it is called once more, on another batch.
        """
        self.end_call(module)  # torch runs no hook after an interrupt: the interrupted call is still recorded
        begins = not self._running or module in self._called
        if begins:
            self._begin_forward()
            if module in self._embedding_modules:  # otherwise the token ids were looked up before this call
                self._token_ids = {}
        call = _RunningCall(module, *_mask_and_position_ids(module, args, kwargs))
        if self._mask is None and call.mask is not None:
            self._mask, self._aligned = call.mask, {}
        if self._position_ids is None:
            self._position_ids = call.position_ids
        self._running.append(call)
        self._called.add(module)
        return begins

    def end_call(self, module: nn.Module, *call: Any) -> None:
        """Record that an enclosing module has returned or raised."""
        running = [call.module for call in self._running]
        if module in running:
            del self._running[running.index(module) :]

    def record_token_ids(self, table: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record the token ids that an embedding table is called with."""
        ids = args[0] if args else kwargs.get("input", kwargs.get("input_ids"))
        if isinstance(ids, Tensor) and not ids.is_floating_point():
            self._token_ids[table, ids.shape], self._aligned = ids, {}

    def align(
        self, layer: Layer, hidden: Tensor, token_ids: Tensor | None = None, mask: Tensor | None = None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Token ids and mask of the rows of a hidden state.

        Args:
            layer: the layer.
            hidden: its hidden state, shape (..., d), batch first.
            token_ids: used instead of those that the model was given; may also be in the order of the model's rows.
            mask: used instead of the one that the model was given; in either order, too.

        Returns:
            The token ids, shape (...), or None if there are none; and the mask, shape (...), True = count this row, or
            None if all rows count.

        Raises:
            TypeError: ``token_ids`` are not integers.
            ValueError: there is not a row for each token, or nothing tells which rows to leave out.
        """
        key = hidden.shape[:-1], layer.positions_first
        if key not in self._aligned:
            rows = _LayerRows(layer, hidden.shape[:-1])
            token_ids = self._fitting_token_ids(rows, token_ids)
            mask = self._fitting_mask(rows, token_ids, mask, hidden.device)
            if mask is not None and bool(mask.all()):
                mask = None
            token_ids, mask = (None if t is None else t.reshape(rows.shape) for t in (token_ids, mask))
            self._aligned[key] = token_ids, mask
        return self._aligned[key]

    def sequence_ids(self, shape: torch.Size) -> Tensor:
        """The sequence of each row of a hidden state: see `embedgeo.functional.rows.sequence_numbers`."""
        return sequence_numbers(shape, self._position_ids, self._token_ids.values())

    def _fitting_token_ids(self, rows: "_LayerRows", given: Tensor | None) -> Tensor | None:
        """The given token ids, or those recorded; of several tables' (segments), the ids of the largest table."""
        if given is not None:
            if given.is_floating_point():
                raise TypeError(f"token_ids must be an integer tensor; got {given.dtype}.")
            return rows.require_fit(given, "token ids")
        recorded = [(getattr(table, "num_embeddings", 0), ids) for (table, _), ids in self._token_ids.items()]
        if not self._is_hugging_face:
            recorded = [(size, ids) for size, ids in recorded if not _are_position_indices(ids)]
        fitting = [(size, fitted) for size, ids in recorded if (fitted := rows.fit(ids)) is not None]
        if not fitting:
            return rows.require_fit(recorded[0][1], "token ids") if recorded else None
        if rows.layer.positions_first and rows.shape == rows.shape[::-1] and rows.shape[0] > 1:
            raise ValueError(
                f"layer {rows.layer.name!r} must tell sequences from positions to find its token ids; there are "
                f"{rows.shape[0]} of both. Give token_ids= in the order of its rows, (positions, batch), or use "
                "batch_first=True."
            )
        return max(fitting, key=lambda each: each[0])[1]

    def _fitting_mask(
        self, rows: "_LayerRows", token_ids: Tensor | None, mask: Tensor | None, device: torch.device
    ) -> Tensor | None:
        """The given mask, or the recorded one, without the positions and token ids to leave out."""
        if mask is not None:
            mask = rows.require_fit(mask, "mask") != 0
        elif self._mask is not None:
            covers_cache = token_ids is not None and _covers_cached_positions(self._mask, token_ids)
            mask = self._mask if covers_cache else rows.require_fit(self._mask, "mask", is_batch_first=True)
        if self._skip_first_positions:
            mask = self._without_first_positions(rows, token_ids, mask, device)
        if self._ignore_token_ids:
            if token_ids is None:
                raise ValueError("ignore_token_ids needs token ids; the model was given none. Give token_ids=.")
            kept = ~torch.isin(token_ids, torch.tensor(self._ignore_token_ids, device=token_ids.device))
            mask = kept if mask is None else mask[..., -kept.shape[-1] :].to(kept.device) & kept
        return mask if mask is None or token_ids is None else mask[..., -token_ids.shape[-1] :]

    def _without_first_positions(
        self, rows: "_LayerRows", token_ids: Tensor | None, mask: Tensor | None, device: torch.device
    ) -> Tensor:
        if mask is None and token_ids is not None:
            mask = torch.ones_like(token_ids, dtype=torch.bool)
        elif mask is None and len(rows.shape) == 2 and (self._is_hugging_face or rows.layer.positions_first):
            mask = torch.ones(rows.shape, dtype=torch.bool, device=device)
        if mask is None or mask.ndim != 2:
            raise ValueError(
                "skip_first_positions needs token ids or a mask of shape (batch, positions); found none. "
                "Give token_ids= or mask=."
            )
        position_ids = self._position_ids
        if position_ids is not None and position_ids.shape not in (mask.shape, (1, mask.shape[1])):
            position_ids = None
        return mask & (sequence_positions(mask, position_ids) > self._skip_first_positions)


class _LayerRows(NamedTuple):
    """The rows of a layer's hidden state; the shape is the hidden state's without its last dimension."""

    layer: Layer
    shape: torch.Size

    def fit(self, tensor: Tensor, *, is_batch_first: bool = False) -> Tensor | None:
        """Token ids or a mask in the order of the rows; None if there is not one for each row.

        If the model has positions first, they may be (positions, batch), unless they are known to be batch first.
        """
        if self.layer.positions_first and not is_batch_first and tensor.ndim == 2 and tensor.T.shape == self.shape:
            return tensor.T
        is_flat = len(self.shape) == 1 and tensor.numel() == self.shape[0]
        return tensor if tensor.shape == self.shape or is_flat else None

    def require_fit(self, tensor: Tensor, what: str, *, is_batch_first: bool = False) -> Tensor:
        fitted = self.fit(tensor, is_batch_first=is_batch_first)
        if fitted is None:
            raise ValueError(
                f"layer {self.layer.name!r} must have a row for each token; its rows have shape {tuple(self.shape)}, "
                f"the {what} {tuple(tensor.shape)}. Leave the layer out, or give token_ids= and mask= in the order of "
                "its rows."
            )
        return fitted


def require_exclusions(skip_first_positions: int, ignore_token_ids: Sequence[int]) -> None:
    """Check what to leave out: TypeError if the token ids are not integers, ValueError if the number is negative."""
    if isinstance(ignore_token_ids, int) or not all(isinstance(token, int) for token in ignore_token_ids):
        raise TypeError(f"ignore_token_ids must be a list of integers; got {ignore_token_ids!r}.")
    if skip_first_positions < 0:
        raise ValueError(f"skip_first_positions must not be negative; got {skip_first_positions}.")


def _mask_and_position_ids(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Tensor | None, Tensor | None]:
    """The mask (True = count) and the position ids that a module is called with, if of shape (batch, positions)."""
    if args:
        kwargs = {**inspect.signature(module.forward).bind_partial(*args).arguments, **kwargs}
    padding = next((kwargs[name] for name in _PADDING_MASKS if kwargs.get(name) is not None), None)
    mask = kwargs.get("attention_mask") if padding is None else padding.logical_not()
    both = mask, kwargs.get("position_ids")
    mask, position_ids = (t if isinstance(t, Tensor) and t.ndim == 2 else None for t in both)
    return None if mask is None else mask != 0, position_ids


def _covers_cached_positions(mask: Tensor, token_ids: Tensor) -> bool:
    """Whether a mask has more positions than there are token ids: those before are in the cache of keys and values."""
    return token_ids.ndim == 2 and mask.shape[0] == token_ids.shape[0] and mask.shape[1] > token_ids.shape[1]


def _are_position_indices(ids: Tensor) -> bool:
    """Whether the ids are 0, 1, 2 … along the last dimension or the first: a table of positions is called with them."""
    return ids.ndim > 0 and any(
        torch.equal(each, torch.arange(each.shape[-1], dtype=each.dtype, device=each.device).expand_as(each))
        for each in (ids, ids.transpose(0, -1))
    )
