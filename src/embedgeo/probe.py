"""Reading hidden states, token ids and masks out of a model's own forward passes."""

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from embedgeo.layers import Layer, input_embedding, measured_model


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

    Token ids come from the call of the input embedding, the attention mask from the call of the outermost model.
    A forward pass that activation checkpointing repeats during the backward pass is left out. While attached, a
    compiled model runs eagerly: a compiled graph would not call the hooks.

    Args:
        model: any module; layers are looked up in it already.
        layers: what to read.
        sink: takes the hidden states, in the forward pass, without gradients and autocast.
        on_error: takes what goes wrong in a hook; None raises it in the forward pass. A note names the layer.
        skip_first_positions: leave out this many real positions at the start of every sequence.
        ignore_token_ids: leave out these token ids.

    Raises:
        TypeError: ``ignore_token_ids`` are not integers.
        ValueError: ``skip_first_positions`` is negative.
    """

    _alone: ClassVar["Probe | None"] = None

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
        if isinstance(ignore_token_ids, int) or not all(isinstance(token, int) for token in ignore_token_ids):
            raise TypeError(f"ignore_token_ids must be a list of integers; got {ignore_token_ids!r}.")
        if skip_first_positions < 0:
            raise ValueError(f"skip_first_positions must not be negative; got {skip_first_positions}.")
        self.layers = list(layers)
        self.num_fired = dict.fromkeys((layer.name for layer in layers), 0)
        self.token_ids: Tensor | None = None
        self.mask: Tensor | None = None
        self._model = measured_model(model)
        self._embedding = input_embedding(model)
        self._sink = sink
        self._on_error = on_error
        self._skip = skip_first_positions
        self._ignore = list(ignore_token_ids)
        self._attached: ExitStack | None = None
        self._begin_forward()

    def attach(self) -> None:
        """Start reading: add the hooks and make compiled regions run eagerly."""
        if self._attached is not None:
            return
        with ExitStack() as stack:
            if "torch._dynamo" in sys.modules:  # nothing can have been compiled otherwise
                stack.enter_context(_eager)

            def add(handle: RemovableHandle) -> None:
                stack.callback(handle.remove)

            add(self._model.register_forward_pre_hook(self._read_mask, with_kwargs=True, prepend=True))
            if self._embedding is not None:
                add(self._embedding.register_forward_pre_hook(self._read_token_ids, with_kwargs=True))
            for layer in self.layers:
                for module in layer.modules:
                    if layer.takes_input:
                        add(module.register_forward_pre_hook(self._input_hook(layer), with_kwargs=True))
                    else:
                        add(module.register_forward_hook(self._output_hook(layer)))
            self._attached = stack.pop_all()

    def detach(self) -> None:
        """Stop reading, whatever happened meanwhile; does nothing when not attached."""
        stack, self._attached = self._attached, None
        self._begin_forward()
        self.token_ids = self.mask = None
        if stack is not None:
            stack.close()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Meanwhile no other probe reads anything: these forward passes are not theirs."""
        before, Probe._alone = Probe._alone, self
        try:
            yield
        finally:
            Probe._alone = before

    def __enter__(self) -> "Probe":
        self.attach()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.detach()

    def _is_deaf(self) -> bool:
        """Whether this call is part of another probe's forward pass, or of one repeated by activation checkpointing."""
        return Probe._alone not in (None, self) or torch._C._current_graph_task_id() != -1

    def _begin_forward(self) -> None:
        self._seen_token_ids: Tensor | None = None
        self._seen_mask: Tensor | None = None
        self._rows: tuple[Tensor | None, Tensor | None] | None = None
        self._sums: dict[str, tuple[int, Tensor]] = {}

    def _read_mask(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._is_deaf():
            return
        self._begin_forward()
        with self._guarded():
            self._seen_mask = _attention_mask(module, args, kwargs)

    def _read_token_ids(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._is_deaf():
            return
        ids = args[0] if args else kwargs.get("input", kwargs.get("input_ids"))
        if isinstance(ids, Tensor):
            self._seen_token_ids, self._rows = ids, None

    def _input_hook(self, layer: Layer) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._read(layer, (*args, *(kwargs[k] for k in sorted(kwargs, key=lambda k: k != "hidden_states"))))

        return hook

    def _output_hook(self, layer: Layer) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            self._read(layer, output)

        return hook

    def _read(self, layer: Layer, value: Any) -> None:
        if self._is_deaf():
            return
        with self._guarded(f"at layer {layer.name!r}"):
            hidden = _first_float(value)
            if hidden is None:
                raise TypeError(f"a layer must give a floating-point tensor first; got {type(value).__name__}.")
            with torch.no_grad(), torch.autocast(hidden.device.type, enabled=False):
                whole = self._mean(layer, hidden.detach())
                if whole is not None:
                    self.num_fired[layer.name] += 1
                    self._sink(layer, whole, *self._rows_of(layer, whole))

    @contextmanager
    def _guarded(self, where: str = "at the model's call") -> Iterator[None]:
        try:
            yield
        except Exception as error:
            error.add_note(where)
            if self._on_error is None:
                raise
            self._on_error(error)

    def _mean(self, layer: Layer, hidden: Tensor) -> Tensor | None:
        """The mean over the layer's modules once the last of them has fired, None before."""
        if len(layer.modules) == 1:
            return hidden
        count, total = self._sums.pop(layer.name, (0, torch.zeros((), device=hidden.device)))
        count, total = count + 1, total + hidden.to(torch.promote_types(hidden.dtype, torch.float32))
        if count == len(layer.modules):
            return total / count
        self._sums[layer.name] = count, total
        return None

    def _rows_of(self, layer: Layer, hidden: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Token ids and mask in the shape of the hidden state's rows."""
        if self._rows is None:
            self._rows = self._token_ids_and_mask()
        shape = hidden.shape[:-1]
        for name, tensor in zip(("token ids", "mask"), self._rows, strict=True):
            fits = tensor is None or tensor.shape == shape or (len(shape) == 1 and tensor.numel() == shape[0])
            if tensor is not None and not fits:
                raise ValueError(
                    f"layer {layer.name!r} must have a row for each token; its hidden state has shape "
                    f"{tuple(hidden.shape)}, the {name} {tuple(tensor.shape)}. Leave the layer out."
                )
        token_ids, mask = (None if t is None else t.reshape(shape) for t in self._rows)
        return token_ids, mask

    def _token_ids_and_mask(self) -> tuple[Tensor | None, Tensor | None]:
        """Once a forward pass: what the model was given, or what was set here instead, less what to leave out."""
        token_ids = self._seen_token_ids if self.token_ids is None else self.token_ids
        mask = self._seen_mask if self.mask is None else self.mask
        if token_ids is not None and token_ids.is_floating_point():
            raise TypeError(f"token_ids must be an integer tensor; got {token_ids.dtype}.")
        mask = None if mask is None else mask != 0
        if self._skip:
            shape = mask if mask is not None else token_ids
            if shape is None or shape.ndim != 2:
                raise ValueError(
                    "skip_first_positions needs token ids or a mask of shape (batch, positions); found none. "
                    "Give token_ids= or mask=."
                )
            real = torch.ones_like(shape, dtype=torch.bool) if mask is None else mask
            mask = real & (real.cumsum(1) > self._skip)
        if self._ignore:
            if token_ids is None:
                raise ValueError("ignore_token_ids needs token ids; the model was given none. Give token_ids=.")
            kept = ~torch.isin(token_ids, torch.tensor(self._ignore, device=token_ids.device))
            mask = kept if mask is None else mask.to(kept.device) & kept
        if mask is not None and bool(mask.all()):
            mask = None
        return token_ids, mask


class _Eager:
    """Inside, compiled regions run eagerly, until the last one that has entered leaves; in whatever order they do."""

    def __init__(self) -> None:
        self._inside = 0

    def __enter__(self) -> None:
        if not self._inside:
            self._stance = torch.compiler.set_stance("force_eager")
        self._inside += 1

    def __exit__(self, *error: object) -> None:
        self._inside -= 1
        if not self._inside:
            self._stance.__exit__(None, None, None)


_eager = _Eager()


def _attention_mask(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """The mask of shape (batch, positions) that a model is called with, by position or by keyword."""
    mask = kwargs.get("attention_mask")
    if mask is None and args:
        mask = inspect.signature(module.forward).bind_partial(*args, **kwargs).arguments.get("attention_mask")
    return mask if isinstance(mask, Tensor) and mask.ndim == 2 else None


def _first_float(value: Any) -> Tensor | None:
    """The first floating-point tensor in what a module was given or gave."""
    if isinstance(value, Tensor):
        return value if value.is_floating_point() else None
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, tuple | list):
        return next((found for found in map(_first_float, value) if found is not None), None)
    return None
