"""Calls of modules, also of their bare ``forward``, which torch's hooks do not see, and the state
kept around them.
"""

import inspect
import random
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from copy import copy
from functools import partial
from types import MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from embedgeo.capture.torch_names import (
    are_equal,
    changes,
    is_flattened,
    is_whole,
    local_part,
    named_shards,
    own_attributes,
)

# for one call
CallContext = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], AbstractContextManager[None]]
_MOST_CONTENTS = 1000  # of a container; what is in longer ones, as data sets are, is not looked at
_MOST_BYTES = 2**30  # of a tensor that is copied: larger ones are data sets, in a file perhaps
_SYNC = "require_forward_param_sync"  # of DDP: the next forward broadcasts the buffers of rank 0
_STATES = "last_hidden_state", "hidden_states"  # names of the one among several outputs
_TABLES = nn.Embedding, nn.EmbeddingBag
_GENERATORS: tuple[type[Any], ...] = torch.Generator, np.random.RandomState
# what calls of watched modules run inside of, by the modules' ids
_contexts: dict[int, list[CallContext]] = {}
# of each class, or module with a ``forward`` of its own, by its id: the watched modules that have
# its ``forward``, what watches, and what was there before
_watches: dict[int, tuple[list[nn.Module], Any, Any]] = {}


@contextmanager
def watched_calls(module: nn.Module, make_context: CallContext) -> Iterator[None]:
    """Context in which every call of a module, ``module(…)`` or ``module.forward(…)``, runs inside
    another context.

    Meanwhile its class has another ``forward``; where the module has its own, the module has. Other
    modules of the class, such as copies and replicas of ``nn.DataParallel``, run as they did.
    """
    holder: Any = module if "forward" in vars(module) else type(module)
    contexts = _contexts.setdefault(id(module), [])
    contexts.append(make_context)
    if id(holder) not in _watches:
        original = inspect.getattr_static(holder, "forward")
        watching = _OwnForward(module, original) if holder is module else _ClassForward(original)
        _watches[id(holder)] = [], watching, vars(holder).get("forward")
        _set_forward(holder, watching)
    watched, watching, before = _watches[id(holder)]
    watched.append(module)
    try:
        yield
    finally:
        watched.remove(module)
        if not watched:
            del _watches[id(holder)]
            if vars(holder).get("forward") is watching:  # and not another one's, set since
                _set_forward(holder, before)
        contexts.remove(make_context)
        if not contexts:
            del _contexts[id(module)]
            # as others have kept it, which set a module's own for a while
            kept = getattr(vars(module).get("forward"), "__func__", None)
            if isinstance(kept, _ClassForward):
                vars(module)["forward"] = kept.original.__get__(module)


class _ClassForward:
    """The ``forward`` of a class that watches; to who looks at it, the one that it stands for."""

    def __init__(self, original: Any) -> None:
        self.original = original

    def __get__(self, module: Any, owner: Any = None) -> Any:
        return self.original if module is None else MethodType(self, module)

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return _run_watched(module, self.original.__get__(module), args, kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.original, name)


class _OwnForward:
    """The ``forward`` of one module that watches; to who looks at it, and in copies and pickles,
    the one that it stands for.
    """

    def __init__(self, module: nn.Module, original: Callable[..., Any]) -> None:
        self.__wrapped__ = original
        self._call = partial(_run_watched, module, original)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(args, kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["__wrapped__"], name)

    def __reduce__(self) -> Any:
        return _itself, (self.__wrapped__,)


def _itself(forward: Any) -> Any:
    return forward


