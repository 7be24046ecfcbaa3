"""The structure of a model: its blocks, encoder and decoder, embedding tables, and the wrappers
around modules.
"""

import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DataParallel, DistributedDataParallel

from embedgeo.capture.torch_names import WRAPPERS, whole_mesh
from embedgeo.formatting import listed

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_UNMEASURED = re.compile(r"(.*[^a-z])?(cp|context.*)([^a-z].*)?|pp|pipe.*|stages?", re.I)
"""Names of dimensions of a mesh along which ranks have parts of a sequence."""

_TORCH_ATTENTION = (
    nn.TransformerEncoderLayer,
    nn.TransformerDecoderLayer,
    nn.MultiheadAttention,
)
_NO_TOKENS = re.compile(r"wpe|pos(?!t).*|seg.*|types?|time.*|rel|relative")
_TOKENS = re.compile(r"wte|tok(en)?s?|words?|vocab.*")


class Stack(NamedTuple):
    """The transformer blocks of a model, and the module that applies them."""

    parent: nn.Module
    name: str  # of the list in its parent
    blocks: list[nn.Module]  # in forward order, as often as they are applied (ALBERT)


def unwrapped(module: nn.Module) -> nn.Module:
    """The module inside torch.compile, FSDP, DDP and activation-checkpoint wrappers."""
    names = (
        {*WRAPPERS, "module"}
        if isinstance(module, DistributedDataParallel | DataParallel)
        else WRAPPERS
    )
    inner = next((child for name, child in module.named_children() if name in names), None)
    return module if inner is None else unwrapped(inner)


def is_hugging_face(module: nn.Module) -> TypeGuard["PreTrainedModel"]:
    """Tell whether a module is a model of transformers, which need not be installed."""
    transformers = sys.modules.get("transformers.modeling_utils")
    return transformers is not None and isinstance(module, transformers.PreTrainedModel)


def library(module: nn.Module) -> str:
    """The package that a module's class comes from."""
    return type(module).__module__.partition(".")[0]


def is_norm(module: nn.Module) -> bool:
    """Tell whether a module is a norm, by a whole word of its class's name. A NormLinear has norms
    of weights.
    """
    return re.search(r"Norm(?![a-z]|\w*(Linear|Head))", type(module).__name__) is not None


def measured_model(model: nn.Module) -> nn.Module:
    """The outermost Hugging Face model inside ``model``, the first one of several, or ``model``
    itself without its wrappers.
    """
    return next((m for m in model.modules() if is_hugging_face(m)), unwrapped(model))


def require_one_model(model: nn.Module, *, also_by_hand: bool) -> None:
    """Raise ValueError if there are several, side by side, as a teacher and a student are: Hugging
    Face models, or lists of blocks in a model written ``by_hand``, which is none of transformers'.
    """
    beside = _hugging_face_models(model)
    if len(beside) > 1:
        raise _several(model, [*beside.values()])
    measured = measured_model(model)
    paths = {module: name for name, module in measured.named_modules()}
    is_known = library(measured) == "transformers"
    parts = [] if is_known or not also_by_hand else [*submodels(model).values()]
    for part in parts:
        others = (
            stack
            for stack in _stacks(measured)
            if not any(contains_any(each, stack.blocks) for each in parts)
        )
        stacks = *_stacks(part), *others
        lists = [f"{paths[stack.parent]}.{stack.name}".lstrip(".") for stack in stacks]
        if len(lists) > 1:
            raise ValueError(
                f"one list of blocks must be measured; {type(model).__name__} has {listed(lists)} "
                f'side by side. Choose one: layers="{lists[-1]}.??", or, of a module that has one '
                f"alone, layers=lambda module: module.NAME."
            )


def require_whole_sequences(model: nn.Module) -> None:
    """Raise ValueError if the mesh of the parameters has one of the `unmeasured_dimensions`."""
    weights = [each for each in model.parameters() if isinstance(each, DTensor)]
    for mesh in {each.device_mesh for each in weights}:
        for name in unmeasured_dimensions(mesh):
            raise ValueError(
                f"each rank must have whole sequences and all blocks; got weights on a mesh with "
                f"{name}. Under context and pipeline parallelism sweep over the checkpoints."
            )


