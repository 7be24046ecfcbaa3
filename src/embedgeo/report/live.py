"""Pictures for loggers, beside the scalars, while a model trains."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import cycle
from time import monotonic
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import ListedColormap, to_rgba
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator

from embedgeo.formatting import short
from embedgeo.glossary import HEADLINES, Term, term
from embedgeo.layer_names import blocks_by_side, is_input, layer_labels
from embedgeo.report.drawing import ACCENT, DEPTH, Array, FigureData, layer_axis, lines, step_axis, value_axis
from embedgeo.report.runs import Run
from embedgeo.results.records import Record

WIDTH, HEIGHT = 3.5, 3.3
"""In inches: TensorBoard's image cards are 350 pixels wide."""

_LEFT, _RIGHT, _BOTTOM, _TOP = 0.56, 0.68, 0.47, 0.54
_STRIP, _GAP = 0.38, 0.1
_MOST_BLOCKS_SHARE = 0.6


def curves(run: Run, metric: str) -> FigureData:
    """A metric against the step: a line for each layer, from dark at the first block to bright at the last.

    `embed` is drawn in a strip below, on a scale of its own; and so is the final norm where it would squeeze the lines
    of the blocks. Means of the last blocks are dashed.
    """
    table, errors, named = run.table(metric), run.table(metric, run.errors), term(metric)
    strips = [layer for layer in run.depth if _is_apart(layer, table, named)]
    if len(strips) == len(run.depth):
        strips = []
    main = [layer for layer in run.depth if layer not in strips]
    means = [layer for layer in run.layers if layer not in run.depth]
    figure, axes = _axes(len(strips))
    ax, *below = axes
    colours = DEPTH(np.linspace(0, 1, len(main)))
    lines(ax, table.index.to_numpy(), table[main].to_numpy().T, colours, errors=errors[main].to_numpy().T)
    for mean, dashes in zip(means, cycle(("--", ":", "-.")), strict=False):
        ax.plot(table[mean], color="black", ls=dashes, lw=1.3, label=mean)
    if means:
        ax.legend(loc="best", fontsize=8, handlelength=1.8, borderpad=0.1)
    value_axis(ax, named, table[main + means].to_numpy(), errors=errors[main + means].to_numpy())
    is_log = ax.get_yscale() == "log"
    _depth_key(figure, ax, main, colours)
    for strip, layer in zip(below, strips, strict=True):
        values = table[layer].to_numpy()
        lines(strip, table.index.to_numpy(), values[None], np.array([to_rgba(ACCENT)]))
        value_axis(strip, named, values)
        finite = values[np.isfinite(values)]
        strip.yaxis.set_major_locator(FixedLocator(sorted({finite.min(), finite.max()}) if finite.size else []))
        strip.yaxis.set_minor_locator(NullLocator())
        strip.yaxis.set_major_formatter(lambda value, _: short(value, 2))
        strip.tick_params(axis="y", labelsize=8.5)
        (label,), _ = layer_labels([layer])
        size = 9.5 if len(label) <= 6 else 7.5
        strip.text(1.03, 0.5, label, transform=strip.transAxes, va="center", color=ACCENT, fontsize=size)
    for each in axes:
        each.set_ylabel("")
        step_axis(each, run.steps)
        if each is not axes[-1]:
            each.set_xlabel("")
            each.tick_params(labelbottom=False)
    x = 0.08 / WIDTH
    figure.text(x, 1 - 0.06 / HEIGHT, f"{named.name} by layer", va="top", fontsize=10.5, weight="bold")
    unit = f"{named.unit} (log scale)" if is_log else named.unit
    figure.text(x, 1 - 0.28 / HEIGHT, unit, va="top", fontsize=8.5, color="#444444")
    alt = f"{named.name} against optimizer step, a line for each of {len(run.layers)} layers."
    return FigureData(f"{metric}-curves", figure, table, alt, "The brighter a line, the deeper its layer.")


def _is_apart(layer: str, table: pd.DataFrame, named: Term) -> bool:
    """Whether a layer enters the first block, or is a norm beside which blocks fill less than 60 % of the height."""
    if is_input(layer):
        return True
    if layer not in ("final_norm", "encoder.final_norm", "decoder.final_norm"):
        return False
    blocks = [block for blocks in blocks_by_side(map(str, table)).values() for block in blocks]
    together = table[[*blocks, layer]].to_numpy()
    scaled = np.log10(together) if named.is_logarithmic(together) else together
    return bool(_span(scaled[:, :-1]) < _MOST_BLOCKS_SHARE * _span(scaled))


def _span(values: Array) -> float:
    finite = values[np.isfinite(values)]
    return float(np.ptp(finite)) if finite.size else 0.0


def _axes(num_strips: int) -> tuple[Figure, list[Axes]]:
    """A figure with its main axes, and strips below them."""
    figure = Figure(figsize=(WIDTH, HEIGHT))
    FigureCanvasAgg(figure)
    width = WIDTH - _LEFT - _RIGHT
    height = HEIGHT - _BOTTOM - _TOP
    for_strips = [min(_STRIP, 0.5 * height / max(1, num_strips) - _GAP)] * num_strips
    heights = [height - sum(for_strips) - _GAP * num_strips, *for_strips]
    top, axes = HEIGHT - _TOP, list[Axes]()
    for each in heights:
        box = (_LEFT / WIDTH, (top - each) / HEIGHT, width / WIDTH, each / HEIGHT)
        axes.append(figure.add_axes(box))
        top -= each + _GAP
    return figure, axes


