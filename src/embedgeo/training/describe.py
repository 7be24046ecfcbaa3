"""Description of what a monitor does on a model: fields, a text, and the lines that open a run."""

import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import ExitStack, suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby, takewhile
from math import inf
from pathlib import Path
from textwrap import TextWrapper
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torchmetrics import Metric

from embedgeo.capture.calls import kept_buffers, kept_random_states, mode_restorer
from embedgeo.capture.inspection import Inspection, inspect_forward, token_modules
from embedgeo.capture.layers import Layer
from embedgeo.capture.residual import STREAMS
from embedgeo.capture.structure import is_compiled, measured_model, model_width, weights_device
from embedgeo.extras import require_extra
from embedgeo.formatting import listed, number, reason, size
from embedgeo.functional.distributed import num_ranks
from embedgeo.functional.representations import drift_values, linearity_values
from embedgeo.functional.rows import RowUnit, row_ids
from embedgeo.geometry import Geometry
from embedgeo.geometry.computing import layer_values
from embedgeo.glossary import headlines, term
from embedgeo.layer_names import LEDGER
from embedgeo.metrics.base import GeometryMetric
from embedgeo.metrics.defaults import (
    TABLE_BYTES,
    keys_of_types,
    measured_keys,
    metric_name,
    width_notes,
)
from embedgeo.metrics.layer import LayerMetrics, MetricFactory, taken_arguments

_TEXT_WIDTH = 100
# up to which metrics are timed; what more takes is extrapolated
_TIMED_ROWS, _TIMED_WIDTH = 4096, 1024
_UNKNOWN_SHAPE = 128, 512  # sequences and tokens of a batch that does not tell them

_ENOUGH: dict[str, tuple[float, float]] = {
    "V_W_over_V_unbiased": (4_096, 64),
    "V_W_text_over_V_W": (8_192, 32),
    "M_over_Q": (2_048, 64),
    "anisotropy": (2_048, 16),
    "mean_cosine": (2_048, 64),
    "effective_rank": (1_024, 8),
    "intrinsic_dimension": (inf, inf),
    "intrinsic_dimension_between": (4_096, 256),
    "intrinsic_dimension_within": (32_768, 256),
}
"""Rows and sequences from which on the error of a number is at most 5 %: `python -m
benchmarks.sampling`.
"""


class DescribedMonitor(NamedTuple):
    """Arguments of a monitor on which a description depends beside the layers and metrics."""

    window: int
    probe: Iterable[Any] | None
    token_ids: Callable[[Any], Tensor] | None
    mask: Callable[[Any], Tensor] | None
    compiled: str
    drift: int  # rows that it compares; 0: none
    # makes the metrics that it takes where token tables do not fit; None: it does not choose
    without_tables: MetricFactory | None


@dataclass(frozen=True)
class DescribedLayer:
    """A layer that was found."""

    name: str  # as in records
    path: str  # of the module in the model, as `named_modules` has it
    kind: str  # class of the module
    width: int | None  # of the hidden state; None where no forward pass has told
    # what its metrics hold at the end of a measurement; None where the width is
    state_bytes: int | None


@dataclass(frozen=True)
class DescribedMetric:
    """A metric that layers would have."""

    name: str  # its class
    num_layers: int  # that have it
    layer_bytes: int = 0  # what it holds at the widest of them, at the end of a measurement
    total_bytes: int = 0  # what it holds at all of them


