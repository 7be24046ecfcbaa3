"""The look of all pictures: figures, legends, axes of steps, layers and values, lines, colours, and
files.
"""

import io
import math
import textwrap
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from pathlib import Path
from threading import get_ident
from types import MappingProxyType
from typing import Any, NamedTuple

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib import ticker
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backend_bases import RendererBase
from matplotlib.backends.backend_agg import FigureCanvasAgg, RendererAgg
from matplotlib.cm import ScalarMappable
from matplotlib.collections import LineCollection
from matplotlib.colors import LinearSegmentedColormap, LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from numpy.typing import NDArray
from PIL import Image

from embedgeo import formatting, glossary
from embedgeo.formatting import listed
from embedgeo.glossary import GAUSSIAN, Term
from embedgeo.layer_names import blocks_by_side, layer_labels, layer_ticks

Array = NDArray[np.float64]
Png = tuple[bytes, int, int]  # a picture, its width and height

DPI = 170
WIDTH, HEIGHT = 4.6, 3.5
SMALL: Any = {"figure.figsize": [3.1, 2.7]}
"""Size of small figures, for `matplotlib.rc_context`."""
COLUMN = (3.25, 2.5)
"""Size of a figure in a column of a paper."""
ACCENT = "#c1440e"
GREY = "#444444"
UNKNOWN_COLOUR = "#d0d0d0"
RUNS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000", "#7a5195")
DASHES = (
    "-",
    (0, (5, 1.5)),
    (0, (1.5, 1.2)),
    (0, (6, 1.5, 1.5, 1.5)),
    (0, (9, 2)),
    (0, (4, 1, 1, 1, 1, 1)),
)
MEAN_DASHES = (
    "-",
    (0, (3, 1, 1, 1)),
    (0, (1, 1)),
    (0, (5, 1)),
    (0, (6, 1, 1, 1, 1, 1)),
    (0, (2, 2)),
)
"""Of the means over the blocks of an encoder and of its decoder, or of what is inside of them."""
BASELINE: dict[str, Any] = {"color": "black", "ls": (0, (4, 2)), "lw": 1.3}
DEPTH = LinearSegmentedColormap.from_list(
    "depth", mpl.colormaps["viridis"](np.linspace(0, 0.8, 256))
)
TIME = LinearSegmentedColormap.from_list("time", mpl.colormaps["plasma"](np.linspace(0, 0.82, 256)))
"""Sequential maps of even lightness, without the end that is too pale for lines on either ground.
"""

_LEGEND_LINE = 0.165  # inches of a line of a legend
_LEAST_SIZE = 1.5  # inches of the sides of a figure with texts of ordinary size
_UNLAID_AXES = (3.57, 2.7)  # inches of the axes of a report's figure before they are laid out
# share of an axis that blocks fill at least where layers far from them are shown, too
_FILLED = 0.3
_LONGEST_LABEL = 30  # letters of ordinary size beside an axis
_LEAST_LENGTH = 1e-300  # length of an axis of which there are fractions
_LETTERS = 128  # in an inch, over their size in points
_SUBTITLE = "embedgeo.subtitle"
_TITLE_LINE = 0.2  # inches of the title above the subtitle
_COLUMN_TEXT = 7.0  # points of the text of a figure in a column

_STYLE: dict[str, Any] = {
    "figure.figsize": [WIDTH, HEIGHT],
    "font.size": 9.5,
    "font.family": ["sans-serif"],
    "font.sans-serif": ["DejaVu Sans"],
    "axes.titlesize": "medium",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "legend.fontsize": "medium",
    "axes.unicode_minus": False,
    "text.parse_math": False,  # names are the users'
    "svg.hashsalt": "embedgeo",
    "svg.fonttype": "none",
    "pdf.fonttype": 42,  # TrueType, as publishers ask for
    "ps.fonttype": 42,
}
_SIZES = (
    "axes.titlesize",
    "axes.labelsize",
    "legend.fontsize",
    "xtick.labelsize",
    "ytick.labelsize",
)
_TEXTS = (
    *(name for name in mpl.rcParamsDefault if name.startswith(("font.", "mathtext."))),
    *(*_SIZES, "axes.titleweight", "axes.titlecolor", "axes.labelweight"),
)
"""Settings of texts, which are those of the session in figures that are asked for one by one."""


class _Asked(NamedTuple):
    """Title and size, in inches, that the next figure is asked to have."""

    title: str | None = None
    size: tuple[float, float] | None = None


