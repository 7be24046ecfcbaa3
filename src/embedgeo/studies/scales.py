"""Figures of the intrinsic dimension over scales, for a report."""

import re
from collections.abc import Iterator, Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from embedgeo import drawing as draw
from embedgeo.drawing import FigureData
from embedgeo.formatting import number
from embedgeo.glossary import term
from embedgeo.report.figures import with_errors
from embedgeo.report.runs import Run

SCALES_TEXT = (
    "Intrinsic dimension from the neighbours of rank n₁ and 2 n₁ (GRIDE). Where it is the same at "
    "all scales, it does not depend on the number of rows: with twice as many, each scale would "
    "lie at twice its rank. Where it falls, small scales see noise, or the finer of two "
    "structures; a number from nearest neighbours alone would then grow with the rows. Those of "
    "Gaussian rows fall, too, the wider the more: neighbours of high rank are no longer near."
)

_SCALE = re.compile(r"intrinsic_dimension_at_(\d+)")
_GRIDE = "dimensions, GRIDE"


def scale_figures(run: Run) -> Iterator[FigureData]:
    """The figures of a run, if it was measured at several scales."""
    if measured_scales(run):
        yield scales_by_layer(run)
        if len(run.steps) > 1:
            yield scales_by_step(run)


def measured_scales(run: Run) -> dict[int, str]:
    """The metric at each scale, in order, of those at several scales that a run has."""
    matched = {
        metric: _SCALE.fullmatch(metric)
        for metric in run.metrics
        if run.values[metric].notna().any()
    }
    found = sorted((int(match[1]), metric) for metric, match in matched.items() if match)
    return dict(found) if len(found) > 1 else {}


def scales_by_layer(run: Run, ax: Axes | None = None) -> FigureData:
    """The dimension against the scale at the last step: a line for each layer, and their mean
    over blocks.
    """
    scales = measured_scales(run)
    step = run.steps[-1]

    def at_last(values: pd.DataFrame, ending: str = "") -> pd.DataFrame:
        columns = {
            scale: values.get(f"{key}{ending}", values[key] * np.nan)
            for scale, key in scales.items()
        }
        return (
            pd.DataFrame(columns)
            .loc[[step]]
            .droplevel("step")
            .reindex(run.depth)
            .T.rename_axis("scale")
        )

    table = at_last(run.values)
    errors = at_last(run.errors).combine_first(at_last(run.values, "_error"))[run.depth]
    means = run.means(table)
    title = run.titled("Intrinsic dimension against scale", step)
    figure, (ax,) = draw.new_figure(title, _GRIDE, ax=ax)
    colours = draw.depth_bar(ax, run.depth)
    draw.lines(ax, table, colours, errors)
    draw.mean_lines(ax, means, run.means(errors))
    named = term("intrinsic_dimension")
    draw.value_axis(ax, named, table, layers=run.depth, errors=errors)
    _scale_axis(ax, list(scales))
    draw.legend(ax)
    numbers, bands = with_errors(table.join(means), errors)
    alt = f"Intrinsic dimension against scale, a line for each of {len(run.depth)} layers."
    text = " ".join(f"{str(name).capitalize()}: {_ends(means[name])}." for name in means) + bands
    return FigureData("intrinsic-dimension-scales", figure, numbers, alt, text)


def scales_by_step(run: Run, ax: Axes | None = None) -> FigureData:
    """The dimension against the scale, mean over blocks: a line for each step."""
    scales = measured_scales(run)
    table = pd.DataFrame(
        {scale: run.table(key)[run.all_blocks].mean(axis=1) for scale, key in scales.items()}
    )
    title = "Intrinsic dimension against scale, by step"
    figure, (ax,) = draw.new_figure(title, f"{_GRIDE}, mean over blocks", ax=ax)
    draw.lines(ax, table.T, draw.time_bar(ax, run.steps))
    draw.value_axis(ax, term("intrinsic_dimension"), table)
    _scale_axis(ax, list(scales))
    alt = (
        f"Intrinsic dimension against scale, mean over blocks, a line for each of {len(run.steps)} "
        "steps."
    )
    first, last = (_ends(table.iloc[i]) for i in (0, -1))
    text = f"Step {run.steps[0]:,}: {first}; step {run.steps[-1]:,}: {last}."
    return FigureData("intrinsic-dimension-scales-by-step", figure, table, alt, text)


def _scale_axis(ax: Axes, scales: Sequence[int]) -> None:
    ax.set_xscale("log", base=2)
    ax.set_xlim(scales[0], scales[-1])
    ax.set_xticks(scales, [draw.tick_label(scale) for scale in scales])
    ax.set_xticks([], minor=True)
    ax.set_xlabel("scale: rank n₁ of the neighbour")


def _ends(values: pd.Series) -> str:
    known = values.dropna()
    return (
        ", ".join(
            f"{number(known.iloc[i])} at scale {known.index[i]}" for i in (0, -1) if len(known)
        )
        or "undefined"
    )
