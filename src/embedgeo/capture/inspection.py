"""What a forward pass on synthetic inputs tells: the widths of layers, and where token ids and masks come from.

Only shapes are looked at, so that a model without memory for its weights (on the meta device) can be inspected.
"""

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from embedgeo.capture.calls import eager_mode, first_float, first_input, watched_calls
from embedgeo.capture.forward_inputs import ForwardInputs, LayerRows
from embedgeo.capture.layers import Layer
from embedgeo.capture.structure import is_callable, is_hugging_face, measured_model, model_width, module_names

_BATCH, _POSITIONS = 2, 8
_MASKS = ("src_key_padding_mask", "tgt_key_padding_mask", "attention_mask")


@dataclass
class Seen:
    """What was seen in a forward pass.

    Attributes:
        hidden: shape of each layer's hidden state that was reached, by the layer's name.
        dtype: of the hidden states.
        token_ids: the tables that were called, with the shape of the ids.
        masks: modules that are called with a mask of shape (batch, positions), with the argument's name.
        error: why the model could not be run; None if it could, or if parts of it could that reach all layers.
    """

    hidden: dict[str, torch.Size] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    token_ids: list[tuple[nn.Module, torch.Size]] = field(default_factory=list)
    masks: list[tuple[nn.Module, str]] = field(default_factory=list)
    error: Exception | None = None

    def fits(self, layer: Layer) -> bool:
        """Whether some of the token ids are those of the layer's rows, as `ForwardInputs.align` finds them."""
        rows = LayerRows(layer, self.hidden[layer.name][:-1])
        return any(rows.fit(torch.empty(shape, device="meta")) is not None for _, shape in self.token_ids)


def inspect_forward(model: nn.Module, layers: Sequence[Layer], inputs: ForwardInputs, batch: Any = None) -> Seen:
    """Run a model on a small batch, without gradients, in the modes that its modules are in.

    Args:
        model: any module, also one on the meta device.
        layers: those to look at.
        inputs: of the same model.
        batch: given by keyword if it is a mapping, otherwise as one argument. Default: 2 sequences of 8 token ids, with
            an attention mask where the model takes one; of other models images or embeddings.
    """
    seen, shapes, depth = Seen(), {}, 0

    def read(layer: Layer, value: Any) -> None:
        hidden = first_float(value)
        if hidden is not None:
            shape = hidden.shape
            is_turned = layer.positions_first and len(shape) == 3
            shapes[layer.name] = torch.Size((shape[1], shape[0], shape[2])) if is_turned else shape
            seen.dtype = hidden.dtype

    @contextmanager
    def called(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
        nonlocal depth
        given = {**inspect.signature(module.forward).bind_partial(*args).arguments, **kwargs}
        name = next((name for name in _MASKS if isinstance(given.get(name), Tensor) and given[name].ndim == 2), None)
        if name is not None and not depth and (module, name) not in seen.masks:
            seen.masks.append((module, name))
        depth += name is not None
        try:
            yield
        finally:
            depth -= name is not None

    def looked_up(table: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], _: Any) -> None:
        ids = args[0] if args else kwargs.get("input", kwargs.get("input_ids"))
        if isinstance(ids, Tensor) and not ids.is_floating_point() and (table, ids.shape) not in seen.token_ids:
            seen.token_ids.append((table, ids.shape))

    with ExitStack() as hooks:
        hooks.enter_context(eager_mode)
        for module in inputs.enclosing_modules:
            hooks.enter_context(watched_calls(module, called))
        for table in inputs.tables:
            hooks.callback(table.register_forward_hook(looked_up, with_kwargs=True).remove)
        for layer in layers:
            module = layer.calls[-1].module
            if layer.takes_input:
                before = _before(read, layer)
                hooks.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
            else:
                hooks.callback(module.register_forward_hook(lambda m, a, value, layer=layer: read(layer, value)).remove)
        error = run_small(model, inputs.enclosing_modules, batch)
    seen.hidden = shapes
    seen.error = error if any(layer.name not in shapes for layer in layers) else None
    return seen


