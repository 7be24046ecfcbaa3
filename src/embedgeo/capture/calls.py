"""Calls of modules, also of their bare ``forward``, which torch's hooks do not see, and the state
kept around them.
"""

import inspect
import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from copy import copy, deepcopy
from functools import partial, wraps
from typing import Any, ClassVar
from weakref import ReferenceType, WeakKeyDictionary, ref

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from embedgeo.capture.torch_names import local_part, own_attributes, version

# for one call
CallContext = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], AbstractContextManager[None]]
_MOST_CONTENTS = 1000  # of a container; what is in longer ones, as data sets are, is not looked at
_SYNC = "require_forward_param_sync"  # of DDP: the next forward broadcasts the buffers of rank 0
_STATES = "last_hidden_state", "hidden_states"  # names of the one among several outputs
_TABLES = nn.Embedding, nn.EmbeddingBag
_GENERATORS: tuple[type[Any], ...] = torch.Generator, np.random.RandomState
# the ``forward`` inside of what watches it
_inside: WeakKeyDictionary[Callable[..., Any], Callable[..., Any]] = WeakKeyDictionary()


@contextmanager
def watched_calls(module: nn.Module, make_context: CallContext) -> Iterator[None]:
    """Context in which every call of a module, ``module(…)`` or ``module.forward(…)``, runs inside
    another context.
    """
    if not isinstance(module, _Watched) or module._embedgeo_module() is not module:
        own: Any = type(module)
        names = {
            "__module__": own.__module__,
            "__qualname__": own.__qualname__,
            "__doc__": own.__doc__,
        }
        state = {"_embedgeo_module": ref(module), "_embedgeo_contexts": []}
        _set_class(module, type(own)(own.__name__, (_Watched, own), names | state))
    watched: Any = type(module)
    contexts: list[CallContext] = watched._embedgeo_contexts
    contexts.append(make_context)
    try:
        yield
    finally:
        contexts.remove(make_context)
        if not contexts and type(module) is watched and watched.__bases__[0] is _Watched:
            _set_class(module, watched.__bases__[1])


class _Watched:
    """Mixed into the class of a watched module, not of copies: a property comes before the
    instance's ``forward``.

    An attribute of the instance would do for calls, too, but shallow copies and the replicas of
    ``nn.DataParallel`` share it, and would run the module itself.
    """

    _embedgeo_module: ClassVar[ReferenceType[nn.Module]]
    _embedgeo_contexts: ClassVar[list[CallContext]]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Keep the class unknown to the ``__init_subclass__`` of the module's own, which may
        register it.
        """

    @property
    def forward(self) -> Callable[..., Any]:
        module: Any = self
        forward = _unwatched(self.__dict__.get("forward") or super(_Watched, module).forward)  # type: ignore[misc]
        is_copy = self._embedgeo_module() is not module
        if is_copy:
            return forward
        contexts = self._embedgeo_contexts  # none are left where others keep this for later

        @wraps(forward)
        def watched(*args: Any, **kwargs: Any) -> Any:
            with ExitStack() as stack:
                for make_context in contexts:
                    stack.enter_context(make_context(module, args, kwargs))
                return forward(*args, **kwargs)

        _inside[watched] = forward
        return watched

    @forward.setter
    def forward(self, forward: Callable[..., Any]) -> None:
        self.__dict__["forward"] = _unwatched(forward)

    @forward.deleter
    def forward(self) -> None:
        del self.__dict__["forward"]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Make a deep copy of the module's own class, which may say how it is made."""
        watched = type(self)
        _set_class(self, watched.__bases__[1])
        try:
            return deepcopy(self, memo)
        finally:
            _set_class(self, watched)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Make copies and pickles of the module's own class."""
        own = type(self).__bases__[1]
        reduced: Any = super().__reduce_ex__(protocol)
        make, args, *state = reduced
        if make.__name__ == "__newobj__":  # which pickle refuses for another class
            make = own.__new__
        return make, tuple(own if arg is type(self) else arg for arg in args), *state


def _set_class(module: object, cls: type) -> None:
    """Set a module's class, of which its ``__setattr__`` may tell others."""
    object.__setattr__(module, "__class__", cls)