@dataclass(frozen=True)
class Description:
    """Description of what a monitor would do on a model; ``str()`` of it is a text of 100
    columns.
    """

    model: str  # class of the model that is measured
    num_parameters: int
    # in forward order; empty where the first warning says why
    layers: tuple[DescribedLayer, ...] = ()
    token_ids: str = "unknown"  # their source: a module's path, or an argument of the monitor
    # its source: the path of a module and its argument, or an argument of the monitor
    mask: str = "unknown"
    num_rows: int = 0  # of a measurement on one rank, padding included
    num_types: int = 0  # token types among them, at most: of each the token table holds a row
    rows: str = "unknown"  # how their number comes about
    # to be expected of which values from so many texts drawn at random; empty where it is unknown
    errors: str = ""
    metrics: tuple[DescribedMetric, ...] = ()  # of all layers
    state_bytes: int = 0  # what all metrics hold at the end of a measurement
    num_ranks: int = 1  # that have different rows
    exchange_bytes: int = 0  # that a rank sends in a measurement, by reductions in a ring
    # a measurement's estimate, without a probe's forward passes; None without widths
    seconds: float | None = None
    warnings: tuple[str, ...] = ()  # what to change, or to know, before training starts

    def __str__(self) -> str:
        tables = [[["model", f"{self.model}, {self.num_parameters:,} parameters"]]]
        if self.layers:
            types = (
                f"of at most {self.num_types:,} token types"
                if self.num_types
                else "without token types"
            )
            seconds = (
                "unknown"
                if self.seconds is None
                else f"about {number(float(f'{self.seconds:.2g}'))} s"
            )
            tables[0] += [
                ["token ids", self.token_ids],
                ["mask", self.mask],
                ["rows", f"{self.num_rows:,} a measurement ({self.rows}), {types}"],
                *([["errors", self.errors]] if self.errors else []),
                ["time", f"{seconds} a measurement, an estimate for this machine"],
                ["memory", f"{size(self.state_bytes)} held during a measurement"],
                *(
                    [["exchange", f"{size(self.exchange_bytes)} sent by each of {ranks} ranks"]]
                    if (ranks := self.num_ranks) > 1
                    else []
                ),
            ]
            metrics = [
                [m.name, str(m.num_layers), size(m.layer_bytes), size(m.total_bytes)]
                for m in self.metrics
            ]
            tables += [
                [["layer", "width", "bytes", "module"], *_layer_rows(self.layers)],
                [["metric", "layers", "bytes a layer", "in all"], *metrics],
            ]
        wrapper = TextWrapper(_TEXT_WIDTH, subsequent_indent="  ", break_long_words=False)
        notes = "\n".join(wrapper.fill(f"! {each}") for each in self.warnings) or "No warnings."
        return "\n\n".join([*map(_columns, tables), notes])


def _layer_rows(layers: Sequence[DescribedLayer]) -> Iterator[list[str]]:
    """Rows of the text's table; blocks one after the other that differ in their numbers alone share
    one.
    """

    def likeness(layer: DescribedLayer) -> tuple[object, ...]:
        return (
            re.sub(r"block\.\d+", "block", layer.name),
            layer.kind,
            layer.width,
            layer.state_bytes,
        )

    def to(first: str, last: str) -> str:
        parts = last.split(".")
        num_shared = sum(
            1
            for _ in takewhile(
                lambda pair: pair[0] == pair[1], zip(first.split("."), parts, strict=False)
            )
        )
        return f"{first} … {'.'.join(parts[num_shared:])}"

    for _, group in groupby(layers, likeness):
        first, *others = group
        name, path = first.name, first.path
        if others:
            name, path = to(name, others[-1].name), to(path, others[-1].path)
        held = "?" if first.state_bytes is None else size(first.state_bytes)
        yield [name, str(first.width or "?"), held, f"{path} ({first.kind})"]


