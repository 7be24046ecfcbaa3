"""Permanent hooks, which stay in the graphs of torch.compile and look at run time whether someone listens.

A graph that is compiled already calls no hook that is added later. These are on the model before it is compiled, and
each is one opaque operator in the graph, so that measured and other steps run the same graphs, in the same rounding.
The operator returns nothing, has no gradient, and is an ordered effect: it is neither removed nor moved past another.
"""

import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import CodeType
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch._dynamo.eval_frame import skip_code
from torch._higher_order_ops.effects import _EffectType, _register_effectful_op
from torch.autograd.forward_ad import _set_fwd_grad_enabled
from torch.distributed.tensor import DTensor

from embedgeo.capture.calls import READ, first_float, first_input, has_gradients
from embedgeo.capture.structure import find_stack, submodels

Event = Literal["call", "return", "lookup", "input", "output"]
"""What is listened to, and the tensors that a listener gets by name: the arguments `READ` of a call; nothing, when it
returns; the ``input`` and the ``output`` of an embedding table; the hidden state that a layer is given or gives."""

Listener = Callable[[dict[str, Tensor]], None]

_listeners: dict[tuple[int, str], list[Listener]] = {}
_keys: WeakKeyDictionary[nn.Module, Tensor] = WeakKeyDictionary()


def prepare(model: nn.Module, events: Iterable[tuple[nn.Module, Event]]) -> None:
    """Put permanent hooks on modules of a model, before it is compiled; what is on them already stays as it is.

    All blocks of a stack get the same hooks, so that they can share a graph as before. Copies and pickles of the
    modules have hooks, too, which nobody can listen to; parameters and buffers are as before.
    """
    wanted = dict.fromkeys(events)
    for stack in filter(None, map(find_stack, submodels(model).values())):
        of_blocks = {event: None for block, event in wanted if block in stack.blocks}
        wanted |= {(block, event): None for block in stack.blocks for event in of_blocks}
    for module, event in wanted:
        if module not in _keys:
            # A tensor, an input of the graph, and not a number, a constant of it, which would take a graph a block.
            _keys[module] = module.__dict__["_embedgeo_key"] = torch.zeros((), dtype=torch.int8, device="cpu")
            module.__dict__["_embedgeo_arguments"] = tuple(inspect.signature(module.forward).parameters)
        if not _is_hooked(module, event):
            if event in ("call", "input"):
                module.register_forward_pre_hook(_HOOKS[event], with_kwargs=True)
            else:
                module.register_forward_hook(_HOOKS[event], with_kwargs=True)
        _set_apart(module)


def is_prepared(module: nn.Module, event: Event) -> bool:
    """Whether `prepare` was called for a module, which is no copy of that one, and an event."""
    return module in _keys and _is_hooked(module, event)


@contextmanager
def listening(module: nn.Module, event: Event, listener: Listener) -> Iterator[None]:
    """Context in which ``listener`` is called at each event of a prepared module."""
    key = _keys[module].data_ptr(), event
    _listeners.setdefault(key, []).append(listener)
    try:
        yield
    finally:
        _listeners[key].remove(listener)
        if not _listeners[key]:
            del _listeners[key]


def _set_apart(module: nn.Module) -> None:
    """Keep graphs of a module of the same class that is not prepared from running in place of this one's.

    torch.compile does not look whether a graph was made for the same hooks, but it does at the types of these dicts.
    """
    for name in ("_modules", "_parameters"):
        module.__dict__[name] = OrderedDict(module.__dict__[name])


def _is_hooked(module: nn.Module, event: Event) -> bool:
    return _HOOKS[event] in (*module._forward_pre_hooks.values(), *module._forward_hooks.values())


# ── The hooks: torch.compile follows these functions, and calls them as they are where they are outside of its graphs


def _at_call(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    found = {}
    for name, value in (*zip(module._embedgeo_arguments, args, strict=False), *kwargs.items()):
        if name in READ and isinstance(value, Tensor):
            found[name] = value
    _tell(module, "call", found)


def _at_return(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    _tell(module, "return", {})


def _at_lookup(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    ids = args[0] if args else kwargs.get("input", kwargs.get("input_ids"))
    if isinstance(ids, Tensor) and isinstance(output, Tensor):
        _tell(module, "lookup", {"input": ids, "output": output})


def _at_input(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    hidden = first_input(args, kwargs)
    if hidden is not None:
        _tell(module, "input", {"hidden_states": hidden})


def _at_output(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    hidden = first_float(output)
    if hidden is not None:
        _tell(module, "output", {"hidden_states": hidden})


def _tell(module: Any, event: Event, found: dict[str, Tensor]) -> None:
    is_compiling = torch.compiler.is_compiling()
    if not is_compiling and not _listeners:
        return
    tensors = []
    for tensor in found.values():
        if isinstance(tensor, DTensor):  # of which the operator would be given this rank's part
            return
        tensors.append(tensor.detach())
    gradients = torch.is_grad_enabled() if is_compiling else has_gradients()
    torch.ops.embedgeo.listen(module._embedgeo_key, event, " ".join(found), tensors, gradients)


_HOOKS: dict[Event, Callable[..., None]] = {
    "call": _at_call,
    "return": _at_return,
    "lookup": _at_lookup,
    "input": _at_input,
    "output": _at_output,
}


# ── The operator


def _listen(key: Tensor, event: str, names: str, tensors: list[Tensor], has_gradients: bool) -> None:
    listeners = _listeners.get((key.data_ptr(), event))
    if listeners:
        _call(listeners, dict(zip(names.split(), tensors, strict=True)), has_gradients)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _call(listeners: list[Listener], found: dict[str, Tensor], has_gradients: bool) -> None:
    """Call listeners in the gradient mode that the model's code has there: a graph runs in another one."""
    with _set_fwd_grad_enabled(True), torch.set_grad_enabled(has_gradients):
        for listener in list(listeners):
            listener(found)


_library = torch.library.Library("embedgeo", "DEF")  # `torch.library.custom_op` takes 14 µs a call instead of 4
_library.define(
    "listen(Tensor key, str event, str names, Tensor[] tensors, bool has_gradients) -> ()",
    # unsafe: a CUDA graph would not run Python again; flexible: tensors are read in any layout
    tags=(torch.Tag.cudagraph_unsafe, torch.Tag.flexible_layout),
)
_library.impl("listen", _listen, "CompositeExplicitAutograd")
torch.library.register_fake("embedgeo::listen", lambda *call: None, lib=_library)
_register_effectful_op(torch.ops.embedgeo.listen.default, _EffectType.ORDERED)


def _skip(code: CodeType) -> None:
    """Keep torch.compile from making graphs of their own of the hooks of the module that it compiles."""
    skip_code(code)
    for inner in filter(lambda each: isinstance(each, CodeType), code.co_consts):
        _skip(inner)


for _function in (*_HOOKS.values(), _tell, _listen, first_float, first_input, has_gradients):
    _skip(_function.__code__)
