"""The look of all pictures: figures, legends, axes of steps, layers and values, lines, colours, and
files.
"""

import io
import math
import textwrap
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib import ticker
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.cm import ScalarMappable
from matplotlib.collections import LineCollection
from matplotlib.colors import FuncNorm, LinearSegmentedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.text import Annotation
from numpy.typing import NDArray
from pandas.api.types import is_numeric_dtype
from PIL import Image

from embedgeo import formatting
from embedgeo.formatting import listed, write_csv
from embedgeo.glossary import GAUSSIAN, Term
from embedgeo.layer_names import blocks_by_side, layer_labels, layer_ticks

Array = NDArray[np.float64]
Png = tuple[bytes, int, int]  # a picture, its width and height

DPI = 170
GREY = "#444444"
UNKNOWN_COLOUR = "#d0d0d0"
RUNS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000", "#7a5195")
_LOG_STEPS = np.log1p, np.expm1  # and its inverse
DASHES = "-", (0, (5, 1.5))
"""Of the means over the blocks of an encoder and of its decoder."""
BASELINE: dict[str, Any] = {"color": "black", "ls": (0, (4, 2)), "lw": 1.3}
DEPTH = LinearSegmentedColormap.from_list(
    "depth", mpl.colormaps["viridis"](np.linspace(0, 0.8, 256))
)
TIME = LinearSegmentedColormap.from_list("time", mpl.colormaps["plasma"](np.linspace(0, 0.82, 256)))
"""Sequential maps of even lightness, without the end that is too pale for lines on either ground.
"""

FEW = 800
"""Values of a kind of lines that have marks."""
_FAMILIES = "layer", "step"  # kinds of which there are many lines
_FEW_MARKS = 40  # values of a line that all have marks
_LONGEST_NAME = 60  # letters of a name in a legend
_REACH = 1.2  # how far an axis goes beyond the range of the blocks, over this range
_LEAST_LENGTH = 1e-300  # length of an axis of which there are fractions
_LETTERS = 140  # in an inch, over their size in points
_LEGEND_LINE = 0.17  # inches of a line of a legend

_STYLE: dict[str, Any] = {
    "figure.figsize": [4.6, 3.5],
    "figure.titlesize": "medium",
    "figure.titleweight": "bold",
    "font.size": 9.5,
    "axes.titlesize": "medium",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "legend.fontsize": "small",
    "legend.columnspacing": 1.2,
    "legend.labelspacing": 0.25,
    "axes.unicode_minus": False,
    "text.parse_math": False,  # names are the users'
    "svg.hashsalt": "embedgeo",
    "svg.fonttype": "none",
}


class Lines(NamedTuple):
    """Lines of one kind in a figure, for a page that draws them again and names what the reader
    points at.

    Attributes:
        kind: of what their names are: "layer", "step" or "run"; "mean", "gaussian" or "last" for
            single lines; "all" for lines of all rows; "earlier" for the two ends of a range.
        values: a column a line, under its name; the index are the steps, layers or depths.
        colours: one a line, or one for all.
        errors: half the heights of their bands, in the order of the values.
        dashes: one a line, or more.
        width: in points.
        markers: of values, one a line, or more.
    """

    kind: str
    values: pd.DataFrame
    colours: Any
    errors: pd.DataFrame | None = None
    dashes: Sequence[Any] = ("-",)
    width: float = 1.1
    markers: Sequence[str] = ("",)


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
    """A figure that pyplot does not know and a notebook shows."""

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        self.savefig(buffer)
        return buffer.getvalue()


@contextmanager
def style() -> Iterator[None]:
    """The look of all figures."""
    with mpl.rc_context(), warnings.catch_warnings():
        # in names, which are the users'
        warnings.filterwarnings("ignore", "Glyph .* missing from font")
        mpl.rcdefaults()
        mpl.rcParams.update(_STYLE)  # type: ignore[arg-type]
        yield


@contextmanager
def resized(width: float, height: float) -> Iterator[None]:
    """Figures are as wide and high, in inches."""
    with mpl.rc_context({"figure.figsize": [width, height]}):
        yield