_NOTHING = _Asked()
_asked: ContextVar[_Asked] = ContextVar("asked", default=_NOTHING)


class Lines(NamedTuple):
    """Lines of one kind in a figure, for a page that draws them again and names what the reader
    points at.

    Attributes:
        kind: of what their names are: "layer", "step" or "run"; "mean", "gaussian", "expected" or
            "last" for single lines; "earlier" for the two ends of a range.
        values: a column a line, under its name; the index are the steps, layers or depths.
        colours: one a line, or one for all.
        errors: half the heights of their bands, in the order of the values.
        dashes: one a line, or one for all.
        width: in points.
        hollow: names of those with hollow marks; of kind "run", all others have full ones.
        panel: the axes of the figure that they are in.
    """

    kind: str
    values: pd.DataFrame
    colours: Any
    errors: pd.DataFrame | None = None
    dashes: Any = "-"
    width: float = 1.1
    hollow: Sequence[str] = ()
    panel: int = 0


class FigureData(NamedTuple):
    """A figure, the name of its files, the values drawn, and texts: one for readers who do not see
    it, one for all.

    And, of a figure over steps or depth, its lines.
    """

    name: str
    figure: Figure
    numbers: pd.DataFrame
    alt: str
    text: str
    lines: Sequence[Lines] = ()


class Picture(Figure):
    """A figure, unknown to pyplot, with its own look in any session: a cell shows it once.

    Attributes:
        texts_look: the settings of its texts.
        top: where the room below the title and the legend ends, as a share of the height.
        is_sized: true if its size was asked for.
    """

    texts_look: Mapping[str, Any] = MappingProxyType({})
    top = 1.0
    is_sized = False

    def end_at(self, top: float) -> None:
        """Lay out what is below the title and the legend up to this share of the height."""
        self.top = top
        self.set_layout_engine(ConstrainedLayoutEngine(rect=(0, 0, 1, top)))

    def draw(self, renderer: RendererBase) -> None:
        """Paint it."""
        with style(self.texts_look):
            super().draw(renderer)

    def savefig(self, *arguments: Any, **options: Any) -> None:
        """Write a file; PDF and PostScript have TrueType fonts."""
        with mpl.rc_context({name: _STYLE[name] for name in ("pdf.fonttype", "ps.fonttype")}):
            super().savefig(*arguments, **options)

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        self.savefig(buffer, format="png")
        return buffer.getvalue()


@contextmanager
def style(changes: Mapping[str, Any] = MappingProxyType({})) -> Iterator[None]:
    """The look of all figures, with changes of it."""
    parameters: Any = mpl.rcParams
    wanted = {**_STYLE, **changes}
    if all(parameters[name] == value for name, value in wanted.items()):  # setting it takes time
        yield
        return
    with mpl.rc_context(), warnings.catch_warnings():
        # in names, which are the users'
        warnings.filterwarnings("ignore", "Glyph .* missing from font")
        mpl.rcdefaults()
        parameters.update(wanted)
        yield


@contextmanager
def session_style() -> Iterator[None]:
    """The look of all figures, but for texts, which are as `matplotlib.rcParams` say."""
    with style(_texts()):
        yield


@contextmanager
def figure_style(
    ax: Axes | None, title: str | None, figsize: tuple[float, float] | None, *, compact: bool
) -> Iterator[None]:
    """The look of one figure that is asked for; see `embedgeo.plot`."""
    if ax is not None and (compact or figsize is not None):
        option = "compact" if compact else "figsize"
        raise ValueError(
            f"{option} is of a new figure; the one of ax= has its size and its texts already."
        )
    if not isinstance(title, str | None):
        raise TypeError(f"title must be a string; got {title!r}.")
    if figsize is not None and not _is_size(figsize):
        raise ValueError(
            f"figsize must be a width and a height above 0, in inches; got {figsize!r}."
        )
    texts = _texts()
    if ax is None:
        usual: Any = mpl.rcParamsDefault
        texts = {name: value for name, value in texts.items() if value != usual[name]}
        size = figsize or (COLUMN if compact else (WIDTH, HEIGHT))
        texts = {
            "figure.figsize": list(size),
            **({"font.size": _COLUMN_TEXT} if compact else {}),
            **texts,
        }
    token = _asked.set(_Asked(title, figsize))
    try:
        with style(texts):
            yield
    finally:
        _asked.reset(token)


def _is_size(figsize: Any) -> bool:
    try:
        width, height = map(float, figsize)
    except (TypeError, ValueError):
        return False
    return 0 < width < math.inf and 0 < height < math.inf


