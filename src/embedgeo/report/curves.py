"""A metric against the step in a small picture: a coloured line for each layer, `embed` on a scale of its own."""

from collections.abc import Sequence
from itertools import cycle

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import ListedColormap, to_rgba
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator

from embedgeo.report.axes import ACCENT, DEPTH, Array, layer_axis, lines, step_axis
from embedgeo.report.drawing import FigureData
from embedgeo.report.runs import Run
from embedgeo.report.values import value_axis
from embedgeo.results.glossary import term
from embedgeo.results.layer_names import blocks_by_side, is_input, layer_labels
from embedgeo.results.term import Term
from embedgeo.results.wording import short

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
