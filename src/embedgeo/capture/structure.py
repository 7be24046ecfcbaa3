"""The structure of a model: its blocks, encoder and decoder, embedding tables, and the wrappers around modules."""

from collections.abc import Iterable
from typing import NamedTuple

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from transformers import PreTrainedModel

_WRAPPERS = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}


class Stack(NamedTuple):
    """The transformer blocks of a model.

    Attributes:
        parent: the module that applies the blocks.
        blocks: in forward order; a block that is applied several times (ALBERT) is listed as many times.
    """

    parent: nn.Module
    blocks: list[nn.Module]


def unwrapped(module: nn.Module) -> nn.Module:
    """The module inside torch.compile, FSDP, DDP and activation-checkpoint wrappers."""
    names = {*_WRAPPERS, "module"} if isinstance(module, DistributedDataParallel | DataParallel) else _WRAPPERS
    inner = next((child for name, child in module.named_children() if name in names), None)
    return module if inner is None else unwrapped(inner)


def measured_model(model: nn.Module) -> nn.Module:
    """The outermost Hugging Face model inside ``model``, or ``model`` itself without its wrappers."""
    return next((m for m in model.modules() if isinstance(m, PreTrainedModel)), unwrapped(model))


def module_names(model: nn.Module) -> dict[str, nn.Module]:
    """The modules inside the measured model by name, with numbers zero-padded and wrappers left out."""
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
    """The parts of a model that process different sequences, by the prefix of their layers' names.

    An encoder-decoder model (of Hugging Face, or with an `nn.Transformer`) has the parts ``encoder.`` and ``decoder.``;
    any other model has one, the measured model, with an empty prefix.
    """
    measured = measured_model(model)
    both = next(((m.encoder, m.decoder) for m in measured.modules() if isinstance(m, nn.Transformer)), ())
    if isinstance(measured, PreTrainedModel) and getattr(measured.config, "is_encoder_decoder", False):
        both = measured.get_encoder(), measured.get_decoder()
    if len({measured, *both}) < 3:
        return {"": measured}
    return dict(zip(("encoder.", "decoder."), both, strict=True))


def find_stack(submodel: nn.Module) -> Stack | None:
    """The list of blocks with the most parameters; None if there is none."""
    config = getattr(submodel, "config", None)
    best, most = None, 0
    for parent in submodel.modules():
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
    """Whether a list of modules holds transformer blocks: of one type, or as many as the configuration says.

    In a `nn.Sequential` the blocks also must have submodules and no convolution, as the stages of a CNN have.
    """
    if len({type(block) for block in blocks}) != 1:
        return len(blocks) == depth  # as where attention and state-space blocks alternate
    inner = [type(module) for module in blocks[0].modules()]
    return isinstance(stack, nn.ModuleList) or (len(inner) > 1 and nn.Conv2d not in inner)


def final_norm(stack: Stack) -> nn.Module | None:
    """The norm after the last block; None if the model has none."""
    if hasattr(stack.parent, "norm_rel_ebd"):  # DeBERTa's only norm here is applied to relative positions
        return None
    norms = [
        child
        for name, child in stack.parent.named_children()
        if type(unwrapped(child)).__name__.endswith("Norm") and not ("emb" in name or "proj" in name)
    ]
    return norms[-1] if norms else None


def enclosing_modules(submodel: nn.Module) -> list[nn.Module]:
    """The modules that contain the blocks, outermost first: an attention mask is an argument of one of their calls."""
    stack = find_stack(submodel)
    inner = submodel if stack is None else stack.parent
    return [m for m in submodel.modules() if unwrapped(m) is m and (m is submodel or contains_any(m, [inner]))]


def token_tables(submodel: nn.Module) -> list[nn.Module]:
    """The input embedding of a Hugging Face model; every `nn.Embedding` of another model, also those of positions."""
    if isinstance(submodel, PreTrainedModel):
        try:
            table = submodel.get_input_embeddings()
        except NotImplementedError:
            return []
        return [table] if isinstance(table, nn.Module) else []
    return [m for m in submodel.modules() if isinstance(m, nn.Embedding)]


def input_embedding(model: nn.Module) -> nn.Module | None:
    """The embedding table of the vocabulary: the largest of the token tables; None if there is none."""
    tables = [table for submodel in submodels(model).values() for table in token_tables(submodel)]
    return max(tables, key=lambda table: getattr(table, "num_embeddings", 0), default=None)


def contains_any(module: nn.Module, wanted: Iterable[nn.Module]) -> bool:
    """Whether ``module`` or a module inside it is one of those ``wanted``."""
    return not set(module.modules()).isdisjoint(wanted)