def _depth_key(figure: Figure, ax: Axes, layers: Sequence[str], colours: Array) -> None:
    """The colour of each layer, to the right of the axes."""
    box = ax.get_position()
    key = figure.add_axes((box.x1 + 0.1 / WIDTH, box.y0, 0.12 / WIDTH, box.height))
    key.imshow(np.arange(len(layers))[:, None], cmap=ListedColormap(colours), aspect="auto", origin="lower")
    key.yaxis.tick_right()
    layer_axis(key, layers, vertical=True, most=9)
    key.set(xticks=[], ylabel="")
    key.grid(visible=False)
    key.spines[:].set_visible(False)
    key.tick_params(length=0, pad=2)


_DRAWN = {*HEADLINES, "M", "V", "V_W_unbiased", "V_B_unbiased"}
_OFTEN = ("curves", "heatmap")
_GROWTH = 1.05
_MOST_STEPS = 512
_PIXELS = 700
_PAUSE = 50
"""Pause after drawing, as a multiple of what drawing took: it takes at most some 2 % of the time."""


class LivePictures:
    """The pictures of a monitor's history while a model trains.

    For each metric to look at first, its curves (value against step, a coloured line for each layer), a heatmap (layer
    against step) and a profile (value against layer, a line for each step); and the shares of M, V_W and V_B in the
    embeddings' size at each layer. They are drawn when they are due; curves and heatmaps also whenever there are 5 %
    more measurements, unless that would take more than 2 % of the time: what is drawn does not grow with the square of
    a run's length. At most 512 steps are drawn, evenly spaced along the axis.

    They are 700 pixels wide, twice the width at which TensorBoard shows them.

    Args:
        prefix: of the tags.
    """

    def __init__(self, prefix: str = "geometry") -> None:
        self.prefix = prefix
        self._num_drawn = dict.fromkeys(("curves", "heatmap", "profile", "shares"), 0)
        self._num_measurements = self._measurements_drawn = 0
        self._paused_until = 0.0

    def draw(self, history: Sequence[Record], *, is_due: bool) -> Iterator[tuple[str, tuple[bytes, int, int]]]:
        """Draw the history, unless drawing is paused.

        Args:
            history: with the records of one more measurement than at the last call.
            is_due: draw all kinds of pictures that have not been drawn of this history.

        Yields:
            A picture's tag, and the picture: a PNG, its width and height.

        Raises:
            ImportError: what pictures are drawn with is not installed.
        """
        self._num_measurements += 1
        started = monotonic()
        is_welcome = started >= self._paused_until and self._num_measurements >= _GROWTH * self._measurements_drawn
        wanted = self._num_drawn if is_due else _OFTEN if is_welcome else ()
        kinds = [kind for kind in wanted if self._num_drawn[kind] < len(history)]
        if not kinds:
            return
        yield from _pictures(history, self.prefix, kinds)
        self._num_drawn |= dict.fromkeys(kinds, len(history))
        self._measurements_drawn = self._num_measurements
        finished = monotonic()
        self._paused_until = finished + _PAUSE * (finished - started)


def _pictures(
    history: Sequence[Record], prefix: str, kinds: Collection[str]
) -> Iterator[tuple[str, tuple[bytes, int, int]]]:
    import pandas as pd

    from embedgeo.report import figures
    from embedgeo.report.drawing import style
    from embedgeo.report.runs import make_run

    steps = _thinned({record["step"] for record in history})
    records = pd.DataFrame([r for r in history if r["metric"] in _DRAWN and r["step"] in steps])
    if records.empty or not (run := make_run("", records.replace([np.inf, -np.inf], np.nan))).depth:
        return
    metrics = [metric for metric in HEADLINES if metric in run.values and run.values[metric].notna().any()]
    with style():
        for kind, draw in (("curves", curves), ("heatmap", figures.heatmap), ("profile", figures.profile)):
            for metric in metrics if kind in kinds else ():
                yield f"{prefix}.{kind}/{metric}", _picture(draw(run, metric).figure)
        if "shares" in kinds and figures.has_shares(run):
            yield f"{prefix}.shares/M, V_W, V_B", _picture(figures.shares_by_layer(run).figure)


def _picture(figure: Any) -> tuple[bytes, int, int]:
    """A PNG of 700 pixels: TensorBoard shows it with 350, and leaves out pixels instead of blending them."""
    from embedgeo.report.drawing import png

    return png(figure, (_PIXELS + 0.5) / figure.get_size_inches()[0])


def _thinned(steps: Iterable[int]) -> set[int]:
    """At most 512 of the steps, evenly spaced along the axis on which they are drawn, with the first and the last."""
    from embedgeo.report.drawing import StepAxis

    every = sorted(steps)
    if len(every) <= _MOST_STEPS:
        return set(every)
    chosen = np.searchsorted(StepAxis(every).position(every), np.linspace(0, 1, _MOST_STEPS))
    return {every[i] for i in chosen.clip(max=len(every) - 1)}
