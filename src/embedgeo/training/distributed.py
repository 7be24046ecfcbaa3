"""Ranks that have a part of a model."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from hashlib import blake2b
from typing import Any, TypeVar

from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from embedgeo.capture.structure import (
    contains_any,
    find_stack,
    measured_model,
    module_names,
    unwrapped,
)
from embedgeo.capture.torch_names import is_flattened, shard_again
from embedgeo.functional.distributed import (
    OwnGroup,
    all_gather_object,
)
from embedgeo.geometry import Geometry

T = TypeVar("T")


def require_same_modules(geometry: Geometry, ranks: OwnGroup) -> None:
    """Raise ValueError if ranks have models of other modules, but for what is inside of blocks and
    is not measured, such as experts of their own; each of them must call this.
    """
    stack = find_stack(measured_model(geometry.model))
    blocks = stack.blocks if stack else []
    inside = {module for block in blocks for module in block.modules()} - {*blocks}
    modules = module_names(geometry.model).items()
    names = [name for name, module in modules if module not in inside]
    text = " ".join([*names, *(layer.name for layer in geometry.layers)])
    digest = blake2b(text.encode()).hexdigest()
    if len({*all_gather_object(digest, ranks)}) > 1:
        raise ValueError(
            "model must have the same modules on every rank; they differ, as those of pipeline "
            "stages do. Sweep over the checkpoints of a pipeline."
        )


def run_inside(model: nn.Module, module: nn.Module, call: Callable[[], object]) -> None:
    """Run ``call``, which calls a module inside the model, in place of the forward pass of the
    outermost FSDP module around it.

    That one gathers its parameters then. The module that FSDP runs first is its root for good.
    """
    kinds = FSDPModule | FullyShardedDataParallel
    sharded = [each for each in model.modules() if isinstance(each, kinds)]
    known = {weight for each in sharded for weight in each.parameters()}
    if any(map(is_flattened, {*model.parameters()} - known)):
        raise ValueError(
            f"model must be the one that FSDP has wrapped; got a {type(model).__name__} inside of "
            "it. Give the monitor the wrapped model, as the loop calls it."
        )
    around = [each for each in sharded if contains_any(each, [module])]
    outer = max(around, key=lambda each: len([*each.modules()]), default=module)
    if outer is module:
        call()
    else:
        _call_instead(outer, unwrapped(outer), call)


def _call_instead(outer: nn.Module, module: nn.Module, call: Callable[[], object]) -> None:
    """Call a wrapper around a module, in which ``call`` runs in place of the module's forward."""
    forward = module.forward

    def redirected(*args: Any) -> None:
        module.forward = forward
        call()

    module.forward = redirected
    try:
        outer()
    finally:
        module.forward = forward


@contextmanager
def kept_sharded(model: nn.Module) -> Iterator[None]:
    """Context after which FSDP modules that were sharded are sharded again, also if it raises.

    A root stays gathered until a backward pass. Until then its forward pass ignores changes of the
    sharded weights.
    """
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    before = [_own_parameters(module) for module in modules]
    undo = shard_again(model)
    try:
        yield
    finally:
        undo()
        for module, parameters in zip(modules, before, strict=True):
            if _own_parameters(module) != parameters:
                module.reshard()
            if _own_parameters(module) != parameters:  # its forward pass has raised
                with suppress(Exception):  # hooks of others get no output
                    _call_instead(module, module, lambda: None)  # it leaves its forward state
                module.reshard()


def _own_parameters(module: nn.Module) -> set[nn.Parameter]:
    """The parameters that an FSDP module shards itself: those of no FSDP module inside it."""
    inside = [each for each in module.modules() if isinstance(each, FSDPModule)]
    others = {weight for each in inside if each is not module for weight in each.parameters()}
    return {*module.parameters()} - others
