"""A module's calls, also those of its bare ``forward``, which torch's hooks do not see."""

import inspect
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from copy import deepcopy
from functools import wraps
from types import FrameType
from typing import Any, ClassVar, NamedTuple
from weakref import ReferenceType, ref

import numpy as np
import torch
from torch import Tensor, nn

OnCall = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], AbstractContextManager[None]]
"""Makes the context in which a call runs, given the module and the call's arguments."""

_PADDING_MASKS = ("src_key_padding_mask", "tgt_key_padding_mask")
"""Arguments of torch's own transformer modules; True, or minus infinity in an additive mask, is padding."""

READ = ("attention_mask", "position_ids", "positions", "inputs_embeds", *_PADDING_MASKS)
"""The arguments that `Call` reads."""


class Call(NamedTuple):
    """A module's call, and what its arguments say about the rows of hidden states.

    Attributes:
        module: the module that is called.
        batch: its only argument, if that is given without a name, otherwise the arguments by name.
        mask: shape (batch, positions), True = count; None if there is none of this shape.
        position_ids: shape (batch or 1, positions), likewise; else an argument ``positions`` of integers.
        embeddings: what the module is to take for embeddings of tokens, shape (batch, positions, d), likewise.
        has_gradients: whether gradients were on when it began; see `has_gradients`.
    """

    module: nn.Module
    batch: Any
    mask: Tensor | None
    position_ids: Tensor | None
    embeddings: Tensor | None
    has_gradients: bool

    @classmethod
    def of(cls, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> "Call":
        """The call of a module with these arguments; a TypeError if they do not fit its ``forward``."""
        given = {**inspect.signature(module.forward).bind_partial(*args).arguments, **kwargs} if args else kwargs
        padding = next((given[name] for name in _PADDING_MASKS if given.get(name) is not None), None)
        mask = _tensor(given.get("attention_mask") if padding is None else padding.logical_not(), 2)
        positions = _tensor(given.get("positions"), 2)  # torchtitan's name; elsewhere it may be of coordinates
        if positions is not None and positions.is_floating_point():
            positions = None
        return cls(
            module=module,
            batch=args[0] if len(args) == 1 and not kwargs else given,
            mask=None if mask is None else mask != 0,
            position_ids=_tensor(given.get("position_ids", positions), 2),
            embeddings=_tensor(given.get("inputs_embeds"), 3),
            has_gradients=has_gradients(),
        )


class Lookup(NamedTuple):
    """A call of an embedding table while no enclosing module was called."""

    table: nn.Module
    token_ids: Tensor
    embeddings: Tensor


@contextmanager
def watched_calls(module: nn.Module, on_call: OnCall) -> Iterator[None]:
    """Context in which every call of a module, ``module(…)`` or ``module.forward(…)``, runs inside ``on_call``'s.

    The module is an instance of a subclass of its class meanwhile, as `torch.nn.utils.parametrize` makes one; copies
    and replicas of the module are not watched.
    """
    if not _is_watched(module):
        module.__class__ = _watched_class(module)
    watched: Any = module.__class__
    watchers: list[OnCall] = watched._embedgeo_watchers
    watchers.append(on_call)
    try:
        yield
    finally:
        watchers.remove(on_call)
        if not watchers and module.__class__ is watched and watched.__bases__[0] is _Watched:
            module.__class__ = watched.__bases__[1]


def has_gradients() -> bool:
    """Whether gradients are on where this runs, or were where an autograd function began whose forward runs.

    Such a function is reentrant activation checkpointing, which runs modules without gradients that it makes up for.
    """
    in_function = not (torch._C._is_fwd_grad_enabled() or torch.is_inference_mode_enabled())
    return torch.is_grad_enabled() or in_function


def in_shape_inference() -> bool:
    """Whether a stage of `torch.distributed.pipelining` runs to learn its shapes: on no microbatch, on any values."""
    frame = _stage_frame()
    return frame is not None and frame.f_code.co_name != "forward_maybe_with_nosync"


def num_pipeline_stages() -> int | None:
    """How many stages the pipeline of `torch.distributed.pipelining` has in which this runs; None if in none."""
    frame = _stage_frame()
    return None if frame is None else getattr(frame.f_locals.get("self"), "num_stages", None)


def _stage_frame() -> FrameType | None:
    """The innermost method of a stage of `torch.distributed.pipelining` that is running."""
    pipelining = sys.modules.get("torch.distributed.pipelining.stage")
    frame = sys._getframe() if pipelining is not None else None
    while frame is not None and frame.f_code.co_filename != pipelining.__file__:  # type: ignore[union-attr]
        frame = frame.f_back
    return frame


def _tensor(value: Any, ndim: int) -> Tensor | None:
    return value if isinstance(value, Tensor) and value.ndim == ndim else None


class _Watched:
    """Mixed into the class of a watched module: a property comes before a ``forward`` of the instance itself."""

    _embedgeo_module: ClassVar[ReferenceType[nn.Module]]
    _embedgeo_watchers: ClassVar[list[OnCall]]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Keep the class unknown to the ``__init_subclass__`` of the module's own, which may register it."""

    @property
    def forward(self) -> Callable[..., Any]:
        module: Any = self
        forward = _plain(self.__dict__.get("forward") or super(_Watched, module).forward)  # type: ignore[misc]
        if not _is_watched(self):
            return forward
        watchers = self._embedgeo_watchers  # none are left where others keep this for later

        @wraps(forward)
        def watched(*args: Any, **kwargs: Any) -> Any:
            with ExitStack() as stack:
                for on_call in watchers:
                    stack.enter_context(on_call(module, args, kwargs))
                return forward(*args, **kwargs)

        watched._embedgeo_plain = forward  # type: ignore[attr-defined]
        return watched

    @forward.setter
    def forward(self, forward: Callable[..., Any]) -> None:
        self.__dict__["forward"] = _plain(forward)

    @forward.deleter
    def forward(self) -> None:
        del self.__dict__["forward"]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A deep copy is of the module's own class, which may say how it is made."""
        watched = type(self)
        self.__class__ = watched.__bases__[1]
        try:
            return deepcopy(self, memo)
        finally:
            self.__class__ = watched

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A copy, or a pickle, is of the module's own class."""
        own = type(self).__bases__[1]
        reduced: Any = super().__reduce_ex__(protocol)
        make, args, *state = reduced
        if make.__name__ == "__newobj__":  # which pickle refuses for another class
            make = own.__new__
        return make, tuple(own if arg is type(self) else arg for arg in args), *state


def _is_watched(module: Any) -> bool:
    return isinstance(module, _Watched) and module._embedgeo_module() is module


def _watched_class(module: nn.Module) -> Any:
    own: Any = type(module)
    names = {name: getattr(own, name) for name in ("__module__", "__qualname__", "__doc__")}
    watched = {"_embedgeo_module": ref(module), "_embedgeo_watchers": []}
    return type(own)(own.__name__, (_Watched, own), {**names, **watched})


def _plain(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A ``forward`` without what watches it: others may take one from a watched module, and put it back later.

    What others wrap around one stays, though `functools.update_wrapper` gives it the attributes of what is inside.
    """
    plain = getattr(forward, "_embedgeo_plain", None)
    return plain if plain is not None and forward.__wrapped__ is plain else forward  # type: ignore[attr-defined]


class Hook:
    """A hook of one module, which does nothing on another one; its copies and pickles hold, and do, nothing."""

    def __init__(self, module: nn.Module | None = None, run: Callable[..., None] | None = None) -> None:
        self._module, self._run = module, run

    def __call__(self, module: nn.Module, *call: Any) -> None:
        """Run, if the module is its own."""
        if self._run is not None and module is self._module:
            self._run(module, *call)

    def __reduce__(self) -> tuple[type["Hook"], tuple[()]]:
        return Hook, ()


class _EagerMode:
    """Context in which modules run eagerly and call their hooks; contexts may overlap, and the last one ends it."""

    def __init__(self) -> None:
        self._num_open = 0
        self._settings = ExitStack()

    def __enter__(self) -> None:
        if not self._num_open:
            self._settings.enter_context(torch.compiler.set_stance("force_eager"))
            self._settings.callback(torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled())
            torch.backends.mha.set_fastpath_enabled(False)
        self._num_open += 1

    def __exit__(self, *error: object) -> None:
        self._num_open -= 1
        if not self._num_open:
            self._settings.close()


eager_mode = _EagerMode()
"""The one of this process."""


def first_float(value: Any) -> Tensor | None:
    """The first floating-point tensor in the arguments or the output of a module."""
    if isinstance(value, Tensor):
        return value if value.is_floating_point() else None
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, tuple | list):
        for each in value:  # no generator: torch.compile follows this
            found = first_float(each)
            if found is not None:
                return found
    return None


def first_input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """The first floating-point tensor that a module is called with; of those given by name ``hidden_states``."""
    return first_float((*args, kwargs.get("hidden_states"), *kwargs.values()))


@contextmanager
def kept_random_states() -> Iterator[None]:
    """Restores the global random states of Python, NumPy and torch (CPU and, once CUDA is in use, GPUs) on exit."""
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002 (the state that user code draws from)
    gpus = range(torch.cuda.device_count() if torch.cuda.is_initialized() else 0)  # reading their states initialises it
    try:
        with torch.random.fork_rng(gpus, device_type="cuda"):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002


def present_modes(model: nn.Module) -> Callable[[], None]:
    """What puts each module back into the mode, train or eval, that it has now."""
    modes = [(module, module.training) for module in model.modules()]

    def put_back() -> None:
        for module, was_training in modes:
            module.training = was_training

    return put_back


@contextmanager
def kept_modes(model: nn.Module) -> Iterator[None]:
    """Puts each module back into train or eval mode on exit."""
    put_back = present_modes(model)
    try:
        yield
    finally:
        put_back()


@contextmanager
def kept_buffers(model: nn.Module) -> Iterator[None]:
    """Puts buffers and their values back on exit, as the running statistics that a pass in train mode updates."""
    buffers = [(m, name, b, b.clone()) for m in model.modules() for name, b in m.named_buffers(recurse=False)]
    try:
        yield
    finally:
        with torch.no_grad():
            for module, name, buffer, values in buffers:
                setattr(module, name, buffer.copy_(values))
