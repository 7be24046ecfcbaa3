"""What a monitor would do on a model: `describe`, and the command ``embedgeo doctor``."""

import inspect
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from embedgeo.capture.calls import (
    eager_mode,
    every_module_called,
    first_float,
    first_input,
    kept_state,
    kept_weights,
    mode_restorer,
    set_eval_modes,
)
from embedgeo.capture.forward_inputs import ForwardInputs
from embedgeo.capture.layers import Layer
from embedgeo.capture.structure import (
    is_callable,
    is_hugging_face,
    measured_model,
)
from embedgeo.capture.torch_names import meta_values
from embedgeo.checkpoints import hub
from embedgeo.checkpoints.loading import described_model, stated_positions
from embedgeo.checkpoints.sources import is_local, require_source
from embedgeo.formatting import listed, reason, size
from embedgeo.functional.distributed import num_ranks
from embedgeo.glossary import headlines
from embedgeo.random_states import kept_random_states
from embedgeo.results.findings import MORE_ROWS, few_rows
from embedgeo.training.monitor import Monitor
from embedgeo.training.plan import memory_sentences, sources_of_rows


@dataclass(frozen=True)
class DescribedLayer:
    """A layer that was found."""

    name: str  # as in records
    path: str  # of the module in the model, as `named_modules` has it, and its class
    width: int | None  # of the hidden state; None where no forward pass has told


@dataclass(frozen=True)
class Description:
    """Description of what a monitor would do on a model; ``str()`` of it is a text."""

    model: str  # class of the model that is measured
    num_parameters: int
    layers: tuple[DescribedLayer, ...]  # in forward order
    token_ids: str  # their source
    mask: str  # its source
    num_rows: int  # of a measurement on one rank, padding included
    metrics: Mapping[str, int]  # bytes that each metric holds at all layers, by its class
    device_bytes: int  # that a measurement takes on the device of a rank at most
    host_bytes: int  # of sampled rows
    warnings: tuple[str, ...]  # what to change, or to know, before training starts

    def __str__(self) -> str:
        notes = [f"! {each}" for each in self.warnings] or ["No warnings."]
        lines = [
            f"model      {self.model}, {self.num_parameters:,} parameters",
            f"rows       {self.num_rows:,} a measurement; {self.token_ids}, {self.mask}",
            f"memory     {size(self.device_bytes)} of a device, {size(self.host_bytes)} of a host",
            "",
            *(f"{each.name:16} {each.width or '?':>6}  {each.path}" for each in self.layers),
            "",
            *(f"{name:24} {size(held)}" for name, held in self.metrics.items()),
            "",
            *notes,
        ]
        return "\n".join(lines)


def describe(
    monitor: Monitor,
    model: nn.Module,
    batch: Any = None,
    *,
    batch_size: int = 8,
    seq_len: int = 512,
    ranks: int | None = None,
) -> Description:
    """Describe what a monitor would do on a model: layers, sources, bytes, and what to change
    before training.

    The model is run on 2 sequences of 8 token ids, or on ``batch`` (a mapping by keyword), without
    gradients and in eval mode. Modes, random states and what modules hold are afterwards what they
    were. A model on the meta device can be described, too. Call it on a model that is not yet
    sharded over ranks. Bytes are those of the package's own metrics.

    Args:
        monitor: any of the three monitors, before its run.
        model: the model that is to be trained.
        batch: a batch of training.
        batch_size: number of sequences of one optimizer step on one rank. Where the batch or the
            monitor's probe has a shape, that counts instead.
        seq_len: number of tokens of each.
        ranks: number of ranks that have different rows; default: those of this process group.

    Raises:
        ValueError: a size is not positive, the monitor cannot start on the model, or a forward pass
            of it changes weights in place.
    """
    ranks = num_ranks() if ranks is None else ranks
    if batch_size < 1 or seq_len < 1 or ranks < 1:
        raise ValueError(
            f"batch_size, seq_len and ranks must be positive; got {batch_size}, {seq_len} and "
            f"{ranks}."
        )
    inner = measured_model(model)
    rows = monitor.plan(batch, ranks, (batch_size, seq_len))
    with kept_random_states(), kept_state(model), kept_weights(model), ExitStack() as kept:
        geometry = monitor.make_geometry(model)
        kept.callback(mode_restorer(model))
        set_eval_modes(model)
        forward = _run(model, geometry.layers, batch)
    paths = {module: name or type(module).__name__ for name, module in model.named_modules()}
    layers = [_described(layer, forward, paths) for layer in geometry.layers]
    gives_ids = monitor.token_ids is not None
    has_ids = bool(forward.inputs.token_ids) or gives_ids
    token_ids, mask = sources_of_rows(
        geometry, has_ids=has_ids, ids=gives_ids, mask=monitor.mask is not None
    )
    seen = monitor.seen_rows(geometry, rows, ranks)
    if not has_ids:
        seen = seen._replace(num_types=0)
    bounds, memory = monitor.choose_metrics(geometry, seen, ranks, [each.width for each in layers])
    notes = memory_sentences(memory, monitor.max_bytes, bounds)[1:]
    width = max(forward.widths.values(), default=1)
    own = geometry.make_metrics(width)
    keys = [key for key in headlines() if any(key in getattr(each, "terms", ()) for each in own)]
    lacking = few_rows(ranks * rows.on_rank, width, keys)
    few = [f"A measurement has too few rows for {lacking}. {MORE_ROWS}"] if lacking else []
    return Description(
        type(inner).__name__,
        sum(weight.numel() for weight in inner.parameters() if not is_lazy(weight)),
        layers=tuple(layers),
        token_ids=token_ids,
        mask=mask,
        num_rows=rows.on_rank,
        metrics=memory.metrics,
        device_bytes=memory.peak,
        host_bytes=memory.on_host,
        warnings=(*_warnings(forward, layers, has_ids=has_ids), *notes, *few),
    )


