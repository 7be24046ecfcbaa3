"""The layers of a model: hidden states that are measured, and their names."""

import difflib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from torch import nn

from embedgeo.capture import structure

LayerSpec = str | Sequence[Any] | Callable[[nn.Module], Any]
"""``"blocks"``, ``"hidden_states"``, a glob pattern of names, ``"mean(last4)"``, a list of these,
or a callable on the model that returns one of these or a mapping of names to modules.
"""

_MEAN = re.compile(r"(encoder\.|decoder\.|)mean\(last(\d+)\)")
# whose last hidden state is wider than the others, and is left out
_WIDER_AT_THE_END = {"reformer"}
# whose first hidden state is the first block's output
_AFTER_FIRST_BLOCK = {"mamba", "mamba2", "falcon_mamba", "rwkv"}
_IMAGES = {"pixel_values", "flattened_patches"}  # names of what models take
_TORCH_STACKS = (
    nn.TransformerEncoder,
    nn.TransformerDecoder,
    nn.TransformerEncoderLayer,
    nn.TransformerDecoderLayer,
)


@dataclass(frozen=True)
class ModuleCall:
    """One of the calls of a module in a forward pass: number ``index`` of ``calls_per_forward``."""

    module: nn.Module
    index: int = 0
    calls_per_forward: int = 1
    takes_input: bool = False  # the hidden state is its input instead of its output


@dataclass(frozen=True)
class Layer:
    """A hidden state of the model: that of a module call, or the mean of several."""

    name: str  # common to all model families and wrappers around the model
    calls: tuple[ModuleCall, ...]
    # its shape is (positions, batch, d) instead of (batch, positions, d); None: nothing tells it
    positions_first: bool | None = None
    # of a final norm: the last block, and the norms beside it, of which it must be called next
    after: tuple[nn.Module, ...] = ()
    place: int | None = None  # among the hidden states that blocks make, one after the other

    @property
    def takes_input(self) -> bool:
        """Tell whether it is what enters a module."""
        return self.calls[0].takes_input


def resolve_layers(model: nn.Module, layers: LayerSpec = "blocks") -> list[Layer]:
    """Find the layers of a model.

    ``"blocks"`` means ``embed`` (the input of the first block), ``block.00`` … (the output of each
    block) and ``final_norm`` (if the model has one); an encoder-decoder model has ``encoder.embed``
    … ``decoder.embed`` …. A block that is applied several times is a layer each time. Patterns
    match these names and the names of modules inside the outermost Hugging Face model, with or
    without zero-padding and without wrappers (FSDP, compile, checkpointing). ``"mean(last4)"`` is
    the mean of the outputs of the last four blocks, without the final norm.

    ``"hidden_states"`` means ``hidden.00`` … ``hidden.L``, exactly what Hugging Face models give
    for ``output_hidden_states=True``: of L blocks, the input of the first one (``embed``), the
    output of each but the last, and the model's last hidden state, ``final_norm`` where there is
    one, else the last block's output.

    Raises:
        TypeError: ``layers`` is not a `LayerSpec`.
        ValueError: a pattern matches nothing, or the model has no list of blocks.

    >>> model = nn.ModuleDict(
    ...     {"layers": nn.ModuleList(nn.RNN(2, 2) for _ in range(2)), "norm": nn.LayerNorm(2)}
    ... )
    >>> [layer.name for layer in resolve_layers(model)]
    ['embed', 'block.00', 'block.01', 'final_norm']
    """
    by_name = {layer.name: layer for layer in _resolve(model, layers)}
    if not by_name:
        raise ValueError(f"layers must name at least one layer; got {layers!r}.")
    stacks = [
        [*module.modules()] for module in model.modules() if isinstance(module, _TORCH_STACKS)
    ]
    # which tell the order of rows, by their attention
    is_turned = {
        inner: any(isinstance(m, nn.MultiheadAttention) and not m.batch_first for m in stack)
        for stack in stacks
        for inner in stack
    }
    return [
        replace(layer, positions_first=is_turned.get(layer.calls[0].module))
        for layer in by_name.values()
    ]


def _resolve(model: nn.Module, layers: object) -> Iterator[Layer]:
    if isinstance(layers, str):
        yield from _match(model, layers)
    elif isinstance(layers, Mapping):
        for name, module in layers.items():
            if not isinstance(module, nn.Module):
                raise TypeError(
                    f"layers must map names to modules; got {type(module).__name__} for {name!r}."
                )
            if structure.model_of(model, [module]) not in (model, structure.measured_model(model)):
                raise ValueError(
                    f"layer {name!r} must be in the first of several models side by side. Give the "
                    "mapping itself, not in a list, or layers=lambda module: module.NAME."
                )
            yield Layer(str(name), (ModuleCall(module),))
    elif isinstance(layers, Sequence):
        for each in layers:
            yield from _resolve(model, each)
    elif callable(layers) and not isinstance(layers, nn.Module):
        yield from _resolve(model, layers(model))
    else:
        raise TypeError(
            'layers must be "blocks", "hidden_states", a pattern of names, a list of these, a '
            f"callable, or map names to modules; got {type(layers).__name__}."
        )


class _Submodel(NamedTuple):
    """A part of the model that has blocks, and the calls of these."""

    prefix: str
    module: nn.Module
    blocks: tuple[ModuleCall, ...]
    norms: list[nn.Module]  # beside them, the final one first

    def final_norm(self, name: str) -> Layer:
        """The layer of the final norm."""
        after = self.blocks[-1].module, *self.norms
        return Layer(name, (ModuleCall(self.norms[0]),), after=after)

    @property
    def embed(self) -> ModuleCall:
        """The call that takes what enters the first block."""
        return replace(self.blocks[0], takes_input=True)


