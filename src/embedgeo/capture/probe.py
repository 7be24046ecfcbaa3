"""Reading hidden states, token ids and masks out of a model's own forward passes."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from embedgeo.capture.forward_inputs import ForwardInputs
from embedgeo.capture.layers import Layer


class Sink(Protocol):
    """Where hidden states go."""

    def __call__(self, layer: Layer, hidden: Tensor, token_ids: Tensor | None, mask: Tensor | None) -> None:
        """Take the hidden state of one forward pass: it may be overwritten afterwards.

        Args:
            layer: which one it is.
            hidden: shape (..., d), detached.
            token_ids: shape (...), or None where the model was not given any.
            mask: shape (...), bool, True = a row that counts; None where all do.
        """


class Probe:
    """Hands the hidden states of a model to a sink, while attached; attaches nothing otherwise.

    A forward pass that activation checkpointing repeats during the backward pass is left out. While attached, a
    compiled model runs eagerly (a compiled graph would not call the hooks), and so do the fused kernels that torch's
    own transformer layers have for inference.

    Args:
        model: any module; layers are looked up in it already.
        layers: what to read.
        sink: takes the hidden states, in the forward pass, without gradients and autocast.
        on_error: takes what goes wrong in a hook; None raises it in the forward pass. A note names the layer.
        skip_first_positions: leave out this many real positions at the start of every sequence.
        ignore_token_ids: leave out these token ids.

    Attributes:
        layers: what is read.
        num_fired: hidden states handed over so far, by the name of the layer.
        token_ids: in place of those that the model is given, until detached.
        mask: likewise.

    Raises:
        TypeError: ``ignore_token_ids`` are not integers.
        ValueError: ``skip_first_positions`` is negative.
    """

    _exclusive: ClassVar["Probe | None"] = None

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[Layer],
        sink: Sink,
        *,
        on_error: Callable[[Exception], None] | None = None,
        skip_first_positions: int = 0,
        ignore_token_ids: Sequence[int] = (),
    ) -> None:
        self.layers = list(layers)
        self.num_fired = dict.fromkeys((layer.name for layer in layers), 0)
        self.token_ids: Tensor | None = None
        self.mask: Tensor | None = None
        self._inputs = ForwardInputs(model, skip_first_positions, ignore_token_ids)
        self._sink = sink
        self._on_error = on_error
        self._attached: ExitStack | None = None
        self._begin_forward()

    def attach(self) -> None:
        """Start reading: add the hooks and make compiled regions run eagerly."""
        if self._attached is not None:
            return
        with ExitStack() as stack:
            stack.enter_context(_eager)
            for handle in self._hooks():
                stack.callback(handle.remove)
            self._attached = stack.pop_all()

    def detach(self) -> None:
        """Stop reading, whatever happened meanwhile; does nothing when not attached."""
        stack, self._attached = self._attached, None
        self._inputs.forget()
        self._begin_forward()
        self.token_ids = self.mask = None
        if stack is not None:
            stack.close()

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Meanwhile no other probe reads anything: these forward passes are not theirs."""
        before, Probe._exclusive = Probe._exclusive, self
        try:
            yield
        finally:
            Probe._exclusive = before

    def __enter__(self) -> "Probe":
        self.attach()
        return self

    def __exit__(self, *error: object) -> None:
        self.detach()

    def _should_skip(self) -> bool:
        """Whether this call is not to be read.

        It is of a copy of the model, made with its hooks while the probe was attached; or it is part of another probe's
        forward pass, or of one repeated by activation checkpointing.
        """
        is_repeated = torch._C._current_graph_task_id() != -1
        return self._attached is None or Probe._exclusive not in (None, self) or is_repeated

    def _begin_forward(self) -> None:
        self._calls: Counter[tuple[str, int]] = Counter()
        self._sums: dict[str, tuple[int, Tensor]] = {}

    def _hooks(self) -> Iterator[RemovableHandle]:
        for caller in self._inputs.enclosing_modules:
            yield caller.register_forward_pre_hook(self._guarded_hook(self._enter), with_kwargs=True, prepend=True)
            yield caller.register_forward_hook(self._guarded_hook(self._inputs.leave), always_call=True)
        for table in self._inputs.tables:
            yield table.register_forward_pre_hook(self._guarded_hook(self._inputs.look_up), with_kwargs=True)
        for layer in self.layers:
            for i, call in enumerate(layer.calls):
                read = self._guarded_hook(partial(self._read, layer, i), f"at layer {layer.name!r}")
                if layer.takes_input:
                    yield call.module.register_forward_pre_hook(read, with_kwargs=True)
                else:
                    yield call.module.register_forward_hook(read)

    def _guarded_hook(self, read: Callable[..., None], where: str = "at the model's call") -> Callable[..., None]:
        """A hook that does nothing where the probe is deaf, and hands on its errors."""

        def hook(*call: Any) -> None:
            if self._should_skip():
                return
            try:
                read(*call)
            except Exception as error:
                error.add_note(where)
                if self._on_error is None:
                    raise
                self._on_error(error)

        return hook

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._inputs.enter(module, args, kwargs):
            self._begin_forward()

    def _read(self, layer: Layer, index: int, module: nn.Module, args: tuple[Any, ...], last: Any) -> None:
        """A source of the layer is called; ``last`` is its keyword arguments if the layer takes its input."""
        calls = self._calls[layer.name, index]
        self._calls[layer.name, index] += 1
        if calls % layer.calls[index].calls_per_forward != layer.calls[index].index:
            return
        value = last
        if layer.takes_input:
            value = (*args, *(last[key] for key in sorted(last, key=lambda key: key != "hidden_states")))
        hidden = _first_float(value)
        if hidden is None:
            raise TypeError(f"a layer must give a floating-point tensor first; got {type(value).__name__}.")
        with torch.no_grad(), torch.autocast(hidden.device.type, enabled=False):
            whole = self._mean(layer, hidden.detach())
            if whole is not None:
                self.num_fired[layer.name] += 1
                self._sink(layer, whole, *self._inputs.rows(layer, whole, self.token_ids, self.mask))

    def _mean(self, layer: Layer, hidden: Tensor) -> Tensor | None:
        """The mean over the layer's calls once the last of them has fired, None before."""
        if len(layer.calls) == 1:
            return hidden
        count, total = self._sums.pop(layer.name, (0, torch.zeros((), dtype=torch.float32, device=hidden.device)))
        count, total = count + 1, total + hidden.to(torch.promote_types(hidden.dtype, torch.float32))
        if count == len(layer.calls):
            return total / count
        self._sums[layer.name] = count, total
        return None


class _Eager:
    """Inside, every module runs and calls its hooks, until the last one that has entered leaves; in whatever order."""

    def __init__(self) -> None:
        self._inside = 0
        self._before = ExitStack()

    def __enter__(self) -> None:
        if not self._inside:
            with ExitStack() as stack:
                stack.enter_context(torch.compiler.set_stance("force_eager"))
                stack.callback(torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled())
                torch.backends.mha.set_fastpath_enabled(False)
                self._before = stack.pop_all()
        self._inside += 1

    def __exit__(self, *error: object) -> None:
        self._inside -= 1
        if not self._inside:
            self._before.close()


_eager = _Eager()


def _first_float(value: Any) -> Tensor | None:
    """The first floating-point tensor in what a module was given or gave."""
    if isinstance(value, Tensor):
        return value if value.is_floating_point() else None
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, tuple | list):
        return next((found for found in map(_first_float, value) if found is not None), None)
    return None
