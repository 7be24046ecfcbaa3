"""Figures of the intrinsic dimension against the scale at which it is measured."""

import re
from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from embedgeo.report.axes import band, depth_bar, lines, short, time_bar
from embedgeo.report.drawing import FigureData, legend, new_figure
from embedgeo.report.figures import band_text, with_errors
from embedgeo.report.runs import Run
from embedgeo.report.values import value_axis
from embedgeo.results.glossary import term
from embedgeo.results.wording import number

READING = (
    "Intrinsic dimension from the neighbours of rank n₁ and 2 n₁ (GRIDE). Where it is the same at all scales, it does "
    "not depend on the number of rows: with twice as many, each scale would lie at twice its rank. Where it falls, "
    "small scales see noise, or the finer of two structures; a number from nearest neighbours alone would then grow "
    "with the rows. Random embeddings fall, too, the wider the more: neighbours of high rank are then no longer near."
)
"""How the figures are read."""

_KEY = re.compile(r"intrinsic_dimension_at_(\d+)")
_UNIT = "dimensions, GRIDE"
_TERM = term("intrinsic_dimension")._replace(unit=_UNIT)


def measured_scales(run: Run) -> dict[int, str]:
    """The metric at each scale, in order, of those at several scales that a run has."""
    matched = {metric: _KEY.fullmatch(metric) for metric in run.metrics if run.values[metric].notna().any()}
    found = sorted((int(match[1]), metric) for metric, match in matched.items() if match)
    return dict(found) if len(found) > 1 else {}


def by_layer(run: Run, ax: Axes | None = None) -> FigureData:
    """The dimension against the scale at the last step: a line for each layer, and the mean of the baseline.

    Args:
        run: with `measured_scales`.
        ax: axes to draw in; default: those of a new figure.
    """
    scales = measured_scales(run)
    step = run.steps[-1]

    def at_last(values: pd.DataFrame, ending: str = "") -> pd.DataFrame:
        columns = {scale: values.get(f"{key}{ending}", values[key] * np.nan) for scale, key in scales.items()}
        return pd.DataFrame(columns).loc[[step]].droplevel("step").reindex(run.depth).T.rename_axis("scale")

    table, random = at_last(run.values), run.means(at_last(run.baseline))
    errors = at_last(run.errors).combine_first(at_last(run.values, "_error"))[run.depth]
    means = run.means(table)
    title = run.titled("Intrinsic dimension against scale", step)
    figure, (ax,) = new_figure(title, _UNIT, sidebar=len(run.depth) > 1, ax=ax)
    colours = depth_bar(ax, run.depth)
    at = table.index.to_numpy(dtype=float)
    lines(ax, at, table.to_numpy().T, colours, errors=errors.to_numpy().T)
    of_means = run.means(errors)
    for name, dashes in zip(means, ("-", (0, (3, 1, 1, 1))), strict=False):
        ax.plot(means[name], color="black", lw=2.0, ls=dashes, label=name)
        band(ax, at, means[name].to_numpy(), of_means[name].to_numpy(), "black")
    value_axis(ax, _TERM, table.to_numpy(), random, run.depth, errors.to_numpy())
    _scale_axis(ax, list(scales))
    legend(figure, ax)
    randoms = ["random" if len(means.columns) == 1 else f"random, {name}" for name in random]
    numbers = with_errors(table.join(means), errors).join(random.set_axis(randoms, axis=1))
    alt = f"Intrinsic dimension against scale, a line for each of {len(run.depth)} layers."
    text = " ".join(f"{str(name).capitalize()}: {_ends(means[name])}." for name in means) + band_text(errors)
    return FigureData("intrinsic-dimension-scales", figure, numbers, alt, text)


def by_step(run: Run, ax: Axes | None = None) -> FigureData:
    """The dimension against the scale, mean over blocks: a line for each step; arguments as of `by_layer`."""
    scales = measured_scales(run)
    blocks = [block for blocks in run.blocks.values() for block in blocks]
    table = pd.DataFrame({scale: run.table(key)[blocks].mean(axis=1) for scale, key in scales.items()})
    title, unit = "Intrinsic dimension against scale, by step", f"{_UNIT}, mean over blocks"
    figure, (ax,) = new_figure(title, unit, sidebar=True, ax=ax)
    lines(ax, np.array(list(scales), dtype=float), table.to_numpy(), time_bar(ax, run.steps))
    value_axis(ax, _TERM, table.to_numpy())
    _scale_axis(ax, list(scales))
    alt = f"Intrinsic dimension against scale, mean over blocks, a line for each of {len(run.steps)} steps."
    first, last = (table.iloc[i] for i in (0, -1))
    text = f"Step {run.steps[0]:,}: {_ends(first)}; step {run.steps[-1]:,}: {_ends(last)}."
    return FigureData("intrinsic-dimension-scales-by-step", figure, table, alt, text)


def _scale_axis(ax: Axes, scales: Sequence[int]) -> None:
    ax.set_xscale("log", base=2)
    ax.set_xlim(scales[0], scales[-1])
    ax.set_xticks(scales, [short(scale) for scale in scales])
    ax.set_xticks([], minor=True)
    ax.set_xlabel("scale: rank n₁ of the neighbour")


def _ends(values: pd.Series) -> str:
    known = values.dropna()
    if known.empty:
        return "undefined"
    return f"{number(known.iloc[0])} at scale {known.index[0]}, {number(known.iloc[-1])} at scale {known.index[-1]}"