def unmeasured_dimensions(mesh: DeviceMesh) -> list[str]:
    """Dimensions of context and pipeline parallelism, of more than one rank, of the whole mesh.

    accelerate joins dimensions to one named dp_shard_cp, also where cp is 1.
    """
    whole = whole_mesh(mesh)
    sizes = zip(whole.mesh_dim_names or (), whole.shape, strict=False)
    return [name for name, size in sizes if size > 1 and _UNMEASURED.fullmatch(name)]


def _several(model: nn.Module, names: Sequence[str]) -> ValueError:
    return ValueError(
        f"one model must be measured; {type(model).__name__} has {listed(names)} side by side. "
        f"Choose one: layers=lambda module: module.{names[-1]}, and a sweep needs "
        "the weights of one alone."
    )


def model_of(model: nn.Module, modules: Collection[nn.Module]) -> nn.Module:
    """The one of several Hugging Face models side by side that has these modules, or ``model``.
    ValueError if no one of them has all.
    """
    beside = _hugging_face_models(model)
    for each in beside if len(beside) > 1 else ():
        if all(module in each.modules() for module in modules):
            return each
    if len(beside) > 1:
        raise _several(model, [*beside.values()])
    return model


def _hugging_face_models(module: nn.Module, name: str = "") -> dict[nn.Module, str]:
    """The outermost ones, each once, and their names."""
    if is_hugging_face(module):
        return {module: name}
    found = dict[nn.Module, str]()
    for key, child in module.named_children():
        found |= _hugging_face_models(child, f"{name}.{key}" if name else key)
    return found


def module_names(model: nn.Module) -> dict[str, nn.Module]:
    """The modules inside the measured model by name, with numbers zero-padded and wrappers left
    out.
    """
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
    """The encoder and the decoder, or the measured model alone, by the prefix of their layers'
    names.
    """
    measured = measured_model(model)
    both = next(
        ((m.encoder, m.decoder) for m in measured.modules() if isinstance(m, nn.Transformer)), ()
    )
    if is_hugging_face(measured) and getattr(measured.config, "is_encoder_decoder", False):
        both = measured.get_encoder(), measured.get_decoder()
    if len({measured, *both}) < 3:
        return {"": measured}
    return dict(zip(("encoder.", "decoder."), both, strict=True))


