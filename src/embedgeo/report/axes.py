"""Axes of steps and layers; colours for depth, time and runs."""

from collections.abc import Sequence
from colorsys import hls_to_rgb
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib import ticker
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.collections import LineCollection
from matplotlib.colors import LinearSegmentedColormap, Normalize
from numpy.typing import NDArray

from embedgeo.report.drawing import Picture, inches
from embedgeo.results.layer_names import layer_labels, layer_ticks
from embedgeo.results.wording import short as shortened

Array = NDArray[np.float64]

ACCENT = "#c1440e"
RUNS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000", "#7a5195")
DASHES = ("-", (0, (5, 1.5)), (0, (1.5, 1.2)), (0, (6, 1.5, 1.5, 1.5)), (0, (9, 2)), (0, (4, 1, 1, 1, 1, 1)))
DEPTH = LinearSegmentedColormap.from_list("depth", mpl.colormaps["viridis"](np.linspace(0, 0.8, 256)))
TIME = LinearSegmentedColormap.from_list("time", mpl.colormaps["plasma"](np.linspace(0, 0.82, 256)))
"""Sequential maps of even lightness, without the end that is too pale for lines on either ground."""


_USUAL = (2.8, 2.2)
"""Width and height, in inches, of the axes of a report's figure."""


def run_colours(count: int) -> list[Any]:
    """A colour for each of some runs, none of them twice."""
    return list(RUNS[:count]) if count <= len(RUNS) else [hls_to_rgb(i / count, 0.4, 0.8) for i in range(count)]


def short(number: float, _: object = None) -> str:
    """The label of a tick; ticks are round numbers already."""
    return shortened(number, 6)


def thinned(count: int, most: int) -> list[int]:
    """At most ``most`` of the positions 0 … count - 1, evenly spaced, the first and the last included.

    >>> thinned(5, 9), thinned(34, 6)
    ([0, 1, 2, 3, 4], [0, 7, 13, 20, 26, 33])
    """
    return [round(at) for at in np.linspace(0, count - 1, min(count, most))]