def _texts() -> dict[str, Any]:
    parameters: Any = mpl.rcParams
    return {name: parameters[name] for name in _TEXTS}


def points(ordinary: float, name: str = "font.size") -> float:
    """Size of a text that has so many points in a report, as the setting of this name has it."""
    parameters: Any = mpl.rcParams
    return ordinary * float(
        FontProperties(size=parameters[name]).get_size_in_points() / _STYLE["font.size"]
    )


def new_picture(width: float, height: float, title: str, subtitle: str) -> Picture:
    """A picture without axes yet, of a size in inches where texts have the size of a report's; what
    it gets is laid out below its title when it is drawn.
    """
    figure = Picture(figsize=(width * points(1), height * points(1)))
    FigureCanvasAgg(figure)
    figure.texts_look = _texts()
    left, lifted = 0.12 / width, 0.0 if title else _TITLE_LINE
    figure.end_at(1 - (0.43 - lifted) / height)
    size = points(10.5, "axes.titlesize")
    colour: Any = mpl.rcParams["axes.titlecolor"]
    look: dict[str, Any] = {"weight": "bold", "color": None if colour == "auto" else colour}
    figure.text(left, 1 - 0.07 / height, title, va="top", fontsize=size, **look)
    most = (width - 0.2) * _LETTERS
    size = max(7.0, min(8.5, most / max(1, len(subtitle))))
    shown = textwrap.shorten(subtitle, int(most / size), placeholder=" …")
    top = 1 - (0.27 - lifted) / height
    figure.text(left, top, shown, va="top", fontsize=points(size), color=GREY)
    for text in figure.texts:
        text.set_in_layout(False)
    return figure


def new_figure(
    title: str,
    subtitle: str = "",
    *,
    panels: int = 1,
    key: Sequence[Line2D] = (),
    ax: Axes | None = None,
) -> tuple[Figure, list[Axes]]:
    """A figure with axes side by side; somebody else's axes get the title and the look instead. The
    lines of the key, with their labels, are below the axes.
    """
    asked = _asked.get()
    title = title if asked.title is None else asked.title
    if ax is not None:
        return _dress(ax, title, subtitle), [ax]
    size = tuple(mpl.rcParams["figure.figsize"])
    width, height = (side / points(1) for side in size)
    width *= 1 if panels == 1 or asked.size else 0.8 * panels
    longest = max((len(str(line.get_label())) for line in key), default=0)
    ncols = max(1, int(width / WIDTH * (1 if longest > 25 else 2 if longest > 13 else 3)))
    height += max(0.0, _LEGEND_LINE * (math.ceil(len(key) / ncols) - 1))
    if min(width, height) < _LEAST_SIZE:
        least = f"{points(_LEAST_SIZE):.2f}"
        raise ValueError(
            f"figsize must be larger than the margins with texts of this size, {least} × {least} "
            f"inches; got {size}."
        )
    figure = new_picture(width, height, title, subtitle)
    figure.is_sized = asked.size is not None
    axes = figure.subplots(1, panels, squeeze=False)[0]
    if key:
        look: dict[str, Any] = {"labelspacing": 0.25, "columnspacing": 1.2, "handlelength": 2.6}
        look["fontsize"] = points(8, "legend.fontsize")
        figure.legend(handles=key, loc="outside lower left", ncols=ncols, **look)
    return figure, list(axes)


def lay_out(figure: Any) -> None:
    """Give the axes of a picture their places now, for what is placed by them."""
    if isinstance(figure, Picture):
        ConstrainedLayoutEngine(rect=(0, 0, 1, figure.top)).execute(figure)


def _dress(ax: Axes, title: str, subtitle: str) -> Any:
    """Give somebody else's axes the look of the report's, with the title above them; their
    figure.
    """
    ax.set_facecolor("white")  # lines are black, on any ground
    ax.set_axisbelow(True)
    ax.grid(visible=True, color=mpl.rcParams["grid.color"], lw=mpl.rcParams["grid.linewidth"])
    ax.spines[["top", "right"]].set_visible(False)
    for label in (ax.xaxis.label, ax.yaxis.label):
        label.set(parse_math=False)
    size = points(8)
    rows = textwrap.wrap(subtitle, _letters(ax, size))
    _set_title(ax, title, 1.3 * size * len(rows))
    if rows:
        text = ax.annotate(
            "\n".join(rows),
            (0, 1),
            (0, 3),
            "axes fraction",
            "offset points",
            va="bottom",
            fontsize=size,
        )
        text.set(color=ax.title.get_color(), gid=_SUBTITLE, in_layout=False)
    return ax.figure


