"""Widths of layers, and sources of token ids and masks, by a forward pass; also of a model on the
meta device.
"""

import inspect
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from embedgeo.capture.calls import eager_mode, first_float, first_input
from embedgeo.capture.forward_inputs import ForwardInputs, LayerRows
from embedgeo.capture.layers import Layer, resolve_layers
from embedgeo.capture.structure import is_callable, is_hugging_face, measured_model
from embedgeo.capture.torch_names import meta_values

_SHAPE = 2, 8  # sequences and positions of synthetic token ids
_MASKS = ("src_key_padding_mask", "tgt_key_padding_mask", "attention_mask")


@dataclass
class Inspection:
    """Findings of a forward pass."""

    # of the layers that were reached, by name
    hidden: dict[str, torch.Size] = field(default_factory=dict)
    # the ids by the table called with them, and by their shape
    token_ids: dict[tuple[nn.Module, torch.Size], Tensor] = field(default_factory=dict)
    # the outermost modules called with one, and the argument's name
    masks: dict[nn.Module, str] = field(default_factory=dict)
    error: Exception | None = None  # where some layers were not reached

    def has_token_rows(self, layer: Layer) -> bool:
        """Tell whether some of the token ids are those of the layer's rows."""
        rows = LayerRows(layer, self.hidden[layer.name][:-1])
        return any(
            rows.fit(torch.empty(shape, device="meta")) is not None for _, shape in self.token_ids
        )

    def add_hidden(
        self, layer: Layer, _: nn.Module, args: Any, kwargs: Any, output: Any = None
    ) -> None:
        """Note the hidden state of a layer's call."""
        if (hidden := _hidden(layer, args, kwargs, output)) is not None:
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
            with meta_values():
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
            module, is_before = layer.calls[-1].module, layer.takes_input
            read = partial(found.add_hidden, layer)
            hooks.enter_context(_hooked(module, read, is_before=is_before))
        for module in dict.fromkeys((measured_model(model), *inputs.enclosing_modules)):
            batches = _token_batches(module) if batch is None else [batch]
            if is_callable(module) and any(found.runs(module, each) for each in batches):
                break
    found.token_ids = inputs.token_ids
    if all(layer.name in found.hidden for layer in layers):
        found.error = None
    return found


def compared_states(model: nn.Module) -> str:
    """Compare ``layers="hidden_states"`` with what a Hugging Face model itself returns.

    The clause that is returned says what is equal, and is empty where there is nothing to compare.
    A copy on the meta device runs, since transformers leaves hooks on a model that is asked for its
    hidden states. Equal is what is the same tensor.
    """
    measured = measured_model(model)
    if not is_hugging_face(measured):
        return ""
    weights = [*measured.parameters(), *measured.buffers()]
    memo = {id(each): each.to("meta") for each in weights if each is not None}
    try:
        copied = deepcopy(measured, memo)
        layers = resolve_layers(copied, "hidden_states")
    except Exception:  # it has no blocks, or cannot be copied
        return ""
    for given in _token_batches(copied):
        found = defaultdict[str, list[Tensor | None]](list)
        with torch.no_grad(), ExitStack() as hooks, suppress(Exception):
            hooks.enter_context(eager_mode)
            for layer in layers:
                module = layer.calls[-1].module
                _hooked(module, partial(_keep, found, layer), is_before=layer.takes_input)
            hooks.enter_context(meta_values())
            return _comparison(layers, found, copied(**given, output_hidden_states=True))
    return ""


def _comparison(
    layers: Sequence[Layer], found: Mapping[str, list[Tensor | None]], output: Any
) -> str:
    kinds = "hidden_states", "encoder_hidden_states", "decoder_hidden_states"
    own = [state for kind in kinds for state in getattr(output, kind, None) or ()]
    if not own:
        return ""
    differ = list[str]()
    for layer, state in zip(layers, own, strict=False):
        calls = found[layer.name]
        index = -1 if layer.is_last_call else layer.calls[-1].index
        if not -1 <= index < len(calls) or calls[index] is not state:
            differ.append(layer.name)
    num_equal = min(len(layers), len(own)) - len(differ)
    apart = f"; other than the model's: {', '.join(differ)}" if differ else ""
    return f"compared with output_hidden_states: equal at {num_equal} layers{apart}"


def _keep(
    found: dict[str, list[Tensor | None]],
    layer: Layer,
    _: nn.Module,
    args: Any,
    kwargs: Any,
    output: Any = None,
) -> None:
    found[layer.name].append(_hidden(layer, args, kwargs, output))


def _hidden(layer: Layer, args: Any, kwargs: Any, output: Any) -> Tensor | None:
    return first_input(args, kwargs) if layer.takes_input else first_float(output)


def _hooked(module: nn.Module, read: Callable[..., None], *, is_before: bool) -> RemovableHandle:
    if is_before:
        return module.register_forward_pre_hook(read, with_kwargs=True)
    return module.register_forward_hook(read, with_kwargs=True)


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
