"""A forward pass on synthetic inputs: widths of layers, and sources of token ids and masks.

Only shapes are looked at, so that a model without memory for its weights (on the meta device) can be inspected.
"""

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from embedgeo.capture.calls import eager_mode, first_float, first_input, watched_calls
from embedgeo.capture.forward_inputs import ForwardInputs, LayerRows
from embedgeo.capture.layers import Layer
from embedgeo.capture.structure import is_callable, is_hugging_face, measured_model, model_width, module_names

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Those of a call, by position and by name."""

_BATCH, _POSITIONS = 2, 8
_MASKS = ("src_key_padding_mask", "tgt_key_padding_mask", "attention_mask")


@dataclass
class Inspection:
    """Findings of a forward pass.

    Attributes:
        num_token_types: rows of the largest embedding table of tokens; a large number where that is not known.
        hidden: shape of each layer's hidden state that was reached, by the layer's name.
        dtype: of the hidden states.
        token_ids: the tables that were called, with the shape of the ids.
        masks: modules that are called with a mask of shape (batch, positions), with the argument's name.
        error: why the model could not be run; None if it could, or if parts of it could that reach all layers.
    """

    num_token_types: int
    hidden: dict[str, torch.Size] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    token_ids: list[tuple[nn.Module, torch.Size]] = field(default_factory=list)
    masks: list[tuple[nn.Module, str]] = field(default_factory=list)
    error: Exception | None = None

    def has_token_rows(self, layer: Layer) -> bool:
        """Tell whether some of the token ids are those of the layer's rows."""
        rows = LayerRows(layer, self.hidden[layer.name][:-1])
        return any(rows.fit(torch.empty(shape, device="meta")) is not None for _, shape in self.token_ids)

    def add_hidden(self, layer: Layer, value: Any) -> None:
        """Note the hidden state of a layer."""
        hidden = first_float(value)
        if hidden is not None:
            is_turned = layer.positions_first and hidden.ndim == 3
            self.hidden[layer.name] = hidden.transpose(0, 1).shape if is_turned else hidden.shape
            self.dtype = hidden.dtype

    def add_token_ids(self, table: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], _: Any) -> None:
        """Note the call of a table."""
        ids = args[0] if args else kwargs.get("input", kwargs.get("input_ids"))
        if isinstance(ids, Tensor) and not ids.is_floating_point() and (table, ids.shape) not in self.token_ids:
            self.token_ids.append((table, ids.shape))


def inspect_forward(model: nn.Module, layers: Sequence[Layer], batch: Any = None) -> Inspection:
    """Run a model on a small batch, without gradients, in the modes that its modules are in.

    Args:
        model: any module, also one on the meta device.
        layers: those to look at.
        batch: given by keyword if it is a mapping, otherwise as one argument. Default: 2 sequences of 8 token ids, with
            an attention mask where the model takes one; of other models images or embeddings.
    """
    inputs = ForwardInputs(model)
    found = Inspection(inputs.num_token_types)
    num_masked_calls = 0  # that have begun and not ended

    @contextmanager
    def enclosing_call(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
        nonlocal num_masked_calls
        given = {**inspect.signature(module.forward).bind_partial(*args).arguments, **kwargs}
        name = next((name for name in _MASKS if isinstance(given.get(name), Tensor) and given[name].ndim == 2), None)
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
            hooks.callback(table.register_forward_hook(found.add_token_ids, with_kwargs=True).remove)
        for layer in layers:
            hooks.callback(
                _hooked(layer.calls[-1].module, partial(found.add_hidden, layer), of_input=layer.takes_input)
            )
        error = _run_small(model, inputs.enclosing_modules, batch)
    found.error = error if any(layer.name not in found.hidden for layer in layers) else None
    return found


def token_modules(model: nn.Module) -> list[str]:
    """Names of modules that give a row for each token, one beside the other, for a model whose blocks are not found."""
    widths: dict[str, int] = {}

    def add_width(name: str, value: Any) -> None:
        hidden = first_float(value)
        if hidden is not None and hidden.ndim == 3 and {*hidden.shape[:2]} == {_BATCH, _POSITIONS}:
            widths[name] = hidden.shape[-1]

    with ExitStack() as hooks:
        hooks.enter_context(eager_mode)
        for name, module in module_names(model).items():
            hooks.callback(_hooked(module, partial(add_width, name)))
        _run_small(model, [measured_model(model)])
    most_common = Counter(widths.values()).most_common(1)
    names = [name for name in module_names(model) if most_common and widths.get(name) == most_common[0][0]]
    outer = _outermost(names)
    while len(outer) == 1 and len(names) > 1:
        names = [name for name in names if name not in outer]
        outer = _outermost(names)
    return outer


def _outermost(names: Sequence[str]) -> list[str]:
    return [name for name in names if not any(name.startswith(f"{other}.") for other in names)]


def _hooked(module: nn.Module, note: Callable[[Any], None], *, of_input: bool = False) -> Callable[[], None]:
    """Have a module's output, or its input, noted; returns what removes the hook."""
    if of_input:
        hook = module.register_forward_pre_hook(
            lambda m, args, kwargs: note(first_input(args, kwargs)), with_kwargs=True
        )
        return hook.remove
    return module.register_forward_hook(lambda m, args, output: note(output)).remove


def _run_small(model: nn.Module, modules: Sequence[nn.Module], batch: Any = None) -> Exception | None:
    """Run the measured model, or those of the modules that can be, on the batch or on synthetic inputs.

    Returns:
        None, or the first error where the measured model could not be run.
    """
    measured = measured_model(model)
    ran = set[nn.Module]()
    errors: list[Exception] = []
    for module in filter(is_callable, dict.fromkeys((measured, *modules))):
        if module in ran:
            continue
        given: Arguments = ((), dict(batch)) if hasattr(batch, "keys") else ((batch,), {})
        for args, kwargs in _synthetic(module) if batch is None else [given]:
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


def _synthetic(module: nn.Module) -> Iterator[Arguments]:
    """Arguments that a model may take, one after the other: token ids with masks and without, images, embeddings."""
    weight = next(module.parameters(), torch.empty(0))
    rows = [getattr(each, "num_embeddings", 2) for each in module.modules() if isinstance(each, nn.Embedding)]
    ids = torch.arange(_BATCH * _POSITIONS, device=weight.device) % max(1, min([64, *rows]))
    ids = ids.view(_BATCH, _POSITIONS)
    if is_hugging_face(module):
        yield from (((), given) for given in _named(module, ids))
    yield (ids,), {}
    width = model_width(module)
    if width is not None:
        yield (torch.zeros(_BATCH, _POSITIONS, width, dtype=weight.dtype, device=weight.device),), {}


def _named(model: "PreTrainedModel", ids: Tensor) -> Iterator[dict[str, Tensor]]:
    """Arguments of a Hugging Face model by name."""
    if model.main_input_name == "pixel_values":
        size = getattr(model.config, "image_size", 0)
        sides = size if isinstance(size, list | tuple) else (size, size)
        channels = getattr(model.config, "num_channels", 3)
        yield {"pixel_values": torch.zeros(_BATCH, channels, *sides, device=ids.device)}
        return
    given = {"input_ids": ids}
    if getattr(model.config, "is_encoder_decoder", False):
        given["decoder_input_ids"] = ids
    taken = inspect.signature(model.forward).parameters
    masks = {name: torch.ones_like(ids) for name in ("attention_mask", "decoder_attention_mask") if name in taken}
    if masks:
        yield given | masks
    if len(masks) > 1:  # one may hide the other
        yield from (given | {name: mask} for name, mask in masks.items())
    yield given
