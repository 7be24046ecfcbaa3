"""What the forward pass under way was given: token ids and masks, in the order of a hidden state's rows."""

import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from embedgeo.capture.layers import Layer
from embedgeo.capture.structure import contains_any, enclosing_modules, measured_model, submodels, token_tables
from embedgeo.functional.rows import sequence_positions

_PADDING = ("src_key_padding_mask", "tgt_key_padding_mask")
"""Arguments of torch's own stacks; True (or minus infinity, to be added) = padding."""


class _Call(NamedTuple):
    """What a caller is called with, while it runs."""

    module: nn.Module
    mask: Tensor | None
    position_ids: Tensor | None


class ForwardInputs:
    """Token ids and masks of the forward pass under way, read from the calls of modules.

    Token ids are what a table of embeddings is called with; the mask and the position ids are arguments of the
    outermost module called (in an encoder-decoder model: of the encoder, of the decoder), or else of one inside it.

    Args:
        model: any module.
        skip_first_positions: leave out this many real positions at the start of every sequence.
        ignore_token_ids: leave out these token ids.

    Raises:
        TypeError: ``ignore_token_ids`` are not integers.
        ValueError: ``skip_first_positions`` is negative.
    """

    def __init__(self, model: nn.Module, skip_first_positions: int = 0, ignore_token_ids: Sequence[int] = ()) -> None:
        if isinstance(ignore_token_ids, int) or not all(isinstance(token, int) for token in ignore_token_ids):
            raise TypeError(f"ignore_token_ids must be a list of integers; got {ignore_token_ids!r}.")
        if skip_first_positions < 0:
            raise ValueError(f"skip_first_positions must not be negative; got {skip_first_positions}.")
        self._skip = skip_first_positions
        self._ignore = list(ignore_token_ids)
        self._is_hugging_face = isinstance(measured_model(model), PreTrainedModel)
        parts = submodels(model).values()
        self.tables = list(dict.fromkeys(table for side in parts for table in token_tables(side)))
        self.enclosing_modules = list(dict.fromkeys(module for side in parts for module in enclosing_modules(side)))
        self._embedders = {module for module in self.enclosing_modules if contains_any(module, self.tables)}
        self.forget()

    def forget(self) -> None:
        """Forget the forward pass."""
        self._inside: list[_Call] = []
        self._called: set[nn.Module] = set()
        self._ids: dict[tuple[nn.Module, torch.Size], Tensor] = {}
        self._begin()

    def _begin(self) -> None:
        self._mask = next((call.mask for call in self._inside if call.mask is not None), None)
        self._position_ids = next((call.position_ids for call in self._inside if call.position_ids is not None), None)
        self._called = {call.module for call in self._inside}
        self._rows: dict[tuple[torch.Size, bool], tuple[Tensor | None, Tensor | None]] = {}

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Take the arguments of a caller that is called; returns whether a forward pass begins here.

        One begins at the outermost call, and inside it where a caller is called again, as on another sequence.
        """
        self.leave(module)  # still inside only if it was interrupted: torch calls no hook then
        begins = not self._inside or module in self._called
        if begins:
            self._begin()
            if module in self._embedders:  # else they were looked up before
                self._ids = {}
        if args:
            kwargs = {**inspect.signature(module.forward).bind_partial(*args).arguments, **kwargs}
        padding = next((kwargs[name] for name in _PADDING if kwargs.get(name) is not None), None)
        found = kwargs.get("attention_mask") if padding is None else padding.logical_not()
        mask = found != 0 if isinstance(found, Tensor) and found.ndim == 2 else None
        found = kwargs.get("position_ids")
        call = _Call(module, mask, found if isinstance(found, Tensor) and found.ndim == 2 else None)
        if self._mask is None and call.mask is not None:
            self._mask, self._rows = call.mask, {}
        if self._position_ids is None:
            self._position_ids = call.position_ids
        self._inside.append(call)
        self._called.add(module)
        return begins

    def leave(self, module: nn.Module, *call: Any) -> None:
        """A caller has returned, or raised."""
        modules = [call.module for call in self._inside]
        if module in modules:
            del self._inside[modules.index(module) :]

    def look_up(self, table: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Take the token ids that a table is called with."""
        ids = args[0] if args else kwargs.get("input", kwargs.get("input_ids"))
        if isinstance(ids, Tensor) and not ids.is_floating_point():
            self._ids[table, ids.shape], self._rows = ids, {}

    def rows(
        self, layer: Layer, hidden: Tensor, token_ids: Tensor | None = None, mask: Tensor | None = None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Token ids, and mask of the rows that count, in the shape of the rows of a layer's hidden state.

        Args:
            layer: the layer.
            hidden: shape (..., d).
            token_ids: in place of those that the model was given; in the order of the rows.
            mask: likewise.
        """
        shape = hidden.shape[:-1]
        key = shape, layer.positions_first
        if key not in self._rows:
            ids, kept = self._sequences(layer, shape, hidden.device, token_ids, mask)
            if kept is not None and bool(kept.all()):
                kept = None
            turned = layer.positions_first and len(shape) == 2
            ids, kept = (None if t is None else (t.T if turned else t).reshape(shape) for t in (ids, kept))
            self._rows[key] = ids, kept
        return self._rows[key]

    def _sequences(
        self, layer: Layer, shape: torch.Size, device: torch.device, token_ids: Tensor | None, mask: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Both in the shape (batch, positions); without what is to be left out."""
        if token_ids is None:
            token_ids = self._given_ids(layer, shape)
        elif token_ids.is_floating_point():
            raise TypeError(f"token_ids must be an integer tensor; got {token_ids.dtype}.")
        else:
            token_ids = _required(_fitted(token_ids, layer, shape), layer, shape, token_ids, "token ids")
        if mask is not None:
            mask = _required(_fitted(mask, layer, shape), layer, shape, mask, "mask") != 0
        elif self._mask is not None:
            cached = token_ids is not None and _is_longer(self._mask, token_ids)
            fitted = self._mask if cached else _fitted(self._mask, layer, shape, in_rows=False)
            mask = _required(fitted, layer, shape, self._mask, "mask")
        if self._skip:
            mask = self._without_first(layer, shape, device, token_ids, mask)
        if self._ignore:
            if token_ids is None:
                raise ValueError("ignore_token_ids needs token ids; the model was given none. Give token_ids=.")
            kept = ~torch.isin(token_ids, torch.tensor(self._ignore, device=token_ids.device))
            mask = kept if mask is None else mask[..., -kept.shape[-1] :].to(kept.device) & kept
        return token_ids, mask if mask is None or token_ids is None else mask[..., -token_ids.shape[-1] :]

    def _given_ids(self, layer: Layer, shape: torch.Size) -> Tensor | None:
        """What fits of the token ids seen; of several tables' (segments), the largest one's."""
        seen = [(getattr(table, "num_embeddings", 0), ids) for (table, _), ids in self._ids.items()]
        if not self._is_hugging_face:
            seen = [(size, ids) for size, ids in seen if not _counts(ids)]
        fitting = [(size, ids) for size, ids in seen if _fitted(ids, layer, shape) is not None]
        if not fitting:
            return _required(None, layer, shape, seen[0][1], "token ids") if seen else None
        if layer.positions_first and shape == shape[::-1] and shape[0] > 1:
            raise ValueError(
                f"layer {layer.name!r} must tell sequences from positions to find its token ids; there are {shape[0]} "
                "of both. Give token_ids= in the order of its rows, (positions, batch), or use batch_first=True."
            )
        return _fitted(max(fitting, key=lambda each: each[0])[1], layer, shape)

    def _without_first(
        self, layer: Layer, shape: torch.Size, device: torch.device, token_ids: Tensor | None, mask: Tensor | None
    ) -> Tensor:
        real = mask
        if real is None and token_ids is not None:
            real = torch.ones_like(token_ids, dtype=torch.bool)
        elif real is None and len(shape) == 2 and (self._is_hugging_face or layer.positions_first):
            real = torch.ones(shape[::-1] if layer.positions_first else shape, dtype=torch.bool, device=device)
        if real is None or real.ndim != 2:
            raise ValueError(
                "skip_first_positions needs token ids or a mask of shape (batch, positions); found none. "
                "Give token_ids= or mask=."
            )
        numbered = self._position_ids
        if numbered is not None and numbered.shape not in (real.shape, (1, real.shape[1])):
            numbered = None
        return real & (sequence_positions(real, numbered) > self._skip)


def _fitted(tensor: Tensor, layer: Layer, shape: torch.Size, *, in_rows: bool = True) -> Tensor | None:
    """The tensor in the order (batch, positions); None where it has no element for each row.

    Args:
        tensor: token ids or mask.
        layer: whose hidden state it is for.
        shape: the hidden state's, without the last dimension.
        in_rows: it may be in the order of the rows; where that is (positions, batch), it is turned.
    """
    if layer.positions_first and len(shape) == 2:
        if in_rows and tensor.shape == shape:
            return tensor.T
        return tensor if tensor.shape == shape[::-1] else None
    return tensor if tensor.shape == shape or (len(shape) == 1 and tensor.numel() == shape[0]) else None


def _required(fitted: Tensor | None, layer: Layer, shape: torch.Size, tensor: Tensor, what: str) -> Tensor:
    if fitted is None:
        raise ValueError(
            f"layer {layer.name!r} must have a row for each token; its rows have shape {tuple(shape)}, the {what} "
            f"{tuple(tensor.shape)}. Leave the layer out, or give token_ids= and mask= in the order of its rows."
        )
    return fitted


def _is_longer(mask: Tensor, token_ids: Tensor) -> bool:
    """Whether a mask has more positions than there are tokens: those that a cache of keys and values holds."""
    return token_ids.ndim == 2 and mask.shape[0] == token_ids.shape[0] and mask.shape[1] > token_ids.shape[1]


def _counts(ids: Tensor) -> bool:
    """Whether they only number the positions, along the last dimension or the first."""
    places = (ids, ids.transpose(0, -1)) if ids.ndim else ()
    return any(
        torch.equal(each, torch.arange(each.shape[-1], dtype=each.dtype, device=each.device).expand_as(each))
        for each in places
    )
