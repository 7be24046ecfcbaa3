"""Axes of steps, layers and values, with colours for depth and time; the null as dashes."""

from collections.abc import Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib import ticker
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.collections import LineCollection
from matplotlib.colors import LinearSegmentedColormap, Normalize, SymLogNorm
from numpy.typing import NDArray

from embedgeo.glossary import Term
from embedgeo.glossary import short as shortened
from embedgeo.names import layer_label

Array = NDArray[np.float64]

ACCENT = "#c1440e"
NULL: dict[str, Any] = {"color": "black", "ls": (0, (4, 2)), "lw": 1.3}
RUNS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000", "#7a5195")
DEPTH = LinearSegmentedColormap.from_list("depth", mpl.colormaps["viridis"](np.linspace(0, 0.88, 256)))
TIME = LinearSegmentedColormap.from_list("time", mpl.colormaps["plasma"](np.linspace(0, 0.88, 256)))
"""Sequential maps of even lightness, without the end that is too pale for lines on white."""


def short(number: float, _: object = None) -> str:
    """A tick, which is rounded already."""
    return shortened(number, 6)


def thinned(count: int, most: int) -> list[int]:
    """At most so many positions out of 0 … count - 1, evenly spaced, the last one among them.

    >>> thinned(5, 9), thinned(34, 6)
    ([0, 1, 2, 3, 4], [0, 7, 14, 21, 33])
    """
    stride = max(1, -(-(count - 1) // (most - 1)))
    return [at for at in range(0, count - 1, stride) if count - 1 - at >= 0.75 * stride] + [count - 1]


def step_axis(ax: Axes, steps: Sequence[int]) -> None:
    """Steps on the x axis: 0, then logarithmic from 1 on where they span more than a decade."""
    first, last = steps[0], steps[-1]
    if last <= 10 * max(first, 1):
        ax.set_xlabel("optimizer step")
        ax.xaxis.set_major_locator(ticker.MaxNLocator(5, integer=True))
    else:
        ax.set_xscale("symlog", linthresh=1, linscale=0.4)
        ax.set_xlabel("optimizer step (log scale" + (" from 1 on)" if first == 0 else ")"))
        decades = [10**k for k in range(12) if first <= 10**k <= last]
        ax.xaxis.set_major_locator(ticker.FixedLocator([0, *decades] if first == 0 else decades))
        minor = [digit * 10**k for k in range(12) for digit in (2, 5)]
        ax.xaxis.set_minor_locator(ticker.FixedLocator([m for m in minor if first <= m <= last]))
    ax.xaxis.set_major_formatter(short)
    if first < last:
        ax.set_xlim(first, last)


def layer_axis(ax: Axes, layers: Sequence[str], *, vertical: bool = False, most: int = 9) -> None:
    """Layers on an axis, few enough of them named that the names do not overlap."""
    labels = [layer_label(layer) for layer in layers]
    named = thinned(len(layers), most if vertical else max(3, min(most, 5 * most // max(map(len, labels)))))
    axis = ax.yaxis if vertical else ax.xaxis
    axis.set_ticks(named, [labels[i] for i in named])
    if vertical:
        ax.set_ylabel("layer" if max(map(len, labels)) <= 6 else "", labelpad=2)
    else:
        ax.set_xlabel("layer (numbers are blocks)" if any(label[-1:].isdecimal() for label in labels) else "layer")


def value_axis(ax: Axes, term: Term, values: Array, null: pd.Series | pd.DataFrame | None = None) -> None:
    """The metric on the y axis, logarithmic where it ranges over orders of magnitude, with the null as dashes.

    A null that is so far off that what is measured would be squeezed to show it is only named in the legend.
    """
    finite = values[np.isfinite(values)]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)
    is_log = term.is_logarithmic(values)
    ax.set_ylabel(term.name + (" (log scale)" if is_log else ""))
    span = (high - low) or abs(high) or 1.0
    room = (low / 3, high * 3) if is_log else (low - 0.6 * span, high + 0.6 * span)
    known = np.array([]) if null is None else null.to_numpy().ravel()
    known = known[np.isfinite(known)]
    if null is not None and known.size:
        near, label = known[(known >= room[0]) & (known <= room[1])], "random"
        low, high = min([low, *near]), max([high, *near])
        if not near.size:
            label = f"random: {shortened(np.median(known))} {'↑' if np.median(known) > high else '↓'}"
        for i, column in enumerate(null.to_numpy().reshape(len(null), -1).T):
            ax.plot(null.index, column, label="" if i else label, **NULL)
    if is_log:
        margin = (high / low) ** 0.05
        ax.set_yscale("log")
        ax.set_ylim(low / margin, high * margin)
        if high / low < 100:
            ax.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        ax.yaxis.set_minor_formatter(ticker.NullFormatter())
        ax.yaxis.set_major_formatter(short)
    else:
        ax.yaxis.set_major_locator(ticker.MaxNLocator(6))
        ax.yaxis.set_major_formatter(short)
        margin = 0.05 * (high - low) or 0.05 * abs(high) or 0.05
        ax.set_ylim(low - margin, high + margin)


def lines(ax: Axes, x: Array, rows: Array, colours: Array, dashes: Sequence[str] = "-") -> None:
    """Many lines over the same abscissae, shape (lines, len(x)); gaps where they are not finite."""
    segments = [np.column_stack((x, row)) for row in rows]
    drawn = LineCollection(segments, colors=colours, linewidths=1.1, linestyles=dashes, alpha=0.9)
    ax.add_collection(drawn, autolim=False)
    if rows.size <= 800:
        for row, colour in zip(rows, colours, strict=True):
            ax.plot(x, row, ls="", marker="o", ms=2.0, color=colour)


def depth_bar(ax: Axes, layers: Sequence[str]) -> Array:
    """Colours of the layers, and the bar that explains them."""
    norm = Normalize(0, max(1, len(layers) - 1))
    named = thinned(len(layers), 6)
    labels = [layer_label(layers[i]) for i in named]
    bar = value_bar(ax, ScalarMappable(norm, DEPTH), "layer" if max(map(len, labels)) <= 6 else "")
    bar.set_ticks(named, labels=labels)
    return DEPTH(norm(np.arange(len(layers))))


def time_bar(ax: Axes, steps: Sequence[int]) -> Array:
    """Colours of the steps, and the bar that explains them."""
    norm = SymLogNorm(1, linscale=0.4, vmin=steps[0], vmax=max(steps[-1], steps[0] + 1))
    bar = value_bar(ax, ScalarMappable(norm, TIME), "optimizer step (log scale)")
    ticks = [t for t in (0, *(10**k for k in range(12))) if steps[0] <= t <= steps[-1]]
    bar.set_ticks(ticks, labels=[short(t) for t in ticks])
    bar.minorticks_off()
    return TIME(norm(np.array(steps, dtype=float)))


def value_bar(ax: Axes, mappable: ScalarMappable, label: str, extend: str = "neither") -> Any:
    """A colour bar to the right of an axes."""
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
