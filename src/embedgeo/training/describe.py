"""Description of what a monitor does on a model: fields, a text, and the lines that open a run."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import groupby
from math import inf
from pathlib import Path
from textwrap import TextWrapper
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from embedgeo.capture.calls import kept_buffers, kept_random_states, mode_restorer
from embedgeo.capture.inspection import Inspection, inspect_forward
from embedgeo.capture.residual import STREAMS
from embedgeo.capture.structure import is_compiled, measured_model, model_width
from embedgeo.extras import require_extra
from embedgeo.formatting import listed, reason, size
from embedgeo.functional.distributed import num_ranks
from embedgeo.functional.rows import RowUnit
from embedgeo.geometry import Geometry
from embedgeo.glossary import headlines, term
from embedgeo.layer_names import LEDGER
from embedgeo.metrics.base import GeometryMetric
from embedgeo.metrics.defaults import TABLE_BYTES, width_notes
from embedgeo.metrics.layer import MetricFactory

_TEXT_WIDTH = 100
_OF_TOKENS = ("tokens", "words")  # units of which a sequence has many
_FLOAT = 4  # bytes of a number that is kept of a row, of all dtypes but float64
_UNKNOWN_SHAPE = 128, 512  # sequences and tokens of a batch that does not tell them


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
    # bytes that each metric holds at all layers, by its class
    metrics: Mapping[str, int] = field(default_factory=dict)
    state_bytes: int = 0  # what all metrics hold at the end of a measurement
    num_ranks: int = 1  # that have different rows
    exchange_bytes: int = 0  # that a rank sends in a measurement, by reductions in a ring
    warnings: tuple[str, ...] = ()  # what to change, or to know, before training starts

    def __str__(self) -> str:
        tables = [[["model", f"{self.model}, {self.num_parameters:,} parameters"]]]
        if self.layers:
            types = f"of at most {self.num_types:,}" if self.num_types else "without"
            tables[0] += [
                ["token ids", self.token_ids],
                ["mask", self.mask],
                ["rows", f"{self.num_rows:,} a measurement ({self.rows}), {types} token types"],
                ["memory", f"{size(self.state_bytes)} held during a measurement"],
            ]
            if self.num_ranks > 1:
                sent = f"{size(self.exchange_bytes)} sent by each of {self.num_ranks} ranks"
                tables[0].append(["exchange", sent])
            tables += [
                [["layer", "width", "bytes", "module"], *_layer_rows(self.layers)],
                [["metric", "bytes"], *([name, size(held)] for name, held in self.metrics.items())],
            ]
        wrapper = TextWrapper(_TEXT_WIDTH, subsequent_indent="  ", break_long_words=False)
        notes = "\n".join(wrapper.fill(f"! {each}") for each in self.warnings) or "No warnings."
        return "\n\n".join([*map(_columns, tables), notes])


def _layer_rows(layers: Sequence[DescribedLayer]) -> Iterator[list[str]]:
    """Rows of the text's table; blocks one after the other that differ in their numbers alone share
    one.
    """

    def likeness(layer: DescribedLayer) -> tuple[object, ...]:
        name = re.sub(r"block\.\d+", "block", layer.name)
        return name, layer.kind, layer.width, layer.state_bytes

    for _, group in groupby(layers, likeness):
        first, *others = group
        name = first.name
        path = first.path
        if others:
            name = f"{name} … {others[-1].name}"
            path = f"{path} … {others[-1].path}"
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
    metrics = listed([type(metric).__name__ for metric in geometry.make_metrics(width)])
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
            f"checkpoints{few if num_compared < width + 2 else ''}."
        )
    if drift_start:
        lines.append(
            f"drift has no rows from before step {drift_start:,}: the first measurement from now "
            f"on is its first."
        )
    own = [each for each in geometry.make_metrics(2) if isinstance(each, GeometryMetric)]
    absent = [key for key in headlines() if any(key in each.keys_of_types for each in own)]
    has_no_types = geometry.settings["rows"] in ("mean", "max")
    if absent and not (given or geometry.inputs.tables or geometry.part or has_no_types):
        lines.append(
            f"{listed([term(key).name for key in absent])} and other values over token types will "
            f"be absent, because {type(measured_model(geometry.model)).__name__} has no embedding "
            f"table that is called with token ids. Give token_ids=, a function of the batch."
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
    """Describe what a monitor would do on a model: layers, sources, bytes, and what to change
    before training.

    The model is run on 2 sequences of 8 token ids, or on ``batch`` (a mapping by keyword), without
    gradients and in eval mode; modes, buffers and random states are afterwards what they were. A
    model on the meta device can be described, too. Call it on a model that is not yet sharded over
    ranks. Bytes are those of the package's own metrics, and of all streams that a block may have.

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
    described = Description(type(inner).__name__, sum(sizes), num_ranks=ranks)
    if isinstance(geometry, ValueError):
        return replace(described, warnings=(" ".join(str(geometry).split()),))
    with kept_random_states(), kept_buffers(model), ExitStack() as kept:
        kept.callback(mode_restorer(model))
        model.eval()
        found = inspect_forward(geometry.model, geometry.layers, batch)
    shape = _shape(batch) or (batch_size, seq_len)
    num_batches, batch_size, seq_len = _expected_batches(
        monitor.window, monitor.probe, shape, ranks
    )
    unit = geometry.settings["rows"]
    has_ids = bool(found.token_ids or monitor.token_ids) and unit not in ("mean", "max")
    rows = _ExpectedRows(
        num_sequences=num_batches * batch_size,
        seq_len=seq_len if unit in _OF_TOKENS else 1,
        most_types=found.num_token_types if has_ids else 0,
        num_groups=min(geometry.settings["jackknife"], num_batches * batch_size),
        num_compared=monitor.drift,
    )
    notes = _choose_metrics(monitor, geometry, rows.total, ranks)
    guess = None if found.error is None else model_width(geometry.model)
    of_all_ranks = rows._replace(num_sequences=ranks * rows.num_sequences)
    layers = list[DescribedLayer]()
    held = Counter[str]()
    sent = 0
    for layer in geometry.layers:
        hidden = found.hidden.get(layer.name)
        width = guess if hidden is None else hidden[-1]
        num_bytes = None
        if width is not None:
            num_streams = len(STREAMS) if layer.stream == LEDGER else 1
            make = geometry.make_metrics_of(layer)
            of_layer = _held_bytes(make, num_streams * width, rows)
            num_bytes = of_layer.total()
            held.update(of_layer)
            exchanged = _held_bytes(make, num_streams * width, of_all_ranks)
            exchanged["drift"] //= 3  # of this measurement alone
            sent += exchanged.total()
        modules = [call.module for call in layer.calls]
        start = "input of " if layer.takes_input else "mean of " if len(modules) > 1 else ""
        path = start + ", ".join(_paths(model, modules))
        kind = type(modules[0]).__name__
        layers.append(DescribedLayer(layer.name, path, kind, width, num_bytes))
    token_ids, mask = _sources(monitor, model, found)
    return replace(
        described,
        layers=tuple(layers),
        token_ids=token_ids,
        mask=mask,
        num_rows=rows.total,
        num_types=rows.num_types,
        rows=f"{num_batches} × {batch_size} sequences"
        + (f" × {seq_len} tokens" if unit in _OF_TOKENS else f", by {unit}"),
        metrics=held,
        state_bytes=held.total(),
        # reduced in a ring, each byte of the states of all rows is sent nearly twice
        exchange_bytes=2 * sent * (ranks - 1) // ranks,
        warnings=(*_warnings(monitor, model, geometry, found, batch), *notes),
    )


