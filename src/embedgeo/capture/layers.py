"""The layers of a model: hidden states that are measured, and their names."""

import difflib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from embedgeo.capture.structure import (
    Part,
    contains_any,
    final_norm,
    find_stack,
    is_callable,
    last_hidden_state,
    measured_model,
    module_names,
    starts_after_first_block,
    submodels,
    unwrapped,
)

LayerSpec = str | Sequence[Any] | Callable[[nn.Module], Any]
"""``"blocks"``, ``"hidden_states"``, a glob pattern of names, ``"mean(last4)"``, a list of these, or a callable on the
model that returns one of these or a mapping of names to modules."""

_MEAN = re.compile(r"(encoder\.|decoder\.|)mean\(last(\d+)\)")
_TORCH_STACKS = (nn.TransformerEncoder, nn.TransformerDecoder, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)


@dataclass(frozen=True)
class ModuleCall:
    """One of the calls of a module in a forward pass: number ``index`` of ``calls_per_forward``."""

    module: nn.Module
    index: int = 0
    calls_per_forward: int = 1


@dataclass(frozen=True)
class Layer:
    """A hidden state of the model.

    Attributes:
        name: the same for every model family and every wrapper around the model.
        calls: the module calls whose output is the hidden state; if there are several, the mean of their outputs is.
        takes_input: the hidden state is the input of the (only) call instead.
        positions_first: the shape is (positions, batch, d) instead of (batch, positions, d).
    """

    name: str
    calls: tuple[ModuleCall, ...]
    takes_input: bool = False
    positions_first: bool = False


def resolve_layers(model: nn.Module, layers: LayerSpec = "blocks", part: Part | None = None) -> list[Layer]:
    """Find the layers of a model.

    ``"blocks"`` means ``embed`` (the input of the first block), ``block.00`` … (the output of each block) and
    ``final_norm`` (if the model has one); an encoder-decoder model has ``encoder.embed`` … ``decoder.embed`` ….
    A block that is applied several times is a layer each time. Patterns match these names and the names of modules
    inside the outermost Hugging Face model, with or without zero-padding and without wrappers (FSDP, compile,
    checkpointing). ``"mean(last4)"`` is the mean of the outputs of the last four blocks, before the final norm.

    ``"hidden_states"`` means ``hidden.00`` … ``hidden.L``, exactly what Hugging Face models give for
    ``output_hidden_states=True``: of L blocks, the input of the first one (``embed``), the output of each but the last,
    and the model's last hidden state, ``final_norm`` where there is one, else the last block's output.

    Of a ``part`` of a model, blocks and what is inside have the numbers that they have in the model; ``embed`` is in
    the first part and ``final_norm`` in the last. A pattern may then match nothing.

    Raises:
        TypeError: ``layers`` is not a `LayerSpec`.
        ValueError: a pattern matches nothing, the model has no list of blocks, or layers of a ``part`` need the others.

    >>> model = nn.ModuleDict({"layers": nn.ModuleList(nn.Linear(2, 2) for _ in range(2)), "norm": nn.LayerNorm(2)})
    >>> [layer.name for layer in resolve_layers(model)]
    ['embed', 'block.00', 'block.01', 'final_norm']
    """
    found = {layer.name: layer for layer in _resolve(model, layers, part)}
    if not found and part is None:
        raise ValueError(f"layers must name at least one layer; got {layers!r}.")
    return [replace(layer, positions_first=_is_positions_first(model, layer)) for layer in found.values()]


