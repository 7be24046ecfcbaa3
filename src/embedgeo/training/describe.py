"""What a monitor would do on a model, as fields and as a text."""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from textwrap import fill
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from embedgeo.capture.calls import kept_buffers, kept_modes, kept_random_states
from embedgeo.capture.inspection import Seen, inspect_forward, named_rows
from embedgeo.capture.layers import Layer
from embedgeo.capture.structure import is_compiled, measured_model, model_width, weights_device
from embedgeo.formatting import listed, number, reason, size
from embedgeo.functional.alignment import drift_values, linearity_values
from embedgeo.geometry import Geometry, choices
from embedgeo.metrics.base import GeometryMetric
from embedgeo.metrics.defaults import is_auto, metric_name
from embedgeo.metrics.layer import LayerMetrics

if TYPE_CHECKING:
    from embedgeo.training.monitor import Monitor


_WIDTH = 100
"""Columns of the text."""


@dataclass(frozen=True)
class DescribedLayer:
    """A layer that was found.

    Attributes:
        name: as in records.
        path: of the module in the model, as ``named_modules`` has it.
        kind: class of the module.
        width: of the hidden state; None where no forward pass has told.
        state_bytes: what its metrics hold at the end of a measurement; None likewise.
    """

    name: str
    path: str
    kind: str
    width: int | None
    state_bytes: int | None


@dataclass(frozen=True)
class DescribedMetric:
    """A metric that layers would have.

    Attributes:
        name: its class.
        num_layers: how many layers have it.
        layer_bytes: what it holds at the widest of them, at the end of a measurement.
        total_bytes: what it holds at all of them.
    """

    name: str
    num_layers: int
    layer_bytes: int
    total_bytes: int


@dataclass(frozen=True)
class Description:
    """What a monitor would do on a model; ``str()`` of it is a text of 100 columns.

    Attributes:
        model: class of the model that is measured.
        num_parameters: of it.
        layers: in forward order; empty where the monitor could not start: the first warning says why.
        token_ids: where the token ids come from: a module's path, or an argument of the monitor.
        mask: where the mask comes from: the path of a module and its argument, or an argument of the monitor.
        num_rows: rows of a measurement on one rank, padding included.
        num_types: token types among them, at most: of each the token table holds a row.
        rows: how the number of rows comes about.
        metrics: of all layers.
        state_bytes: what all metrics hold at the end of a measurement.
        seconds: an estimate of what a measurement adds to its steps on this machine, beside the forward passes of a
            probe; None where the widths are not known.
        warnings: what to change, or to know, before training starts.
    """

    model: str
    num_parameters: int
    layers: tuple[DescribedLayer, ...]
    token_ids: str
    mask: str
    num_rows: int
    num_types: int
    rows: str
    metrics: tuple[DescribedMetric, ...]
    state_bytes: int
    seconds: float | None
    warnings: tuple[str, ...]

    def __str__(self) -> str:
        about = [["model", f"{self.model}, {self.num_parameters:,} parameters"]]
        if self.layers:
            types = f"of at most {self.num_types:,} token types" if self.num_types else "without token types"
            seconds = "unknown" if self.seconds is None else f"about {number(float(f'{self.seconds:.2g}'))} s"
            about += [
                ["token ids", self.token_ids],
                ["mask", self.mask],
                ["rows", f"{self.num_rows:,} a measurement ({self.rows}), {types}"],
                ["time", f"{seconds} a measurement, an estimate for this machine"],
                ["memory", f"{size(self.state_bytes)} held during a measurement"],
            ]
        layers = [["layer", "width", "bytes", "module"], *map(_row, _runs(self.layers))]
        metrics = [["metric", "layers", "bytes a layer", "in all"]]
        metrics += [[m.name, str(m.num_layers), size(m.layer_bytes), size(m.total_bytes)] for m in self.metrics]
        tables = [about, *([layers, metrics] if self.layers else [])]
        text = "\n\n".join("\n".join(_lines(table)) for table in tables)
        notes = [fill(f"! {each}", _WIDTH, subsequent_indent="  ", break_long_words=False) for each in self.warnings]
        return "\n".join([text, "", *(notes or ["No warnings."])])


