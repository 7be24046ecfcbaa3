"""Reading hidden states, token ids and masks from a model's own forward passes."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from embedgeo.capture.calls import Hook, eager_mode, first_float, first_input, in_shape_inference, watched_calls
from embedgeo.capture.forward_inputs import Aligned, ForwardInputs, Given, gathered
from embedgeo.capture.layers import Layer

if TYPE_CHECKING:
    from embedgeo.capture.listening import Event

_AT_CALL, _AT_TABLE = "at the model's call", "at the embedding table"

OnHidden = Callable[[Layer, Tensor, Aligned], None]
"""Called with a layer, its hidden state in one forward pass, and what its rows are."""


class Probe:
    """Reads the hidden states of a model's layers by forward hooks, which are on the model only while attached.

    Copies of the model, also those made while the probe is attached, are not read, nor is a forward pass that
    activation checkpointing repeats during the backward pass, nor one in which a pipeline stage learns its shapes.
    While the probe is attached, a compiled model runs eagerly, because a compiled graph would not call the hooks; so do
    torch's own transformer layers, which otherwise have fused kernels for inference. A model that is prepared before it
    is compiled (see `embedgeo.capture.listening`) is read in its compiled graphs instead, where ``is_stable``.

    Args:
        layers: the layers to read, as `embedgeo.capture.layers.resolve_layers` finds them in a model.
        inputs: records what the model is given.
        on_hidden: called with the layer; its hidden state, shape (..., d), batch first, detached, which the model may
            overwrite later; and the token ids, the mask and the word ids of its rows. It runs without gradients and
            without autocast.
        on_error: called with an exception raised in a hook, to which a note with the layer is added. Default: the
            exception is raised in the forward pass.
        no_grad_passes: whether to read forward passes without gradients (generation, reference models, teachers); those
            of an `exclusive` probe are always read. What counts is how the calls of the modules around the blocks
            began, or, where only blocks are called, how these did: reentrant activation checkpointing changes nothing.

    Attributes:
        token_ids: used instead of those that the model is given; see `ForwardInputs.align`.
        mask: used instead of the one that the model is given; likewise.
        word_ids: the word of each token; likewise.
        sequence_mesh: the ranks of which each may have a part of the positions; None: no rank has a part.
        is_stable: listen to the permanent hooks of a prepared model, and leave compiled regions as they are.
        layers_without_gradients: names of layers that were not read because of ``no_grad_passes``.
    """

    _exclusive: ClassVar["Probe | None"] = None

    def __init__(
        self,
        layers: Sequence[Layer],
        inputs: ForwardInputs,
        on_hidden: OnHidden,
        on_error: Callable[[Exception], None] | None = None,
        *,
        no_grad_passes: bool = True,
    ) -> None:
        self.token_ids: Given | None = None
        self.mask: Given | None = None
        self.word_ids: Given | None = None
        self.sequence_mesh: DeviceMesh | None = None
        self.is_stable = False
        self.layers_without_gradients: set[str] = set()
        self._no_grad_passes = no_grad_passes
        self._layers = layers
        self._inputs = inputs
        self._on_hidden = on_hidden
        self._on_error = on_error
        self._attached: ExitStack | None = None
        self._begin_forward()

    def attach(self) -> None:
        """Add the hooks to the model and make compiled regions run eagerly; of a stable probe, listen."""
        if self._attached is not None:
            return
        with ExitStack() as stack:
            (self._listen if self.is_stable else self._add_hooks)(stack)
            self._attached = stack.pop_all()

    def prepare(self, model: nn.Module) -> None:
        """Put permanent hooks on the model: see `embedgeo.capture.listening.prepare`."""
        from embedgeo.capture import listening

        listening.prepare(model, [(module, event) for module, event, _ in self._listeners()])

    def is_prepared(self) -> bool:
        """Whether `prepare` was called on the model, by this probe or another one of the same layers."""
        from embedgeo.capture import listening

        return all(listening.is_prepared(module, event) for module, event, _ in self._listeners())

    def _add_hooks(self, stack: ExitStack) -> None:
        stack.enter_context(eager_mode)
        for module in self._inputs.enclosing_modules:
            stack.enter_context(watched_calls(module, self._call))
        for table in self._inputs.tables:
            record = Hook(table, self._unless_skipped(self._inputs.record_token_ids, _AT_TABLE))
            stack.callback(table.register_forward_hook(record, with_kwargs=True).remove)
        for layer in self._layers:
            for i, call in enumerate(layer.calls):
                read = Hook(call.module, self._unless_skipped(partial(self._read, layer, i), _at(layer)))
                if layer.takes_input:
                    handle = call.module.register_forward_pre_hook(read, with_kwargs=True)
                else:
                    handle = call.module.register_forward_hook(read)
                stack.callback(handle.remove)

    def _listen(self, stack: ExitStack) -> None:
        from embedgeo.capture.listening import listening

        for module, event, hook in self._listeners():
            stack.enter_context(listening(module, event, hook))

    def _listeners(self) -> Iterator[tuple[nn.Module, "Event", Callable[..., None]]]:
        for module in self._inputs.enclosing_modules:
            yield module, "call", self._unless_skipped(partial(self._begin_call, module, ()), _AT_CALL)
            yield module, "return", self._unless_skipped(lambda found: self._inputs.end_call(), _AT_CALL)
        for table in self._inputs.tables:
            record = partial(self._inputs.record_token_ids, table, ())
            recorded = self._unless_skipped(lambda found, record=record: record(found, found["output"]), _AT_TABLE)
            yield table, "lookup", recorded
        for layer in self._layers:
            for i, call in enumerate(layer.calls):
                read = self._unless_skipped(partial(self._read, layer, i, call.module, ()), _at(layer))
                yield call.module, "input" if layer.takes_input else "output", read

    def detach(self) -> None:
        """Undo `attach`; does nothing when not attached."""
        stack, self._attached = self._attached, None
        self._inputs.reset()
        self._begin_forward()
        if stack is not None:
            stack.close()

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Context in which no other probe reads the forward passes that run, and these are eager."""
        previous, Probe._exclusive = Probe._exclusive, self
        try:
            with eager_mode:  # other modes than training's: a stable probe would have a graph compiled for them
                yield
        finally:
            Probe._exclusive = previous

    def __enter__(self) -> "Probe":
        self.attach()
        return self

    def __exit__(self, *error: object) -> None:
        self.detach()

    def should_skip(self) -> bool:
        """Whether a call must not be read: only another probe may, it is a repetition, or it is on no real values."""
        in_backward = torch._C._current_graph_task_id() != -1
        is_other = self._attached is None or Probe._exclusive not in (None, self)
        return is_other or in_backward or in_shape_inference()

    def _begin_forward(self) -> None:
        self._num_calls: Counter[tuple[str, int]] = Counter()
        self._sums: dict[str, tuple[int, Tensor]] = {}

    @contextmanager
    def _guarded(self, where: str) -> Iterator[None]:
        """Context for the probe's own work in a forward pass: passes exceptions to ``on_error``."""
        try:
            yield
        except Exception as error:
            error.add_note(where)
            if self._on_error is None:
                raise
            self._on_error(error)

    @contextmanager
    def _call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
        """Context in which an enclosing module is called."""
        if self.should_skip():
            yield
            return
        with self._guarded(_AT_CALL):
            self._begin_call(module, args, kwargs)
        try:
            yield
        finally:
            self._inputs.end_call()

    def _begin_call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._inputs.begin_call(module, args, kwargs):
            self._begin_forward()

    def _unless_skipped(self, hook: Callable[..., None], where: str) -> Callable[..., None]:
        def guarded(*call: Any) -> None:
            if not self.should_skip():
                with self._guarded(where):
                    hook(*call)

        return guarded

    def _read(self, layer: Layer, index: int, module: nn.Module, args: tuple[Any, ...], value: Any) -> None:
        """Read ``layer.calls[index]``; ``value`` is its output, or its keyword arguments if the layer is an input."""
        if not (self._no_grad_passes or Probe._exclusive is self or self._inputs.has_gradients):
            self.layers_without_gradients.add(layer.name)
            return
        call, num_calls = layer.calls[index], self._num_calls[layer.name, index]
        self._num_calls[layer.name, index] += 1
        if num_calls % call.calls_per_forward != call.index:
            return
        hidden = first_input(args, value) if layer.takes_input else first_float(value)
        if hidden is None:
            raise TypeError(
                f"a layer must have a floating-point tensor as its hidden state; got {type(value).__name__}. "
                "Leave the layer out."
            )
        with torch.no_grad(), torch.autocast(hidden.device.type, enabled=False):
            mean = self._mean(layer, hidden.detach())
            if mean is not None:
                mean = mean.transpose(0, 1) if layer.positions_first and mean.ndim == 3 else mean
                given = self.token_ids, self.mask, self.word_ids
                if self.sequence_mesh is not None:
                    tensors = [*filter(torch.is_tensor, given), *self._inputs.recorded]
                    mean = gathered(mean, self.sequence_mesh, tensors)
                self._on_hidden(layer, mean, self._inputs.align(layer, mean, *given))

    def _mean(self, layer: Layer, hidden: Tensor) -> Tensor | None:
        """The mean over the layer's calls at the last of them, None at the others."""
        if len(layer.calls) == 1:
            return hidden
        count, total = self._sums.pop(layer.name, (0, torch.zeros((), dtype=torch.float32, device=hidden.device)))
        count, total = count + 1, total.to(hidden.device) + hidden.to(torch.promote_types(hidden.dtype, torch.float32))
        if count == len(layer.calls):
            return total / count
        self._sums[layer.name] = count, total
        return None


def _at(layer: Layer) -> str:
    return f"at layer {layer.name!r}"