def _resolve(model: nn.Module, layers: object, part: Part | None) -> Iterator[Layer]:
    if isinstance(layers, str):
        yield from _match(model, layers, part)
    elif isinstance(layers, Mapping):
        for name, module in layers.items():
            if not isinstance(module, nn.Module):
                raise TypeError(f"layers must map names to modules; got {type(module).__name__} for {name!r}.")
            yield Layer(str(name), (ModuleCall(module),))
    elif isinstance(layers, nn.Module):
        raise TypeError(f"layers must map names to modules, {{name: module}}; got a bare {type(layers).__name__}.")
    elif isinstance(layers, Sequence):
        for each in layers:
            yield from _resolve(model, each, part)
    elif callable(layers):
        yield from _resolve(model, layers(model), part)
    else:
        raise TypeError(
            'layers must be "blocks", "hidden_states", a pattern of names, a list of these or a callable; '
            f"got {type(layers).__name__}."
        )


def _match(model: nn.Module, pattern: str, part: Part | None) -> Iterator[Layer]:
    if part is not None and (pattern == "hidden_states" or _MEAN.fullmatch(pattern) or len(submodels(model)) > 1):
        raise ValueError(
            f"layers={pattern!r} must be found within one stage of the pipeline, of a model that is no encoder and "
            'decoder; it needs several. Use layers="blocks" or a pattern of names.'
        )
    parts = submodels(model).items()
    standard = [layer for prefix, submodel in parts for layer in _standard_layers(prefix, submodel, part)]
    numbered = [layer for prefix, submodel in submodels(model).items() for layer in _hidden_states(prefix, submodel)]
    mean = _MEAN.fullmatch(pattern)
    if pattern in ("blocks", "hidden_states"):
        if not standard:
            _require_callable_blocks(model, pattern)
            names = ", ".join([*module_names(model)][:6]) or "(the model has no modules)"
            raise ValueError(
                f"layers={pattern!r} needs a list of transformer blocks; found none in {type(model).__name__}. "
                f"Name layers by a pattern of module names instead, such as {names}."
            )
        yield from standard if pattern == "blocks" else numbered
    elif mean:
        yield from _means(model, pattern, mean[1], int(mean[2]))
    else:
        yield from _glob(model, pattern, standard, numbered, part)


def _means(model: nn.Module, pattern: str, wanted: str, count: int) -> Iterator[Layer]:
    """The mean of the last ``count`` blocks of the submodel with the prefix ``wanted``, of each submodel if empty.

    It is taken before the final norm.
    """
    for prefix, submodel in submodels(model).items():
        if wanted in ("", prefix):
            blocks = _blocks(submodel)
            if not 1 <= count <= len(blocks):
                raise ValueError(
                    f"layers={pattern!r} must average at least one block and at most all; the model has {len(blocks)}."
                )
            yield Layer(f"{prefix}mean(last{count})", tuple(blocks[-count:]))


def _glob(
    model: nn.Module, pattern: str, standard: list[Layer], numbered: list[Layer], part: Part | None
) -> list[Layer]:
    """The layers and modules whose names match; only where none does, numbered hidden states."""
    taken, names = {layer.name for layer in standard}, module_names(model)
    if part is not None:
        names, numbered = _numbered_in_model(names, model, part), []
    others = [Layer(name, (ModuleCall(module),)) for name, module in names.items() if name not in taken]
    matching = _matching(pattern, standard + others) or _matching(pattern, numbered)
    if not matching and part is None:
        everything = [layer.name for layer in standard + others + numbered]
        parts = difflib.get_close_matches(pattern.rsplit(".", 1)[-1], {name.rsplit(".", 1)[-1] for name in everything})
        close = [name for name in everything if name.rsplit(".", 1)[-1] in parts] or everything
        raise ValueError(
            f"layers={pattern!r} matches no layer of {type(model).__name__}. Close to it: {', '.join(close[:6])}."
        )
    return matching


def _matching(pattern: str, layers: list[Layer]) -> list[Layer]:
    return [
        layer
        for layer in layers
        if fnmatchcase(layer.name, pattern) or fnmatchcase(re.sub(r"(?<![^.])0+(?=\d)", "", layer.name), pattern)
    ]