class _Forward(NamedTuple):
    """What a forward pass on a batch, or on a few token ids, shows."""

    inputs: ForwardInputs
    widths: dict[str, int]  # of the layers that were reached
    error: Exception | None  # where some layers were not reached


def _run(model: nn.Module, layers: Sequence[Layer], batch: Any) -> _Forward:
    """Run the measured model, or the first of the modules inside that can be run."""
    inputs = ForwardInputs(model)
    widths = dict[str, int]()
    first_error: Exception | None = None

    def add_hidden(layer: Layer, _: nn.Module, args: Any, kwargs: Any, output: Any = None) -> None:
        hidden = first_input(args, kwargs) if layer.takes_input else first_float(output)
        if hidden is not None:
            widths[layer.name] = hidden.shape[-1]

    with ExitStack() as hooks, torch.no_grad(), meta_values():
        hooks.enter_context(eager_mode)
        hooks.enter_context(every_module_called)
        for table in inputs.tables:
            hooks.enter_context(
                table.register_forward_hook(inputs.record_token_ids, with_kwargs=True)
            )
        for layer in layers:
            module = layer.calls[-1].module
            before = module.register_forward_pre_hook
            register = before if layer.takes_input else module.register_forward_hook
            hooks.enter_context(register(partial(add_hidden, layer), with_kwargs=True))
        for module in dict.fromkeys((measured_model(model), *inputs.enclosing_modules)):
            for each in _token_batches(module) if batch is None else [batch]:
                if not is_callable(module):
                    continue
                try:
                    module(**each) if hasattr(each, "keys") else module(each)
                except Exception as error:
                    first_error = first_error or error
                else:
                    return _Forward(inputs, widths, first_error)
    return _Forward(inputs, widths, first_error)


def _token_batches(module: nn.Module) -> list[Any]:
    """A few token ids, as a Hugging Face model takes them, with masks and without, or as the only
    argument.
    """
    ids = torch.zeros(
        2, 8, dtype=torch.int64, device=next((each.device for each in module.parameters()), None)
    )
    if not is_hugging_face(module):
        return [ids]
    given = {"input_ids": ids}
    if getattr(module.config, "is_encoder_decoder", False):
        given["decoder_input_ids"] = ids
    masks = inspect.signature(module.forward).parameters.keys() & {
        "attention_mask",
        "decoder_attention_mask",
    }
    return [given | dict.fromkeys(masks, ids + 1), given]


def _described(layer: Layer, forward: _Forward, paths: Mapping[nn.Module, str]) -> DescribedLayer:
    modules = [call.module for call in layer.calls]
    path = " … ".join(dict.fromkeys(paths[each] for each in (modules[0], modules[-1])))
    start = "input of " if layer.takes_input else "mean of " if len(modules) > 1 else ""
    width = forward.widths.get(layer.name)
    return DescribedLayer(layer.name, f"{start}{path} ({type(modules[0]).__name__})", width)


def _warnings(
    forward: _Forward, layers: Sequence[DescribedLayer], *, has_ids: bool
) -> Iterator[str]:
    silent = [layer.name for layer in layers if layer.width is None]
    if silent and forward.error:
        yield (
            f"The model could not be run on this batch, or on synthetic token ids "
            f"({reason(forward.error)}): widths and sources may be missing. Give a batch: "
            "embedgeo.describe(monitor, model, batch)."
        )
    elif silent:
        yield (
            f"No forward pass reached {listed(silent)}: nothing would be measured there. Leave it "
            "out of layers=."
        )
    elif not has_ids:
        yield (
            "No token ids were found: values over token types (V_W, V_B …) will be absent. Give "
            "the monitor token_ids=, a function of the batch."
        )


def usual_length(model: nn.Module) -> int:
    """Tokens of a sequence: 512, or as many as a model has positions."""
    return min(stated_positions(measured_model(model)) or 512, 512)


def named_model(source: str, *, trust_remote_code: bool | None) -> nn.Module:
    """The model of a repository or a folder, by its ``config.json`` alone."""
    folder = Path(source).expanduser()
    require_source("model", source)
    with tempfile.TemporaryDirectory() as cache:
        if not is_local(source):
            commit = hub.list_revisions(source)["main"]
            folder = hub.fetch_small(
                source, commit, ["config.json"], Path(cache), with_code=trust_remote_code
            )
        return described_model(folder, trust_remote_code=trust_remote_code)