def _runs(layers: Sequence[DescribedLayer]) -> Iterator[list[DescribedLayer]]:
    """Layers one after the other that differ in their numbers alone."""

    def alike(layer: DescribedLayer) -> tuple[object, ...]:
        stem = layer.name.rstrip("0123456789")
        return stem if stem.endswith("block.") else layer.name, layer.kind, layer.width, layer.state_bytes

    return (list(run) for _, run in groupby(layers, alike))


def _row(run: Sequence[DescribedLayer]) -> list[str]:
    first, last = run[0], run[-1]
    name, path = first.name, first.path
    if len(run) > 1:
        name, path = f"{name} … {last.name.rpartition('.')[2]}", f"{path} … {last.path.rpartition('.')[2]}"
    held = "?" if first.state_bytes is None else size(first.state_bytes)
    return [name, str(first.width or "?"), held, f"{path} ({first.kind})"]


def _lines(table: Sequence[Sequence[str]]) -> Iterator[str]:
    """The rows of a table in columns; what is too long for the last one goes on below it."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)][:-1]
    start = sum(widths) + 2 * len(widths)
    for row in table:
        head = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False))
        yield fill(
            f"{head}  {row[-1]}", _WIDTH, subsequent_indent=" " * start, break_on_hyphens=False, break_long_words=False
        )


_TIMED_ROWS, _TIMED_WIDTH = 4096, 1024
"""Rows and width up to which metrics are timed; what more takes is extrapolated."""


class Rows(NamedTuple):
    """The rows of a measurement at a layer.

    Attributes:
        num_sequences: number of sequences.
        seq_len: rows of each.
        num_types: token types among them, at most; 0: there are no token ids.
        num_groups: of sequences, for standard errors; 0: there are none.
        itemsize: bytes of a number that is kept of a row.
    """

    num_sequences: int
    seq_len: int
    num_types: int
    num_groups: int
    itemsize: int

    @property
    def total(self) -> int:
        """How many there are."""
        return self.num_sequences * self.seq_len

    def drawn(self, width: int, device: torch.device) -> tuple[Tensor, Tensor | None, Tensor]:
        """Some of them at random, shape (sequences, positions, width), with token ids and sequence ids."""
        positions = min(self.seq_len, _TIMED_ROWS)
        shape = max(1, min(self.num_sequences, _TIMED_ROWS // positions)), positions
        generator = torch.Generator().manual_seed(0)
        rows = torch.randn(*shape, width, generator=generator)
        ids = torch.randint(self.num_types, shape, generator=generator).to(device) if self.num_types else None
        return rows.to(device), ids, torch.arange(shape[0])[:, None].expand(shape).to(device)


def held_bytes(metric: Metric, width: int, rows: Rows) -> int:
    """What a metric of a layer holds at the end of a measurement, with its copies for standard errors.

    What one of another package holds is found by updating it: in proportion to rows where it grows with them.
    """
    if not isinstance(metric, GeometryMetric):
        before, (hidden, ids, sequences) = _held(metric), rows.drawn(width, torch.device("cpu"))
        metric.update(hidden, **metric._filter_kwargs(token_ids=ids, sequence_ids=sequences))
        return before + round((_held(metric) - before) * rows.total / hidden.shape[:-1].numel())
    whole = metric.state_bytes(rows.total, rows.num_types, rows.itemsize)
    if not rows.num_groups or not metric.has_copies:
        return whole
    of_group = -(-rows.num_sequences // rows.num_groups) * rows.seq_len
    return whole + rows.num_groups * metric.state_bytes(of_group, min(rows.num_types, of_group), rows.itemsize)


def estimated_seconds(make: Callable[[int], Metric], width: int, rows: Rows, device: torch.device) -> float:
    """An estimate of what updating a metric of a layer, and computing its values, takes on this machine.

    It is timed on up to 4096 random rows, and of up to 1024 columns: more rows take longer in proportion, more columns
    in proportion to what the metric holds: d, or d² for a scatter.
    """
    metric, at, share = make(width), width, 1.0
    if isinstance(metric, GeometryMetric) and width > _TIMED_WIDTH:
        at, narrow = _TIMED_WIDTH, metric.of_width(_TIMED_WIDTH)
        share = metric.state_bytes(rows.total, 1) / narrow.state_bytes(rows.total, 1)
    hidden, ids, sequences = rows.drawn(at, device)
    for few in (slice(1), slice(None)):  # the first time threads and memory are set up
        metrics = LayerMetrics(
            lambda dim: [metric.of_width(dim) if isinstance(metric, GeometryMetric) else make(dim)],
            at,
            device=device,
            jackknife=rows.num_groups,
        )
        started = _now(device)
        metrics.update(hidden[few], None if ids is None else ids[few], None, sequences[few])
        updated = _now(device)
        metrics.compute()
        computed = _now(device)
        metrics.reset()
    return share * ((updated - started) * rows.total / hidden.shape[:-1].numel() + computed - updated)


def drift_seconds(width: int, num_rows: int, device: torch.device) -> float:
    """An estimate of what comparing the rows of a layer takes: with three others, and with the layer below."""
    at = min(width, _TIMED_WIDTH)
    below, rows = torch.randn(2, num_rows, at, generator=torch.Generator().manual_seed(0)).to(device)
    started = _now(device)
    drift_values(below, rows)
    compared = _now(device)
    linearity_values(below, rows)
    return width / at * (3 * (compared - started) + _now(device) - compared)


def _held(metric: Metric) -> int:
    states = metric.metric_state.values()
    return sum(each.nbytes for state in states for each in (state if isinstance(state, list) else [state]))


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def describe(
    monitor: "Monitor", model: nn.Module, batch: Any = None, *, batch_size: int = 8, seq_len: int = 512
) -> Description:
    """What a monitor would do on a model: layers, sources, bytes, seconds, and what to change before training starts.

    The model is run on 2 sequences of 8 token ids, or on ``batch``, without gradients and in eval mode, and metrics are
    timed on random rows; modes, buffers and random states are afterwards what they were. A model on the meta device can
    be described, too. Call it on a model that is not yet sharded over ranks.

    Args:
        monitor: any of the monitors.
        model: as it is given to the trainer.
        batch: one to run the model on, where it does not take token ids alone: given by keyword if it is a mapping.
            Its shape is then that of training batches.
        batch_size: sequences in the batches of one optimizer step on one rank; of a probe that has its own, that.
        seq_len: tokens in a sequence; of a probe that is a list of batches, theirs.

    Raises:
        ValueError: ``batch_size`` or ``seq_len`` is not positive.
    """
    if batch_size < 1 or seq_len < 1:
        raise ValueError(f"batch_size and seq_len must be positive; got {batch_size} and {seq_len}.")
    with kept_random_states(), kept_modes(model), kept_buffers(model):
        model.eval()
        inner = measured_model(model)
        num_parameters = sum(weight.numel() for weight in inner.parameters())
        about: dict[str, Any] = {"model": type(inner).__name__, "num_parameters": num_parameters}
        try:
            geometry = monitor._make_geometry(model)
        except ValueError as error:
            found = {**about, "layers": (), "token_ids": "unknown", "mask": "unknown", "num_rows": 0, "num_types": 0}
            found |= {"rows": "unknown", "metrics": (), "state_bytes": 0, "seconds": None}
            return Description(**found, warnings=(_unresolved(model, error),))
        seen = inspect_forward(geometry.model, geometry.layers, geometry.inputs, batch)
        shape = _shape(batch) or (batch_size, seq_len)
        return _Run(monitor, model, geometry, seen, *shape, has_batch=batch is not None).description(about)


class _Run:
    """A measurement that a monitor would make: so many sequences of so many positions at each of the window's steps."""

    def __init__(
        self,
        monitor: "Monitor",
        model: nn.Module,
        geometry: Geometry,
        seen: Seen,
        batch_size: int,
        seq_len: int,
        *,
        has_batch: bool,
    ) -> None:
        self._tried = "this batch" if has_batch else "synthetic token ids"
        self._monitor, self._model, self._geometry, self._seen = monitor, model, geometry, seen
        self._make, unit = geometry.make_metrics, geometry.settings["rows"]
        probe: Any = monitor.probe
        num_batches = monitor.schedule.window if probe is None else getattr(probe, "__len__", lambda: 1)()
        if probe is not None:
            batch_size, seq_len = _shape_of_first(probe) or (getattr(probe, "batch_size", None) or batch_size, seq_len)
        length, by = (seq_len, f" × {seq_len} tokens") if unit in ("tokens", "words") else (1, f", by {unit}")
        self._by = f"{num_batches} × {batch_size} sequences{by}"
        num_sequences = num_batches * batch_size
        has_ids = bool(seen.token_ids or monitor.token_ids) and unit not in ("mean", "max")
        num_types = min(num_sequences * length, geometry.inputs.num_token_types) if has_ids else 0
        itemsize = 8 if seen.dtype == torch.float64 else 4
        self._rows = Rows(num_sequences, length, num_types, geometry.settings["jackknife"], itemsize)
        guess = model_width(geometry.model) if seen.error is not None else None
        shapes = seen.hidden
        self._widths = {each.name: shapes[each.name][-1] if each.name in shapes else guess for each in geometry.layers}

    def description(self, about: Mapping[str, Any]) -> Description:
        """All of it."""
        widths = Counter(width for width in self._widths.values() if width is not None)
        bytes_of = {width: self._bytes(width) for width in widths}
        totals: dict[str, DescribedMetric] = {}
        for width, count in sorted(widths.items()):
            for name, num_bytes in bytes_of[width].items():
                before = totals.get(name, DescribedMetric(name, 0, 0, 0))
                total = before.total_bytes + count * num_bytes
                totals[name] = DescribedMetric(name, before.num_layers + count, num_bytes, total)
        return Description(
            **about,
            layers=tuple(self._layer(layer, bytes_of) for layer in self._geometry.layers),
            token_ids=self._token_ids(),
            mask=self._mask(),
            num_rows=self._rows.total,
            num_types=self._rows.num_types,
            rows=self._by,
            metrics=tuple(totals.values()),
            state_bytes=sum(metric.total_bytes for metric in totals.values()),
            seconds=sum(count * self._seconds(width) for width, count in widths.items()) if widths else None,
            warnings=tuple(self._warnings(bytes_of)),
        )

    def _layer(self, layer: Layer, bytes_of: Mapping[int, Mapping[str, int]]) -> DescribedLayer:
        modules = [call.module for call in layer.calls]
        path = ", ".join(dict.fromkeys(map(self._path, modules)))
        start = "input of " if layer.takes_input else "mean of " if len(modules) > 1 else ""
        width = self._widths[layer.name]
        held = None if width is None else sum(bytes_of[width].values())
        return DescribedLayer(layer.name, f"{start}{path}", type(modules[0]).__name__, width, held)

    def _path(self, module: nn.Module) -> str:
        return next(name or type(module).__name__ for name, each in self._model.named_modules() if each is module)

    def _token_ids(self) -> str:
        if self._monitor.token_ids is not None:
            return "the function given as token_ids="
        paths = dict.fromkeys(self._path(table) for table, _ in self._seen.token_ids)
        if not paths:
            return "none" if self._seen.error is None else "unknown"
        return f"what {' and '.join(paths)} {'is' if len(paths) == 1 else 'are'} called with"

    def _mask(self) -> str:
        if self._monitor.mask is not None:
            return "the function given as mask="
        found = [f"{name} of {self._path(module)}" for module, name in self._seen.masks]
        if not found and self._seen.error is not None:
            return "unknown"
        return f"{' and '.join(found)}, where given" if found else "none: every position counts"

    def _bytes(self, width: int) -> dict[str, int]:
        """What each metric of a layer of this width holds."""
        held: Counter[str] = Counter()
        for metric in self._make(width):
            held[metric_name(metric)] += held_bytes(metric, width, self._rows)
        if self._monitor.drift:  # of the first measurement, of the last one and of this one
            held["drift"] = 3 * min(self._monitor.drift, self._rows.total) * width * self._rows.itemsize
        return held

    def _seconds(self, width: int) -> float:
        """An estimate of what the metrics of a layer of this width take."""
        device = weights_device(self._model)
        num_compared = min(self._monitor.drift, self._rows.total)
        total = drift_seconds(width, num_compared, device) if num_compared else 0.0
        for i in range(len(self._make(width))):
            total += estimated_seconds(lambda dim, i=i: self._make(dim)[i], width, self._rows, device)  # type: ignore[misc]
        return total

    def _warnings(self, bytes_of: Mapping[int, Mapping[str, int]]) -> Iterator[str]:
        seen, layers = self._seen, self._geometry.layers
        reached = [layer for layer in layers if layer.name in seen.hidden]
        if seen.error is not None:
            yield (
                f"The model could not be run on {self._tried} ({reason(seen.error)}): widths and sources may be "
                "missing or guessed. Give a batch: monitor.describe(model, batch)."
            )
        elif silent := [layer.name for layer in layers if layer not in reached]:
            yield f"No forward pass reached {listed(silent)}: nothing would be measured there. Leave it out of layers=."
        if not seen.token_ids and self._monitor.token_ids is None and seen.error is None:
            yield (
                "No token ids were found: values over token types (V_W, V_B …) will be absent. Give token_ids=, a "
                "function of the batch."
            )
        elif seen.token_ids and (apart := [each.name for each in reached if not seen.fits(each)]):
            yield (
                f"The rows of {listed(apart)} are not one for each token id: the monitor would turn off there. Leave "
                "that out of layers=, or give token_ids= and mask= in the order of its rows."
            )
        for width, held in bytes_of.items():
            yield from choices(self._make, width)
            excess = sum(held.values()) - self._monitor.max_state_bytes
            for name, num_bytes in sorted(held.items(), key=lambda item: -item[1]):
                if excess > 0:
                    remedy = _FEWER if is_auto(self._make) else _REMEDIES.get(name, _FEWER)
                    yield f"{name} holds {size(num_bytes)} at each layer of width {width}. {remedy}"
                    excess -= num_bytes
        is_stable = self._monitor.compiled == "stable" and self._geometry.probe.is_prepared()
        if is_compiled(self._model) and not is_stable:
            yield "The model is compiled: a measured step runs eagerly, so it is slower; the other steps are as before."
        if getattr(getattr(self._monitor, "_stage", None), "is_part", False):
            yield "The model is one stage of a pipeline: layers and bytes are those of this stage."


