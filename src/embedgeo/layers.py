"""Which hidden states of a model to look at, and what to call them."""

import difflib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from transformers import PreTrainedModel

LayerSpec = str | Sequence[Any] | Callable[[nn.Module], Any]
"""``"blocks"``, a glob pattern of names, ``"mean(last4)"``, a list of these, or a callable on the model that returns
one of these or a mapping of names to modules."""

_WRAPPERS = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
_MEAN = re.compile(r"mean\(last(\d+)\)")


@dataclass(frozen=True)
class Layer:
    """A hidden state of the model.

    Attributes:
        name: the same for every model family and every wrapper around the model.
        modules: whose output it is; the mean of their outputs where there are several.
        takes_input: it is instead what enters the (only) module.
    """

    name: str
    modules: tuple[nn.Module, ...]
    takes_input: bool = False


def resolve_layers(model: nn.Module, layers: LayerSpec = "blocks") -> list[Layer]:
    """Find the layers of a model.

    ``"blocks"`` stands for ``embed`` (what enters the first block), ``block.00`` … (each block's output) and
    ``final_norm`` (where the model has one). Patterns match these names and the module names, relative to the
    outermost Hugging Face model, numbers zero-padded or not, without wrappers (FSDP, compile, checkpointing).
    ``"mean(last4)"`` is the mean of the last four blocks.

    Raises:
        TypeError: ``layers`` is none of what `LayerSpec` says.
        ValueError: a pattern that matches nothing, or a model in which no blocks are found.

    >>> model = nn.ModuleDict({"layers": nn.ModuleList(nn.Linear(2, 2) for _ in range(2)), "norm": nn.LayerNorm(2)})
    >>> [layer.name for layer in resolve_layers(model)]
    ['embed', 'block.00', 'block.01', 'final_norm']
    """
    found = {layer.name: layer for layer in _resolve(model, layers)}
    if not found:
        raise ValueError(f"layers must name at least one layer; got {layers!r}.")
    return list(found.values())


def _resolve(model: nn.Module, layers: object) -> Iterator[Layer]:
    if isinstance(layers, str):
        yield from _match(model, layers)
    elif isinstance(layers, Mapping):
        for name, module in layers.items():
            if not isinstance(module, nn.Module):
                raise TypeError(f"layers must map names to modules; got {type(module).__name__} for {name!r}.")
            yield Layer(str(name), (module,))
    elif isinstance(layers, nn.Module):
        raise TypeError(f"layers must map names to modules, {{name: module}}; got a bare {type(layers).__name__}.")
    elif isinstance(layers, Sequence):
        for each in layers:
            yield from _resolve(model, each)
    elif callable(layers):
        yield from _resolve(model, layers(model))
    else:
        raise TypeError(
            f'layers must be "blocks", a pattern of names, a list of these or a callable; got {type(layers).__name__}.'
        )


def _match(model: nn.Module, pattern: str) -> Iterator[Layer]:
    standard = _standard_layers(model)
    if pattern == "blocks":
        if not standard:
            raise ValueError(
                f'layers="blocks" needs a list of transformer blocks; found none in {type(model).__name__}. '
                f"Name layers by a pattern of module names instead, such as {_some(module_names(model))}."
            )
        yield from standard
        return
    mean = _MEAN.fullmatch(pattern)
    if mean:
        blocks = [layer.modules[0] for layer in standard if layer.name.startswith("block.")]
        if not 1 <= int(mean[1]) <= len(blocks):
            raise ValueError(f"layers={pattern!r} needs that many blocks; the model has {len(blocks)}.")
        yield Layer(pattern, tuple(blocks[-int(mean[1]) :]))
        return
    names = module_names(model)
    taken = {layer.name for layer in standard}
    candidates = standard + [Layer(name, (module,)) for name, module in names.items() if name not in taken]
    matching = [
        layer for layer in candidates if fnmatchcase(layer.name, pattern) or fnmatchcase(_unpadded(layer.name), pattern)
    ]
    if not matching:
        everything = [layer.name for layer in candidates]
        parts = difflib.get_close_matches(pattern.rsplit(".", 1)[-1], {name.rsplit(".", 1)[-1] for name in everything})
        close = [name for name in everything if name.rsplit(".", 1)[-1] in parts] or everything
        raise ValueError(f"layers={pattern!r} matches no layer of {type(model).__name__}. Close to it: {_some(close)}.")
    yield from matching


