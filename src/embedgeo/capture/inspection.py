"""Widths of layers, and sources of token ids and masks, by a forward pass; also of a model on the
meta device.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from embedgeo.capture.calls import eager_mode, first_float, first_input
from embedgeo.capture.forward_inputs import ForwardInputs, LayerRows
from embedgeo.capture.layers import Layer
from embedgeo.capture.structure import (
    is_callable,
    is_hugging_face,
    measured_model,
    model_width,
)

Arguments = tuple[tuple[Any, ...], dict[str, Any]]  # of a call, by position and by name
_SHAPE = 2, 8  # sequences and positions of synthetic inputs
_MASKS = ("src_key_padding_mask", "tgt_key_padding_mask", "attention_mask")


@dataclass
class Inspection:
    """Findings of a forward pass."""

    # rows of the largest embedding table of tokens; a large number where that is not known
    num_token_types: int
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

    def add_hidden(self, layer: Layer, hidden: Tensor) -> None:
        """Note the hidden state of a layer."""
        is_turned = layer.positions_first and hidden.ndim == 3
        self.hidden[layer.name] = hidden.transpose(0, 1).shape if is_turned else hidden.shape

    def add_mask(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note the mask that a module is called with, unless one around it was given one."""
        given = {**inspect.signature(module.forward).bind_partial(*args).arguments, **kwargs}
        is_inside = any(module in outer.modules() for outer in self.masks)
        for name in _MASKS:
            value = given.get(name)
            if isinstance(value, Tensor) and value.ndim == 2 and not is_inside:
                self.masks.setdefault(module, name)


def inspect_forward(model: nn.Module, layers: Sequence[Layer], batch: Any = None) -> Inspection:
    """Run a model without gradients, on a batch (a mapping by keyword) or on small synthetic
    inputs.
    """
    inputs = ForwardInputs(model)
    found = Inspection(inputs.num_token_types)
    with ExitStack() as hooks:
        hooks.enter_context(eager_mode)
        for module in inputs.enclosing_modules:
            hook = module.register_forward_pre_hook(found.add_mask, with_kwargs=True)
            hooks.callback(hook.remove)
        for table in inputs.tables:
            hook = table.register_forward_hook(inputs.record_token_ids, with_kwargs=True)
            hooks.callback(hook.remove)
        for layer in layers:
            call = layer.calls[-1]
            note = partial(found.add_hidden, layer)
            hooks.callback(_hooked(call.module, note, of_input=call.takes_input))
        error = _run_small(model, inputs.enclosing_modules, batch)
    found.token_ids = [*inputs.token_ids]
    if any(layer.name not in found.hidden for layer in layers):
        found.error = error
    return found


def _hooked(
    module: nn.Module, note: Callable[[Tensor], None], *, of_input: bool = False
) -> Callable[[], None]:
    """Have the hidden state that a module gives, or is given, noted; returns a function that
    removes the hook.
    """

    def read(
        _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any = None
    ) -> None:
        hidden = first_input(args, kwargs) if of_input else first_float(output)
        if hidden is not None:
            note(hidden)

    if of_input:
        return module.register_forward_pre_hook(read, with_kwargs=True).remove
    return module.register_forward_hook(read, with_kwargs=True).remove


def _run_small(
    model: nn.Module, modules: Sequence[nn.Module], batch: Any = None
) -> Exception | None:
    """Run the measured model, or else the first of the modules that can be run; returns the first
    error unless it was the measured model.
    """
    measured = measured_model(model)
    of_batch: Arguments = ((), dict(batch)) if hasattr(batch, "keys") else ((batch,), {})
    first: Exception | None = None
    for module in filter(is_callable, dict.fromkeys((measured, *modules))):
        for args, kwargs in _synthetic(module) if batch is None else [of_batch]:
            try:
                with torch.no_grad():
                    module(*args, **kwargs)
            except Exception as error:
                first = first or error
            else:
                return None if module is measured else first
    return first or ValueError("it has no forward()")


def _synthetic(module: nn.Module) -> Iterator[Arguments]:
    """Arguments that a model may take, one after the other: token ids with masks and without,
    embeddings.
    """
    weight = next(module.parameters(), torch.empty(0))
    tables = [each for each in module.modules() if isinstance(each, nn.Embedding)]
    num_types = max(1, min([64, *(table.num_embeddings for table in tables)]))
    ids = (torch.arange(_SHAPE[0] * _SHAPE[1], device=weight.device) % num_types).view(_SHAPE)
    if is_hugging_face(module):
        named = {"input_ids": ids}
        if getattr(module.config, "is_encoder_decoder", False):
            named["decoder_input_ids"] = ids
        taken = inspect.signature(module.forward).parameters
        names = {"attention_mask", "decoder_attention_mask"} & taken.keys()
        yield (), {**named, **dict.fromkeys(names, torch.ones_like(ids))}
        yield (), named
    yield (ids,), {}
    if (width := model_width(module)) is not None:
        yield (torch.zeros(*_SHAPE, width, dtype=weight.dtype, device=weight.device),), {}
