"""Profiles over the depth of a model, and the shares of M, V_W and V_B, drawn by matplotlib."""

import io
from collections.abc import Mapping, Sequence

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LinearSegmentedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter
from numpy.typing import NDArray
from PIL import Image

from embedgeo.glossary import Term, short
from embedgeo.names import relative_depths
from embedgeo.pages.axis import StepAxis, named

Picture = tuple[bytes, int, int]
"""A PNG, its width and height."""

_TIME = LinearSegmentedColormap.from_list("time", mpl.colormaps["plasma"](np.linspace(0, 0.88, 256)))
_MOST_LINES = 12
_PARTS = {
    "M": ("M: offset", "#0072b2"),
    "V_B_unbiased": ("V_B: token", "#e69f00"),
    "V_W_unbiased": ("V_W: context", "#009e73"),
    "V": ("V: variance", "#999999"),
}


def profile(term: Term, steps: Sequence[int], layers: Sequence[str], values: NDArray[np.float64]) -> Picture:
    """A metric against relative depth, one line a step (of many steps, 12 evenly spaced ones), coloured by step.

    Those of a decoder beside an encoder are dashed.

    Args:
        term: of the metric.
        steps: ascending.
        layers: in order of depth.
        values: shape (steps, layers).
    """
    depths = relative_depths(layers)
    axis = StepAxis(steps)
    places = axis.place(steps)
    chosen = sorted({int(np.abs(places - at).argmin()) for at in np.linspace(0, 1, min(_MOST_LINES, len(steps)))})
    with mpl.rc_context():
        mpl.rcdefaults()
        is_log = term.is_logarithmic(values)
        figure, ax = _new_figure(term.name, term.unit + (", log scale" if is_log else ""), right=0.79)
        if is_log:
            ax.set_yscale("log")
            ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            ax.yaxis.set_major_formatter(lambda value, _: short(value))
            ax.yaxis.set_minor_formatter(NullFormatter())
        for depth, line in zip(depths.values(), ("-", "--"), strict=False):
            shown = [layers.index(layer) for layer in depth]
            for i in chosen:
                ax.plot([*depth.values()], values[i, shown], line, color=_TIME(places[i]), lw=1.1, marker="o", ms=2)
        ax.set_xlabel("relative depth" + (" (dashed: decoder)" if len(depths) > 1 else " (1: the last)"))
        box = ax.get_position()
        cax = figure.add_axes((0.83, box.y0, 0.03, box.height))
        bar = figure.colorbar(ScalarMappable(Normalize(0, 1), _TIME), cax=cax)
        ticks = axis.ticks()
        bar.set_ticks(list(axis.place(ticks)), labels=[short(step) for step in ticks])
        cax.set_title("step" + (", log" if axis.is_log else ""), fontsize=8, pad=6)
        return _png(figure)


def shares(step: int, layers: Sequence[str], parts: Mapping[str, NDArray[np.float64]]) -> Picture:
    """A bar a layer: the shares of M, V_B and V_W in Q = M + V, or of M and V where no token ids were known.

    Args:
        step: at which they were measured.
        layers: in order of depth.
        parts: M, V, V_W_unbiased and V_B_unbiased, shape (layers,).
    """
    split = np.isfinite(parts["V_W_unbiased"]).any()
    stacked = {name: parts[name].clip(min=0) for name in _PARTS if (name == "V") != split or name == "M"}
    total = sum(stacked.values())
    with mpl.rc_context():
        mpl.rcdefaults()
        subtitle = f"shares of the mean squared norm, step {step}"
        figure, ax = _new_figure("Q = M + V_B + V_W" if split else "Q = M + V", subtitle, rows=len(layers), right=0.96)
        left = np.zeros(len(layers))
        for name, values in stacked.items():
            label, colour = _PARTS[name]
            share = np.nan_to_num(values / np.where(total > 0, total, np.nan))  # no bar where it is undefined
            ax.barh(range(len(layers)), share, 0.82, left=left, color=colour, label=label)
            left += share
        stride = -(-len(layers) // 20)
        ax.set_yticks(range(0, len(layers), stride), [named(layer) for layer in layers[::stride]])
        ax.set_xlim(0, 1)
        ax.set_ylim(-0.6, len(layers) - 0.4)
        ax.set_xlabel("share of Q" + (", unbiased estimates" if split else ""))
        place = (0, 1 - 0.36 / figure.get_size_inches()[1])
        figure.legend(loc="upper left", bbox_to_anchor=place, ncols=3, columnspacing=1, handlelength=1, frameon=False)
        return _png(figure)


def _new_figure(title: str, subtitle: str, *, rows: int = 0, right: float) -> tuple[Figure, Axes]:
    """Of the width and with the letters that TensorBoard's small view of an image needs."""
    mpl.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "legend.fontsize": 8})
    height = max(2.8, 1.3 + 0.14 * min(rows, 20))
    figure = Figure(figsize=(3.6, height), dpi=200)
    FigureCanvasAgg(figure)
    bottom, top = 0.44 / height, 1 - (0.68 if rows else 0.6) / height
    left = 0.25 if rows else 0.15
    ax = figure.add_axes((left, bottom, right - left, top - bottom))
    figure.text(0.015, 1 - 0.04 / height, title, va="top", fontsize=10.5)
    figure.text(0.015, 1 - 0.22 / height, subtitle, va="top", fontsize=8.5)
    return figure, ax


def _png(figure: Figure) -> Picture:
    canvas = figure.canvas
    assert isinstance(canvas, FigureCanvasAgg)
    canvas.draw()
    image = Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")
    buffer = io.BytesIO()
    image.quantize(128, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE).save(buffer, "PNG")
    return buffer.getvalue(), image.width, image.height
