"""Reading hidden states, token ids and masks from a model's own forward passes."""

import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from threading import get_ident
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from embedgeo.capture.calls import (
    arguments_by_name,
    eager_mode,
    every_module_called,
    first_float,
    first_input,
    num_states,
    watched_calls,
)
from embedgeo.capture.forward_inputs import (
    ForwardInputs,
    PerToken,
    RowTokens,
    SeveralStreamsError,
    whole_sequences,
)
from embedgeo.capture.layers import Layer
from embedgeo.capture.structure import library
from embedgeo.capture.torch_names import (
    are_equal,
    has_gradients,
    in_backward,
    is_transformed,
    is_whole,
    version,
    without_modes,
)
from embedgeo.layer_names import side

_Event = Literal["call", "lookup", "input", "output"]  # lookup: of an embedding table
# what blocks call the one among several inputs
_STATE_NAMES = re.compile(r"x|h|tgt|src|inputs?|hidden(_?states?)?|inputs_embeds|embeddings", re.I)


@dataclass(eq=False)
class _Hook:
    """A hook of one module, which does nothing on another one; its copies and pickles hold, and do,
    nothing.
    """

    probe: "Probe"
    module: nn.Module
    place: str  # of an exception
    read: Callable[..., None]

    def __call__(self, module: nn.Module, *call: Any) -> None:
        if module is not self.module or self.probe.should_skip():
            return
        try:
            self.probe.require_one_thread()
            with without_modes():
                self.read(module, *call)
        except Exception as error:
            error.add_note(self.place)
            if self.probe.on_error is None:
                raise
            self.probe.on_error(error)

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return partial, (_do_nothing,)


def _do_nothing(*call: object) -> None:
    """The hook of a copy."""


def _require_values(layer: Layer, hidden: Tensor) -> None:
    if hidden.layout != torch.strided or hidden.is_nested or hidden.is_meta:
        kind = "nested" if hidden.is_nested else hidden.layout
        raise TypeError(
            f"layer {layer.name!r} must have a dense hidden state with values; got one that is "
            f"{'on the meta device' if hidden.is_meta else kind}. Leave the layer out."
        )
    if is_transformed(hidden):
        raise ValueError(
            f"layer {layer.name!r} must have values; the model runs in a function transform of "
            "torch.func (grad, vmap), whose tensors have none. Measure a plain forward pass."
        )


def _require_one_state(
    layer: Layer, module: nn.Module, given: Tensor | None, hidden: Tensor, output: Any
) -> None:
    """Raise ValueError where a block returns several tensors that may be its hidden state, or
    another one before that, which has the shape of what it is ``given``.
    """
    several = ""
    if num_states(output, hidden) > 1:
        several = f"several of shape {tuple(hidden.shape)}, as a branch and the residual stream"
    elif (
        given is not None
        and given.shape != hidden.shape
        and num_states(output, given)
        # those of transformers may make rows fewer, as a pyramid does
        and (given.shape[:-1] == hidden.shape[:-1] or library(module) != "transformers")
    ):
        several = f"one of shape {tuple(hidden.shape)} before that, as a router's or attention's"
    if several:
        raise ValueError(
            f"layer {layer.name!r} must return one hidden state; its {type(module).__name__} "
            f"returns {several}. Measure the module that gets it, or the sum, by layers= with a "
            "pattern of its name."
        )


def _require_state(
    layer: Layer, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], hidden: Tensor
) -> None:
    """Raise ValueError if the first of several inputs of one shape has no name of a hidden
    state.
    """
    names = (k for k, each in arguments_by_name(module, args, kwargs).items() if each is hidden)
    name = next(names, "x")  # of one that has none nothing is known
    if not _STATE_NAMES.fullmatch(name):
        raise ValueError(
            f"layer {layer.name!r} must be the hidden state that enters a block; its "
            f"{type(module).__name__} is given several inputs of shape {tuple(hidden.shape)}, the "
            f"first of which it calls {name}. Call it x or hidden_states, or leave the layer out: "
            'layers="block.*".'
        )


def _are_same(one: Tensor | None, other: Tensor | None) -> bool:
    """Tell whether tensors may be one: they are not where those of one shape have other values."""
    if one is None or other is None or one is other or DTensor in (type(one), type(other)):
        return True
    return one.shape != other.shape or are_equal(one, other.to(one))


