"""What all figures share: style, axes of steps, layers and values, the null, and how they are saved."""

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib import ticker
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.cm import ScalarMappable
from matplotlib.collections import LineCollection
from matplotlib.colors import LinearSegmentedColormap, Normalize, SymLogNorm
from matplotlib.figure import Figure
from numpy.typing import NDArray
from PIL import Image

from embedgeo.glossary import Term

Array = NDArray[np.float64]

DPI = 170
WIDTH, HEIGHT = 4.6, 3.5
NULL = "#c1440e"
RUNS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000", "#7a5195")
DEPTH = LinearSegmentedColormap.from_list("depth", mpl.colormaps["viridis"](np.linspace(0, 0.88, 256)))
TIME = LinearSegmentedColormap.from_list("time", mpl.colormaps["plasma"](np.linspace(0, 0.88, 256)))
"""Sequential maps of even lightness, without the end that is too pale for lines on white."""

_STYLE: dict[str, Any] = {
    "font.size": 9.5,
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "axes.titlesize": 9.5,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "text.parse_math": False,  # names are the users'
    "svg.hashsalt": "embedgeo",
    "svg.fonttype": "none",
}


class Drawn(NamedTuple):
    """A figure with what it shows.

    Attributes:
        name: of its files.
        figure: the picture.
        numbers: what is drawn.
        alt: what kind of figure it is, for those who do not see it.
        text: what it shows, in one or two sentences.
    """

    name: str
    figure: Figure
    numbers: pd.DataFrame
    alt: str
    text: str


@contextmanager
def style() -> Iterator[None]:
    """The look of all figures."""
    with mpl.rc_context():
        mpl.rcdefaults()
        parameters: Any = mpl.rcParams
        parameters.update(_STYLE)
        yield


def new_figure(title: str, subtitle: str = "", *, panels: int = 1, sidebar: bool = False) -> tuple[Figure, list[Axes]]:
    """A figure with some panels side by side; margins are fixed, which is much faster than fitting them.

    Args:
        title: of the whole, in bold.
        subtitle: below it: units, estimators.
        panels: how many.
        sidebar: leave room for a colour bar.
    """
    width = WIDTH * (1 if panels == 1 else 0.8 * panels)
    figure = Figure(figsize=(width, HEIGHT))
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, panels, squeeze=False)[0]
    left, right, bottom, top = (
        0.72 if panels == 1 else 0.84,
        0.86 if sidebar else 0.16,
        0.54,
        0.72 if panels == 1 else 0.88,
    )
    figure.subplots_adjust(left / width, bottom / HEIGHT, 1 - right / width, 1 - top / HEIGHT, wspace=0.3)
    figure.text(0.12 / width, 1 - 0.07 / HEIGHT, title, va="top", fontsize=10.5, weight="bold")
    figure.text(0.12 / width, 1 - 0.27 / HEIGHT, subtitle, va="top", fontsize=8.5, color="#444444")
    return figure, list(axes)


def legend(figure: Figure, ax: Axes) -> None:
    """The legend of an axes, in a row below the subtitle."""
    width = figure.get_size_inches()[0]
    handles, labels = ax.get_legend_handles_labels()
    if handles:
        place = (0.04 / width, 1 - 0.43 / HEIGHT)
        figure.legend(handles, labels, loc="upper left", bbox_to_anchor=place, ncols=4, columnspacing=1.4, borderpad=0)


def save(drawn: Drawn, folder: Path) -> bytes:
    """Write PNG, SVG and CSV; the same numbers give the same bytes. Returns the PNG."""
    drawn.numbers.to_csv(folder / f"{drawn.name}.csv", lineterminator="\n")
    drawn.figure.savefig(folder / f"{drawn.name}.svg", dpi=DPI, metadata={"Date": None, "Creator": None})
    drawn.figure.set_dpi(DPI)
    canvas: Any = drawn.figure.canvas
    canvas.draw()
    image = Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")
    buffer = io.BytesIO()
    image.quantize(256, Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE).save(buffer, "PNG", optimize=True)
    (folder / f"{drawn.name}.png").write_bytes(buffer.getvalue())
    return buffer.getvalue()


def short(number: float, _: object = None) -> str:
    """A number for an axis: 1000 as 1k.

    >>> short(143_000), short(0.5), short(1e6), short(1e-5)
    ('143k', '0.5', '1M', '1e-05')
    """
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= size:
            return f"{number / size:.6g}{letter}"
    return f"{number:.6g}"


def number(value: float) -> str:
    """A number in a sentence or a table.

    >>> number(323_812.4), number(0.012345), number(7.0)
    ('323,812', '0.01234', '7')
    """
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e9 else f"{value:.4g}"


