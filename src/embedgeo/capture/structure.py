"""How a model is built: its blocks, its encoder and decoder, its tables of token embeddings, the wrappers around it."""

from collections.abc import Iterable
from typing import NamedTuple

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from transformers import PreTrainedModel

_WRAPPERS = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}


class Stack(NamedTuple):
    """The transformer blocks of a model.

    Attributes:
        parent: the module that applies them.
        blocks: in forward order; a block that is applied several times (ALBERT) is there as many times.
    """

    parent: nn.Module
    blocks: list[nn.Module]


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


def submodels(model: nn.Module) -> dict[str, nn.Module]:
    """The parts of a model that see sequences of their own, by the prefix of their layers' names.

    ``encoder.`` and ``decoder.`` of an encoder-decoder model, of Hugging Face or with an `nn.Transformer`; else the
    measured model, without a prefix.
    """
    measured = measured_model(model)
    both: tuple[nn.Module, ...] = ()
    if isinstance(measured, PreTrainedModel) and getattr(measured.config, "is_encoder_decoder", False):
        both = measured.get_encoder(), measured.get_decoder()
    else:
        both = next(((m.encoder, m.decoder) for m in measured.modules() if isinstance(m, nn.Transformer)), ())
    if len({measured, *both}) < 3:
        return {"": measured}
    return dict(zip(("encoder.", "decoder."), both, strict=True))


def find_stack(side: nn.Module) -> Stack | None:
    """The list of blocks that holds the most parameters; None where there is none."""
    config = getattr(side, "config", None)
    best, most = None, 0
    for parent in side.modules():
        for stack in parent.children():
            if not isinstance(stack, nn.ModuleList | nn.Sequential):
                continue
            blocks = [unwrapped(block) for block in stack]
            size = sum(p.numel() for p in stack.parameters())
            if size > most and _are_blocks(stack, blocks, getattr(config, "num_hidden_layers", None)):
                best, most = Stack(parent, blocks), size
    if best is not None and getattr(config, "num_hidden_groups", None) == len(best.blocks):  # ALBERT
        depth, groups = config.num_hidden_layers, len(best.blocks)  # type: ignore[union-attr]
        return best._replace(blocks=[best.blocks[i * groups // depth] for i in range(depth)])
    return best


def _are_blocks(stack: nn.Module, blocks: list[nn.Module], depth: int | None) -> bool:
    """Whether they are alike, or as many as the model has; in a Sequential, also built as no stage of a CNN is."""
    if len({type(block) for block in blocks}) != 1:
        return len(blocks) == depth  # attention and state-space blocks in turn
    inner = [type(module) for module in blocks[0].modules()]
    return isinstance(stack, nn.ModuleList) or (len(inner) > 1 and nn.Conv2d not in inner)


def final_norm(stack: Stack) -> nn.Module | None:
    """The norm that follows the blocks; None where the model has none."""
    if hasattr(stack.parent, "norm_rel_ebd"):  # DeBERTa's is for its relative positions
        return None
    norms = [
        child
        for name, child in stack.parent.named_children()
        if type(unwrapped(child)).__name__.endswith("Norm") and not ("emb" in name or "proj" in name)
    ]
    return norms[-1] if norms else None


def enclosing_modules(side: nn.Module) -> list[nn.Module]:
    """The modules around the blocks, outermost first: those of whose calls an attention mask can be an argument."""
    stack = find_stack(side)
    inner = side if stack is None else stack.parent
    return [m for m in side.modules() if unwrapped(m) is m and (m is side or contains_any(m, [inner]))]


def token_tables(side: nn.Module) -> list[nn.Module]:
    """The modules that are given token ids: what Hugging Face says, else every `nn.Embedding` (also of positions)."""
    if isinstance(side, PreTrainedModel):
        try:
            table = side.get_input_embeddings()
        except NotImplementedError:
            return []
        return [table] if isinstance(table, nn.Module) else []
    return [m for m in side.modules() if isinstance(m, nn.Embedding)]


def input_embedding(model: nn.Module) -> nn.Module | None:
    """The table of the token types: of the token tables, the largest."""
    tables = [table for side in submodels(model).values() for table in token_tables(side)]
    return max(tables, key=lambda table: getattr(table, "num_embeddings", 0), default=None)


def contains_any(module: nn.Module, wanted: Iterable[nn.Module]) -> bool:
    """Whether one of the ``wanted`` modules is ``module`` or inside it."""
    return not set(module.modules()).isdisjoint(wanted)