def _at_least_float32(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


class Probe:
    """Reads the hidden states of a model's layers by forward hooks, which are on the model only
    while attached.

    Copies of the model are not read, nor is a forward pass that activation checkpointing repeats
    during the backward pass. Compiled models and torch's own transformer layers run eagerly
    meanwhile.

    ``on_hidden`` is called with a layer, its hidden state, shape (..., d), batch first, detached,
    which the model may overwrite later, and the tokens of its rows; without gradients and autocast.
    ``on_error`` is called with an exception raised in a hook, and a note that names the layer; by
    default it is raised. Passes without gradients are read with ``no_grad_passes`` or by an
    `exclusive` probe: the calls of the modules around the blocks decide, or, where only blocks are
    called, these. Otherwise this is training, and passes of one state of the weights are read until
    `forget_weights`: none that follows a change of them, as the second pass of SAM does.

    A forward pass that raises counts nowhere: ``undoing`` is called as a call begins, and what it
    returns if that call raises.
    """

    _exclusive: ClassVar["Probe | None"] = None

    def __init__(
        self,
        layers: Sequence[Layer],
        inputs: ForwardInputs,
        on_hidden: Callable[[Layer, Tensor, RowTokens], None],
        on_error: Callable[[Exception], None] | None = None,
        *,
        no_grad_passes: bool = True,
        undoing: Callable[[], Callable[[], None]] = lambda: _do_nothing,
    ) -> None:
        self.token_ids: PerToken | None = None
        self.mask: PerToken | None = None
        self.word_ids: PerToken | None = None
        # the ranks of which each may have a part of the positions
        self.sequence_mesh: DeviceMesh | None = None
        self.on_error = on_error
        self.layers_without_gradients: set[str] = set()  # which were not read
        self.autocast_dtype: torch.dtype | None = None  # of the hidden state read last
        self._no_grad_passes = no_grad_passes
        self._layers = layers
        self._inputs = inputs
        inputs.takes_no_grad = no_grad_passes
        self._on_hidden = on_hidden
        self._undoing = undoing
        # as the last forward pass left them
        self._versions: list[object] = []
        self._is_stale = False  # the weights have changed since
        self.has_left_out = False  # a pass of other weights
        self._thread: int | None = None  # in which a pass runs
        self._attached: ExitStack | None = None
        self._read_inside = dict[tuple[str, int], bool]()  # since attached: in the model's own call
        self.left_out = set[str]()  # layers that are not measured, while others are

    def attach(self) -> None:
        """Add the hooks to the model and make compiled regions run eagerly."""
        self._inputs.first_pass = None
        if self._attached is not None:
            return
        with ExitStack() as stack:
            stack.enter_context(eager_mode)
            if self._no_grad_passes:
                stack.enter_context(every_module_called)
            for module in self._inputs.outer_modules:
                take = _Hook(self, module, "at the model's call", self._inputs.take_outer)
                stack.enter_context(watched_calls(module, partial(self._outer_call, take)))
            for event, hook in self._hooks():
                module = hook.module
                if event == "call":
                    end = _Hook(self, module, hook.place, self._end_call)
                    stack.enter_context(watched_calls(module, partial(self._call, hook, end)))
                elif event == "input":
                    stack.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)
                else:
                    stack.callback(module.register_forward_hook(hook, with_kwargs=True).remove)
            self._attached = stack.pop_all()

    def detach(self) -> None:
        """Undo `attach`; does nothing when not attached."""
        stack, self._attached = self._attached, None
        self._inputs.reset()
        self._read_inside.clear()
        if stack is not None:
            stack.close()

    def forget_weights(self) -> None:
        """Read the next passes whatever state the weights have: another step begins."""
        self._versions = []

    def __enter__(self) -> "Probe":
        self.attach()
        return self

    def __exit__(self, *error: object) -> None:
        self.detach()

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Context in which no other probe reads the forward passes that run, and these are
        eager.
        """
        previous, Probe._exclusive = Probe._exclusive, self
        try:
            with eager_mode, every_module_called:
                yield
        finally:
            Probe._exclusive = previous

    def should_skip(self) -> bool:
        """True if a call must not be read: only another probe may, or it is a repetition."""
        is_other = self._attached is None or Probe._exclusive not in (None, self)
        if self._is_beside_a_pass() and not (self._no_grad_passes or has_gradients()):
            return True
        return is_other or in_backward()

    def _is_beside_a_pass(self) -> bool:
        """Tell whether a forward pass is running in another thread."""
        return self._inputs.depth > 0 and self._thread != get_ident()

    def require_one_thread(self) -> None:
        """Raise ValueError if a forward pass is running in another thread."""
        if self._is_beside_a_pass():
            raise ValueError(
                "forward passes of a measured model must run one after the other; another thread "
                "calls it while one runs. Measure in one thread, or a copy of the model."
            )

    def _hooks(self) -> Iterator[tuple[_Event, _Hook]]:
        for module in self._inputs.enclosing_modules:
            yield "call", _Hook(self, module, "at the model's call", self._begin_call)
        for table in self._inputs.tables:
            read = self._inputs.record_token_ids
            yield "lookup", _Hook(self, table, "at the embedding table", read)
        for block in self._inputs.first_blocks:
            yield "input", _Hook(self, block, "at the first block", self._inputs.take_order)
        for layer in self._layers:
            for i, call in enumerate(layer.calls):
                event: _Event = "input" if call.takes_input else "output"
                place = f"at layer {layer.name!r}"
                yield event, _Hook(self, call.module, place, partial(self._read, layer, i))
            for module in layer.after:
                yield "output", _Hook(self, module, place, partial(self._pass, layer))

    @contextmanager
    def _call(
        self,
        begin: _Hook,
        end: _Hook,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Iterator[None]:
        if self.should_skip():
            yield
            return
        with self._undone_if_raised():
            begin(module, args, kwargs)
            try:
                yield
            except BaseException:
                self._inputs.forward.held.clear()
                self._end_call()
                raise
            end(module, args, kwargs)

    @contextmanager
    def _outer_call(self, take: _Hook, *call: Any) -> Iterator[None]:
        before = self._inputs.outer
        take(*call)
        try:
            with self._undone_if_raised():
                yield
        finally:
            self._inputs.outer = before

    @contextmanager
    def _undone_if_raised(self) -> Iterator[None]:
        undo = self._undoing()
        try:
            yield
        except BaseException:
            undo()
            raise

    def _weight_versions(self) -> list[object]:
        """What shows a change of the weights; of ``.data`` the norms of the tables do."""
        versions = [version(weight) for weight in self._inputs.weights]
        tables = [weight for table in self._inputs.tables for weight in table.parameters()]
        tables = tables or self._inputs.weights[:1]
        # sharded ones have other values, or none, between passes
        if self._inputs.is_sharded or not all(map(is_whole, tables)):
            return versions
        norms = (
            torch.linalg.vector_norm(weight.detach(), dtype=_at_least_float32(weight))
            for weight in tables
            if weight.is_floating_point() and weight.itemsize > 1
        )
        return [*versions, *(each.nan_to_num() for each in norms)]

    def _begin_call(self, module: nn.Module, *call: Any) -> None:
        if not self._inputs.depth:
            self._thread = get_ident()
            self._compare_weights()
        self._inputs.begin_call(module, *call)

    def _compare_weights(self) -> None:
        """Find, as a pass with gradients begins, whether the weights have changed since another one
        of the step.
        """
        is_compared = has_gradients() and not self._no_grad_passes
        versions = self._weight_versions() if is_compared else self._versions
        self._is_stale = bool(self._versions) and self._versions != versions
        self.has_left_out |= self._is_stale
        self._versions = self._versions or versions

    def _end_call(self, *call: Any) -> None:
        try:
            if self._inputs.depth == 1:
                self._inputs.read_held()
                # a pass itself may change some, as an embedding table with max_norm does
                if self._versions and has_gradients() and not self._is_stale:
                    self._versions = self._weight_versions()
        finally:
            self._inputs.end_call(*call)

    def _pass(self, layer: Layer, module: nn.Module, *call: Any) -> None:
        output = first_float(call[-1]) if module is layer.after[0] else None
        self._inputs.forward.before[layer.name] = module, output

    def _read(
        self,
        layer: Layer,
        i: int,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Any = None,
    ) -> None:
        is_inside = self._inputs.depth > 0
        if not self._is_of_layer(layer, i, is_inside=is_inside):
            return
        takes_input = layer.calls[i].takes_input
        hidden = first_input(args, kwargs) if takes_input else first_float(output)
        if hidden is None:
            raise TypeError(
                "a layer must have a floating-point tensor as its hidden state; got "
                f"{type(kwargs if takes_input else output).__name__}. Leave the layer out."
            )
        _require_values(layer, hidden)
        if layer.after and not _are_same(
            first_input(args, kwargs), self._inputs.forward.before[layer.name][1]
        ):
            self._leave_out(
                layer,
                f"must be given what the last block returns; its {type(module).__name__} is given "
                "something else, as one of a head is: it has no rows.",
            )
            return
        if takes_input and num_states((*args, *kwargs.values()), hidden) > 1:
            _require_state(layer, module, args, kwargs, hidden)
        if not takes_input and module in self._inputs.stacked:
            _require_one_state(layer, module, first_input(args, kwargs), hidden, output)
        if not (is_inside and (layer.after or self._inputs.awaits_mask)):
            self._take(layer, hidden)
            return
        # in inference mode changes in place do not show
        kept = hidden.clone() if hidden.is_inference() else hidden
        changes = version(hidden)

        def take_last() -> None:
            if changes is not None and version(kept) != changes:
                raise ValueError(
                    f"layer {layer.name!r} must keep its hidden state until the forward pass ends; "
                    "it was overwritten in place. Leave the layer out."
                )
            self._take(layer, kept)

        self._inputs.forward.held[layer, i] = take_last

    def _is_of_layer(self, layer: Layer, i: int, *, is_inside: bool) -> bool:
        """Tell whether a call of a module of a layer is the one to read. ValueError where the model
        calls it otherwise than a layer is called.
        """
        call = layer.calls[i]
        forward = self._inputs.forward
        if (layer, i, is_inside) == (self._layers[0], 0, False):  # only blocks are called
            self._compare_weights()
        if self._is_stale:
            return False
        if not (self._no_grad_passes or Probe._exclusive is self or self._inputs.has_gradients):
            self.layers_without_gradients.add(layer.name)
            forward.has_rows = True  # which are not asked for: the ids are those of another pass
            return False
        was_inside = self._read_inside.setdefault((layer.name, i), is_inside)
        if was_inside and not is_inside:
            return False  # of the training step, on an inner state
        must = f"layer {layer.name!r} must"
        kind = type(call.module).__name__
        if is_inside and not was_inside:
            raise ValueError(
                f"{must} be called in the model's own call or outside of it; its {kind} was called "
                "outside first. Leave the layer out."
            )
        number = forward.num_calls[layer.name, i]
        forward.num_calls[layer.name, i] += 1
        has_begun = is_inside or bool(self._inputs.token_ids)  # by a call or a look-up
        is_again = has_begun and number >= call.calls_per_forward
        if is_again and not layer.after:
            raise ValueError(
                f"{must} be called once in a forward pass for each time that it is listed; its "
                f"{kind} was called again, as in a looped model. Measure modules that are called "
                "once, by layers= with a pattern of their names, or leave the layer out."
            )
        if not is_again and number % call.calls_per_forward != call.index:
            return False
        if layer.after and forward.before.get(layer.name, (None,))[0] is not layer.after[0]:
            if is_inside:  # a later call may be that one
                forward.held[layer, i] = partial(
                    self._leave_out,
                    layer,
                    f"must be the next norm after the last block, once; its {kind} is called "
                    "again, after another one, or where the last block was not: it has no rows.",
                )
            return False
        if has_begun and layer.place is not None:
            part = side(layer.name)
            if forward.places.get(part, -1) > layer.place:
                raise ValueError(
                    f"{must} come before the layers after it; its {kind} was called later. Measure "
                    "modules by layers= with a pattern of their names."
                )
            forward.places[part] = layer.place
        return True

    def _take(self, layer: Layer, hidden: Tensor) -> None:
        """Give the hidden state of a call to the metrics of its layer."""
        kind = hidden.device.type
        is_cast = torch.is_autocast_enabled(kind)
        self.autocast_dtype = torch.get_autocast_dtype(kind) if is_cast else None
        with torch.no_grad(), torch.autocast(kind, enabled=False):
            state = hidden.detach() if len(layer.calls) == 1 else self._mean(layer, hidden.detach())
            if state is None:
                return
            if layer.positions_first and state.ndim == 3:
                state = state.transpose(0, 1)
            values = self.token_ids, self.mask, self.word_ids
            if self.sequence_mesh is not None:
                tensors = [*filter(torch.is_tensor, values), *self._inputs.recorded]
                state = whole_sequences(state, self.sequence_mesh, tensors)
            if not layer.positions_first:
                try:
                    state = self._inputs.aligned(layer, state)
                except SeveralStreamsError as error:
                    self._leave_out(
                        layer,
                        f"{error}: it is left out. Measure a module that makes one of them, or "
                        "their mean, by layers= with a pattern of its name.",
                    )
                    return
            forward = self._inputs.forward
            shape = state.shape[:-1]
            if layer.place is not None:
                forward.shape = shape
            elif layer.after and shape != (forward.shape or shape):
                self._leave_out(layer, "is of pooled rows, not of tokens: it is left out.")
                return
            self._on_hidden(layer, state, self._inputs.row_tokens(layer, state, *values))

    def _leave_out(self, layer: Layer, why: str) -> None:
        """Warn, once, that a layer is not measured while others are."""
        if layer.name not in self.left_out:
            self.left_out.add(layer.name)
            warnings.warn(f"Layer {layer.name!r} {why}", stacklevel=2)

    def _mean(self, layer: Layer, hidden: Tensor) -> Tensor | None:
        """The mean over the layer's calls at the last of them, None at the others."""
        zero = torch.zeros((), dtype=torch.float32, device=hidden.device)
        count, total = self._inputs.forward.sums.pop(layer.name, (0, zero))
        total = total.to(hidden.device) + hidden.to(_at_least_float32(hidden))
        if count + 1 == len(layer.calls):
            return total / len(layer.calls)
        self._inputs.forward.sums[layer.name] = count + 1, total
        return None