def _unpadded(name: str) -> str:
    return re.sub(r"(?<![^.])0+(?=\d)", "", name)


def _some(names: Sequence[str] | Mapping[str, object]) -> str:
    return ", ".join(list(names)[:6]) or "(the model has no modules)"


def _standard_layers(model: nn.Module) -> list[Layer]:
    """``embed``, the blocks and ``final_norm``, or nothing where no blocks are found."""
    found = _find_blocks(measured_model(model))
    if found is None:
        return []
    parent, stack = found
    blocks = [unwrapped(block) for block in stack]
    width = max(2, len(str(len(blocks) - 1)))
    layers = [Layer("embed", (blocks[0],), takes_input=True)]
    layers += [Layer(f"block.{i:0{width}}", (block,)) for i, block in enumerate(blocks)]
    norms = [child for name, child in parent.named_children() if _is_norm(child) and "emb" not in name]
    return layers + [Layer("final_norm", (norm,)) for norm in norms[-1:]]


def _find_blocks(model: nn.Module) -> tuple[nn.Module, list[nn.Module]] | None:
    """The list of like modules that holds the most parameters, and the module it is in."""
    best, most = None, 0
    for parent in model.modules():
        for stack in parent.children():
            if not isinstance(stack, nn.ModuleList) or len({type(unwrapped(block)) for block in stack}) != 1:
                continue
            size = sum(p.numel() for p in stack.parameters())
            if size > most:
                best, most = (parent, list(stack)), size
    return best


def _is_norm(module: nn.Module) -> bool:
    return type(unwrapped(module)).__name__.endswith(("Norm", "RMSNorm", "LayerNorm"))


def unwrapped(module: nn.Module) -> nn.Module:
    """The module inside compile, FSDP, DDP and activation-checkpoint wrappers."""
    while True:
        for name, child in module.named_children():
            if _is_wrapped_child(module, name):
                module = child
                break
        else:
            return module


def _is_wrapped_child(parent: nn.Module, name: str) -> bool:
    return name in _WRAPPERS or (name == "module" and isinstance(parent, DistributedDataParallel | DataParallel))


def measured_model(model: nn.Module) -> nn.Module:
    """The outermost Hugging Face model inside ``model``, or ``model`` itself without its wrappers."""
    return next((m for m in model.modules() if isinstance(m, PreTrainedModel)), unwrapped(model))


def module_names(model: nn.Module) -> dict[str, nn.Module]:
    """Modules below the measured model by name: numbers zero-padded, wrappers left out."""
    names: dict[str, nn.Module] = {}

    def walk(module: nn.Module, prefix: str) -> None:
        module = unwrapped(module)
        if prefix:
            names[prefix] = module
        children = list(module.named_children())
        width = max(2, len(str(len(children) - 1)))
        for name, child in children:
            part = name.zfill(width) if name.isdigit() else name
            walk(child, f"{prefix}.{part}" if prefix else part)

    walk(measured_model(model), "")
    return names


def input_embedding(model: nn.Module) -> nn.Module | None:
    """The module that turns token ids into embeddings: what Hugging Face says, else the largest `nn.Embedding`."""
    measured = measured_model(model)
    if isinstance(measured, PreTrainedModel):
        try:
            return measured.get_input_embeddings()
        except NotImplementedError:
            return None
    tables = [m for m in measured.modules() if isinstance(m, nn.Embedding)]
    return max(tables, key=lambda table: table.num_embeddings, default=None)
