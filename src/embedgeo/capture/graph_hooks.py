"""Permanent hooks, operators in the graphs of torch.compile; import it late, for a torch may lack
what these take.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from embedgeo.capture.calls import first_float, first_input, named_state, num_states
from embedgeo.capture.forward_inputs import READ_ARGUMENTS
from embedgeo.capture.structure import find_stacks
from embedgeo.capture.torch_names import (
    forward_gradients,
    has_gradients,
    keep_apart,
    keep_order,
    skip,
)

Event = Literal["call", "return", "lookup", "input", "output"]
"""Lookup: of an embedding table; input, output: a hidden state."""

_forward_gradients = forward_gradients()
_listeners: dict[tuple[int, str], list[Callable[..., None]]] = {}
_keys: WeakKeyDictionary[nn.Module, Tensor] = WeakKeyDictionary()


def prepare(model: nn.Module, events: Iterable[tuple[nn.Module, Event]]) -> None:
    """Put permanent hooks on modules of a model before it is compiled: its graphs call none that
    are added later.
    """
    wanted = dict.fromkeys(events)
    for stack in find_stacks(model):
        of_blocks = {event: None for block, event in wanted if block in stack.blocks}
        wanted |= {(block, event): None for block in stack.blocks for event in of_blocks}
    for module, event in wanted:
        if module not in _keys:
            # A tensor, an input of the graph, and not a number, a constant of it, which would take
            # a graph a block.
            _keys[module] = torch.zeros((), dtype=torch.int8, device="cpu")
            module.__dict__["embedgeo_key"] = _keys[module]
            module.__dict__["embedgeo_arguments"] = tuple(
                inspect.signature(module.forward).parameters
            )
            module.__dict__.setdefault("embedgeo_events", ())
        if not _is_hooked(module, event):
            if event in ("call", "input"):
                module.register_forward_pre_hook(_HOOKS[event], with_kwargs=True)
            else:
                module.register_forward_hook(_HOOKS[event], with_kwargs=True)
            module.__dict__["embedgeo_events"] += (event,)
        # of one of the class that is not prepared, which would call no hooks
        keep_apart(module)


def is_prepared(module: nn.Module, event: Event) -> bool:
    """Tell whether `prepare` was called for a module, which is no copy of that one, and an
    event.
    """
    return module in _keys and _is_hooked(module, event)


@contextmanager
def hook_in_graph(module: nn.Module, event: Event, hook: Callable[..., None]) -> Iterator[None]:
    """Context in which a function is called at each event of a prepared module, as forward hooks
    with kwargs are.
    """
    key = _keys[module].data_ptr(), event
    listener = partial(hook, module, ())
    _listeners.setdefault(key, []).append(listener)
    try:
        yield
    finally:
        _listeners[key].remove(listener)
        if not _listeners[key]:
            del _listeners[key]


def _is_hooked(module: nn.Module, event: Event) -> bool:
    return event in module.__dict__.get("embedgeo_events", ())  # a copy has the hooks, too


# torch.compile follows these hooks, and calls them as they are where they are outside of its graphs
def _on_call(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    states = {}
    for name, value in (*zip(module.embedgeo_arguments, args, strict=False), *kwargs.items()):
        if name in READ_ARGUMENTS and isinstance(value, Tensor):
            states[name] = value
    _notify(module, "call", states)


def _on_return(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    _notify(module, "return", {})


def _on_lookup(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    ids = args[0] if args else kwargs.get("input", kwargs.get("input_ids"))
    if isinstance(ids, Tensor) and isinstance(output, Tensor):
        _notify(module, "lookup", {"input": ids, "output": output})


def _on_input(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    hidden = first_input(args, kwargs)
    if hidden is not None:
        _notify(module, "input", {"hidden_states": hidden})


def _on_output(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    hidden = first_float(output)
    if hidden is not None and num_states(output, hidden) < 2:
        _notify(module, "output", {"output": hidden})


def _notify(module: Any, event: Event, states: dict[str, Tensor]) -> None:
    is_compiling = torch.compiler.is_compiling()
    if not is_compiling and not _listeners:
        return
    tensors = []
    for tensor in states.values():
        if isinstance(tensor, DTensor):  # of which the operator would be given this rank's part
            return
        tensors.append(tensor.detach())
    gradients = torch.is_grad_enabled() if is_compiling else has_gradients()
    torch.ops.embedgeo.notify(module.embedgeo_key, event, " ".join(states), tensors, gradients)


_HOOKS: dict[Event, Callable[..., None]] = {
    "call": _on_call,
    "return": _on_return,
    "lookup": _on_lookup,
    "input": _on_input,
    "output": _on_output,
}


def _run_notify(
    key: Tensor, event: str, names: str, tensors: list[Tensor], has_gradients: bool
) -> None:
    listeners = _listeners.get((key.data_ptr(), event))
    if listeners:
        _call(listeners, dict(zip(names.split(), tensors, strict=True)), has_gradients)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _call(
    listeners: list[Callable[..., None]], states: dict[str, Tensor], has_gradients: bool
) -> None:
    """Call listeners in the gradient mode that the model's code has there: a graph runs in another
    one.
    """
    with _forward_gradients(True), torch.set_grad_enabled(has_gradients):
        for listener in list(listeners):
            listener(states, states.get("output"))


# faster to call than a `torch.library.custom_op`
_library = torch.library.Library("embedgeo", "DEF")
_library.define(
    # no result and no gradient, an ordered effect: it is neither removed nor moved past another one
    "notify(Tensor key, str event, str names, Tensor[] tensors, bool has_gradients) -> ()",
    # unsafe: a CUDA graph would not run Python again; flexible: tensors are read in any layout
    tags=(torch.Tag.cudagraph_unsafe, torch.Tag.flexible_layout),
)
_library.impl("notify", _run_notify, "CompositeExplicitAutograd")
torch.library.register_fake("embedgeo::notify", lambda *call: None, lib=_library)
keep_order(torch.ops.embedgeo.notify.default)


_FOLLOWED = first_float, first_input, named_state, num_states, has_gradients
for _function in (*_HOOKS.values(), _notify, _run_notify, *_FOLLOWED):
    skip(_function.__code__)
