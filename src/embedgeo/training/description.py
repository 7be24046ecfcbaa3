"""What a monitor would do on a model, as fields and as a text."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from textwrap import fill

from embedgeo.results.wording import number, size

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