def _set_title(ax: Axes, title: str, room: float) -> None:
    """Set the title of somebody else's axes above so many points, which have to be kept free
    without one, too.
    """
    size = points(_STYLE["font.size"], "axes.titlesize")
    shown = "\n".join(textwrap.wrap(title, _letters(ax, size))) or " "
    ax.set_title(
        shown,
        loc="left",
        va="bottom",
        pad=4 + room - (0 if title else 1.2 * size),
        parse_math=False,
    )


def _letters(ax: Axes, size: float, *, vertical: bool = False) -> int:
    """Letters of a size in points that an axes has room for in a line."""
    return max(10, round(_inches(ax)[vertical] * _LETTERS / size))


def _inches(ax: Axes) -> tuple[float, float]:
    box = ax.get_window_extent()
    return box.width / ax.figure.dpi, box.height / ax.figure.dpi


def legend(figure: Figure, ax: Axes, ncols: int = 0) -> None:
    """The legend of an axes, in a row below the subtitle; of as many columns as the width allows
    unless told.
    """
    handles, labels = ax.get_legend_handles_labels()
    if not handles:
        return
    if not isinstance(figure, Picture):
        _legend_above(ax, handles, labels)
        return
    size = points(8.5, "legend.fontsize")
    most = round(figure.get_size_inches()[0] * _LETTERS / size)
    ncols = ncols or _columns(labels, most)
    look: dict[str, Any] = {"columnspacing": 1.0, "handlelength": 1.6, "borderpad": 0}
    look |= {"loc": "upper left", "bbox_to_anchor": (0, figure.top), "fontsize": size}
    figure.legend(handles, labels, ncols=ncols, **look)
    height = 1.44 * size * math.ceil(len(labels) / ncols) / 72
    figure.end_at(figure.top - height / figure.get_size_inches()[1])


