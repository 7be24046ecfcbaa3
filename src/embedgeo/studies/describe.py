"""Description of what a monitor would do on a model: fields and a text."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import groupby
from textwrap import TextWrapper
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from embedgeo.capture.calls import kept_buffers, kept_random_states, mode_restorer
from embedgeo.capture.structure import is_compiled, measured_model, model_width
from embedgeo.formatting import listed, reason, size
from embedgeo.functional.distributed import num_ranks
from embedgeo.geometry import Geometry
from embedgeo.metrics.base import GeometryMetric
from embedgeo.metrics.defaults import TABLE_BYTES, width_notes
from embedgeo.studies.inspection import Inspection, compared_states, inspect_forward
from embedgeo.training.monitor import Monitor
from embedgeo.training.opening import expected_rows, without_tables

GIVE_BATCH = "Give a batch: embedgeo.describe(monitor, model, batch)."
"""The advice where a model cannot be run on token ids."""

_TEXT_WIDTH = 100


@dataclass(frozen=True)
class DescribedLayer:
    """A layer that was found."""

    name: str  # as in records
    path: str  # of the module in the model, as `named_modules` has it
    kind: str  # class of the module
    width: int | None  # of the hidden state; None where no forward pass has told


@dataclass(frozen=True)
class Description:
    """Description of what a monitor would do on a model; ``str()`` of it is a text of 100
    columns.
    """

    model: str  # class of the model that is measured
    num_parameters: int
    # in forward order; empty where the first warning says why
    layers: tuple[DescribedLayer, ...] = ()
    token_ids: str = "unknown"  # their source: the path of a table, or an argument of the monitor
    # its source: an argument and the path of a module, or an argument of the monitor
    mask: str = "unknown"
    num_rows: int = 0  # of a measurement on one rank, padding included
    # bytes that each metric holds at all layers, by its class
    metrics: Mapping[str, int] = field(default_factory=dict)
    num_ranks: int = 1  # that have different rows
    exchange_bytes: int = 0  # that a rank sends in a measurement, by reductions in a ring
    # how `layers="hidden_states"` compares with the model's own; empty where it has none
    compared: str = ""
    beginnings: str = ""  # how many sequences of the batch begin with the model's BOS token
    warnings: tuple[str, ...] = ()  # what to change, or to know, before training starts

    @property
    def state_bytes(self) -> int:
        """What all metrics hold at the end of a measurement."""
        return sum(self.metrics.values())

    def __str__(self) -> str:
        tables = [[["model", f"{self.model}, {self.num_parameters:,} parameters"]]]
        if self.layers:
            sent = f", {size(self.exchange_bytes)} sent by each of {self.num_ranks} ranks"
            tables[0] += [
                ["token ids", self.token_ids],
                ["mask", self.mask],
                *([["states", self.compared]] if self.compared else []),
                *([["sequences", self.beginnings]] if self.beginnings else []),
                ["rows", f"{self.num_rows:,} a measurement"],
                ["memory", f"{size(self.state_bytes)}{sent if self.num_ranks > 1 else ''}"],
            ]
            metrics = [[name, size(held)] for name, held in self.metrics.items()]
            tables += [
                [["layer", "width", "module"], *_layer_rows(self.layers)],
                [["metric", "bytes"], *metrics],
            ]
        wrapper = TextWrapper(_TEXT_WIDTH, subsequent_indent="  ", break_long_words=False)
        notes = "\n".join(wrapper.fill(f"! {each}") for each in self.warnings) or "No warnings."
        return "\n\n".join([*map(_columns, tables), notes])


def _layer_rows(layers: Sequence[DescribedLayer]) -> Iterator[list[str]]:
    """Rows of the text's table; blocks one after the other that differ in their numbers alone share
    one.
    """
    for _, group in groupby(
        layers, lambda layer: (re.sub(r"block\.\d+", "", layer.name), layer.kind, layer.width)
    ):
        first, *others = group
        name, path = first.name, first.path
        if others:
            name += f" … {others[-1].name}"
            path += f" … {others[-1].path}"
        yield [name, str(first.width or "?"), f"{path} ({first.kind})"]


def _columns(table: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*table, strict=True)][:-1]
    return "\n".join("  ".join([*map(str.ljust, row, widths), row[-1]]) for row in table)


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
    gradients and in eval mode; modes, buffers and random states are afterwards what they were. A
    model on the meta device can be described, too. Call it on a model that is not yet sharded over
    ranks. Bytes are those of the package's own metrics.

    Args:
        monitor: any of the three monitors, before its run.
        model: the model that is to be trained.
        batch: a batch of training.
        batch_size: number of sequences of one optimizer step on one rank; where the batch or the
            monitor's probe has a shape, that counts instead.
        seq_len: number of tokens of each.
        ranks: number of ranks that have different rows; default: those of this process group.

    Raises:
        ValueError: a size is not positive.
    """
    ranks = num_ranks() if ranks is None else ranks
    if batch_size < 1 or seq_len < 1 or ranks < 1:
        raise ValueError(
            f"batch_size, seq_len and ranks must be positive; got {batch_size}, {seq_len} and "
            f"{ranks}."
        )
    inner = measured_model(model)
    sizes = (weight.numel() for weight in inner.parameters() if not is_lazy(weight))
    of_model = type(inner).__name__, sum(sizes)
    try:
        with kept_random_states():
            geometry = monitor.make_geometry(model)
    except ValueError as error:
        return Description(*of_model, warnings=(" ".join(str(error).split()),))
    given = {"token_ids": monitor.token_ids, "mask": monitor.mask}
    num_rows = expected_rows(
        monitor.schedule.window,
        monitor.probe,
        batch,
        geometry.settings["rows"],
        ranks,
        (batch_size, seq_len),
    ).on_rank
    needed = geometry.table_bytes(num_rows, ranks, given=monitor.token_ids is not None)
    notes = []
    if monitor.chooses_metrics and needed > TABLE_BYTES:
        geometry.use_metrics(monitor.make_without_tables)
        notes.append(without_tables(needed))
    if is_compiled(model) and not (monitor.compiled == "stable" and geometry.probe.is_prepared()):
        notes.append(
            "The model is compiled: a measured step runs eagerly, so it is slower; the other steps "
            "are as before."
        )
    with kept_random_states(), kept_buffers(model), ExitStack() as kept:
        kept.callback(mode_restorer(model))
        model.eval()
        found = inspect_forward(model, geometry.layers, batch)
        compared = compared_states(model)
    paths = {module: name or type(module).__name__ for name, module in model.named_modules()}
    tables = list(dict.fromkeys(paths[table] for table, _ in found.token_ids))
    masks = [f"{name} of {paths[module]}" for module, name in found.masks.items()]
    unknown = ["unknown"] if found.error else []
    sources = {
        "token_ids": " and ".join(tables or unknown or ["none"]),
        "mask": " and ".join(masks or unknown or ["none: every position counts"]),
    }
    for name, function in given.items():
        if function is not None:
            sources[name] = f"the function given as {name}="
    guess = None if found.error is None else model_width(model)
    layers = []
    for layer in geometry.layers:
        modules = [call.module for call in layer.calls]
        path = " … ".join(dict.fromkeys(paths[each] for each in (modules[0], modules[-1])))
        start = "input of " if layer.takes_input else "mean of " if len(modules) > 1 else ""
        width = found.hidden[layer.name][-1] if layer.name in found.hidden else guess
        kind = type(modules[0]).__name__
        layers.append(DescribedLayer(layer.name, f"{start}{path}", kind, width))
    has_ids = bool(found.token_ids or given["token_ids"])
    held = _held_bytes(geometry, layers, num_rows, has_ids=has_ids)
    sent = _held_bytes(geometry, layers, num_rows * ranks, has_ids=has_ids).total()
    return Description(
        *of_model,
        layers=tuple(layers),
        token_ids=sources["token_ids"],
        mask=sources["mask"],
        num_rows=num_rows,
        metrics=held,
        num_ranks=ranks,
        # reduced in a ring, each byte of the states of all rows is sent nearly twice
        exchange_bytes=2 * sent * (ranks - 1) // ranks,
        compared=compared,
        beginnings="" if batch is None else _beginnings(inner, found, batch),
        warnings=(*_warnings(geometry, found, batch, has_ids=has_ids), *notes),
    )