def _run_watched(
    module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    with ExitStack() as stack:
        # none are left where others keep what watches for later
        for make_context in _contexts.get(id(module), ()):
            stack.enter_context(make_context(module, args, kwargs))
        return forward(*args, **kwargs)


def _set_forward(holder: Any, forward: Any) -> None:
    """Set that of a class, or a module's own; None: take it away."""
    if isinstance(holder, nn.Module):
        vars(holder)["forward"] = forward
    elif forward is None:
        del holder.forward
    else:
        holder.forward = forward


def arguments_by_name(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """What a module is called with, by the names of the arguments of its ``forward``."""
    if not args:
        return kwargs
    return {**inspect.signature(module.forward).bind_partial(*args).arguments, **kwargs}


def first_float(value: Any) -> Tensor | None:
    """The first floating-point tensor in the arguments or the output of a module."""
    if isinstance(value, Tensor):
        return value if value.is_floating_point() else None
    if (named := named_state(value)) is not None:
        return named
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, tuple | list):
        for each in value:  # no generator: torch.compile follows this
            if (tensor := first_float(each)) is not None:
                return tensor
    return None


def named_state(output: Any) -> Tensor | None:
    """The tensor that a dict or a named tuple calls the hidden state."""
    for name in _STATES:
        state = output.get(name) if isinstance(output, dict) else getattr(output, name, None)
        if isinstance(state, Tensor):
            return state
    return None


def num_states(output: Any, hidden: Tensor) -> int:
    """How many tensors in a module's output have the shape of its hidden state: two where it gives
    a branch and the residual stream, neither of which is that state. A name tells which is.
    """
    if named_state(output) is hidden:
        return 1
    parts = output.values() if isinstance(output, dict) else output
    parts = parts if isinstance(output, tuple | list | dict) else [output]
    tensors = (each for each in parts if isinstance(each, Tensor) and each.is_floating_point())
    return len({id(each) for each in tensors if each.shape == hidden.shape})


def first_input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """The first floating-point tensor that a module is called with; of those given by name
    ``hidden_states``.
    """
    return first_float((*args, kwargs.get("hidden_states"), *kwargs.values()))


class _Setting:
    """Context in which a setting of the process is another one; contexts may overlap, and the last
    one ends it.
    """

    def __init__(self, change: Callable[[], AbstractContextManager[object]]) -> None:
        self._change = change
        self._num_open = 0
        self._changed = ExitStack()

    def __enter__(self) -> None:
        if not self._num_open:
            self._changed.enter_context(self._change())
        self._num_open += 1

    def __exit__(self, *error: object) -> None:
        self._num_open -= 1
        if not self._num_open:
            self._changed.close()


@contextmanager
def _without_fast_path() -> Iterator[None]:
    is_enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(is_enabled)


eager_mode = _Setting(partial(torch.compiler.set_stance, "force_eager"))
"""Context in which nothing runs in compiled graphs."""

every_module_called = _Setting(_without_fast_path)
"""Context in which torch's transformer layers call their modules in passes without gradients."""


def set_eval_modes(model: nn.Module) -> None:
    """Put each module into eval mode by its attribute alone: its ``eval()`` may merge adapters into
    weights.
    """
    for module in model.modules():
        if hasattr(module, "training"):  # frozen TorchScript is in no mode
            module.training = False


def mode_restorer(model: nn.Module) -> Callable[[], None]:
    """A function that puts each module back into the mode, train or eval, that it has now."""
    modes = [(each, each.training) for each in model.modules() if hasattr(each, "training")]

    def put_back() -> None:
        for module, was_training in modes:
            module.training = was_training

    return put_back


class ChangedWeightsError(ValueError):
    """A forward pass has changed parameters in place: their names, by their ids."""

    def __init__(self, changed: dict[int, str]) -> None:
        super().__init__(
            f"a forward pass must not change parameters in place; {min(changed.values())!r} was "
            "changed, and stays so unless the model undoes it. Give probe_forward=, which calls "
            "the part that changes none, or measure training batches alone: no probe=, "
            "measure_last=False."
        )
        self.changed = set(changed)


@contextmanager
def kept_state(model: nn.Module) -> Iterator[None]:
    """Puts back on exit what modules hold besides parameters, and what their hooks refer to: the
    tensors, containers, generators and other modules in buffers, attributes and variables.

    Objects of other classes are left as they are. So are the wrappers of FSDP, and lazy modules
    that are not made ready yet. Of DDP's the one attribute is put back that a pass changes, also of
    a wrapper around the model that is called meanwhile. After `ChangedWeightsError` the flags of
    modules with changed parameters are not, for by what it has noted in them a model may undo that.
    """
    undo: dict[int, Callable[[], object]] = {}

    def keep(value: Any) -> None:
        pending = [value]
        while pending:
            value = pending.pop()
            if id(value) not in undo and (put_back := _undo(value, pending)) is not None:
                undo[id(value)] = put_back

    wrappers: Any = DistributedDataParallel
    forward = wrappers.forward

    def kept(wrapper: Any, *args: Any, **kwargs: Any) -> Any:
        keep(wrapper)
        return forward(wrapper, *args, **kwargs)

    keep(model)
    keep(nn.utils.parametrize._cache)
    wrappers.forward = kept
    try:
        yield
    except ChangedWeightsError as error:
        for module in model.modules():
            if error.changed & {*map(id, module.parameters())}:
                flags = {
                    name: each
                    for name, each in own_attributes(module).items()
                    if isinstance(each, bool) and name != _SYNC
                }
                undo[id(flags)] = partial(vars(module).update, flags)  # after all others
        raise
    finally:
        wrappers.forward = forward
        with torch.no_grad(), ExitStack() as stack:  # each, also where another one fails
            for put_back in reversed(undo.values()):
                stack.callback(put_back)


@contextmanager
def kept_weights(model: nn.Module) -> Iterator[None]:
    """Puts back on exit the parameters that a forward pass replaces, as that of a model with a
    momentum copy does, and rows of embedding tables with ``max_norm``.

    `ChangedWeightsError` where a parameter, or this rank's part of it, was changed in place, which
    cannot be put back.
    """
    limited = [
        module.weight
        for module in model.modules()
        if isinstance(module, _TABLES) and module.max_norm is not None
    ]
    copies = {id(weight): weight.detach().clone() for weight in limited}
    shards = named_shards(model)
    held = [] if shards else [(each, [*each._parameters.items()]) for each in model.modules()]
    weights = [
        (name, weight, weight.data, changes(weight), _first_numbers(weight))
        for name, weight in [*model.named_parameters(), *shards]
        if weight.is_floating_point()
        and not (is_lazy(weight) or weight.is_meta or hasattr(weight, "ds_id"))
    ]
    try:
        yield
    finally:
        changed = dict[int, str]()
        for module, parameters in held:
            for name, parameter in parameters:
                module._parameters[name] = parameter
        with torch.no_grad():
            for name, weight, before, number, first in weights:
                if is_whole(weight) and weight.data_ptr() != before.data_ptr():
                    weight.data = before
                elif id(weight) in copies:
                    _put_values(weight, copies[id(weight)])
                elif changes(weight) != number or not first.equal(_first_numbers(weight)):
                    changed[id(weight)] = name
        # of a pass that has failed, too; an interrupt stays one
        if changed and isinstance(sys.exception(), Exception | None):
            raise ChangedWeightsError(changed)


def _first_numbers(weight: Tensor) -> Tensor:
    """A copy of the first bytes of a parameter, or of this rank's part of it, which change with its
    ``data``; none where they cannot be read.
    """
    part = local_part(weight).detach()
    if is_flattened(weight) or not (type(part) is Tensor and part.is_contiguous()):
        return torch.empty(0, device="cpu")
    return part.flatten()[:16].clone().view(torch.uint8)


def _undo(value: Any, pending: list[Any]) -> Callable[[], object] | None:
    """What puts a value back into its state, if anything does; what is in it is added to
    ``pending``.
    """
    put_back: Callable[[], object] | None = None
    if isinstance(value, nn.Module):
        pending += value.children()
        if isinstance(value, DistributedDataParallel):
            put_back = partial(setattr, value, _SYNC, getattr(value, _SYNC))
        elif not (
            isinstance(value, FullyShardedDataParallel)
            or (isinstance(value, LazyModuleMixin) and value.has_uninitialized_params())
        ):
            pending += value.buffers(recurse=False)  # of a scripted one, too
            for hook in [*value._forward_pre_hooks.values(), *value._forward_hooks.values()]:
                pending += _used_by(hook)
            pending += (attributes := own_attributes(value)).values()
            put_back = partial(_put_attributes, value, attributes)
    elif isinstance(value, tuple):
        pending += value
    elif isinstance(value, dict | list | deque | set):
        pending += _contents(value) if len(value) <= _MOST_CONTENTS else ()
        put_back = partial(_put_contents, value, copy(value))
    elif isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
        local = local_part(value)  # comparing DTensors is a collective
        is_here = local.layout is torch.strided and not local.is_meta
        if is_here and local.nbytes <= _MOST_BYTES:
            put_back = partial(_put_values, local, local.detach().clone())
    elif isinstance(value, _GENERATORS):
        put_back = partial(value.set_state, value.get_state())
    elif isinstance(value, np.random.Generator):
        put_back = partial(setattr, value.bit_generator, "state", value.bit_generator.state)
    elif type(value) is random.Random:
        put_back = partial(value.setstate, value.getstate())
    return put_back


def _used_by(hook: Any) -> Iterator[Any]:
    """What a hook refers to: its object, arguments that are bound to it, variables around it."""
    function = hook
    if isinstance(hook, partial):
        yield from (*hook.args, *hook.keywords.values())
        function = hook.func
    owner = getattr(function, "__self__", function)
    yield owner
    yield from () if isinstance(owner, nn.Module) else getattr(owner, "__dict__", {}).values()
    with suppress(TypeError, ValueError):  # it is no function, or a variable is not set yet
        names = inspect.getclosurevars(function)
        yield from (*names.nonlocals.values(), *names.globals.values())


def _put_attributes(module: nn.Module, before: dict[str, Any]) -> None:
    for name in own_attributes(module).keys() - before.keys():
        del vars(module)[name]
    vars(module).update(before)


def _contents(value: Any) -> list[Any]:
    """Elements, or keys and values."""
    return [*value, *(value.values() if isinstance(value, dict) else ())]


def _put_contents(value: Any, before: Any) -> None:
    if [*map(id, _contents(value))] != [*map(id, _contents(before))]:  # some cannot be changed
        value.clear()
        (value.update if isinstance(value, dict | set) else value.extend)(before)


def _put_values(tensor: Tensor, before: Tensor) -> None:
    if not are_equal(tensor, before):  # a backward pass may need an unchanged one's version
        if tensor.shape != before.shape:
            tensor.resize_(before.shape)
        tensor.copy_(before)