def _choose_metrics(
    monitor: DescribedMonitor, geometry: Geometry, num_rows: int, ranks: int
) -> list[str]:
    """Do without token tables where they do not fit, if the monitor does; sentences on them."""
    num_bytes = geometry.table_bytes(num_rows, ranks, given=monitor.token_ids is not None)
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


def _paths(model: nn.Module, modules: Iterable[nn.Module]) -> list[str]:
    """Paths of modules in the model, each once; those of no module inside have the name of their
    class.
    """
    paths = {module: name for name, module in model.named_modules()}
    return list(dict.fromkeys(paths.get(module) or type(module).__name__ for module in modules))


def _sources(monitor: DescribedMonitor, model: nn.Module, found: Inspection) -> tuple[str, str]:
    """The sources of the token ids and of the mask."""
    token_ids = "unknown" if found.error else "none"
    mask = "unknown" if found.error else "none: every position counts"
    if monitor.token_ids is not None:
        token_ids = "the function given as token_ids="
    elif tables := _paths(model, [table for table, _ in found.token_ids]):
        token_ids = f"what {' and '.join(tables)} {'is' if len(tables) == 1 else 'are'} called with"
    if monitor.mask is not None:
        mask = "the function given as mask="
    elif masks := [f"{name} of {_paths(model, [each])[0]}" for each, name in found.masks.items()]:
        mask = f"{' and '.join(masks)}, where given"
    return token_ids, mask


