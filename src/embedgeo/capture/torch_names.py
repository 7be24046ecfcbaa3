"""Names of torch that it does not promise, and what is done in a torch without one: most often a
slower way is taken.

Others: ``_apply`` (`embedgeo.metrics.base`), and modules' dictionaries of hooks and parameters.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parameter import is_lazy
from torch.utils import _python_dispatch as dispatch

WRAPPERS = {
    "_orig_mod",
    "_fsdp_wrapped_module",
    "_checkpoint_wrapped_module",
    "_forward_module",
}
"""Names by which torch.compile, FSDP, checkpoint wrappers and Fabric hold a module; another one
shows in layers' names.
"""

_OF_MODULES = vars(nn.Module()).keys() - {"_buffers", "_non_persistent_buffers_set"}


def has_gradients() -> bool:
    """Tell whether gradients are on, here or where a running autograd function began, as of
    reentrant checkpointing.
    """
    return torch.is_grad_enabled() or not (
        torch._C._is_fwd_grad_enabled() or torch.is_inference_mode_enabled()
    )


def in_backward() -> bool:
    """Tell whether a backward pass is running in this thread, in which checkpointing repeats
    forward passes.
    """
    return torch._C._current_graph_task_id() != -1


def is_transformed(tensor: Tensor) -> bool:
    """Tell whether a tensor is that of a function transform (``torch.func.grad``, ``vmap``), which
    has no storage.
    """
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def version(tensor: Tensor) -> object:
    """A number that changes with every change of a tensor in place; an object equal to no other
    where there is none.
    """
    return None if tensor.is_inference() else getattr(tensor, "_version", object())


def are_equal(one: Tensor, other: Tensor) -> bool:
    """Tell whether tensors of one dtype have the same shape and numbers, NaN in the same places."""
    return one.shape == other.shape and torch.allclose(one, other, 0, 0, equal_nan=True)


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, or of a flat parameter of FSDP; another tensor itself."""
    local: Tensor = getattr(tensor, "_local_tensor", getattr(tensor, "_local_shard", tensor))
    return local


def is_flattened(weight: Tensor) -> bool:
    """Tell whether a parameter is one of ``FullyShardedDataParallel``'s, of which ranks have parts;
    a torch with another name for the mark hides it.
    """
    return hasattr(weight, "_fsdp_flattened")


def is_whole(weight: Tensor) -> bool:
    """Tell whether this rank has all of a parameter in memory."""
    is_there = not (weight.is_meta or is_lazy(weight) or hasattr(weight, "ds_id"))
    return is_there and local_part(weight) is weight and not is_flattened(weight)


def named_shards(model: nn.Module) -> list[tuple[str, Tensor]]:
    """The parameters of which FSDP gives each rank a part, by the names of the modules that it
    wraps, also while others are in their place; a torch with other names hides them.
    """
    shards = list[tuple[str, Tensor]]()
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            state: Any = module._get_fsdp_state()
            for group in getattr(state, "_fsdp_param_groups", [state._fsdp_param_group]):
                shards += [(name, each.sharded_param) for each in group.fsdp_params]
        elif isinstance(module, FullyShardedDataParallel) and module._handle is not None:
            shards.append((name, module._handle.flat_param))
    return shards


def changes(weight: Tensor) -> list[object]:
    """What a change in place of a parameter, or of a rank's part of it, changes."""
    views = getattr(weight, "_params", None) or ()  # that optimizers have of a flat one
    return [version(each) for each in (weight, *views)]


def own_attributes(module: nn.Module) -> dict[str, Any]:
    """Attributes that are not torch's own, nor DeepSpeed's, nor parameters as FSDP1 has them; and
    the dict of buffers.
    """
    has_views = not getattr(module, "_fsdp_use_orig_params", True)
    return {
        name: value
        for name, value in vars(module).items()
        if not (name in _OF_MODULES or name in module._parameters or name.startswith("ds_"))
        and not (has_views and isinstance(value, Tensor) and value._is_view())
    }


def has_compiled(model: nn.Module) -> bool:
    """Tell whether a module inside is what ``torch.compile(module)`` gives, or one of which
    ``module.compile()`` was called, or something has run in a graph in this process. A torch with
    other names hides it.
    """
    return torch._dynamo.utils.counters["frames"]["total"] > 0 or any(
        hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None
        for module in model.modules()
    )


def meta_values() -> AbstractContextManager[Any]:
    """Context in which tensors on the meta device have values, so that a model runs that asks for
    some.

    A number is 1, no element is zero, and products of groups of rows, as of a mixture of experts,
    are made in every dtype.
    """

    class MetaValues(dispatch.TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            first: Any = args[0] if args else None
            name = str(func) if isinstance(first, Tensor) and first.is_meta else ""
            if name == "aten._local_scalar_dense.default":
                return 1
            if name == "aten.nonzero.default":
                return first.new_empty((first.numel(), first.ndim), dtype=torch.int64)
            if name == "aten._grouped_mm.default":
                return first.new_empty((len(first), args[1].shape[-1]))
            return func(*args, **(kwargs or {}))

    make: Callable[[], AbstractContextManager[Any]] = MetaValues
    return make()


@contextmanager
def without_modes() -> Iterator[None]:
    """Context in which no ``TorchDispatchMode`` of others sees what runs: that of selective
    activation checkpointing would keep it in place of the model's own.
    """
    modes = [dispatch._pop_mode() for _ in range(torch._C._len_torch_dispatch_stack())]
    try:
        yield
    finally:
        for mode in reversed(modes):
            dispatch._push_mode(mode)


def whole_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh that another one is a part of; a torch with another name for it gives the part."""
    return getattr(mesh, "_root_mesh", None) or mesh


def fsdp1_sizes(model: nn.Module) -> list[int]:
    """Over how many ranks each ``FullyShardedDataParallel`` shards and replicates; a torch with
    another name for those that replicate hides them.
    """
    groups: list[list[Any]] = [
        [module.process_group, getattr(module, "_inter_node_pg", None)]
        for module in model.modules()
        if isinstance(module, FullyShardedDataParallel)
    ]
    return [math.prod(each.size() for each in pair if each is not None) for pair in groups]


def shard_again(model: nn.Module) -> Callable[[], None]:
    """A function that shards each ``FullyShardedDataParallel`` again that is sharded now, also
    after a forward pass that has raised.

    A torch that lacks one of the names raises ImportError or AttributeError.
    """
    modules: list[Any] = [
        module
        for module in model.modules()
        if isinstance(module, FullyShardedDataParallel)
        and (handle := module._handle) is not None
        and handle.uses_sharded_strategy
        and (module._is_root is None or handle.needs_unshard())
    ]
    states = [(module.training_state, module._handle._training_state) for module in modules]
    if not modules:
        return lambda: None
    from torch.distributed.fsdp._runtime_utils import _reshard

    def undo() -> None:
        for module, (state, of_handle) in zip(modules, states, strict=True):
            module.training_state, module._handle._training_state = state, of_handle
            if module._is_root is not None and not module._handle.needs_unshard():
                _reshard(module, module._handle, True)

    return undo