def _columns(table: Sequence[Sequence[str]]) -> str:
    """A table in columns; what is too long for the last one goes on below it."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)][:-1]
    indent = " " * (sum(widths) + 2 * len(widths))
    lines = ("  ".join([*map(str.ljust, row, widths), row[-1]]) for row in table)
    wrapper = TextWrapper(
        _TEXT_WIDTH, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False
    )
    return "\n".join(map(wrapper.fill, lines))


def opening(
    geometry: Geometry,
    schedule: object,
    path: Path | None,
    num_compared: int,
    drift_start: int,
    *,
    given: bool,
) -> list[str]:
    """Sentences, when training starts, on what a monitor measures, and when.

    ``path`` is the history file's; token ids may be ``given`` in place of those that the model's
    table is called with.
    """
    width = model_width(geometry.model) or 2
    layers = listed([layer.name for layer in geometry.layers], 4)
    metrics = listed([metric_name(metric) for metric in geometry.make_metrics(width)])
    why_not = missing_for_history() or "folder= has it written"
    history = f"written to {path}" if path else f"kept in its history alone ({why_not})"
    lines = [f"{len(geometry.layers)} layers ({layers}), {metrics}, {schedule}; {history}."]
    lines += width_notes(geometry.make_metrics, width)
    if num_compared:
        held = size(2 * len(geometry.layers) * num_compared * width * 4)
        few = (
            f"; the linearity is undefined, it needs more than {width + 1}: drift={2 * width}, say"
        )
        lines.append(
            f"drift keeps {num_compared} rows of each layer twice, up to {held} in all, also in "
            f"checkpoints"
            f"{few if num_compared < width + 2 else ''}."
        )
    if drift_start:
        before = f"drift has no rows from before step {drift_start:,}"
        lines.append(f"{before}: the first measurement from now on is its first.")
    has_ids = (
        given
        or geometry.inputs.tables
        or geometry.part
        or geometry.settings["rows"] in ("mean", "max")
    )
    if (
        absent := ()
        if has_ids
        else [key for key in keys_of_types(geometry.make_metrics) if key in headlines()]
    ):
        lines.append(
            f"{listed([term(key).name for key in absent])} and other values over token types will "
            f"be absent, because "
            f"{type(measured_model(geometry.model)).__name__} has no embedding table that is "
            f"called with token ids. "
            "Give token_ids=, a function of the batch."
        )
    return lines


def missing_for_history() -> str:
    """Name what the history file needs that is not installed, with the command that installs it;
    empty if nothing.
    """
    try:
        require_extra("report", "history.parquet", "pandas", "pyarrow")
    except ImportError as missing:
        return str(missing)
    return ""


def describe(
    monitor: DescribedMonitor,
    geometry: Geometry | ValueError,
    model: nn.Module,
    batch: Any = None,
    *,
    batch_size: int = 8,
    seq_len: int = 512,
    ranks: int | None = None,
) -> Description:
    """Describe what a monitor would do on a model: layers, sources, bytes, seconds, and what to
    change before training.

    The model is run on 2 sequences of 8 token ids, or on ``batch`` (a mapping by keyword), without
    gradients and in eval mode, and metrics are timed on random rows; modes, buffers and random
    states are afterwards what they were. A model on the meta device can be described, too. Call it
    on a model that is not yet sharded over ranks.

    ``batch_size`` counts the sequences of one optimizer step on one rank, ``seq_len`` the tokens of
    each; where the batch or the monitor's probe has a shape, that counts instead. ``ranks`` is the
    number of ranks that have different rows; default: those of this process group.
    """
    ranks = num_ranks() if ranks is None else ranks
    if batch_size < 1 or seq_len < 1 or ranks < 1:
        raise ValueError(
            f"batch_size, seq_len and ranks must be positive; got {batch_size}, {seq_len} and "
            f"{ranks}."
        )
    inner = measured_model(model)
    sizes = (weight.numel() for weight in inner.parameters() if not is_lazy(weight))
    described = Description(type(inner).__name__, sum(sizes))
    with kept_random_states(), kept_buffers(model), ExitStack() as kept:
        kept.callback(mode_restorer(model))
        model.eval()
        if isinstance(geometry, ValueError):
            return replace(described, warnings=(_unresolved(model, geometry),))
        inspected = inspect_forward(geometry.model, geometry.layers, batch)
        shape = _shape(batch) or (batch_size, seq_len)
        rows = _expected_rows(monitor, geometry, inspected, shape, ranks)
        notes = _choose_metrics(monitor, geometry, rows, ranks)
        shapes = inspected.hidden
        guess = None if inspected.error is None else model_width(geometry.model)
        layers = [layer for layer in geometry.layers if layer.name not in inspected.absent]
        widths = {
            each.name: shapes[each.name][-1] if each.name in shapes else guess for each in layers
        }
        # by width, which that of all streams of a block is several times
        makers = dict[int, MetricFactory]()
        for layer in layers:
            if (width := widths[layer.name]) is not None:
                width *= len(STREAMS) if layer.stream == LEDGER else 1
                widths[layer.name] = width
                makers[width] = geometry.make_metrics_of(layer)
        counts = Counter(width for width in widths.values() if width is not None)
        held = {width: _held_bytes(makers[width](width), width, rows) for width in counts}
        metrics = _totals(counts, held)
        device = weights_device(model)
        seconds = [
            count * _seconds(makers[width](width), width, rows, device)
            for width, count in counts.items()
        ]
        token_ids, mask = _sources(monitor, model, inspected)
        return replace(
            described,
            layers=_described_layers(model, layers, widths, held),
            token_ids=token_ids,
            mask=mask,
            num_rows=rows.total,
            num_types=rows.num_types,
            rows=rows.origin,
            errors=_errors(geometry, rows),
            metrics=metrics,
            state_bytes=sum(metric.total_bytes for metric in metrics),
            num_ranks=ranks,
            exchange_bytes=_exchange_bytes(counts, makers, rows, ranks),
            seconds=sum(seconds) if seconds else None,
            warnings=tuple(_warnings(monitor, model, geometry, inspected, batch, held, notes)),
        )


def _choose_metrics(
    monitor: DescribedMonitor, geometry: Geometry, rows: "_ExpectedRows", ranks: int
) -> list[str]:
    """Do without token tables where they do not fit, if the monitor does; sentences on them."""
    num_bytes = geometry.table_bytes(rows.total, ranks, given=monitor.token_ids is not None)
    if num_bytes <= TABLE_BYTES:
        return []
    if monitor.without_tables is None:
        return [
            f"{_tables_take(num_bytes)}. Leave metrics= out, or take embedgeo.streaming_metrics, "
            f"which has none."
        ]
    geometry.use_metrics(monitor.without_tables)
    return [without_tables(num_bytes)]


def without_tables(num_bytes: float) -> str:
    """A sentence on what a monitor does without token tables, which would take so many bytes."""
    needed = "" if num_bytes == inf else f" {_tables_take(num_bytes)}."
    return (
        f"EmbeddingMoments is in place of TokenMoments: V_W is estimated within updates, and "
        f"other values over token types are absent.{needed} metrics=embedgeo.default_metrics has "
        f"the tables."
    )


def _tables_take(num_bytes: float) -> str:
    return (
        f"Token tables and their union over the ranks may take {size(num_bytes)} on a rank, more "
        f"than {size(TABLE_BYTES)}"
    )


def _described_layers(
    model: nn.Module,
    layers: Iterable[Layer],
    widths: Mapping[str, int | None],
    held: Mapping[int, Counter[str]],
) -> tuple[DescribedLayer, ...]:
    described = []
    for layer in layers:
        modules = [call.module for call in layer.calls]
        start = "input of " if layer.takes_input else "mean of " if len(modules) > 1 else ""
        path = start + ", ".join(_paths(model, modules))
        width = widths[layer.name]
        state_bytes = held[width].total() if width is not None else None
        if width is not None and layer.stream == LEDGER:
            width //= len(STREAMS)
        described.append(
            DescribedLayer(layer.name, path, type(modules[0]).__name__, width, state_bytes)
        )
    return tuple(described)


def _paths(model: nn.Module, modules: Iterable[nn.Module]) -> list[str]:
    """Paths of modules in the model, each once; those of no module inside have the name of their
    class.
    """
    paths = {module: name for name, module in model.named_modules()}
    return list(dict.fromkeys(paths.get(module) or type(module).__name__ for module in modules))


def _unresolved(model: nn.Module, error: ValueError) -> str:
    names = list[str]()
    with suppress(Exception):  # of what could only have been a suggestion
        names = token_modules(model)
    remedy = f" These modules give a row for each token: layers={names!r}." if names else ""
    return f"{' '.join(str(error).split())}{remedy}"


def _sources(monitor: DescribedMonitor, model: nn.Module, inspected: Inspection) -> tuple[str, str]:
    """The sources of the token ids and of the mask."""
    has_run = inspected.error is None
    token_ids, mask = ("none", "none: every position counts") if has_run else ("unknown", "unknown")
    if monitor.token_ids is not None:
        token_ids = "the function given as token_ids="
    elif tables := _paths(model, [table for table, _ in inspected.token_ids]):
        token_ids = f"what {' and '.join(tables)} {'is' if len(tables) == 1 else 'are'} called with"
    if monitor.mask is not None:
        mask = "the function given as mask="
    elif masks := [f"{name} of {_paths(model, [module])[0]}" for module, name in inspected.masks]:
        mask = f"{' and '.join(masks)}, where given"
    return token_ids, mask


def _warnings(
    monitor: DescribedMonitor,
    model: nn.Module,
    geometry: Geometry,
    inspected: Inspection,
    batch: Any,
    held: Mapping[int, Counter[str]],
    notes: Sequence[str],
) -> Iterator[str]:
    reached = [layer for layer in geometry.layers if layer.name in inspected.hidden]
    if inspected.error is not None:
        tried = "synthetic token ids" if batch is None else "this batch"
        yield (
            f"The model could not be run on {tried} ({reason(inspected.error)}): widths and "
            f"sources may be "
            "missing or guessed. Give a batch: monitor.describe(model, batch)."
        )
    elif silent := [
        each.name
        for each in geometry.layers
        if each not in reached and each.name not in inspected.absent
    ]:
        yield (
            f"No forward pass reached {listed(silent)}: nothing would be measured there. Leave it "
            "out of layers=."
        )
    if not inspected.token_ids and monitor.token_ids is None and inspected.error is None:
        yield (
            "No token ids were found: values over token types (V_W, V_B …) will be absent. Give "
            "token_ids=, a "
            "function of the batch."
        )
    elif inspected.token_ids and (
        misfits := [layer.name for layer in reached if not inspected.has_token_rows(layer)]
    ):
        yield (
            f"The rows of {listed(misfits)} are not one for each token id: the monitor would turn "
            f"off there. Leave "
            "that out of layers=, or give token_ids= and mask= in the order of its rows."
        )
    for width in held:
        yield from width_notes(geometry.make_metrics, width)
    yield from notes
    if is_compiled(model) and not (monitor.compiled == "stable" and geometry.probe.is_prepared()):
        yield (
            "The model is compiled: a measured step runs eagerly, so it is slower; the other steps "
            "are as before."
        )
    if geometry.part is not None:
        yield "The model is one stage of a pipeline: layers and bytes are those of this stage."


class _ExpectedRows(NamedTuple):
    """The rows of a measurement at a layer."""

    num_sequences: int
    seq_len: int  # rows of each sequence
    most_types: int  # of tokens that there are; 0: no token ids
    num_groups: int  # of sequences, for standard errors
    num_compared: int  # by the drift, at most; 0: none
    itemsize: int  # bytes of a number that is kept of a row
    origin: str  # of their number

    @property
    def total(self) -> int:
        return self.num_sequences * self.seq_len

    @property
    def num_types(self) -> int:
        """Number of token types among them, at most."""
        return min(self.total, self.most_types)

    def drawn(self, width: int, device: torch.device) -> tuple[Tensor, Tensor | None, Tensor]:
        """Some of them at random, shape (sequences, positions, width), with token ids and sequence
        ids.
        """
        positions = min(self.seq_len, _TIMED_ROWS)
        shape = max(1, min(self.num_sequences, _TIMED_ROWS // positions)), positions
        generator = torch.Generator().manual_seed(0)
        rows = torch.randn(*shape, width, generator=generator).to(device)
        ids = (
            torch.randint(self.num_types, shape, generator=generator).to(device)
            if self.num_types
            else None
        )
        return rows, ids, torch.arange(shape[0])[:, None].expand(shape).to(device)


def _expected_rows(
    monitor: DescribedMonitor,
    geometry: Geometry,
    inspected: Inspection,
    shape: tuple[int, int],
    ranks: int,
) -> _ExpectedRows:
    num_batches, batch_size, seq_len = _expected_batches(
        monitor.window, monitor.probe, shape, ranks
    )
    origin = f"{num_batches} × {batch_size} sequences"
    unit = geometry.settings["rows"]
    if unit in ("tokens", "words"):
        origin += f" × {seq_len} tokens"
    else:
        origin += f", by {unit}"
        seq_len = 1
    has_ids = bool(inspected.token_ids or monitor.token_ids) and unit not in ("mean", "max")
    num_sequences = num_batches * batch_size
    most_types = inspected.num_token_types if has_ids else 0
    num_groups = min(geometry.settings["jackknife"], num_sequences)
    itemsize = 8 if inspected.dtype == torch.float64 else 4
    return _ExpectedRows(
        num_sequences, seq_len, most_types, num_groups, monitor.drift, itemsize, origin
    )


def _expected_batches(
    window: int, probe: Iterable[Any] | None, shape: tuple[int, int], ranks: int
) -> tuple[int, int, int]:
    """Number of the batches of a measurement on one rank, of their sequences, and of the tokens of
    these; training batches are of this shape.
    """
    if probe is None:
        return window, *shape
    num_batches = len(probe) if isinstance(probe, Sized) else 1
    first = _shape(probe[0]) if isinstance(probe, Sequence) and probe else None
    batch_size, seq_len = first or (getattr(probe, "batch_size", None) or shape[0], shape[1])
    return -(-num_batches // ranks), batch_size, seq_len


def expected_rows(
    window: int, probe: Iterable[Any] | None, batch: Any, unit: RowUnit, ranks: int
) -> int:
    """Number of rows of a measurement on one rank, at most; of a window of so many training batches
    like this one.
    """
    shape = _shape(batch) or _UNKNOWN_SHAPE
    num_batches, batch_size, seq_len = _expected_batches(window, probe, shape, ranks)
    return num_batches * batch_size * (seq_len if unit in ("tokens", "words") else 1)


def _exchange_bytes(
    counts: Mapping[int, int], makers: Mapping[int, MetricFactory], rows: _ExpectedRows, ranks: int
) -> int:
    """Bytes that a rank sends in a measurement: reduced in a ring, each byte of the states of all
    rows is sent nearly twice.
    """
    of_all = rows._replace(num_sequences=ranks * rows.num_sequences)
    num_bytes = 0
    for width, count in counts.items():
        held = _held_bytes(makers[width](width), width, of_all)
        held["drift"] //= 3  # of this measurement alone
        num_bytes += count * held.total()
    return 2 * num_bytes * (ranks - 1) // ranks


def _errors(geometry: Geometry, rows: _ExpectedRows) -> str:
    """The values to be expected with errors of at most 5 %, the others, and what would be enough
    for each of these.
    """
    if geometry.settings["rows"] != "tokens":
        return ""
    measured = measured_keys(geometry.make_metrics, token_ids=rows.num_types > 0)
    small, large = list[str](), list[str]()
    enough = "enough: {:,} rows from {:,} sequences"
    for key, (num_rows, num_sequences) in _ENOUGH.items():
        if key in measured and rows.total >= num_rows and rows.num_sequences >= num_sequences:
            small.append(key)
        elif key in measured and num_rows + num_sequences < inf:
            large.append(f"{key} ({enough.format(num_rows, num_sequences)})")
            enough = "{:,} from {:,}"  # the first says of what
        elif key in measured:
            large.append(f"{key} (enough: more than was tried)")
    of_rows = "with the rows of one rank, " if num_ranks() > 1 else ""
    parts = [f"at most 5 % expected for {', '.join(small)}"] if small else []
    parts += [f"above 5 % expected for {', '.join(large)}"] if large else []
    return of_rows + "; ".join(parts) if parts else ""


def _shape(batch: Any) -> tuple[int, int] | None:
    """Sequences and tokens of a batch: the shape of its first matrix of integers, if it has one."""
    values = (
        batch.values() if hasattr(batch, "values") and not isinstance(batch, Tensor) else [batch]
    )
    integers = (
        each for each in values if isinstance(each, Tensor) and not each.is_floating_point()
    )
    return next(((len(each), each.shape[1]) for each in integers if each.ndim == 2), None)


def _held_bytes(metrics: Sequence[Metric], width: int, rows: _ExpectedRows) -> Counter[str]:
    held: Counter[str] = Counter()
    for metric in metrics:
        held[metric_name(metric)] += _metric_bytes(metric, width, rows)
    if rows.num_compared:  # of the first measurement, of the last one and of this one
        held["drift"] = 3 * min(rows.num_compared, rows.total) * width * rows.itemsize
    return held


def _metric_bytes(metric: Metric, width: int, rows: _ExpectedRows) -> int:
    """Bytes of a metric with its copies for standard errors; one of another package is updated to
    find them.
    """
    if not isinstance(metric, GeometryMetric):
        empty = _state_bytes(metric)
        hidden, ids, sequences = rows.drawn(width, torch.device("cpu"))
        metric.update(
            hidden, **taken_arguments(metric, {"token_ids": ids, "sequence_ids": sequences})
        )
        return empty + round(
            (_state_bytes(metric) - empty) * rows.total / hidden.shape[:-1].numel()
        )
    whole = metric.state_bytes(rows.total, rows.num_types, rows.itemsize)
    if not rows.num_groups or not metric.has_copies:
        return whole
    in_group = -(-rows.num_sequences // rows.num_groups) * rows.seq_len
    return whole + rows.num_groups * metric.state_bytes(
        in_group, min(rows.num_types, in_group), rows.itemsize
    )


def _state_bytes(metric: Metric) -> int:
    states = metric.metric_state.values()
    return sum(
        each.nbytes for state in states for each in (state if isinstance(state, list) else [state])
    )


def _totals(
    counts: Mapping[int, int], held: Mapping[int, Counter[str]]
) -> tuple[DescribedMetric, ...]:
    metrics = []
    for name in dict.fromkeys(name for width in sorted(held) for name in held[width]):
        widths = [width for width in sorted(held) if name in held[width]]
        total_bytes = sum(counts[width] * held[width][name] for width in widths)
        metrics.append(
            DescribedMetric(
                name, sum(counts[w] for w in widths), held[widths[-1]][name], total_bytes
            )
        )
    return tuple(metrics)


def _seconds(
    metrics: Sequence[Metric], width: int, rows: _ExpectedRows, device: torch.device
) -> float:
    """An estimate of what the metrics of a layer take, and comparing its rows: with three others,
    and those below.
    """
    total = sum(_metric_seconds(metric, width, rows, device) for metric in metrics)
    if rows.num_compared:
        timed_width = min(width, _TIMED_WIDTH)
        shape = 2, min(rows.num_compared, rows.total), timed_width
        below, compared = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device)
        drift_seconds = _timed(lambda: drift_values(below, compared), device)
        linearity_seconds = _timed(lambda: linearity_values(below, compared), device)
        total += width / timed_width * (3 * drift_seconds + linearity_seconds)
    return total


def _metric_seconds(metric: Metric, width: int, rows: _ExpectedRows, device: torch.device) -> float:
    """Updating and computing, timed on some random rows: of more columns in proportion to the bytes
    held, d or d².
    """
    timed_width = width
    share = 1.0
    if isinstance(metric, GeometryMetric) and width > _TIMED_WIDTH:
        share = metric.state_bytes(rows.total, 1)
        metric = metric.of_width(_TIMED_WIDTH)
        timed_width = metric.dim
        share /= metric.state_bytes(rows.total, 1)
    hidden, ids, sequences = rows.drawn(timed_width, device)
    seconds = 0.0
    for part in (slice(1), slice(None)):  # the first time threads and memory are set up
        timed = LayerMetrics(
            lambda _: [deepcopy(metric)], timed_width, device=device, jackknife=rows.num_groups
        )
        part_ids = row_ids(hidden[part], None if ids is None else ids[part], None, sequences[part])
        update = partial(timed.update, hidden[part], part_ids)
        seconds = _timed(update, device) * rows.total / hidden.shape[:-1].numel()
        seconds += _timed(partial(layer_values, [timed]), device)
    return share * seconds


def _timed(call: Callable[[], object], device: torch.device) -> float:
    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    started = now()
    call()
    return now() - started