def new_figure(title: str, subtitle: str = "") -> tuple[Figure, Axes]:
    """A figure with axes below a title and a subtitle."""
    width, _ = mpl.rcParams["figure.figsize"]
    own = Picture(layout="constrained")
    FigureCanvasAgg(own)
    rows = textwrap.wrap(subtitle, _letters(own))
    # constrained layout leaves room for lines of the title, before which the subtitle stands
    shown = own.suptitle(title + "\n" * len(rows), x=0.1 / width, ha="left")
    below: dict[str, Any] = {"xycoords": shown, "va": "bottom", "in_layout": False}
    look: dict[str, Any] = {"fontsize": "small", "color": GREY, "annotation_clip": False}
    own.add_artist(Annotation("\n".join(rows), (0, 0), **below, **look))
    return own, own.subplots()


def _letters(figure: Figure) -> int:
    """Letters that a figure has room for in a line."""
    return max(10, round(figure.get_figwidth() * _LETTERS / float(mpl.rcParams["font.size"])))


def legend(ax: Axes) -> None:
    """The legend of an axes: below it, in as many columns as the width allows."""
    handles = ax.get_legend_handles_labels()[0]
    figure: Any = ax.figure
    if not handles:
        return
    longest = max(len(str(each.get_label())) for each in handles)
    ncols = max(1, min(len(handles), _letters(figure) // (longest + 7)))
    figure.legend(handles=handles, loc="outside lower left", ncols=ncols)
    more = math.ceil(len(handles) / ncols) - 1
    figure.set_figheight(figure.get_figheight() + _LEGEND_LINE * more)


def png(figure: Figure, dpi: float = DPI) -> Png:
    """The picture as a PNG of at most 256 colours, its width and height."""
    figure.set_dpi(dpi)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    image = Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")
    # the default is slow
    image = image.quantize(256, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
    # white stays white
    image.putpalette([255 if level == 254 else level for level in image.getpalette() or ()])
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue(), image.width, image.height


def save(data: FigureData, folder: Path) -> bytes:
    """Write PNG, SVG and CSV; the same numbers give the same bytes. Returns the PNG."""
    write_csv(data.numbers, folder / f"{data.name}.csv")
    picture, *_ = png(data.figure)
    data.figure.set_layout_engine("none")  # it is laid out
    FigureCanvasSVG(data.figure).print_svg(  # savefig would draw it once more
        folder / f"{data.name}.svg", metadata={"Date": None, "Creator": None}
    )
    (folder / f"{data.name}.png").write_bytes(picture)
    return picture


def tick_label(number: float, _: object = None) -> str:
    """The label of a tick; ticks are round numbers already."""
    return formatting.short(number, 6)


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

    def ticks(self, digits: Sequence[int] = (1,)) -> list[int]:
        """Round steps to name; on a logarithmic axis, steps of one of the digits followed by
        zeros.
        """
        if self.is_log:
            candidates = [0, *(digit * 10**k for k in range(19) for digit in digits)]
        else:
            locator = ticker.MaxNLocator(6, steps=[1, 2, 5, 10], integer=True)
            candidates = sorted({*map(int, locator.tick_values(self.first, self.last))})
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
        ax.set_xscale("function", functions=_LOG_STEPS)
        ax.xaxis.set_minor_locator(ticker.FixedLocator(axis.ticks((2, 5))))
    ax.xaxis.set_major_locator(ticker.FixedLocator(axis.ticks()))
    ax.xaxis.set_major_formatter(tick_label)
    if float(steps[0]) < float(steps[-1]):
        ax.set_xlim(steps[0], steps[-1])


def layer_axis(ax: Axes, layers: Sequence[str], *, vertical: bool = False, most: int = 9) -> None:
    """Put layers on an axis, and name so few of them that the names do not overlap."""
    labels = layer_labels(layers)
    longest = max(map(len, labels))
    named = layer_ticks(
        layers, most if vertical else max(3, min(most, 5 * most // max(1, longest)))
    )
    axis = ax.yaxis if vertical else ax.xaxis
    axis.set_ticks(named, [labels[i] for i in named], parse_math=False)
    if vertical:
        ax.set_ylabel("layer" if longest <= 6 else "")
        return
    are_blocks = any(label.rpartition(" ")[2].isdecimal() for label in labels)
    ax.set_xlabel("layer (numbers are blocks)" if are_blocks else "layer")


def value_axis(
    ax: Axes,
    term: Term,
    values: Array | pd.Series | pd.DataFrame,
    baseline: pd.DataFrame | None = None,
    layers: Sequence[str] = (),
    errors: Array | pd.DataFrame | float = np.nan,
    others: Mapping[str, pd.DataFrame] | None = None,
) -> None:
    """Put a metric on the y axis, logarithmic where it spans orders of magnitude, and draw the
    baseline as dashes.

    The axis spans the blocks, and what else lies so near that the blocks still fill a good part of
    it. Layers (of the columns of ``values``), a baseline (by abscissa) and ``others``, by what they
    are, with values that lie farther away are named in the legend.
    """
    values = np.asarray(values, dtype=float)
    errors = np.asarray(errors, dtype=float)
    low, high, _ = colour_range(layers, values)
    is_log = term.is_logarithmic(low, high)
    scale: Callable[[Any], Array] = np.log10 if is_log else np.asarray
    scaled = " (log\N{NO-BREAK SPACE}scale)" * is_log
    ax.set_ylabel(textwrap.fill(term.name + scaled, 36))
    first, last = (float(end) for end in scale(np.array([low, high])))
    reach = _REACH * ((last - first) or abs(last) or 1.0)

    def near(column: Array) -> Array:
        with np.errstate(invalid="ignore", divide="ignore"):
            at = scale(column)
        return at[(at >= first - reach) & (at <= last + reach)]

    more = [(label, each.to_numpy(dtype=float).ravel()) for label, each in (others or {}).items()]
    if baseline is not None:
        known = baseline.dropna(axis=1, how="all")
        expected = known.to_numpy().ravel()
        for line in ax.plot(known, **BASELINE)[:1]:
            line.set_label(GAUSSIAN if near(expected).size else "")
        more.append((GAUSSIAN, expected))
    beyond = [
        f"{label} {_range_text(finite)}"
        for label, column in (*zip(layer_labels(layers), values.T, strict=False), *more)
        if near(finite := column[np.isfinite(column)]).size < finite.size
    ]
    if beyond:
        ax.plot([], ls="", label=f"beyond: {listed(beyond, 2)}")
    drawn = values, values - errors, values + errors, *(column for _, column in more)
    at = np.concatenate([[first, last], *map(near, drawn)])
    bottom = at.min()
    top = at.max()
    margin = 0.05 * max((top - bottom) or abs(top) or 1.0, _LEAST_LENGTH)
    if is_log:
        # before the scale looks for limits
        ax.set_ylim(10 ** (bottom - margin), 10 ** (top + margin))
        ax.set_yscale("log")
        log_ticks(ax, 10**bottom, 10**top)
    else:
        ax.yaxis.set_major_locator(ticker.MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
        ax.yaxis.set_major_formatter(tick_label)
        ax.set_ylim(bottom - margin, top + margin)


def colour_range(layers: Sequence[str], values: Array) -> tuple[float, float, str]:
    """The range of the blocks, if their values differ, else of all values, shape (steps, layers);
    columns beyond the layers are of means over blocks.

    And the ends beyond which values lie: ``"neither"``, ``"min"``, ``"max"`` or ``"both"``.
    """
    blocks = {block for blocks in blocks_by_side(layers).values() for block in blocks}
    finite = values[np.isfinite(values)]
    is_inside = [layer in blocks for layer in layers]
    is_inside += [True] * (values.shape[-1] - len(layers))
    inside = values[:, is_inside] if blocks else finite
    inside = inside[np.isfinite(inside)]
    if not inside.size or inside.min() == inside.max():
        inside = finite
    low, high = (float(inside.min()), float(inside.max())) if inside.size else (0.0, 1.0)
    is_below = bool((finite < low).any())
    is_above = bool((finite > high).any())
    ends = ("both" if is_below else "max") if is_above else "min" if is_below else "neither"
    return low, high, ends


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


def lines(ax: Axes, *kinds: Lines) -> None:
    """Draw lines with gaps where they are not finite, and their bands; layers and steps are thin
    and have no names in the legend, and runs, each of which has its own steps, have no gaps.
    """
    for each in kinds:
        if each.kind in _FAMILIES and each.values.size:
            _family(ax, each)
        alpha = max(0.06, min(0.2, 0.5 / max(1, len(each.values.columns))))
        looks = zip(each.values, cycle(each.colours), cycle(each.dashes), cycle(each.markers))
        for name, colour, dashes, marker in looks:
            is_drawn = each.values[name].notna() | (each.kind != "run")
            values = each.values[name][is_drawn]
            if each.errors is not None:
                is_thin = each.kind in _FAMILIES
                band(ax, values, each.errors[name][is_drawn], colour, 0.2 if is_thin else alpha)
            if each.kind not in _FAMILIES:
                ax.plot(
                    _abscissae(values),
                    values,
                    color=colour,
                    ls=dashes,
                    lw=each.width,
                    marker=marker,
                    ms=3.5,
                    markevery=1 if len(values) <= _FEW_MARKS else 0.06,  # of the diagonal
                    label=_legend_name(str(name)),
                )


def _legend_name(name: str) -> str:
    """A name without letters that cannot be drawn, in its length; matplotlib hides one that begins
    with an underscore.
    """
    half = _LONGEST_NAME // 2
    shown = formatting.printable(name)
    shown = shown if len(shown) <= _LONGEST_NAME else f"{shown[: half - 1]}…{shown[-half:]}"
    return f" {shown}" if shown.startswith("_") else shown


def _family(ax: Axes, family: Lines) -> None:
    """Draw many lines at once; few of them have marks."""
    x = _abscissae(family.values)
    values = family.values.to_numpy(dtype=float)
    segments = [np.column_stack((x, column)) for column in values.T]
    collection = LineCollection(segments, colors=family.colours, linewidths=1.1, alpha=0.9)
    ax.add_collection(collection, autolim=False)
    if values.size <= FEW:
        marks = np.repeat(family.colours, len(x), axis=0)
        ax.scatter(np.tile(x, len(segments)), values.T.ravel(), s=9, color=marks, lw=0, zorder=2)


def _abscissae(values: pd.Series | pd.DataFrame) -> Array:
    """Where the rows of a table are drawn: at their numbers, or at their places."""
    at = values.index if is_numeric_dtype(values.index) else range(len(values))
    return np.array(at, dtype=float)


def band(ax: Axes, values: pd.Series, errors: pd.Series, colour: Any, alpha: float) -> None:
    """Draw a band of one error to each side of a line, where it is known."""
    if np.isfinite(errors).any():
        low = values - errors
        high = values + errors
        look: dict[str, Any] = {"color": colour, "alpha": alpha, "lw": 0.8, "zorder": 1.5}
        ax.fill_between(_abscissae(values), low, high, **look)


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
    """Add a colour bar for steps; their colours, from violet to orange for the last."""
    axis = StepAxis(steps)
    ends = steps[0], steps[-1]
    norm = FuncNorm(_LOG_STEPS, *ends) if axis.is_log else Normalize(*ends)
    bar = value_bar(ax, ScalarMappable(norm, TIME), axis.label)
    bar.set_ticks(axis.ticks())
    colours: Array = TIME(norm(np.array(steps, dtype=float)))
    return colours


def value_bar(ax: Axes, mappable: ScalarMappable, label: str, extend: str = "neither") -> Any:
    """Add a colour bar to the right of an axes."""
    figure: Any = ax.figure
    bar = figure.colorbar(mappable, ax=ax, fraction=0.05, pad=0.03, aspect=22, extend=extend)
    bar.set_label(label, fontsize="small", color=ax.yaxis.label.get_color())
    bar.outline.set_visible(False)
    bar.ax.yaxis.set_major_formatter(tick_label)
    bar.ax.yaxis.set_minor_formatter(ticker.NullFormatter())
    bar.ax.tick_params(labelsize="small", length=2, labelcolor=ax.yaxis.label.get_color())
    bar.ax.grid(visible=False)
    return bar