def find_stack(submodel: nn.Module) -> Stack | None:
    """The list of blocks with the most parameters; None if there is none.

    Lists with attention or a norm inside come before others, and a list before those inside its
    blocks. Of a model of text and images or sounds the blocks are those of the text.
    """
    config = getattr(submodel, "config", None)
    best = next(iter(_stacks(submodel)), None)
    if best is None or not all(map(is_callable, best.blocks)):
        return None  # lists of modules are no blocks
    # ALBERT
    if getattr(config, "num_hidden_groups", None) == len(best.blocks):
        depth = config.num_hidden_layers  # type: ignore[union-attr]
        groups = len(best.blocks)
        return best._replace(blocks=[best.blocks[i * groups // depth] for i in range(depth)])
    return best


def _stacks(submodel: nn.Module) -> list[Stack]:
    """The lists of modules that may be blocks, those with attention or a norm inside first, and of
    these the one with the most parameters. Modules with nothing inside are blocks where no others
    are.
    """
    depth = getattr(getattr(submodel, "config", None), "num_hidden_layers", None)
    found = list[Stack]()

    def walk(parent: nn.Module, *, is_inside: bool) -> None:
        for name, child in parent.named_children():
            if name == "parametrizations":  # of a weight
                continue
            entries: Iterable[Any] = ()
            if isinstance(child, nn.ModuleList | nn.Sequential):
                entries = child
            elif isinstance(child, nn.ModuleDict):
                entries = child.values()
            blocks = [unwrapped(block) for block in entries if block is not None]
            num_usual = sum(map(_is_usual, blocks))
            is_stack = _are_blocks(child, blocks, depth) and not _is_cut(parent, blocks)
            if is_stack and (num_usual or not is_inside):
                found.append(Stack(parent, name, blocks))
            # what is inside of attention, or of blocks, of several types too, is a part of these
            is_whole = is_stack or (num_usual > 1 and not isinstance(child, nn.ModuleDict))
            if not (is_whole or _is_attention(child)):
                # beside attention there are experts
                walk(child, is_inside=is_inside or any(map(_is_attention, child.children())))

    def rank(stack: Stack) -> tuple[bool, bool, int]:
        parameters = stack.parent.get_submodule(stack.name).parameters()
        return (
            any(map(_is_usual, stack.blocks)),
            any([*block.children()] for block in stack.blocks),
            sum(p.numel() for p in parameters),
        )

    walk(_text_model(submodel), is_inside=False)
    stacks = sorted(found, key=rank, reverse=True)
    return [stack for stack in stacks if any(rank(stack)[:2])] or stacks[:1]


def _is_attention(module: nn.Module) -> bool:
    return re.search(r"(Attention|Attn)\d*$", type(module).__name__) is not None


def _is_usual(block: nn.Module) -> bool:
    """Tell whether a module has attention, or a norm inside."""
    own, *inner = (type(module).__name__ for module in block.modules())
    return "Attention" in own or any("Attention" in kind or "Norm" in kind for kind in inner)


def _text_model(submodel: nn.Module) -> nn.Module:
    """The model of the text inside a Hugging Face model that also takes images or sounds."""
    if not is_hugging_face(submodel):
        return submodel
    text = submodel.config.get_text_config()
    inside = (m for m in submodel.modules() if is_hugging_face(m) and m.config is text)
    return next(inside, submodel)


def find_stacks(model: nn.Module) -> list[Stack]:
    """The stacks of those parts of a model that have one."""
    return [stack for part in submodels(model).values() if (stack := find_stack(part)) is not None]


def _are_blocks(stack: nn.Module, blocks: list[nn.Module], depth: int | None) -> bool:
    """Tell whether modules are transformer blocks: of one type, or as many as the configuration
    says.
    """
    if isinstance(stack, nn.ModuleDict) and not all(key[-1:].isdigit() for key in stack):
        return False
    if any(isinstance(block, nn.Linear | nn.Embedding) for block in blocks):
        return False  # heads, or tables
    if len({type(block) for block in blocks}) != 1:
        # attention and state-space blocks in turn
        return len(blocks) == depth and not isinstance(stack, nn.ModuleDict)
    # the stages of a CNN have convolutions
    inner = [type(module) for module in blocks[0].modules()]
    return not isinstance(stack, nn.Sequential) or (len(inner) > 1 and nn.Conv2d not in inner)


def _is_cut(parent: nn.Module, blocks: list[nn.Module]) -> bool:
    """Tell whether the parts of blocks are in several lists side by side, one of them of norms or
    attention.
    """
    lists = [m for m in parent.children() if isinstance(m, nn.ModuleList) and len(m) == len(blocks)]
    parts = ({is_norm(m) or _is_attention(m) for m in each} for each in lists)
    return len(lists) > 1 and {True} in parts


def is_callable(block: nn.Module) -> bool:
    """Tell whether a module has a ``forward``: lists and dicts of modules have none."""
    return getattr(block.forward, "__func__", None) is not nn.Module.forward


def final_norms(stack: Stack) -> list[nn.Module]:
    """The norms beside the blocks, that may follow them. By the order in which they are defined the
    final one is the first one: the first behind the list of blocks, else the last before it.
    """
    # DeBERTa's only norm here is applied to relative positions
    if hasattr(stack.parent, "norm_rel_ebd"):
        return []
    before = list[nn.Module]()
    behind = list[nn.Module]()
    norms = before
    for name, child in stack.parent.named_children():
        # BART's, applied before the blocks though defined after them
        if name == "layernorm_embedding":
            continue
        if stack.blocks[0] in map(unwrapped, child.children()):
            norms = behind
        module = unwrapped(child)
        leaves = [
            inner
            for inner in module.modules()
            if hasattr(inner, "parametrizations") or not [*inner.children()]
        ]
        # one with nothing but norms inside is one, too: an adapter may train a copy
        is_one = is_norm(module) or (is_callable(module) and all(map(is_norm, leaves)))
        # of embeddings: before the blocks
        if is_one and "proj" not in name and (norms is behind or "emb" not in name):
            norms.append(child)
    return [*behind, *reversed(before)]


def base_model(submodel: nn.Module, block: nn.Module) -> nn.Module | None:
    """The Hugging Face model around a block that has no head, whose output is the last hidden
    state; None if there is none.
    """
    around = [m for m in submodel.modules() if is_hugging_face(m) and contains_any(m, [block])]
    headless = [m for m in around[-1:] if m.get_output_embeddings() is None]
    return headless[0] if headless else None


def enclosing_modules(submodel: nn.Module) -> list[nn.Module]:
    """The modules that contain the blocks, outermost first: an attention mask is an argument of one
    of their calls.
    """
    stack = find_stack(submodel)
    inner = submodel if stack is None else stack.parent
    return [
        m
        for m in submodel.modules()
        if unwrapped(m) is m and (m is submodel or contains_any(m, [inner]))
    ]


def towers_around(
    modules: Iterable[nn.Module], model: nn.Module, inner: Sequence[nn.Module]
) -> list[nn.Module]:
    """The modules around blocks of which some of these are, beside the ``inner`` modules of a model
    that have the blocks looked for: each may be called with a mask of its own.
    """
    known = {module for each in inner for module in each.modules()}
    others = [module for module in modules if module not in known]
    return [
        tower
        for tower in (model.modules() if others else ())
        if not contains_any(tower, inner)
        and (stack := find_stack(tower))
        and contains_any(stack.parent, others)
    ]


def other_towers(model: nn.Module, tables: Iterable[nn.Module]) -> set[nn.Module]:
    """The modules of those parts of a model that have blocks of their own beside the part that has
    the embedding tables and blocks: the images' beside the text's.
    """
    stack = find_stack(model)
    if stack is None:
        return set()
    parts = [module for module in model.modules() if find_stack(module)]
    # where the model tells no table, as CLIP does not: the blocks of the text
    marks = {*tables} or {stack.parent}
    of_text = [part for part in parts if contains_any(part, marks)]
    own = {*of_text[-1].modules()} if of_text else set()  # the innermost
    others = (part for part in parts if part not in own and part not in of_text)
    return {module for part in others for module in part.modules()}


def torch_attention(submodel: nn.Module) -> Iterator[nn.Module]:
    """Torch's own layers and attention in the blocks, the outermost: they may be told of padding
    that no module around the blocks is.
    """
    stack = find_stack(submodel)
    if stack is None or isinstance(stack.parent, nn.TransformerEncoder | nn.TransformerDecoder):
        return
    inside = set[nn.Module]()
    for module in (inner for block in stack.blocks for inner in block.modules()):
        if isinstance(module, _TORCH_ATTENTION) and module not in inside:
            inside.update(module.modules())
            yield module


def token_embeddings(submodel: nn.Module) -> Sequence[nn.Module]:
    """The embedding tables of tokens: several only where the structure does not tell which one it
    is.

    Those that ``get_input_embeddings`` tells; or, of the tables outside the blocks that share a
    head's weight or are not named after positions, segments and times, those named after tokens,
    else all.
    """
    get_table = getattr(_text_model(submodel), "get_input_embeddings", None)
    if callable(get_table):
        try:
            table = get_table()
        # transformers' own, or another signature
        except (NotImplementedError, AttributeError, TypeError):
            table = None
        if isinstance(table, nn.Module) or is_hugging_face(submodel):
            tables = [m for m in submodel.modules() if isinstance(m, nn.Embedding)]
            # T5's encoder calls another
            if not isinstance(table, nn.Module):
                return []
            return [each for each in tables if _weight(each) is _weight(table)] or [table]
    outside = _outside_blocks(submodel)
    head_weights = {id(_weight(each)) for each in outside if isinstance(each, nn.Linear)}
    words = {
        table: _words(table, name)
        for table, name in outside.items()
        if isinstance(table, nn.Embedding)
    }
    tables = [
        table
        for table in words
        if id(_weight(table)) in head_weights or not any(map(_NO_TOKENS.fullmatch, words[table]))
    ]
    return [table for table in tables if any(map(_TOKENS.fullmatch, words[table]))] or tables


def _weight(module: Any) -> object:
    """The weight of a module that has one, else the module: asking a parametrization may change
    it.
    """
    return {**vars(module), **module._parameters}.get("weight", module)  # noqa: SLF001


def _outside_blocks(submodel: nn.Module) -> dict[nn.Module, str]:
    """The modules of a model that are not in its blocks, with their names."""
    stack = find_stack(submodel)
    in_blocks = {inner for block in (stack.blocks if stack else []) for inner in block.modules()}
    return {module: name for name, module in submodel.named_modules() if module not in in_blocks}


def _words(module: nn.Module, path: str) -> list[str]:
    """The words, in lower case, of the last two names in a module's path and of its class's
    name.
    """
    names = [name for name in path.split(".") if name not in WRAPPERS][-2:]
    return [
        word.lower()
        for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+", " ".join([*names, type(module).__name__]))
    ]


def input_embedding(model: nn.Module) -> nn.Module | None:
    """The embedding table of the vocabulary: the largest of the token tables; None if there is
    none.
    """
    tables = [
        table for submodel in submodels(model).values() for table in token_embeddings(submodel)
    ]
    return max(tables, key=lambda table: getattr(table, "num_embeddings", 0), default=None)


def output_embedding(model: nn.Module) -> nn.Module | None:
    """The module that makes the logits, as the model itself tells; None if it tells none."""
    head = getattr(measured_model(model), "get_output_embeddings", lambda: None)()
    return head if isinstance(head, nn.Module) else None


def find_logits(model: nn.Module, output: Any) -> Tensor | None:
    """The logits in the output of a model, shape (batch, positions, vocabulary).

    They are what the output names so. Where it names none, they are the one tensor that is as wide
    as the embedding table has rows.
    """
    parts = named_parts(output)
    if isinstance(parts.get("logits"), Tensor):
        return parts["logits"]
    width = getattr(input_embedding(model), "num_embeddings", 0)
    tensors = (each for each in parts.values() if isinstance(each, Tensor) and each.ndim == 3)
    candidates = [each for each in tensors if each.shape[-1] == width]
    return candidates[0] if len(candidates) == 1 else None


def named_parts(output: Any) -> Mapping[Any, Any]:
    """What the output of a model consists of, by name where there are names, or else by place."""
    if isinstance(output, Mapping):
        return output
    if hasattr(output, "_asdict"):
        return output._asdict()
    if isinstance(output, tuple | list):
        return dict(enumerate(output))
    return {0: output} if isinstance(output, Tensor) else getattr(output, "__dict__", {})


def model_width(model: nn.Module) -> int | None:
    """The width of hidden states by the configuration, the embedding table, or the last norm or
    bias of a block.
    """
    width = getattr(getattr(measured_model(model), "config", None), "hidden_size", None)
    width = width or getattr(input_embedding(model), "embedding_dim", None)
    last = [weight for stack in find_stacks(model) for weight in stack.blocks[0].parameters()][-1:]
    width = width or next((weight.shape[0] for weight in last if weight.ndim == 1), None)
    return width if isinstance(width, int) else None


def config_widths(measured: nn.Module) -> set[int]:
    """The widths of hidden states that the configuration tells."""
    names = "hidden_size", "hidden_sizes", "embed_dim", "embed_dims", "embedding_size"
    widths = (getattr(getattr(measured, "config", None), name, ()) for name in names)
    return {
        width
        for each in widths
        for width in (each if isinstance(each, list | tuple) else [each])
        if isinstance(width, int)
    }


def weights_device(model: nn.Module) -> torch.device:
    """The device of a model's first weight that is in memory; the CPU if none is."""
    return next(
        (weight.device for weight in model.parameters() if not weight.is_meta), torch.device("cpu")
    )


def contains_any(module: nn.Module, wanted: Iterable[nn.Module]) -> bool:
    """Tell whether a module or one inside it is one of those ``wanted``."""
    return not set(module.modules()).isdisjoint(wanted)