def named_rows(model: nn.Module) -> list[str]:
    """Names of modules that give a row for each token, one beside the other, for a model whose blocks are not found."""
    widths: dict[str, int] = {}

    def note(name: str, value: Any) -> None:
        hidden = first_float(value)
        if hidden is not None and hidden.ndim == 3 and {*hidden.shape[:2]} == {_BATCH, _POSITIONS}:
            widths[name] = hidden.shape[-1]

    with ExitStack() as hooks:
        hooks.enter_context(eager_mode)
        for name, module in module_names(model).items():
            hooks.callback(module.register_forward_hook(lambda m, a, value, name=name: note(name, value)).remove)
        run_small(model, [measured_model(model)])
    width = next((width for width, _ in Counter(widths.values()).most_common(1)), None)
    names = [name for name in module_names(model) if widths.get(name) == width]
    outer = _outermost(names)
    while len(outer) == 1 and len(names) > 1:
        names = [name for name in names if name not in outer]
        outer = _outermost(names)
    return outer


def run_small(model: nn.Module, modules: Sequence[nn.Module], batch: Any = None) -> Exception | None:
    """Run the measured model, or those of the modules that can be, on the batch or on synthetic inputs.

    Returns:
        None, or the first error where the measured model could not be run.
    """
    measured, ran = measured_model(model), set[nn.Module]()
    errors: list[Exception] = []
    for module in filter(is_callable, dict.fromkeys((measured, *modules))):
        if module in ran:
            continue
        for args, kwargs in _calls(module) if batch is None else [_call(batch)]:
            try:
                with torch.no_grad():
                    module(*args, **kwargs)
            except Exception as error:
                errors.append(error)
            else:
                ran.update(module.modules())
                break
    if measured in ran:
        return None
    return errors[0] if errors else ValueError("it has no forward()")


def _call(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return ((), dict(batch)) if hasattr(batch, "keys") else ((batch,), {})


def _calls(module: nn.Module) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Arguments that a model may take."""
    device = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
    taken = inspect.signature(module.forward).parameters
    config = getattr(module, "config", None)
    rows = [getattr(each, "num_embeddings", 2) for each in module.modules() if isinstance(each, nn.Embedding)]
    ids = (torch.arange(_BATCH * _POSITIONS, device=device) % max(1, min([64, *rows]))).view(_BATCH, _POSITIONS)
    if is_hugging_face(module):
        given = {"input_ids": ids}
        if getattr(config, "is_encoder_decoder", False):
            given["decoder_input_ids"] = ids
        if module.main_input_name == "pixel_values":
            size = getattr(config, "image_size", 0)
            sides = size if isinstance(size, list | tuple) else (size, size)
            given = {"pixel_values": torch.zeros(_BATCH, getattr(config, "num_channels", 3), *sides, device=device)}
        masks = {name: torch.ones_like(ids) for name in ("attention_mask", "decoder_attention_mask") if name in taken}
        alone = [{name: mask} for name, mask in masks.items() if len(masks) > 1]  # one may hide the other
        for some in [masks, *alone] if masks and "input_ids" in given else []:
            yield (), given | some
        yield (), given
    yield (ids,), {}
    width = model_width(module)
    if width is not None:
        dtype = next((parameter.dtype for parameter in module.parameters()), torch.float32)
        yield (torch.zeros(_BATCH, _POSITIONS, width, dtype=dtype, device=device),), {}


def _before(read: Callable[[Layer, Any], None], layer: Layer) -> Callable[..., None]:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        read(layer, first_input(args, kwargs))

    return hook


def _outermost(names: Sequence[str]) -> list[str]:
    return [name for name in names if not any(name.startswith(f"{other}.") for other in names)]
