"""Widths of layers, and sources of token ids and masks, by a forward pass; also of a model on the
meta device.
"""

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from embedgeo.capture.calls import eager_mode, first_float, first_input, watched_calls
from embedgeo.capture.forward_inputs import ForwardInputs, LayerRows
from embedgeo.capture.layers import Layer
from embedgeo.capture.residual import ResidualBlock
from embedgeo.capture.structure import (
    is_callable,
    is_hugging_face,
    measured_model,
    model_width,
    module_names,
)
from embedgeo.layer_names import LEDGER

Arguments = tuple[tuple[Any, ...], dict[str, Any]]  # of a call, by position and by name
_BATCH = 2
_POSITIONS = 8
_MASKS = ("src_key_padding_mask", "tgt_key_padding_mask", "attention_mask")


@dataclass
class Inspection:
    """Findings of a forward pass."""

    # rows of the largest embedding table of tokens; a large number where that is not known
    num_token_types: int
    # of the layers that were reached, by name
    hidden: dict[str, torch.Size] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32  # of the hidden states
    # tables called, and shapes of the ids
    token_ids: list[tuple[nn.Module, torch.Size]] = field(default_factory=list)
    # modules called with one, and the argument's name
    masks: list[tuple[nn.Module, str]] = field(default_factory=list)
    # names of layers inside of a block that it does not have
    absent: set[str] = field(default_factory=set)
    # None if the model could be run, or parts of it that reach all layers
    error: Exception | None = None

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
        self.dtype = hidden.dtype

    def add_streams(self, layers: Sequence[Layer], block: ResidualBlock, output: Tensor) -> None:
        """Note the layers that are streams of a block, given its output; on the meta device it may
        have all of them.
        """
        streams = {} if output.is_meta else block.streams(output)
        self.absent.update(
            layer.name for layer in layers if streams and layer.stream not in streams
        )
        for layer in layers:
            if layer.name not in self.absent:
                self.add_hidden(layer, output)
        block.leave()


def inspect_forward(model: nn.Module, layers: Sequence[Layer], batch: Any = None) -> Inspection:
    """Run a model without gradients, on a batch (a mapping by keyword) or on small synthetic
    inputs.
    """
    inputs = ForwardInputs(model)
    found = Inspection(inputs.num_token_types)
    num_masked_calls = 0  # that have begun and not ended

    @contextmanager
    def enclosing_call(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Iterator[None]:
        nonlocal num_masked_calls
        by_name = {**inspect.signature(module.forward).bind_partial(*args).arguments, **kwargs}
        tensors = {
            name: value
            for name, value in by_name.items()
            if isinstance(value, Tensor) and value.ndim == 2
        }
        name = next((name for name in _MASKS if name in tensors), None)
        if name is not None and not num_masked_calls and (module, name) not in found.masks:
            found.masks.append((module, name))
        num_masked_calls += name is not None
        try:
            yield
        finally:
            num_masked_calls -= name is not None

    with ExitStack() as hooks:
        hooks.enter_context(eager_mode)
        for module in inputs.enclosing_modules:
            hooks.enter_context(watched_calls(module, enclosing_call))
        for table in inputs.tables:
            hooks.callback(
                table.register_forward_hook(inputs.record_token_ids, with_kwargs=True).remove
            )
        for layer in layers:
            note = partial(found.add_hidden, layer)
            if not layer.stream:
                hooks.callback(
                    _hooked(layer.calls[-1].module, note, of_input=layer.calls[-1].takes_input)
                )
            elif layer.stream == LEDGER:
                streams = [each for each in layers if each.stream and each.calls == layer.calls]
                block = ResidualBlock(layer)
                for module, is_before, read in block.hooks():
                    register = (
                        module.register_forward_pre_hook
                        if is_before
                        else module.register_forward_hook
                    )
                    hooks.callback(register(read, with_kwargs=True).remove)
                hooks.callback(
                    _hooked(layer.calls[0].module, partial(found.add_streams, streams, block))
                )
        error = _run_small(model, inputs.enclosing_modules, batch)
    found.token_ids = [*inputs.token_ids]
    reached = found.hidden.keys() | found.absent
    found.error = error if any(layer.name not in reached for layer in layers) else None
    return found


def token_modules(model: nn.Module) -> list[str]:
    """Names of modules that give a row for each token, one beside the other, for a model whose
    blocks are not found.
    """
    widths: dict[str, int] = {}

    def add_width(name: str, hidden: Tensor) -> None:
        if hidden.ndim == 3 and {*hidden.shape[:2]} == {_BATCH, _POSITIONS}:
            widths[name] = hidden.shape[-1]

    with ExitStack() as hooks:
        hooks.enter_context(eager_mode)
        for name, module in module_names(model).items():
            hooks.callback(_hooked(module, partial(add_width, name)))
        _run_small(model, [measured_model(model)])
    most_common = Counter(widths.values()).most_common(1)
    names = [
        name
        for name in module_names(model)
        if most_common and widths.get(name) == most_common[0][0]
    ]
    while True:
        outer = [name for name in names if not any(name.startswith(f"{other}.") for other in names)]
        if len(outer) != 1 or len(names) == 1:
            return outer
        names = [name for name in names if name not in outer]


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
    """Run the measured model, or the modules that can be run; the first error where the measured
    model cannot be.
    """
    measured = measured_model(model)
    ran = set[nn.Module]()
    errors: list[Exception] = []
    of_batch: Arguments = ((), dict(batch)) if hasattr(batch, "keys") else ((batch,), {})
    for module in filter(is_callable, dict.fromkeys((measured, *modules))):
        for args, kwargs in _synthetic(module) if batch is None else [of_batch]:
            if module in ran:
                break
            try:
                with torch.no_grad():
                    module(*args, **kwargs)
                ran.update(module.modules())
            except Exception as error:
                errors.append(error)
    if measured in ran:
        return None
    return errors[0] if errors else ValueError("it has no forward()")


def _synthetic(module: nn.Module) -> Iterator[Arguments]:
    """Arguments that a model may take, one after the other: token ids with masks and without,
    images, embeddings.
    """
    weight = next(module.parameters(), torch.empty(0))
    rows = [
        getattr(each, "num_embeddings", 2)
        for each in module.modules()
        if isinstance(each, nn.Embedding)
    ]
    ids = torch.arange(_BATCH * _POSITIONS, device=weight.device).view(_BATCH, _POSITIONS) % max(
        1, min([64, *rows])
    )
    if is_hugging_face(module) and module.main_input_name == "pixel_values":
        size = getattr(module.config, "image_size", 0)
        sides = size if isinstance(size, list | tuple) else (size, size)
        channels = getattr(module.config, "num_channels", 3)
        yield (), {"pixel_values": torch.zeros(_BATCH, channels, *sides, device=ids.device)}
    elif is_hugging_face(module):
        named = {"input_ids": ids}
        if getattr(module.config, "is_encoder_decoder", False):
            named["decoder_input_ids"] = ids
        taken = inspect.signature(module.forward).parameters
        masks = {
            name: torch.ones_like(ids)
            for name in ("attention_mask", "decoder_attention_mask")
            if name in taken
        }
        if masks:
            yield (), named | masks
        if len(masks) > 1:  # one may hide the other
            yield from (((), named | {name: mask}) for name, mask in masks.items())
        yield (), named
    yield (ids,), {}
    width = model_width(module)
    if width is not None:
        yield (
            (torch.zeros(_BATCH, _POSITIONS, width, dtype=weight.dtype, device=weight.device),),
            {},
        )
