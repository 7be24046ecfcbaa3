"""Axes of values: scaled to the blocks, with the Gaussian baseline as a dashed line."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import ticker
from matplotlib.axes import Axes

from embedgeo.report.axes import Array, short
from embedgeo.results.layer_names import blocks_by_side, layer_labels
from embedgeo.results.term import Term
from embedgeo.results.wording import listed
from embedgeo.results.wording import short as shortened

_FILLED = 0.3
"""Share of an axis that blocks fill at least where layers far from them are shown, too."""

_LONGEST = 30
"""Letters of ordinary size beside an axis."""

_LEAST = 1e-300
"""Length of an axis of which there are fractions."""

BASELINE: dict[str, Any] = {"color": "black", "ls": (0, (4, 2)), "lw": 1.3}


def colour_range(layers: Sequence[str], values: Array) -> tuple[float, float, str]:
    """The range of values that the colours of a heatmap span: that of the blocks, if their values differ.

    Args:
        layers: names; without any block, all of them count.
        values: shape (steps, layers).

    Returns:
        The least and the largest value, and at which end other values lie beyond: ``"neither"``, ``"min"``, ``"max"``
        or ``"both"``.
    """
    blocks = {block for blocks in blocks_by_side(layers).values() for block in blocks}
    finite = values[np.isfinite(values)]
    inside = values[:, [layer in blocks for layer in layers]] if blocks else finite
    inside = inside[np.isfinite(inside)]
    if not inside.size or inside.min() == inside.max():
        inside = finite
    low, high = (float(inside.min()), float(inside.max())) if inside.size else (0.0, 1.0)
    return low, high, ("neither", "min", "max", "both")[(finite < low).any() + 2 * (finite > high).any()]


def value_axis(
    ax: Axes,
    term: Term,
    values: Array,
    baseline: pd.Series | pd.DataFrame | None = None,
    layers: Sequence[str] = (),
    errors: Array | float = np.nan,
) -> None:
    """Put a metric on the y axis, logarithmic where it spans orders of magnitude, and draw the baseline as dashes.

    A baseline of which most lies so far away that showing it would squeeze the measured values is only named in the
    legend. Likewise layers that are no blocks, if they would leave these less than 30 % of the axis: they are named at
    the margin, with their values.

    Args:
        ax: the axes.
        term: of the metric.
        values: all that is drawn.
        baseline: the expected values, by abscissa.
        layers: of the columns of ``values``, where these are of layers; the axis then spans those of the blocks.
        errors: standard errors of ``values``, whose bands the axis spans too, unless that would squeeze the lines.
    """
    finite = values[np.isfinite(values)]
    low, high, _ = colour_range(layers, values)
    is_log = term.is_logarithmic(np.array([low, high]))
    name = term.name + (" (log scale)" if is_log else "")
    ax.set_ylabel(name, fontsize=float(ax.yaxis.label.get_fontsize()) * _LONGEST / max(_LONGEST, len(name)))
    span = (high - low) or abs(high) or 1.0
    room = (low / 3, high * 3) if is_log else (low - 0.6 * span, high + 0.6 * span)

    def extended(more: Array, low: float, high: float) -> tuple[float, float]:
        near = more[(more >= room[0]) & (more <= room[1])]
        return min([low, *near]), max([high, *near])

    inner = low, high
    low, high = extended(finite, *_widened(inner, inner, finite, is_log=is_log))
    room = min(room[0], low), max(room[1], high)
    ends = np.array([values - errors, values + errors])[:, (values >= low) & (values <= high)]
    ends = ends[np.isfinite(ends)].clip(*((low / 10, high * 10) if is_log else (low - 2 * span, high + 2 * span)))
    low, high = min([low, *ends]), max([high, *ends])
    known = np.array([]) if baseline is None else baseline.to_numpy().ravel()
    known = known[np.isfinite(known)]
    if baseline is not None and known.size:
        middle = np.median(known)
        if room[0] <= middle <= room[1]:
            low, high = extended(known, *_widened(inner, (low, high), known, is_log=is_log))
            for i, column in enumerate(baseline.to_numpy().reshape(len(baseline), -1).T):
                ax.plot(baseline.index, column, label="" if i else "random", **BASELINE)
        else:
            ax.plot([], label=f"random: {_span(known)} {'↑' if middle > high else '↓'}", **BASELINE)
    beyond = _name_beyond(ax, layers, values, low, high)
    if is_log:
        decades = np.log10(high) - np.log10(low)
        below, above = (decades * (0.12 if is_named else 0.05) for is_named in beyond)
        ax.set_ylim(low / 10**below, high * 10**above)  # first: the scale would look for limits of its own
        ax.set_yscale("log")
        log_ticks(ax, low, high)
    else:
        ax.yaxis.set_major_locator(ticker.MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
        ax.yaxis.set_major_formatter(short)
        size = max((high - low) or abs(high) or 1.0, _LEAST)
        below, above = (size * (0.12 if is_named else 0.05) for is_named in beyond)
        ax.set_ylim(low - below, high + above)


def _widened(
    inner: tuple[float, float], shown: tuple[float, float], values: Array, *, is_log: bool
) -> tuple[float, float]:
    """A range with values beyond both of its ends, or else beyond one, of which the inner one is still a good part."""
    values = values[values > 0] if is_log else values
    low, high = shown
    least, most = float(values.min(initial=low)), float(values.max(initial=high))

    def length(low: float, high: float) -> float:
        return math.log10(high) - math.log10(low) if is_log else high - low

    wider = ((least, most), (low, most), (least, high))
    return next((ends for ends in wider if length(*inner) >= _FILLED * length(*ends)), shown)


def _name_beyond(ax: Axes, layers: Sequence[str], values: Array, low: float, high: float) -> tuple[bool, bool]:
    """Name the layers with values beyond the axis at its lower and upper margin; whether there are any."""
    labels, _ = layer_labels(layers)
    columns = {label: column[np.isfinite(column)] for label, column in zip(labels, values.T, strict=False)}
    found = []
    for y, arrow, sign, bound in ((0.015, "↓", -1, low), (0.985, "↑", 1, high)):
        outside = {label: x[sign * x > sign * bound] for label, x in columns.items()}
        names = [f"{label} {_span(x)}" for label, x in outside.items() if x.size]
        if names:
            look: dict[str, Any] = {"fontsize": 7.5, "color": "#444444", "ha": "center", "zorder": 5}
            card = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1}
            text = f"{arrow} beyond: {listed(names, 2)}"
            ax.text(0.5, y, text, transform=ax.transAxes, va="bottom" if y < 0.5 else "top", bbox=card, **look)
        found.append(bool(names))
    return found[0], found[1]


def _span(values: Array) -> str:
    return " to ".join(dict.fromkeys(shortened(value) for value in (values.min(), values.max())))


def log_ticks(ax: Axes, low: float, high: float) -> None:
    """Set the ticks of a logarithmic y axis: also at 2 and 5 where it spans less than three decades."""
    ax.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5) if high / low < 1000 else (1,)))
    ax.yaxis.set_major_formatter(short)
    ax.yaxis.set_minor_formatter(ticker.NullFormatter())