def _warnings(
    monitor: DescribedMonitor, model: nn.Module, geometry: Geometry, found: Inspection, batch: Any
) -> Iterator[str]:
    reached = [layer for layer in geometry.layers if layer.name in found.hidden]
    silent = [layer.name for layer in geometry.layers if layer not in reached]
    misfits = [layer.name for layer in reached if not found.has_token_rows(layer)]
    if found.error is not None:
        tried = "synthetic token ids" if batch is None else "this batch"
        yield (
            f"The model could not be run on {tried} ({reason(found.error)}): widths and sources "
            f"may be missing or guessed. Give a batch: monitor.describe(model, batch)."
        )
    elif silent:
        yield (
            f"No forward pass reached {listed(silent)}: nothing would be measured there. Leave it "
            f"out of layers=."
        )
    if found.token_ids and misfits:
        yield (
            f"The rows of {listed(misfits)} are not one for each token id: the monitor would turn "
            f"off there. Leave that out of layers=, or give token_ids= and mask= in the order of "
            f"its rows."
        )
    elif not (found.token_ids or monitor.token_ids or found.error):
        yield (
            "No token ids were found: values over token types (V_W, V_B …) will be absent. Give "
            "token_ids=, a function of the batch."
        )
    for width in dict.fromkeys(found.hidden[layer.name][-1] for layer in reached):
        yield from width_notes(geometry.make_metrics, width)
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

    @property
    def total(self) -> int:
        return self.num_sequences * self.seq_len

    @property
    def num_types(self) -> int:
        """Number of token types among them, at most."""
        return min(self.total, self.most_types)


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
    return num_batches * batch_size * (seq_len if unit in _OF_TOKENS else 1)


def _shape(batch: Any) -> tuple[int, int] | None:
    """Sequences and tokens of a batch: the shape of its first matrix of integers, if it has one."""
    is_mapping = hasattr(batch, "values") and not isinstance(batch, Tensor)
    for each in batch.values() if is_mapping else [batch]:
        if isinstance(each, Tensor) and each.ndim == 2 and not each.is_floating_point():
            return len(each), each.shape[1]
    return None


def _held_bytes(make: MetricFactory, width: int, rows: _ExpectedRows) -> Counter[str]:
    """Bytes that each of the package's metrics holds at a layer, with its copies for standard
    errors; 0 of another package's.
    """
    held = Counter[str]()
    for metric in make(width):
        num_bytes = 0
        if isinstance(metric, GeometryMetric):
            num_bytes = metric.state_bytes(rows.total, rows.num_types)
        if isinstance(metric, GeometryMetric) and metric.has_copies and rows.num_groups:
            in_group = -(-rows.num_sequences // rows.num_groups) * rows.seq_len
            num_types = min(rows.num_types, in_group)
            of_group = metric.state_bytes(in_group, num_types)
            num_bytes += rows.num_groups * of_group
        held[type(metric).__name__] += num_bytes
    if rows.num_compared:  # of the first measurement, of the last one and of this one
        held["drift"] = 3 * min(rows.num_compared, rows.total) * width * _FLOAT
    return held