def layer_label(layer: str) -> str:
    """A layer on an axis.

    >>> layer_label("block.07"), layer_label("final_norm"), layer_label("gpt_neox.layers.11.attention.dense")
    ('7', 'norm', '…ttention.dense')
    """
    if layer.startswith("block.") and layer[6:].isdecimal():
        return str(int(layer[6:]))
    label = {"final_norm": "norm"}.get(layer, layer)
    return label if len(label) <= 15 else f"…{label[-14:]}"


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
    named = thinned(len(layers), most if vertical or max(map(len, labels)) <= 5 else 3)
    axis = ax.yaxis if vertical else ax.xaxis
    axis.set_ticks(named, [labels[i] for i in named])
    if vertical:
        ax.set_ylabel("layer", labelpad=2)
    else:
        ax.set_xlabel("layer (numbers are blocks)" if any(layer.startswith("block.") for layer in layers) else "layer")


def value_axis(ax: Axes, term: Term, values: Array, null: pd.Series | None = None) -> None:
    """The metric on the y axis, logarithmic where it ranges over orders of magnitude, with the null as dashes.

    A null that is so far off that what is measured would be squeezed to show it is only named in the legend.
    """
    finite = values[np.isfinite(values)]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)
    is_log = is_logarithmic(term, values)
    ax.set_ylabel(term.name + (" (log scale)" if is_log else ""))
    span = (high - low) or abs(high) or 1.0
    room = (low / 3, high * 3) if is_log else (low - 0.6 * span, high + 0.6 * span)
    known = pd.Series(dtype=float) if null is None else null[null.notna()]
    if null is not None and len(known):
        near, label = known[known.between(*room)], "random"
        low, high = min([low, *near]), max([high, *near])
        if near.empty:
            label = f"random: {known.median():.3g}, {'above' if known.median() > high else 'below'}"
        ax.plot(null, label=label, color=NULL, ls=(0, (4, 2)), lw=1.4)
    if is_log:
        margin = (high / low) ** 0.05
        ax.set_yscale("log")
        ax.set_ylim(low / margin, high * margin)
        if high / low < 100:
            ax.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        ax.yaxis.set_minor_formatter(ticker.NullFormatter())
        ax.yaxis.set_major_formatter(short)
    else:
        margin = 0.05 * (high - low) or 0.05 * abs(high) or 0.05
        ax.set_ylim(low - margin, high + margin)


def is_logarithmic(term: Term, values: Array) -> bool:
    """Whether a metric goes on a logarithmic scale: all of it is positive, over more than a factor of 10."""
    finite = values[np.isfinite(values)]
    return bool(term.ranges and finite.size and finite.min() > 0 and finite.max() > 10 * finite.min())


def lines(ax: Axes, x: Array, rows: Array, colours: Array) -> None:
    """Many lines over the same abscissae, shape (lines, len(x)); gaps where they are not finite."""
    segments = [np.column_stack((x, row)) for row in rows]
    ax.add_collection(LineCollection(segments, colors=colours, linewidths=1.1, alpha=0.9), autolim=False)
    if rows.size <= 800:
        for row, colour in zip(rows, colours, strict=True):
            ax.plot(x, row, ls="", marker="o", ms=2.0, color=colour)


def depth_bar(ax: Axes, layers: Sequence[str]) -> Array:
    """Colours of the layers, and the bar that explains them."""
    norm = Normalize(0, max(1, len(layers) - 1))
    bar = value_bar(ax, ScalarMappable(norm, DEPTH), "layer")
    named = thinned(len(layers), 6)
    bar.set_ticks(named, labels=[layer_label(layers[i]) for i in named])
    return DEPTH(norm(np.arange(len(layers))))


def time_bar(ax: Axes, steps: Sequence[int]) -> Array:
    """Colours of the steps, and the bar that explains them."""
    norm = SymLogNorm(1, linscale=0.4, vmin=steps[0], vmax=max(steps[-1], steps[0] + 1))
    bar = value_bar(ax, ScalarMappable(norm, TIME), "optimizer step (log scale)")
    ticks = [t for t in (0, *(10**k for k in range(12))) if steps[0] <= t <= steps[-1]]
    bar.set_ticks(ticks, labels=[short(t) for t in ticks])
    bar.minorticks_off()
    return TIME(norm(np.array(steps, dtype=float)))


def value_bar(ax: Axes, mappable: ScalarMappable, label: str) -> Any:
    """A colour bar to the right of an axes."""
    box = ax.get_position()
    figure: Any = ax.figure
    width = figure.get_size_inches()[0]
    cax = figure.add_axes((box.x1 + 0.1 / width, box.y0, 0.12 / width, box.height))
    bar = figure.colorbar(mappable, cax=cax)
    bar.set_label(label, fontsize=8.5, labelpad=2)
    bar.outline.set_visible(False)
    cax.yaxis.set_minor_formatter(ticker.NullFormatter())
    cax.tick_params(labelsize=8, length=2, pad=1.5)
    cax.grid(visible=False)
    return bar
