"""Axes of steps, layers and values; colours for depth and time; the Gaussian baseline as a dashed line."""

from collections.abc import Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib import ticker
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.collections import LineCollection
from matplotlib.colors import LinearSegmentedColormap, Normalize
from numpy.typing import NDArray

from embedgeo.results.layer_names import blocks_by_side, layer_label, layer_ticks
from embedgeo.results.term import Term
from embedgeo.results.wording import short as shortened

Array = NDArray[np.float64]

ACCENT = "#c1440e"
BASELINE: dict[str, Any] = {"color": "black", "ls": (0, (4, 2)), "lw": 1.3}
RUNS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000", "#7a5195")
DEPTH = LinearSegmentedColormap.from_list("depth", mpl.colormaps["viridis"](np.linspace(0, 0.88, 256)))
TIME = LinearSegmentedColormap.from_list("time", mpl.colormaps["plasma"](np.linspace(0, 0.88, 256)))
"""Sequential maps of even lightness, without the end that is too pale for lines on white."""


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

    >>> StepAxis([0, 1, 2, 4, 8, 16, 32]).is_log, StepAxis([0, 100, 200, 300]).is_log
    (True, False)
    """

    def __init__(self, steps: Sequence[int]) -> None:
        gaps = np.diff(steps)
        self.is_log = bool(len(gaps) and np.median(gaps) >= 3 * gaps[0])
        self.first, self.last = steps[0], steps[-1]
        self.label = "optimizer step" + (" (log scale)" if self.is_log else "")

    def position(self, steps: Sequence[int]) -> Array:
        """Positions of steps along the axis: 0 for its first step, 1 for its last."""
        scaled = (np.log1p if self.is_log else np.asarray)([self.first, self.last, *steps])
        return (scaled[2:] - scaled[0]) / (scaled[1] - scaled[0] or 1)

    def ticks(self, digits: Sequence[int] = (1,)) -> list[int]:
        """Round steps to name; on a logarithmic axis, steps of one of the digits followed by zeros."""
        if self.is_log:
            candidates = [0, *(digit * 10**k for k in range(12) for digit in digits)]
        else:
            units = (digit * 10**k for k in range(20) for digit in (1, 2, 5))
            unit = next(unit for unit in units if self.last - self.first <= 6 * unit)
            candidates = list(range(self.first // unit * unit, self.last + 1, unit))
        ticks = [step for step in candidates if self.first <= step <= self.last]
        if self.is_log and len(digits) == 1 and len(ticks) < 2:
            return self.ticks((1, 2, 5))
        return ticks or list(dict.fromkeys((self.first, self.last)))


def step_axis(ax: Axes, steps: Sequence[int]) -> None:
    """Put steps on the x axis."""
    axis = StepAxis(steps)
    ax.set_xlabel(axis.label)
    if axis.is_log:
        ax.set_xscale("function", functions=(np.log1p, np.expm1))
        ax.xaxis.set_minor_locator(ticker.FixedLocator(axis.ticks((2, 5))))
    ax.xaxis.set_major_locator(ticker.FixedLocator(axis.ticks()))
    ax.xaxis.set_major_formatter(short)
    if steps[0] < steps[-1]:
        ax.set_xlim(steps[0], steps[-1])


def layer_axis(ax: Axes, layers: Sequence[str], *, vertical: bool = False, most: int = 9) -> None:
    """Put layers on an axis, and name so few of them that the names do not overlap."""
    labels = [layer_label(layer) for layer in layers]
    named = layer_ticks(layers, most if vertical else max(3, min(most, 5 * most // max(map(len, labels)))))
    axis = ax.yaxis if vertical else ax.xaxis
    axis.set_ticks(named, [labels[i] for i in named])
    if vertical:
        ax.set_ylabel("layer" if max(map(len, labels)) <= 6 else "", labelpad=2)
    else:
        ax.set_xlabel("layer (numbers are blocks)" if any(label[-1:].isdecimal() for label in labels) else "layer")


def colour_range(layers: Sequence[str], values: Array) -> tuple[float, float, str]:
    """The range of values that the colours of a heatmap span: that of the blocks, if their values differ.

    Args:
        layers: names.
        values: shape (steps, layers).

    Returns:
        The least and the largest value, and at which end other values lie beyond: ``"neither"``, ``"min"``, ``"max"``
        or ``"both"``.
    """
    blocks = {block for blocks in blocks_by_side(layers).values() for block in blocks}
    finite, inside = values[np.isfinite(values)], values[:, [layer in blocks for layer in layers]]
    inside = inside[np.isfinite(inside)]
    if not inside.size or inside.min() == inside.max():
        inside = finite
    low, high = (float(inside.min()), float(inside.max())) if inside.size else (0.0, 1.0)
    return low, high, ("neither", "min", "max", "both")[(finite < low).any() + 2 * (finite > high).any()]


def value_axis(ax: Axes, term: Term, values: Array, baseline: pd.Series | pd.DataFrame | None = None) -> None:
    """Put a metric on the y axis, logarithmic where it spans orders of magnitude, and draw the baseline as dashes.

    A baseline of which most lies so far away that showing it would squeeze the measured values is only named in the
    legend.
    """
    finite = values[np.isfinite(values)]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)
    is_log = term.is_logarithmic(values)
    ax.set_ylabel(term.name + (" (log scale)" if is_log else ""))
    span = (high - low) or abs(high) or 1.0
    room = (low / 3, high * 3) if is_log else (low - 0.6 * span, high + 0.6 * span)
    known = np.array([]) if baseline is None else baseline.to_numpy().ravel()
    known = known[np.isfinite(known)]
    if baseline is not None and known.size:
        middle = np.median(known)
        if room[0] <= middle <= room[1]:
            near = known[(known >= room[0]) & (known <= room[1])]
            low, high = min(low, near.min()), max(high, near.max())
            for i, column in enumerate(baseline.to_numpy().reshape(len(baseline), -1).T):
                ax.plot(baseline.index, column, label="" if i else "random", **BASELINE)
        else:
            ends = dict.fromkeys(shortened(value) for value in (known.min(), known.max()))
            ax.plot([], label=f"random: {' to '.join(ends)} {'↑' if middle > high else '↓'}", **BASELINE)
    if is_log:
        margin = (high / low) ** 0.05
        ax.set_yscale("log")
        ax.set_ylim(low / margin, high * margin)
        log_ticks(ax, low, high)
    else:
        ax.yaxis.set_major_locator(ticker.MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
        ax.yaxis.set_major_formatter(short)
        margin = 0.05 * (high - low) or 0.05 * abs(high) or 0.05
        ax.set_ylim(low - margin, high + margin)


def log_ticks(ax: Axes, low: float, high: float) -> None:
    """Set the ticks of a logarithmic y axis: also at 2 and 5 where it spans less than three decades."""
    ax.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5) if high / low < 1000 else (1,)))
    ax.yaxis.set_major_formatter(short)
    ax.yaxis.set_minor_formatter(ticker.NullFormatter())


def lines(ax: Axes, x: Array, rows: Array, colours: Array, dashes: Sequence[str] = "-") -> None:
    """Draw lines over the same abscissae, shape (lines, len(x)), with gaps where they are not finite."""
    segments = [np.column_stack((x, row)) for row in rows]
    drawn = LineCollection(segments, colors=colours, linewidths=1.1, linestyles=dashes, alpha=0.9)
    ax.add_collection(drawn, autolim=False)
    if rows.size <= 800:
        ax.scatter(np.tile(x, len(rows)), rows.ravel(), s=9, color=np.repeat(colours, len(x), axis=0), lw=0, zorder=2)


def depth_bar(ax: Axes, layers: Sequence[str]) -> Array:
    """Add a colour bar for layers; the colours of the layers."""
    norm = Normalize(0, max(1, len(layers) - 1))
    bar = value_bar(ax, ScalarMappable(norm, DEPTH), "")
    layer_axis(bar.ax, layers, vertical=True, most=12)
    return DEPTH(norm(np.arange(len(layers))))


def time_bar(ax: Axes, steps: Sequence[int]) -> Array:
    """Add a colour bar for steps; the colours of the steps."""
    axis = StepAxis(steps)
    bar = value_bar(ax, ScalarMappable(Normalize(0, 1), TIME), axis.label)
    bar.set_ticks(axis.position(axis.ticks()), labels=[short(step) for step in axis.ticks()])
    return TIME(axis.position(steps))


def value_bar(ax: Axes, mappable: ScalarMappable, label: str, extend: str = "neither") -> Any:
    """Add a colour bar to the right of an axes."""
    box = ax.get_position()
    figure: Any = ax.figure
    width = figure.get_size_inches()[0]
    cax = figure.add_axes((box.x1 + 0.1 / width, box.y0, 0.12 / width, box.height))
    bar = figure.colorbar(mappable, cax=cax, extend=extend, extendfrac=0.04)
    bar.set_label(label, fontsize=8.5, labelpad=2)
    bar.outline.set_visible(False)
    cax.yaxis.set_minor_formatter(ticker.NullFormatter())
    cax.tick_params(labelsize=8, length=2, pad=1.5)
    cax.grid(visible=False)
    return bar