def _numbered_in_model(names: Mapping[str, nn.Module], model: nn.Module, part: Part) -> dict[str, nn.Module]:
    """The modules of a part by name, its blocks with the numbers that they have in the model."""
    own = [next(name for name, m in names.items() if m is call.module) for call in _blocks(measured_model(model))]
    width = max(2, len(str(part.num_blocks - 1)))
    stem = {name: f"{name.rpartition('.')[0]}.{i:0{width}}".lstrip(".") for i, name in enumerate(own, part.first_block)}
    inside = {name: next((block for block in own if f"{name}.".startswith(f"{block}.")), "") for name in names}
    return {stem.get(inside[name], "") + name.removeprefix(inside[name]): module for name, module in names.items()}


def _standard_layers(prefix: str, submodel: nn.Module, part: Part | None) -> Iterator[Layer]:
    """``embed``, the blocks and ``final_norm``, of a part those that it has; nothing if there are no blocks."""
    stack, blocks = find_stack(submodel), _blocks(submodel)
    if stack is None or not blocks:
        return
    first, total = part or (0, len(blocks))
    width = max(2, len(str(total - 1)))
    if first == 0:
        yield Layer(f"{prefix}embed", blocks[:1], takes_input=True)
    for i, block in enumerate(blocks, first):
        yield Layer(f"{prefix}block.{i:0{width}}", (block,))
    norm = final_norm(stack)
    if norm is not None and first + len(blocks) == total:
        yield Layer(f"{prefix}final_norm", (ModuleCall(norm),))


def _hidden_states(prefix: str, submodel: nn.Module) -> Iterator[Layer]:
    """``hidden.00`` … ``hidden.L``; nothing if there are no blocks."""
    stack, blocks = find_stack(submodel), _blocks(submodel)
    if stack is None or not blocks:
        return
    last = last_hidden_state(submodel, stack)
    end = blocks[-1] if last is None else ModuleCall(last)
    width = max(2, len(str(len(blocks))))
    is_late = starts_after_first_block(submodel)
    first = Layer("", blocks[:1], takes_input=not is_late)
    states = [first, *(Layer("", (call,)) for call in [*(blocks[1:] if is_late else blocks[:-1]), end])]
    for i, state in enumerate(states):
        yield replace(state, name=f"{prefix}hidden.{i:0{width}}")


def _require_callable_blocks(model: nn.Module, pattern: str) -> None:
    """Raise ValueError if there are blocks, but lists of modules that are never called, and so have no output."""
    for stack in filter(None, map(find_stack, submodels(model).values())):
        inside = set(map(unwrapped, stack.blocks[0].children()))
        *before, number, part = [path for path, m in module_names(model).items() if m in inside][-1].split(".")
        raise ValueError(
            f"layers={pattern!r} needs blocks that are called; those of {type(stack.parent).__name__} are a "
            f"{type(stack.blocks[0]).__name__} of modules each. Name the modules inside whose output is the hidden "
            f"state, such as layers={'.'.join([*before, '?' * len(number), part])!r}."
        )


def _blocks(submodel: nn.Module) -> tuple[ModuleCall, ...]:
    """The calls of the blocks; none if there are no blocks, or if these are lists of modules that are never called."""
    stack = find_stack(submodel)
    blocks = stack.blocks if stack is not None and all(map(is_callable, stack.blocks)) else []
    return tuple(ModuleCall(block, blocks[:i].count(block), blocks.count(block)) for i, block in enumerate(blocks))


def _is_positions_first(model: nn.Module, layer: Layer) -> bool:
    """Whether the layer is, or is inside, a transformer module of torch that was built with ``batch_first=False``."""
    stacks = [m for m in model.modules() if isinstance(m, _TORCH_STACKS) and contains_any(m, [layer.calls[0].module])]
    attention = (m for stack in stacks for m in stack.modules() if isinstance(m, nn.MultiheadAttention))
    return any(not m.batch_first for m in attention)
