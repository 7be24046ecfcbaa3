"""Style, margins, legend and saving, which all figures share."""

import io
import math
import textwrap
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import matplotlib as mpl
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backend_bases import RendererBase
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

DPI = 170
WIDTH, HEIGHT = 4.6, 3.5
_LONGEST = 34
"""Letters in the names of a legend in one row, of ordinary size."""

_ROW = 0.165
"""Inches of a line of a legend."""

_X_LABEL = 0.285
"""Inches from the axes down to the label of the x axis."""

_SUBTITLE = "embedgeo.subtitle"

_STYLE: dict[str, Any] = {
    "font.size": 9.5,
    "font.family": ["sans-serif"],
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


class Picture(Figure):
    """A figure of fixed margins that has its own look, whatever the settings of the session it is painted in.

    pyplot does not know it: a notebook shows it once, as the value of a cell.
    """

    def draw(self, renderer: RendererBase) -> None:
        """Paint it."""
        with style():
            super().draw(renderer)

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        self.savefig(buffer, format="png")
        return buffer.getvalue()


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


class TableData(NamedTuple):
    """A table for the page.

    Attributes:
        name: of its file.
        caption: what it is.
        cells: as they are shown.
        numbers: the values.
        text: what has to be known to read it.
    """

    name: str
    caption: str
    cells: pd.DataFrame
    numbers: pd.DataFrame
    text: str


@contextmanager
def style() -> Iterator[None]:
    """The look of all figures."""
    now: Any = mpl.rcParams
    if all(now[name] == value for name, value in _STYLE.items()):  # it is set already, and setting it takes time
        yield
        return
    with mpl.rc_context(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")  # in names, which are the users'
        mpl.rcdefaults()
        parameters: Any = mpl.rcParams
        parameters.update(_STYLE)
        yield


def new_figure(
    title: str,
    subtitle: str = "",
    *,
    panels: int = 1,
    sidebar: bool = False,
    names: Sequence[str] = (),
    ax: Axes | None = None,
) -> tuple[Figure, list[Axes]]:
    """A figure with axes side by side; its margins are fixed, which is much faster than fitting them.

    Args:
        title: of the whole figure, in bold.
        subtitle: below the title: units, estimators.
        panels: how many axes.
        sidebar: leave room for a colour bar.
        names: leave room for these in `legend_below`.
        ax: put the title and the look on these axes of somebody else's figure instead.
    """
    if ax is not None:
        return _dressed(ax, title, subtitle), [ax]
    width = WIDTH * (1 if panels == 1 else 0.8 * panels)
    below = _ROW * math.ceil(len(names) / _columns(names, width)) if names else 0
    height = HEIGHT + below - (0.22 if names else 0)
    figure = Picture(figsize=(width, height))
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, panels, squeeze=False)[0]
    left, right, bottom = 0.88, 0.96 if sidebar else 0.32, 0.54 + below
    top = 0.5 if names else 0.88 if panels > 1 else 0.72
    figure.subplots_adjust(left / width, bottom / height, 1 - right / width, 1 - top / height, wspace=0.3)
    for each in axes:  # where it would be found to be, below one line of names, each time that it is drawn
        each.xaxis.set_label_coords(0.5, -_X_LABEL / (height - bottom - top))
    figure.text(0.12 / width, 1 - 0.07 / height, title, va="top", fontsize=10.5, weight="bold")
    figure.text(0.12 / width, 1 - 0.27 / height, subtitle, va="top", fontsize=8.5, color="#444444")
    return figure, list(axes)


def _dressed(ax: Axes, title: str, subtitle: str) -> Any:
    """Give axes the look of the report's, with the title above them; their figure."""
    ax.set_facecolor("white")  # lines are black, on any ground
    ax.set_axisbelow(True)
    ax.grid(visible=True, color=mpl.rcParams["grid.color"], lw=mpl.rcParams["grid.linewidth"])
    ax.spines[["top", "right"]].set_visible(False)
    for label in (ax.xaxis.label, ax.yaxis.label):
        label.set(parse_math=False)
    lines = textwrap.wrap(subtitle, _letters(ax))
    _set_title(ax, title, 4 + 10.5 * len(lines))
    if lines:
        look: dict[str, Any] = {"xycoords": "axes fraction", "textcoords": "offset points", "va": "bottom"}
        look |= {"fontsize": 8, "color": ax.title.get_color(), "gid": _SUBTITLE, "in_layout": False}
        ax.annotate("\n".join(lines), (0, 1), (0, 3), **look)
    return ax.figure


def _set_title(ax: Axes, title: str, pad: float) -> None:
    ax.set_title(title, loc="left", fontsize=10, weight="bold", pad=pad, parse_math=False)


def _letters(ax: Axes) -> int:
    """How many small letters fit above axes."""
    return max(10, round(inches(ax)[0] * 16))


def _legend_above(ax: Axes, handles: Sequence[Artist], names: Sequence[str]) -> None:
    """A legend between the subtitle and axes of somebody else's figure."""
    most, longest = _letters(ax), max(map(len, names)) + 6
    is_row = sum(len(name) + 4 for name in names) <= most
    ncols = len(names) if is_row else max(1, most // longest)
    height = 11.5 * math.ceil(len(names) / ncols) + 2
    look: dict[str, Any] = {"frameon": True, "facecolor": "white", "edgecolor": "none", "framealpha": 1, "fontsize": 8}
    look |= {"columnspacing": 1.0, "handlelength": 1.5, "labelspacing": 0.2, "borderpad": 0.1, "borderaxespad": 0.2}
    box = ax.legend(handles, names, loc="lower left", bbox_to_anchor=(0, 1), ncols=ncols, **look)
    box.set_in_layout(False)  # the title, which makes room for it, is
    rows = 0
    for text in ax.texts:
        if text.get_gid() == _SUBTITLE:
            text.set_y(3 + height)
            rows = text.get_text().count("\n") + 1
    _set_title(ax, ax.get_title("left"), 4 + 10.5 * rows + height)


def inches(ax: Axes) -> tuple[float, float]:
    """Width and height of axes."""
    box = ax.get_window_extent()
    return box.width / ax.figure.dpi, box.height / ax.figure.dpi


def legend(figure: Figure, ax: Axes) -> None:
    """The legend of an axes, in a row below the subtitle."""
    handles, labels = ax.get_legend_handles_labels()
    if handles and not isinstance(figure, Picture):
        _legend_above(ax, handles, labels)
    elif handles:
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