class StepAxis:
    """An axis of steps, logarithmic in 1 + step if the first steps are much closer together than most.

    Args:
        steps: ascending.
        is_log: says so instead, for the steps of several runs together.

    >>> StepAxis([0, 1, 2, 4, 8, 16, 32]).is_log, StepAxis([0, 100, 200, 300]).is_log
    (True, False)
    """

    def __init__(self, steps: Sequence[int], *, is_log: bool | None = None) -> None:
        gaps = np.diff(np.asarray(steps, dtype=float))
        is_denser = bool(len(gaps) and steps[0] >= 0 and np.median(gaps) >= 3 * gaps[0])
        self.is_log = is_denser if is_log is None else is_log
        self.first, self.last = steps[0], steps[-1]
        self.label = "optimizer step" + (" (log scale)" if self.is_log else "")

    def position(self, steps: Sequence[int]) -> Array:
        """Positions of steps along the axis: 0 for its first step, 1 for its last."""
        scaled = (np.log1p if self.is_log else np.asarray)(np.array([self.first, self.last, *steps], dtype=float))
        return (scaled[2:] - scaled[0]) / (scaled[1] - scaled[0] or 1)

    def ticks(self, digits: Sequence[int] = (1,)) -> list[int]:
        """Round steps to name; on a logarithmic axis, steps of one of the digits followed by zeros."""
        if self.is_log:
            candidates = [0, *(digit * 10**k for k in range(19) for digit in digits)]
        else:
            units = (digit * 10**k for k in range(20) for digit in (1, 2, 5))
            unit = next(unit for unit in units if self.last - self.first <= 6 * unit)
            candidates = list(range(self.first // unit * unit, self.last + 1, unit))
        ticks = [step for step in candidates if self.first <= step <= self.last]
        if self.is_log and len(digits) == 1 and len(ticks) < 2:
            return self.ticks((1, 2, 5))
        return ticks or list(dict.fromkeys((self.first, self.last)))


def step_axis(ax: Axes, *runs: Sequence[int]) -> None:
    """Put the steps of a run, or of several, on the x axis."""
    steps = sorted({step for run in runs for step in run})
    axis = StepAxis(steps, is_log=steps[0] >= 0 and any(StepAxis(run).is_log for run in runs))
    ax.set_xlabel(axis.label)
    if axis.is_log:
        ax.set_xscale("function", functions=(np.log1p, np.expm1))
        ax.xaxis.set_minor_locator(ticker.FixedLocator(axis.ticks((2, 5))))
    ax.xaxis.set_major_locator(ticker.FixedLocator(axis.ticks()))
    ax.xaxis.set_major_formatter(short)
    if float(steps[0]) < float(steps[-1]):
        ax.set_xlim(steps[0], steps[-1])


def few_ticks(ax: Axes) -> None:
    """Leave out minor ticks, and every second one of five or more: ticks take most of the time that drawing takes."""
    ax.minorticks_off()
    for axis in (ax.xaxis, ax.yaxis):
        low, high = sorted(axis.get_view_interval())
        ticks = [tick for tick in axis.get_majorticklocs() if low <= tick <= high]
        axis.set_major_locator(ticker.FixedLocator(ticks[:: 2 if len(ticks) >= 5 else 1]))


def layer_axis(ax: Axes, layers: Sequence[str], *, vertical: bool = False, most: int = 9) -> None:
    """Put layers on an axis, and name so few of them that the names do not overlap."""
    labels, pattern = layer_labels(layers)
    most = _fitting(ax, most, vertical=vertical)
    named = layer_ticks(layers, most if vertical else max(3, min(most, 5 * most // max(1, *map(len, labels)))))
    axis = ax.yaxis if vertical else ax.xaxis
    axis.set_ticks(named, [labels[i] for i in named], parse_math=False)
    if vertical:
        ax.set_ylabel("layer" if max(map(len, labels)) <= 6 else "", labelpad=2)
    else:
        are_blocks = any(label.rpartition(" ")[2].isdecimal() for label in labels)
        are_counted = any(label.startswith("#") for label in labels)
        meaning = " (numbers are blocks)" if are_blocks else " (#0 is the first)" if are_counted else ""
        ax.set_xlabel(f"layer: * in {pattern}" if pattern else f"layer{meaning}")


def _fitting(ax: Axes, most: int, *, vertical: bool) -> int:
    """As many of the names on an axis of a report's figure as somebody else's axes, if smaller, have room for."""
    if isinstance(ax.figure, Picture):
        return most
    return max(3, round(most * min(1, inches(ax)[vertical] / _USUAL[vertical])))


def lines(
    ax: Axes, x: Array, rows: Array, colours: Array, dashes: Sequence[str] = "-", errors: Array | None = None
) -> None:
    """Draw lines over the same abscissae, shape (lines, len(x)), with gaps where they are not finite, and bands."""
    for row, error, colour in zip(rows, rows * np.nan if errors is None else errors, colours, strict=True):
        band(ax, x, row, error, colour)
    segments = [np.column_stack((x, row)) for row in rows]
    drawn = LineCollection(segments, colors=colours, linewidths=1.1, linestyles=dashes, alpha=0.9)
    ax.add_collection(drawn, autolim=False)
    if rows.size <= 800:
        ax.scatter(np.tile(x, len(rows)), rows.ravel(), s=9, color=np.repeat(colours, len(x), axis=0), lw=0, zorder=2)


def band(ax: Axes, x: Array, values: Array, errors: Array, colour: Any, alpha: float = 0.2) -> None:
    """Draw a band of one error to each side of a line, where it is known."""
    if np.isfinite(errors).any():
        ax.fill_between(x, values - errors, values + errors, color=colour, alpha=alpha, lw=0.8, zorder=1.5)


def depth_bar(ax: Axes, layers: Sequence[str]) -> Array:
    """Add a colour bar for layers, if there are several; the colours of the layers."""
    if len(layers) > 1:
        bar = value_bar(ax, ScalarMappable(Normalize(0, len(layers) - 1), DEPTH), "")
        layer_axis(bar.ax, layers, vertical=True, most=12)
    return depth_colours(len(layers))


def depth_colours(num_layers: int) -> Array:
    """The colours of layers, from violet for the first to green for the last."""
    return DEPTH(np.arange(num_layers) / max(1, num_layers - 1))


def time_bar(ax: Axes, steps: Sequence[int]) -> Array:
    """Add a colour bar for steps; the colours of the steps."""
    axis = StepAxis(steps)
    bar = value_bar(ax, ScalarMappable(Normalize(0, 1), TIME), axis.label)
    bar.set_ticks(axis.position(axis.ticks()), labels=[short(step) for step in axis.ticks()])
    return TIME(axis.position(steps))


def value_bar(ax: Axes, mappable: ScalarMappable, label: str, extend: str = "neither") -> Any:
    """Add a colour bar to the right of an axes; in somebody else's figure it takes room from the axes."""
    figure: Any = ax.figure
    place: dict[str, Any] = {"ax": ax, "fraction": 0.05, "pad": 0.03, "aspect": 22}
    if isinstance(figure, Picture):
        box = ax.get_position()
        width = figure.get_size_inches()[0]
        place = {"cax": figure.add_axes((box.x1 + 0.1 / width, box.y0, 0.12 / width, box.height))}
    bar = figure.colorbar(mappable, **place, extend=extend, extendfrac=0.04)
    bar.set_label(label, fontsize=8.5, labelpad=4, color=ax.yaxis.label.get_color())
    bar.outline.set_visible(False)
    cax = bar.ax
    cax.yaxis.set_minor_formatter(ticker.NullFormatter())
    cax.tick_params(labelsize=8, length=2, pad=1.5, labelcolor=ax.yaxis.label.get_color())
    cax.grid(visible=False)
    return bar