def _columns(labels: Sequence[str], most: int) -> int:
    """Columns of a legend, in whose lines there is room for so many letters."""
    if sum(len(label) + 4 for label in labels) <= most:
        return len(labels)
    return max(1, most // (max(map(len, labels)) + 6))


def _legend_above(ax: Axes, handles: Sequence[Artist], names: Sequence[str]) -> None:
    """A legend between the subtitle and axes of somebody else's figure."""
    size = points(_STYLE["font.size"], "legend.fontsize")
    ncols = _columns(names, _letters(ax, size))
    height = 1.44 * size * math.ceil(len(names) / ncols) + 2
    look: dict[str, Any] = {
        "frameon": True,
        "facecolor": "white",
        "edgecolor": "none",
        "framealpha": 1,
    }
    look |= {
        "columnspacing": 1.0,
        "handlelength": 1.5,
        "labelspacing": 0.2,
        "borderpad": 0.1,
        "borderaxespad": 0.2,
    }
    box = ax.legend(handles, names, loc="lower left", bbox_to_anchor=(0, 1), ncols=ncols, **look)
    box.set_in_layout(False)  # the title, which makes room for it, is
    room = height
    for text in ax.texts:
        if text.get_gid() == _SUBTITLE:
            text.set_y(3 + height)
            room += 1.3 * float(text.get_fontsize()) * (text.get_text().count("\n") + 1)
    _set_title(ax, ax.get_title("left").replace("\n", " ").strip(), room)


@lru_cache(maxsize=8)
def _renderer(width: int, height: int, dpi: float, thread: int) -> RendererAgg:
    """A renderer for figures of one size: it remembers the extents of texts, most of which are in
    many of them.
    """
    return RendererAgg(width, height, dpi)


def png(figure: Figure, dpi: float = DPI) -> Png:
    """The picture as a PNG of at most 256 colours, its width and height."""
    figure.set_dpi(dpi)
    width, height = (int(side) for side in figure.canvas.get_width_height(physical=True))
    renderer = _renderer(width, height, dpi, get_ident())
    renderer.clear()
    figure.draw(renderer)
    image = Image.fromarray(np.asarray(renderer.buffer_rgba())).convert("RGB")
    # the default is slow
    image = image.quantize(256, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
    # white stays white
    image.putpalette([255 if level == 254 else level for level in image.getpalette() or ()])
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue(), image.width, image.height


def save(data: FigureData, folder: Path) -> bytes:
    """Write PNG, SVG and CSV; the same numbers give the same bytes. Returns the PNG."""
    data.numbers.to_csv(folder / f"{data.name}.csv", lineterminator="\n")
    picture, *_ = png(data.figure)
    data.figure.set_layout_engine("none")  # it is laid out
    data.figure.savefig(
        folder / f"{data.name}.svg", dpi=DPI, metadata={"Date": None, "Creator": None}
    )
    (folder / f"{data.name}.png").write_bytes(picture)
    return picture


def tick_label(number: float, _: object = None) -> str:
    """The label of a tick; ticks are round numbers already."""
    return formatting.short(number, 6)


def thinned(count: int, most: int) -> list[int]:
    """At most ``most`` of the positions 0 … count - 1, evenly spaced, the first and the last
    included.
    """
    return [round(at) for at in np.linspace(0, count - 1, min(count, most))]


class StepAxis:
    """An axis of ascending steps, logarithmic in 1 + step if the first ones are much closer
    together than most.
    """

    def __init__(self, steps: Sequence[int], *, is_log: bool | None = None) -> None:
        gaps = np.diff(np.asarray(steps, dtype=float))
        is_denser = bool(len(gaps) and steps[0] >= 0 and np.median(gaps) >= 3 * gaps[0])
        self.is_log = is_denser if is_log is None else is_log
        self.first = steps[0]
        self.last = steps[-1]
        self.label = "optimizer step" + (" (log scale)" if self.is_log else "")

    def position(self, steps: Sequence[int]) -> Array:
        """Positions of steps along the axis: 0 for its first step, 1 for its last."""
        scaled = (np.log1p if self.is_log else np.asarray)(
            np.array([self.first, self.last, *steps], dtype=float)
        )
        return (scaled[2:] - scaled[0]) / (scaled[1] - scaled[0] or 1)

    def ticks(self, digits: Sequence[int] = (1,)) -> list[int]:
        """Round steps to name; on a logarithmic axis, steps of one of the digits followed by
        zeros.
        """
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
    ax.xaxis.set_major_formatter(tick_label)
    if float(steps[0]) < float(steps[-1]):
        ax.set_xlim(steps[0], steps[-1])


def few_ticks(ax: Axes) -> None:
    """Leave out minor ticks, and every second one of five or more: ticks take most of the time that
    drawing takes.
    """
    ax.minorticks_off()
    for axis in (ax.xaxis, ax.yaxis):
        low, high = sorted(axis.get_view_interval())
        ticks = [tick for tick in axis.get_majorticklocs() if low <= tick <= high]
        axis.set_major_locator(ticker.FixedLocator(ticks[:: 2 if len(ticks) >= 5 else 1]))


def round_ticks(ax: Axes) -> None:
    """Few ticks on both axes, with short labels."""
    ax.locator_params(nbins=5)
    ax.xaxis.set_major_formatter(tick_label)
    ax.yaxis.set_major_formatter(tick_label)


def layer_axis(ax: Axes, layers: Sequence[str], *, vertical: bool = False, most: int = 9) -> None:
    """Put layers on an axis, and name so few of them that the names do not overlap."""
    labels, pattern = layer_labels(layers)
    figure = ax.figure
    if not isinstance(figure, Picture) or figure.is_sized:  # fewer where axes are smaller
        most = max(3, round(most * min(1, _inches(ax)[vertical] / points(_UNLAID_AXES[vertical]))))
    longest = max(map(len, labels))
    named = layer_ticks(
        layers, most if vertical else max(3, min(most, 5 * most // max(1, longest)))
    )
    axis = ax.yaxis if vertical else ax.xaxis
    axis.set_ticks(named, [labels[i] for i in named], parse_math=False)
    if vertical:
        ax.set_ylabel("layer" if longest <= 6 else "", labelpad=2)
    else:
        are_blocks = any(label.rpartition(" ")[2].isdecimal() for label in labels)
        are_counted = any(label.startswith("#") for label in labels)
        meaning = (
            " (numbers are blocks)" if are_blocks else " (#0 is the first)" if are_counted else ""
        )
        ax.set_xlabel(f"layer: * in {pattern}" if pattern else f"layer{meaning}")


def value_axis(
    ax: Axes,
    term: Term,
    values: Array,
    baseline: pd.Series | pd.DataFrame | None = None,
    layers: Sequence[str] = (),
    errors: Array | float = np.nan,
) -> None:
    """Put a metric on the y axis, logarithmic where it spans orders of magnitude, and draw the
    baseline as dashes.

    A baseline (by abscissa) of which most lies so far away that showing it would squeeze the
    measured values is only named in the legend. Layers (of the columns of ``values``) that are no
    blocks, if they would leave these less than 30 % of the axis, are named at the margin, with
    their values. Bands of errors are spanned unless they would squeeze the lines.
    """
    finite = values[np.isfinite(values)]
    low, high, _ = colour_range(layers, values)
    is_log = term.is_logarithmic(np.array([low, high]))
    name = term.name + (" (log scale)" if is_log else "")
    size = float(ax.yaxis.label.get_fontsize())
    if isinstance(ax.figure, Picture):
        ax.set_ylabel(name, fontsize=size * _LONGEST_LABEL / max(_LONGEST_LABEL, len(name)))
    else:
        ax.set_ylabel("\n".join(textwrap.wrap(name, _letters(ax, size, vertical=True))))
    span = (high - low) or abs(high) or 1.0
    room = (low / 3, high * 3) if is_log else (low - 0.6 * span, high + 0.6 * span)

    def extended(more: Array, low: float, high: float) -> tuple[float, float]:
        near = more[(more >= room[0]) & (more <= room[1])]
        return min([low, *near]), max([high, *near])

    inner = (low, high)
    low, high = extended(finite, *_widened(inner, inner, finite, is_log=is_log))
    room = min(room[0], low), max(room[1], high)
    ends = np.array([values - errors, values + errors])[:, (values >= low) & (values <= high)]
    ends = ends[np.isfinite(ends)].clip(
        *((low / 10, high * 10) if is_log else (low - 2 * span, high + 2 * span))
    )
    low, high = min([low, *ends]), max([high, *ends])
    known = np.array([]) if baseline is None else baseline.to_numpy().ravel()
    known = known[np.isfinite(known)]
    if baseline is not None and known.size:
        middle = np.median(known)
        if room[0] <= middle <= room[1]:
            low, high = extended(known, *_widened(inner, (low, high), known, is_log=is_log))
            for i, column in enumerate(baseline.to_numpy().reshape(len(baseline), -1).T):
                ax.plot(baseline.index, column, label="" if i else GAUSSIAN, **BASELINE)
        else:
            ax.plot(
                [],
                label=f"{GAUSSIAN}: {_range_text(known)} {'↑' if middle > high else '↓'}",
                **BASELINE,
            )
    below, above = (
        0.12 if is_named else 0.05 for is_named in _name_beyond(ax, layers, values, low, high)
    )
    if is_log:
        decades = np.log10(high) - np.log10(low)
        # before the scale looks for limits
        ax.set_ylim(low / 10 ** (decades * below), high * 10 ** (decades * above))
        ax.set_yscale("log")
        log_ticks(ax, low, high)
    else:
        ax.yaxis.set_major_locator(ticker.MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
        ax.yaxis.set_major_formatter(tick_label)
        length = max((high - low) or abs(high) or 1.0, _LEAST_LENGTH)
        ax.set_ylim(low - length * below, high + length * above)


def colour_range(layers: Sequence[str], values: Array) -> tuple[float, float, str]:
    """The range of the blocks, if their values differ, else of all values, shape (steps, layers).

    And the ends beyond which values lie: ``"neither"``, ``"min"``, ``"max"`` or ``"both"``.
    """
    blocks = {block for blocks in blocks_by_side(layers).values() for block in blocks}
    finite = values[np.isfinite(values)]
    inside = values[:, [layer in blocks for layer in layers]] if blocks else finite
    inside = inside[np.isfinite(inside)]
    if not inside.size or inside.min() == inside.max():
        inside = finite
    low, high = (float(inside.min()), float(inside.max())) if inside.size else (0.0, 1.0)
    ends = {
        (False, False): "neither",
        (True, False): "min",
        (False, True): "max",
        (True, True): "both",
    }
    return low, high, ends[bool((finite < low).any()), bool((finite > high).any())]


def _widened(
    inner: tuple[float, float], ends: tuple[float, float], values: Array, *, is_log: bool
) -> tuple[float, float]:
    """A range with values beyond both of its ends, or else beyond one, of which the inner one is
    still a good part.
    """
    values = values[values > 0] if is_log else values
    low, high = ends
    least, most = float(values.min(initial=low)), float(values.max(initial=high))

    def length(low: float, high: float) -> float:
        return math.log10(high) - math.log10(low) if is_log else high - low

    wider = ((least, most), (low, most), (least, high))
    return next((each for each in wider if length(*inner) >= _FILLED * length(*each)), ends)


def _name_beyond(
    ax: Axes, layers: Sequence[str], values: Array, low: float, high: float
) -> list[bool]:
    """Name the layers with values beyond the axis at its lower and upper margin; whether there are
    any.
    """
    labels, _ = layer_labels(layers)
    columns = {
        label: column[np.isfinite(column)] for label, column in zip(labels, values.T, strict=False)
    }
    are_named = []
    for y, va, arrow, sign, bound in (
        (0.015, "bottom", "↓", -1, low),
        (0.985, "top", "↑", 1, high),
    ):
        outside = {label: column[sign * column > sign * bound] for label, column in columns.items()}
        names = [
            f"{label} {_range_text(column)}" for label, column in outside.items() if column.size
        ]
        if names:
            text = ax.text(
                0.5,
                y,
                f"{arrow} beyond: {listed(names, 2)}",
                transform=ax.transAxes,
                ha="center",
                va=va,
            )
            text.set(fontsize=points(7.5), color=GREY, zorder=5)
            text.set_bbox({"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1})
        are_named.append(bool(names))
    return are_named


def _range_text(values: Array) -> str:
    return " to ".join(
        dict.fromkeys(formatting.short(value) for value in (values.min(), values.max()))
    )


def log_ticks(ax: Axes, low: float, high: float) -> None:
    """Set the ticks of a logarithmic y axis: also at 2 and 5 where it spans less than three
    decades.
    """
    ax.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5) if high / low < 1000 else (1,)))
    ax.yaxis.set_major_formatter(tick_label)
    ax.yaxis.set_minor_formatter(ticker.NullFormatter())


def lines(
    ax: Axes,
    x: Array,
    rows: Array,
    colours: Array,
    dashes: Sequence[str] = "-",
    errors: Array | None = None,
) -> None:
    """Draw lines over the same abscissae, shape (lines, len(x)), with gaps where they are not
    finite, and bands.
    """
    for row, error, colour in zip(
        rows, rows * np.nan if errors is None else errors, colours, strict=True
    ):
        band(ax, x, row, error, colour)
    segments = [np.column_stack((x, row)) for row in rows]
    collection = LineCollection(
        segments, colors=colours, linewidths=1.1, linestyles=dashes, alpha=0.9
    )
    ax.add_collection(collection, autolim=False)
    if rows.size <= 800:
        ax.scatter(
            np.tile(x, len(rows)),
            rows.ravel(),
            s=9,
            color=np.repeat(colours, len(x), axis=0),
            lw=0,
            zorder=2,
        )


def mean_lines(ax: Axes, means: pd.DataFrame, errors: pd.DataFrame) -> None:
    """Draw the means over blocks, of encoder and decoder apart, with their bands."""
    for name, dashes in zip(means, MEAN_DASHES, strict=False):
        ax.plot(means[name], color="black", lw=2.0, ls=dashes, label=name)
        band(
            ax,
            means.index.to_numpy(dtype=float),
            means[name].to_numpy(),
            errors[name].to_numpy(),
            "black",
        )


def band(ax: Axes, x: Array, values: Array, errors: Array, colour: Any, alpha: float = 0.2) -> None:
    """Draw a band of one error to each side of a line, where it is known."""
    if np.isfinite(errors).any():
        ax.fill_between(
            x, values - errors, values + errors, color=colour, alpha=alpha, lw=0.8, zorder=1.5
        )


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
    bar.set_ticks(axis.position(axis.ticks()), labels=[tick_label(step) for step in axis.ticks()])
    return time_colours(steps)


def time_colours(steps: Sequence[int]) -> Array:
    """The colours of steps, from violet for the first to orange for the last."""
    return TIME(StepAxis(steps).position(steps))


def count_bar(ax: Axes, least: float, most: float, cmap: str) -> LogNorm:
    """Add a colour bar for how often token types occur; the scale of its colours."""
    most = max(least + 1, most)  # which is not a number where there are no token types
    norm = LogNorm(least, most)
    log_ticks(
        value_bar(ax, ScalarMappable(norm, cmap), "occurrences n (log scale)").ax, least, most
    )
    return norm


def value_bar(ax: Axes, mappable: ScalarMappable, label: str, extend: str = "neither") -> Any:
    """Add a colour bar to the right of an axes; in somebody else's figure it takes room from the
    axes.
    """
    figure: Any = ax.figure
    place: dict[str, Any] = {"ax": ax, "fraction": 0.05, "pad": 0.03, "aspect": 22}
    bar = figure.colorbar(mappable, **place, extend=extend, extendfrac=0.04)
    sizes = (8.5, 8) if isinstance(figure, Picture) else (_STYLE["font.size"], _STYLE["font.size"])
    look: dict[str, Any] = {"fontsize": points(sizes[0], "axes.labelsize"), "labelpad": 4}
    bar.set_label(label, **look, color=ax.yaxis.label.get_color())
    bar.outline.set_visible(False)
    bar.ax.yaxis.set_major_formatter(tick_label)
    bar.ax.yaxis.set_minor_formatter(ticker.NullFormatter())
    size = points(sizes[1], "ytick.labelsize")
    bar.ax.tick_params(labelsize=size, length=2, pad=1.5, labelcolor=ax.yaxis.label.get_color())
    bar.ax.grid(visible=False)
    return bar


@session_style()
def draw_values(values: Mapping[str, float], ax: Axes | None) -> tuple[Any, Any]:
    """Draw a row for each key, with the value as a point and as a number; the figure, pyplot's if
    new, and its axes.
    """
    if ax is None:
        import matplotlib.pyplot as plt

        _, ax = plt.subplots(figsize=(6.4, 0.9 + 0.24 * len(values)), layout="constrained")
    at = range(len(values))
    finite = [value if math.isfinite(value) else math.nan for value in values.values()]
    ax.hlines(at, 0, finite, color=RUNS[0], lw=1, alpha=0.5)
    ax.plot(finite, at, ls="", marker="o", ms=5, color=RUNS[0])
    ax.axvline(0, color="grey", lw=0.8)
    known = [value for value in finite if math.isfinite(value)]
    low, high = min([0.0, *known]), max([0.0, *known])
    if max(-low, high) > 5:
        ax.set_xscale("symlog", linthresh=0.01, linscale=0.3)
        powers = [10.0**k for k in range(0, 308, 2)]
        ax.set_xticks([0, *(x for power in powers for x in (-power, power) if low <= x <= high)])
        ax.set_xlim(3 * low or -0.01, 100 * high or 0.01)  # with room for the numbers
    else:
        span = (high - low) or 1
        ax.set_xlim(low - 0.05 * span, high + 0.25 * span)
    for y, value in enumerate(finite):
        text, x = (
            ("–", 0)
            if math.isnan(value)
            else (formatting.with_minus(f"{value:.4g}"), max(value, 0))
        )
        ax.annotate(text, (x, y), (6, 0), textcoords="offset points", va="center", fontsize="small")
    ax.set_yticks(at, list(values), fontsize="small", parse_math=False)
    ax.set_ylim(len(values) - 0.5, -0.5)
    ax.spines[["top", "right"]].set_visible(False)
    return ax.figure, ax


@session_style()
def draw_over_steps(values: Mapping[str, Sequence[float]], ax: Axes | None) -> tuple[Any, Any]:
    """Draw a line for each key; several without axes in a panel each. The figure, pyplot's if new,
    and its axes.
    """
    import matplotlib.pyplot as plt

    if ax is None and len(values) > 1:
        ncols = min(4, len(values))
        nrows = math.ceil(len(values) / ncols)
        size = (2.7 * ncols, 0.4 + 1.7 * nrows)
        figure, axes = plt.subplots(
            nrows, ncols, figsize=size, sharex=True, squeeze=False, layout="constrained"
        )
        for panel, (key, of_key) in zip(axes.flat, values.items(), strict=False):
            draw_over_steps({key: of_key}, panel)
            panel.set_title(key, loc="center", parse_math=False)
            panel.set(xlabel="Step" if panel in axes[-1] else "", ylabel="")
        for panel in axes.flat[len(values) :]:
            panel.set_axis_off()
        return figure, axes
    if ax is None:
        _, ax = plt.subplots(layout="constrained")
    for key, of_key in values.items():
        ax.plot(of_key, marker="o", ms=4, label=key)
    drawn = np.concatenate([np.asarray(line.get_ydata(), dtype=float) for line in ax.lines])
    value_axis(
        ax, glossary.term(key)._replace(name=key) if len(values) == 1 else Term("", "", ""), drawn
    )
    ax.xaxis.set_major_locator(ticker.MaxNLocator(5, integer=True))
    ax.set_xlabel("Step")
    if len(values) > 1:
        _legend_above(ax, *ax.get_legend_handles_labels())
    return ax.figure, ax