def _unwatched(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A ``forward`` without what watches it; what others wrap around one stays."""
    return _inside.get(forward, forward)


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
    tensors = [each for each in parts if isinstance(each, Tensor) and each.is_floating_point()]
    return len([each for each in tensors if each.shape == hidden.shape])


def first_input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """The first floating-point tensor that a module is called with; of those given by name
    ``hidden_states``.
    """
    return first_float((*args, kwargs.get("hidden_states"), *kwargs.values()))


class _EagerMode:
    """Context in which modules run eagerly and call their hooks; contexts may overlap, and the last
    one ends it.
    """

    def __init__(self) -> None:
        self._num_open = 0
        self._settings = ExitStack()

    def __enter__(self) -> None:
        if not self._num_open:
            self._settings.enter_context(torch.compiler.set_stance("force_eager"))
            self._settings.callback(
                torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled()
            )
            torch.backends.mha.set_fastpath_enabled(False)
        self._num_open += 1

    def __exit__(self, *error: object) -> None:
        self._num_open -= 1
        if not self._num_open:
            self._settings.close()


eager_mode = _EagerMode()  # of this process


@contextmanager
def kept_random_states() -> Iterator[None]:
    """Restores the global random states of Python, NumPy and torch (CPU and, once CUDA is in use,
    GPUs) on exit.
    """
    python = random.getstate()
    numpy = np.random.get_state()  # noqa: NPY002 (the state that user code draws from)
    # reading their states initialises it
    gpus = range(torch.cuda.device_count() if torch.cuda.is_initialized() else 0)
    try:
        with torch.random.fork_rng(gpus, device_type="cuda"):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002


def mode_restorer(model: nn.Module) -> Callable[[], None]:
    """A function that puts each module back into the mode, train or eval, that it has now."""
    modes = [(module, module.training) for module in model.modules()]

    def put_back() -> None:
        for module, was_training in modes:
            module.training = was_training

    return put_back


@contextmanager
def kept_state(model: nn.Module) -> Iterator[None]:
    """Puts back on exit what modules hold besides parameters and hooks: buffers, plain attributes,
    and the tensors, containers, generators and other modules in them.

    Objects of other classes are left as they are. So are the wrappers of FSDP, and lazy modules
    that are not made ready yet. Of DDP's the one attribute is put back that a pass changes, also of
    a wrapper around the model that is called meanwhile.
    """
    undo: dict[int, Callable[[], object]] = {}

    def keep(module: nn.Module) -> None:
        pending: list[Any] = [module]
        while pending:
            value = pending.pop()
            if id(value) not in undo and (put_back := _undo(value, pending)) is not None:
                undo[id(value)] = put_back

    keep(model)
    wrappers: Any = DistributedDataParallel
    forward = wrappers.forward

    def kept(wrapper: nn.Module, *args: Any, **kwargs: Any) -> Any:
        keep(wrapper)
        return forward(wrapper, *args, **kwargs)

    try:
        wrappers.forward = kept
        yield
    finally:
        wrappers.forward = forward
        with torch.no_grad():
            for put_back in undo.values():
                put_back()


@contextmanager
def kept_weights(model: nn.Module) -> Iterator[None]:
    """Puts back on exit the parameters that a forward pass replaces, as that of a model with a
    momentum copy does, and rows of embedding tables with ``max_norm``.

    ValueError where a parameter was changed in place, which cannot be put back. Sharded ones are
    left to what shards them.
    """
    modules = [*model.modules()]
    limited = [m.weight for m in modules if isinstance(m, _TABLES) and m.max_norm is not None]
    copies = {id(weight): weight.detach().clone() for weight in limited}
    is_sharded = any(isinstance(module, FullyShardedDataParallel) for module in modules)
    weights = [
        (name, weight, weight.data, version(weight))
        for name, weight in ([] if is_sharded else model.named_parameters())
        if weight.is_floating_point()
        and local_part(weight) is weight
        and not (weight.is_meta or is_lazy(weight) or hasattr(weight, "ds_id"))
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            changed = list[str]()
            for name, weight, before, number in weights:
                if weight.data_ptr() != before.data_ptr():
                    weight.data = before
                elif id(weight) in copies:
                    _put_values(weight, copies[id(weight)])
                elif version(weight) != number:
                    changed.append(name)
    if changed:
        raise ValueError(
            f"a forward pass must not change parameters in place; {changed[0]!r} was changed, once "
            "in each pass of the monitor's own. Give probe_forward=, which calls the part that "
            "changes none, or measure training batches alone: no probe=, measure_last=False."
        )


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
            pending += (attributes := own_attributes(value)).values()
            put_back = partial(_put_attributes, value, attributes)
    elif isinstance(value, tuple):
        pending += value
    elif isinstance(value, dict | list | deque | set):
        pending += _contents(value) if len(value) <= _MOST_CONTENTS else ()
        put_back = partial(_put_contents, value, copy(value))
    elif isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
        local = local_part(value)  # comparing DTensors is a collective
        if local.layout is torch.strided and not local.is_meta:
            put_back = partial(_put_values, local, local.detach().clone())
    elif isinstance(value, _GENERATORS):
        put_back = partial(value.set_state, value.get_state())
    elif isinstance(value, np.random.Generator):
        put_back = partial(setattr, value.bit_generator, "state", value.bit_generator.state)
    elif type(value) is random.Random:
        put_back = partial(value.setstate, value.getstate())
    return put_back


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
    if not torch.equal(tensor, before):  # a backward pass may need an unchanged one's version
        tensor.copy_(before)