_FEWER = "Measure fewer layers (layers=)."
_REMEDIES = {
    "Anisotropy": "Its scatter is d × d: Anisotropy(dim, sketch=512) has none; or measure fewer layers (layers=).",
    "TokenMoments": (
        "Its table has a row for each token type: metrics=embedgeo.streaming_metrics has none, nor has "
        'metrics="auto" where it is too large; or measure fewer layers (layers=).'
    ),
}


def _unresolved(model: nn.Module, error: ValueError) -> str:
    """Why no layers were found, and which can be given instead."""
    try:
        names = named_rows(model)
    except Exception:  # of what could only have been a suggestion
        names = []
    remedy = f" These modules give a row for each token: layers={names!r}." if names else ""
    return f"{' '.join(str(error).split())}{remedy}"


def _shape(batch: Any) -> tuple[int, int] | None:
    """Sequences and tokens of a batch: the shape of its first matrix of integers, if it has one."""
    values = batch.values() if hasattr(batch, "values") and not isinstance(batch, Tensor) else [batch]
    integers = (each for each in values if isinstance(each, Tensor) and not each.is_floating_point())
    return next(((len(each), each.shape[1]) for each in integers if each.ndim == 2), None)


def _shape_of_first(probe: Any) -> tuple[int, int] | None:
    """That of the first of a list of batches."""
    return _shape(probe[0]) if isinstance(probe, Sequence) and probe else None
