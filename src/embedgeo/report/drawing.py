"""Style, margins, legend and saving, which all figures share."""

import io
import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image

DPI = 170
WIDTH, HEIGHT = 4.6, 3.5
_LONGEST = 34
"""Letters in the names of a legend in one row, of ordinary size."""

_ROW = 0.165
"""Inches of a line of a legend."""

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
    "axes.unicode_minus": False,
    "text.parse_math": False,  # names are the users'
    "svg.hashsalt": "embedgeo",
    "svg.fonttype": "none",
}


class FigureData(NamedTuple):
    """A figure with the numbers and texts that go with it.

    Attributes:
        name: of its files.
        figure: the picture.
        numbers: the values drawn.
        alt: the kind of figure, for readers who do not see it.
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
    with mpl.rc_context(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")  # in names, which are the users'
        mpl.rcdefaults()
        parameters: Any = mpl.rcParams
        parameters.update(_STYLE)
        yield


def new_figure(
    title: str, subtitle: str = "", *, panels: int = 1, sidebar: bool = False, names: Sequence[str] = ()
) -> tuple[Figure, list[Axes]]:
    """A figure with axes side by side; its margins are fixed, which is much faster than fitting them.

    Args:
        title: of the whole figure, in bold.
        subtitle: below the title: units, estimators.
        panels: how many axes.
        sidebar: leave room for a colour bar.
        names: leave room for these in `legend_below`.
    """
    width = WIDTH * (1 if panels == 1 else 0.8 * panels)
    below = _ROW * math.ceil(len(names) / _columns(names, width)) if names else 0
    height = HEIGHT + below - (0.22 if names else 0)
    figure = Figure(figsize=(width, height))
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, panels, squeeze=False)[0]
    left, right, bottom = 0.88, 0.96 if sidebar else 0.32, 0.54 + below
    top = 0.5 if names else 0.88 if panels > 1 else 0.72
    figure.subplots_adjust(left / width, bottom / height, 1 - right / width, 1 - top / height, wspace=0.3)
    figure.text(0.12 / width, 1 - 0.07 / height, title, va="top", fontsize=10.5, weight="bold")
    figure.text(0.12 / width, 1 - 0.27 / height, subtitle, va="top", fontsize=8.5, color="#444444")
    return figure, list(axes)


def legend(figure: Figure, ax: Axes) -> None:
    """The legend of an axes, in a row below the subtitle."""
    handles, labels = ax.get_legend_handles_labels()
    if handles:
        width = figure.get_size_inches()[0]
        look: dict[str, Any] = {"ncols": 4 if width <= WIDTH else 6, "columnspacing": 1.1, "handlelength": 1.7}
        if width <= WIDTH and len("".join(labels)) > _LONGEST:
            look |= {"fontsize": 7.5, "columnspacing": 0.8, "handlelength": 1.5}
        place = (0.04 / width, 1 - 0.43 / HEIGHT)
        figure.legend(handles, labels, loc="upper left", bbox_to_anchor=place, borderpad=0, **look)


def legend_below(figure: Figure, handles: Sequence[Artist], names: Sequence[str]) -> None:
    """A legend below the axes of a figure that was made with these names."""
    width = figure.get_size_inches()[0]
    look: dict[str, Any] = {"ncols": _columns(names, width), "columnspacing": 1.2, "handlelength": 2.6, "fontsize": 8}
    labels = [f" {name}" for name in names]  # the first letter may be "_", which would hide it
    figure.legend(handles, labels, loc="lower left", bbox_to_anchor=(0.06 / width, 0.0), labelspacing=0.25, **look)


def _columns(names: Sequence[str], width: float) -> int:
    longest = max(map(len, names))
    return min(len(names), int(width / WIDTH) * (1 if longest > 24 else 2 if longest > 12 else 3))


def png(figure: Figure, dpi: float = DPI) -> tuple[bytes, int, int]:
    """The picture as a PNG of at most 256 colours, its width and height."""
    figure.set_dpi(dpi)
    canvas: Any = figure.canvas
    canvas.draw()
    image = Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")
    buffer = io.BytesIO()
    image.quantize(256, dither=Image.Dither.NONE).save(buffer, "PNG")
    return buffer.getvalue(), image.width, image.height


def save(data: FigureData, folder: Path) -> bytes:
    """Write PNG, SVG and CSV; the same numbers give the same bytes. Returns the PNG."""
    data.numbers.to_csv(folder / f"{data.name}.csv", lineterminator="\n")
    data.figure.savefig(folder / f"{data.name}.svg", dpi=DPI, metadata={"Date": None, "Creator": None})
    picture, *_ = png(data.figure)
    (folder / f"{data.name}.png").write_bytes(picture)
    return picture