def _beginnings(model: nn.Module, found: Inspection, batch: Any) -> str:
    bos = getattr(getattr(model, "config", None), "bos_token_id", None)
    ids = next((ids for ids in found.token_ids.values() if ids.ndim == 2), None)
    if bos is None or ids is None or ids.is_meta:
        return ""
    mask = batch.get("attention_mask") if hasattr(batch, "keys") else None
    real = torch.ones_like(ids) if mask is None or mask.shape != ids.shape else mask.to(ids.device)
    first = ids.gather(1, real.long().argmax(1, keepdim=True))
    return f"{int((first == bos).sum())} of {len(ids)} begin with BOS (id {bos})"


def _warnings(geometry: Geometry, found: Inspection, batch: Any, *, has_ids: bool) -> Iterator[str]:
    reached = [layer for layer in geometry.layers if layer.name in found.hidden]
    silent = [layer.name for layer in geometry.layers if layer not in reached]
    misfits = [layer.name for layer in reached if not found.has_token_rows(layer)]
    if found.error is not None:
        tried = "synthetic token ids" if batch is None else "this batch"
        yield (
            f"The model could not be run on {tried} ({reason(found.error)}): widths and sources "
            f"may be missing or guessed. {GIVE_BATCH}"
        )
    elif silent:
        yield (
            f"No forward pass reached {listed(silent)}: nothing would be measured there. Leave it "
            f"out of layers=."
        )
    if found.token_ids and misfits:
        yield (
            f"The rows of {listed(misfits)} are not one for each token id: the monitor would turn "
            f"off there. Leave that out of layers=, or give the monitor token_ids= and mask= in "
            f"the order of its rows."
        )
    elif not (has_ids or found.error):
        yield (
            "No token ids were found: values over token types (V_W, V_B …) will be absent. Give "
            "the monitor token_ids=, a function of the batch."
        )
    for width in dict.fromkeys(found.hidden[layer.name][-1] for layer in reached):
        yield from width_notes(geometry.make_metrics, width)


def _held_bytes(
    geometry: Geometry, layers: Sequence[DescribedLayer], num_rows: int, *, has_ids: bool
) -> Counter[str]:
    """Bytes that each of the package's metrics holds at all layers, with its copies for standard
    errors; 0 of another package's.
    """
    settings = geometry.settings
    num_groups = settings["jackknife"]
    has_types = has_ids and settings["rows"] not in ("mean", "max")
    most_types = geometry.inputs.num_token_types if has_types else 0
    held = Counter[str]()
    for described in layers:
        for metric in geometry.make_metrics(described.width) if described.width else ():
            name = type(metric).__name__
            held[name] += 0
            if isinstance(metric, GeometryMetric):
                held[name] += metric.state_bytes(num_rows, min(num_rows, most_types))
            if isinstance(metric, GeometryMetric) and metric.has_copies and num_groups:
                rows = -(-num_rows // num_groups)
                held[name] += num_groups * metric.state_bytes(rows, min(rows, most_types))
    return held