def _submodels(model: nn.Module) -> Iterator[_Submodel]:
    for prefix, module in structure.submodels(model).items():
        stack = structure.find_stack(module)
        if stack is None:
            continue
        blocks = stack.blocks
        calls = [
            ModuleCall(block, blocks[:i].count(block), blocks.count(block))
            for i, block in enumerate(blocks)
        ]
        yield _Submodel(prefix, module, tuple(calls), structure.final_norms(stack))


def _match(model: nn.Module, pattern: str) -> list[Layer]:
    mean = _MEAN.fullmatch(pattern)
    is_of_blocks = mean is not None or pattern in ("blocks", "hidden_states")
    structure.require_one_model(model, also_by_hand=is_of_blocks)
    submodels = [*_submodels(model)]
    if mean:
        return [
            _mean(submodel, pattern, int(mean[2]))
            for submodel in submodels
            if mean[1] in ("", submodel.prefix)
        ]
    standard = [layer for submodel in submodels for layer in _standard_layers(submodel)]
    numbered = [layer for submodel in submodels for layer in _hidden_states(submodel)]
    if pattern not in ("blocks", "hidden_states"):
        return _glob(model, pattern, standard, numbered)
    if not standard:
        names = [*structure.module_names(model)][:6]
        raise ValueError(
            f"layers={pattern!r} needs a list of transformer blocks; found none in "
            f"{type(model).__name__}. Name layers by a pattern of module names instead, such as "
            f"{', '.join(names) or 'none'}."
        )
    return standard if pattern == "blocks" else numbered


def _mean(submodel: _Submodel, pattern: str, count: int) -> Layer:
    if not 1 <= count <= len(submodel.blocks):
        raise ValueError(
            f"layers={pattern!r} must average at least one block and at most all; the model has "
            f"{len(submodel.blocks)}."
        )
    return Layer(f"{submodel.prefix}mean(last{count})", submodel.blocks[-count:])


def _standard_layers(submodel: _Submodel) -> Iterator[Layer]:
    prefix, _, blocks, norms = submodel
    yield Layer(f"{prefix}embed", (submodel.embed,), place=0)
    for i, block in enumerate(blocks):
        yield Layer(f"{prefix}block.{_padded(i, len(blocks))}", (block,), place=i + 1)
    if norms:
        yield submodel.final_norm(f"{prefix}final_norm")


def _hidden_states(submodel: _Submodel) -> Iterator[Layer]:
    prefix, module, blocks, norms = submodel
    last = structure.base_model(module, blocks[0].module) or next(iter(norms), None)
    is_of_images = getattr(module, "main_input_name", None) in _IMAGES and not any(
        isinstance(table, nn.Embedding) for table in structure.token_embeddings(module)
    )
    if is_of_images or not _ties_last(module, last):
        last = None  # models of images, and some others, leave out what is after the blocks
    kind = getattr(getattr(module, "config", None), "model_type", None)
    is_late = kind in _AFTER_FIRST_BLOCK
    calls = [
        *(blocks if is_late else (submodel.embed, *blocks[:-1])),
        blocks[-1] if last is None else ModuleCall(last),
    ]
    for i, call in enumerate(calls[:-1] if kind in _WIDER_AT_THE_END else calls):
        name = f"{prefix}hidden.{_padded(i, len(calls))}"
        place = None if call.module is last else i + is_late
        is_norm = call.module in norms
        yield submodel.final_norm(name) if is_norm else Layer(name, (call,), place=place)


def _ties_last(submodel: nn.Module, last: nn.Module | None) -> bool:
    """Tell whether the last of a Hugging Face model's ``hidden_states`` is its last hidden state,
    as its configuration says, or else its class.
    """
    config = getattr(submodel, "config", None)
    is_tied = getattr(config, "tie_last_hidden_states", None)
    forward: Any = getattr(last, "forward", None)
    while is_tied is None and forward is not None:
        forward = getattr(forward, "__func__", forward)
        names = getattr(getattr(forward, "__code__", None), "co_freevars", ())
        cells = dict(zip(names, getattr(forward, "__closure__", None) or (), strict=False))
        if "tie_last_hidden_states" in cells:  # of transformers' capture_outputs
            is_tied = cells["tie_last_hidden_states"].cell_contents
        forward = getattr(forward, "__wrapped__", None)
    return is_tied is not False


def _padded(number: int, count: int) -> str:
    return f"{number:0{max(2, len(str(count - 1)))}}"


def _glob(
    model: nn.Module, pattern: str, standard: list[Layer], numbered: list[Layer]
) -> list[Layer]:
    taken = {layer.name for layer in standard}
    names = structure.module_names(model)
    others = [
        Layer(name, (ModuleCall(module),)) for name, module in names.items() if name not in taken
    ]
    matching = _matching(pattern, standard + others) or _matching(pattern, numbered)
    if not matching:
        everything = [layer.name for layer in standard + others + numbered]
        parts = difflib.get_close_matches(
            pattern.rsplit(".", 1)[-1], {name.rsplit(".", 1)[-1] for name in everything}
        )
        close = [name for name in everything if name.rsplit(".", 1)[-1] in parts] or everything
        raise ValueError(
            f"layers={pattern!r} matches no layer of {type(model).__name__}. "
            f"Close to it: {', '.join(close[:6]) or 'none'}."
        )
    return matching


def _matching(pattern: str, layers: list[Layer]) -> list[Layer]:
    names = {layer: (layer.name, re.sub(r"(?<![^.])0+(?=\d)", "", layer.name)) for layer in layers}
    return [layer for layer in layers if any(fnmatchcase(name, pattern) for name in names[layer])]
