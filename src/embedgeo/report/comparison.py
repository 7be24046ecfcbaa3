"""Figures that compare several runs: their means over blocks against the step, their last steps over the depth."""

from collections.abc import Sequence
from itertools import cycle

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from embedgeo.report.axes import DASHES, band, run_colours, step_axis
from embedgeo.report.drawing import FigureData, legend_below, new_figure
from embedgeo.report.figures import band_text, course, with_errors
from embedgeo.report.runs import Run
from embedgeo.report.values import value_axis
from embedgeo.results.glossary import term
from embedgeo.results.layer_names import relative_depths
from embedgeo.results.wording import number, printable


def compare_dynamics(runs: Sequence[Run], metric: str) -> FigureData:
    """Means over blocks of several runs against the step."""
    curves: dict[str, pd.Series] = {}
    errors: dict[str, pd.Series] = {}
    for run in runs:
        means, of_means = run.means(run.table(metric)), run.mean_errors(metric)
        for name in run.blocks:
            label = f"{run.label}, {name}" if len(run.blocks) > 1 else run.label
            curves[label], errors[label] = means[name], of_means[name]
    numbers = with_errors(pd.DataFrame(curves), pd.DataFrame(errors))
    figure, ax, text = _draw_runs(curves, errors, metric, "against step", "mean over blocks")
    step_axis(ax, *(run.steps for run in runs))
    alt = f"{term(metric).name} against optimizer step, a line for each of {len(runs)} runs."
    return FigureData(f"{metric}-compared-dynamics", figure, numbers, alt, text)


def compare_profiles(runs: Sequence[Run], metric: str) -> FigureData:
    """Several runs at their last steps against relative depth: 0 enters the first block, 1 leaves the last one."""
    curves: dict[str, pd.Series] = {}
    errors: dict[str, pd.Series] = {}
    for run in runs:
        last, last_errors = (run.table(metric, values).iloc[-1] for values in (run.values, run.errors))
        for part, depths in relative_depths(run.depth).items():
            label = f"{run.label}, {part[:-1]}" if part else run.label
            curves[label], errors[label] = (
                pd.Series(each[[*depths]].to_numpy(), [*depths.values()]) for each in (last, last_errors)
            )
    figure, ax, text = _draw_runs(curves, errors, metric, "over relative depth", "last step")
    ax.set_xlabel("relative depth (1: output of the last block)")
    ax.set_xlim(-0.02, 1.02)
    columns, of_columns = (pd.concat(found, names=["run", "depth"]).to_frame(metric) for found in (curves, errors))
    numbers = with_errors(columns, of_columns)
    alt = f"{term(metric).name} against relative depth, a line for each of {len(curves)}: {', '.join(curves)}."
    return FigureData(f"{metric}-compared-profiles", figure, numbers, alt, text)


def _draw_runs(
    curves: dict[str, pd.Series], errors: dict[str, pd.Series], metric: str, over: str, note: str
) -> tuple[Figure, Axes, str]:
    """A figure with a line and a band for each curve, its axes, and the curves in words."""
    named = term(metric)
    names = [label if len(label) <= 60 else f"{label[:29]}…{label[-30:]}" for label in map(printable, curves)]
    figure, (ax,) = new_figure(f"{named.name} {over}", f"{named.unit}; {note}", names=names)
    values, spread = (np.concatenate([each.to_numpy() for each in found.values()]) for found in (curves, errors))
    value_axis(ax, named, values, errors=spread)
    styles = zip(run_colours(len(curves)), cycle("osD^vPX*<>"), cycle(DASHES), strict=False)
    for (label, curve), (colour, marker, dashes) in zip(curves.items(), styles, strict=False):
        every = 1 if len(curve) <= 40 else 0.06  # of the diagonal
        ax.plot(curve.dropna(), color=colour, marker=marker, ms=3.5, markevery=every, ls=dashes, lw=1.3)
        band(ax, curve.index.to_numpy(), curve.to_numpy(), errors[label].to_numpy(), colour)
    legend_below(figure, ax.lines, names)
    return figure, ax, _courses(curves) + band_text(pd.DataFrame(errors))


def _courses(curves: dict[str, pd.Series]) -> str:
    """Each of a few curves in words; of many, at which values they end."""
    if len(curves) <= 3:
        return " ".join(f"{label}: {course(curve)}" for label, curve in curves.items())
    last = pd.Series({label: curve.dropna().iloc[-1] for label, curve in curves.items() if curve.notna().any()})
    if last.empty:
        return "undefined."
    return f"Last values: from {number(last.min())} ({last.idxmin()}) to {number(last.max())} ({last.idxmax()})."
