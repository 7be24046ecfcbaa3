"""Widths of layers, and sources of token ids and masks, by a forward pass; also of a model on the
meta device.
"""

import inspect
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from embedgeo.capture.calls import eager_mode, first_float, first_input
from embedgeo.capture.forward_inputs import ForwardInputs, LayerRows
from embedgeo.capture.layers import Layer
from embedgeo.capture.structure import is_callable, is_hugging_face, measured_model

_SHAPE = 2, 8  # sequences and positions of synthetic token ids
_MASKS = ("src_key_padding_mask", "tgt_key_padding_mask", "attention_mask")


@dataclass
class Inspection:
    """Findings of a forward pass."""

    # of the layers that were reached, by name
    hidden: dict[str, torch.Size] = field(default_factory=dict)
    # tables called, and shapes of the ids
    token_ids: list[tuple[nn.Module, torch.Size]] = field(default_factory=list)
    # the outermost modules called with one, and the argument's name
    masks: dict[nn.Module, str] = field(default_factory=dict)
    error: Exception | None = None  # where some layers were not reached

    def has_token_rows(self, layer: Layer) -> bool:
        """Tell whether some of the token ids are those of the layer's rows."""
        rows = LayerRows(layer, self.hidden[layer.name][:-1])
        return any(
            rows.fit(torch.empty(shape, device="meta")) is not None for _, shape in self.token_ids
        )

    def add_input(self, layer: Layer, _: nn.Module, args: Any, kwargs: Any) -> None:
        """Note the hidden state that the module of a layer is given."""
        if (hidden := first_input(args, kwargs)) is not None:
            self.hidden[layer.name] = hidden.shape

    def add_output(self, layer: Layer, _: nn.Module, args: Any, output: Any) -> None:
        """Note the hidden state that the module of a layer gives."""
        if (hidden := first_float(output)) is not None:
            self.hidden[layer.name] = hidden.shape

    def add_mask(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note the mask that a module is called with, unless one around it was given one."""
        given = {**inspect.signature(module.forward).bind_partial(*args).arguments, **kwargs}
        is_inside = any(module in outer.modules() for outer in self.masks)
        for name in _MASKS:
            value = given.get(name)
            if isinstance(value, Tensor) and value.ndim == 2 and not is_inside:
                self.masks.setdefault(module, name)

    def runs(self, module: nn.Module, batch: Any) -> bool:
        """Run a module on a batch; tell whether it could be, and keep the first error."""
        try:
            module(**batch) if hasattr(batch, "keys") else module(batch)
        except Exception as error:
            self.error = self.error or error
            return False
        return True


def inspect_forward(model: nn.Module, layers: Sequence[Layer], batch: Any = None) -> Inspection:
    """Run a model without gradients, on a batch (a mapping by keyword) or on a few token ids.

    Where the measured model cannot be run on these, the first of the modules inside that can is.
    """
    inputs = ForwardInputs(model)
    found = Inspection()
    with ExitStack() as hooks, torch.no_grad():
        hooks.enter_context(eager_mode)
        for module in inputs.enclosing_modules:
            hooks.enter_context(module.register_forward_pre_hook(found.add_mask, with_kwargs=True))
        for table in inputs.tables:
            hooks.enter_context(
                table.register_forward_hook(inputs.record_token_ids, with_kwargs=True)
            )
        for layer in layers:
            call = layer.calls[-1]
            hooks.enter_context(
                call.module.register_forward_pre_hook(
                    partial(found.add_input, layer), with_kwargs=True
                )
                if call.takes_input
                else call.module.register_forward_hook(partial(found.add_output, layer))
            )
        for module in dict.fromkeys((measured_model(model), *inputs.enclosing_modules)):
            batches = _token_batches(module) if batch is None else [batch]
            if is_callable(module) and any(found.runs(module, each) for each in batches):
                break
    found.token_ids = [*inputs.token_ids]
    if all(layer.name in found.hidden for layer in layers):
        found.error = None
    return found


def _token_batches(module: nn.Module) -> list[Any]:
    """A few token ids, as a Hugging Face model takes them, with masks and without, or as the only
    argument.
    """
    device = next((weight.device for weight in module.parameters()), None)
    ids = torch.zeros(_SHAPE, dtype=torch.int64, device=device)
    if not is_hugging_face(module):
        return [ids]
    given = {"input_ids": ids}
    if getattr(module.config, "is_encoder_decoder", False):
        given["decoder_input_ids"] = ids
    taken = inspect.signature(module.forward).parameters
    masks = {"attention_mask", "decoder_attention_mask"} & taken.keys()
    return [given | dict.fromkeys(masks, ids + 1), given]
