"""Figures of several runs or models beside each other."""

from collections.abc import Sequence
from colorsys import hls_to_rgb
from typing import Any

import pandas as pd

from embedgeo.drawing import (
    RUNS,
    FigureData,
    Lines,
    legend,
    lines,
    new_figure,
    step_axis,
    value_axis,
)
from embedgeo.formatting import number
from embedgeo.glossary import term
from embedgeo.layer_names import relative_depths
from embedgeo.report.figures import with_errors
from embedgeo.report.runs import Run, of_rows

Curves = dict[str, pd.Series]  # by the label of their run or model


def compare_dynamics(runs: Sequence[Run], metric: str) -> FigureData:
    """Means over blocks of several runs against the step."""
    values = Curves()
    errors = Curves()
    for run in runs:
        means = run.means(metric)
        of_means = run.mean_errors(metric)
        for name in means:
            label = f"{run.label}, {name}" if len(run.blocks) > 1 else run.label
            values[label] = means[name]
            errors[label] = of_means[name]
    when = f"mean over blocks{of_rows(metric, runs)}; "
    data = _comparison("dynamics", metric, "against step", when, values, errors)
    step_axis(data.figure.axes[0], *(run.steps for run in runs))
    return data._replace(
        alt=f"{term(metric).name} against optimizer step, a line for each of {len(runs)} runs."
    )


def compare_profiles(runs: Sequence[Run], metric: str) -> FigureData:
    """Models, and runs at their last steps, against relative depth: 0 enters the first block, 1
    leaves the last one.
    """
    values = Curves()
    errors = Curves()
    for run in runs:
        both = [run.table(metric, each).iloc[-1] for each in (run.values, run.errors)]
        for part, depths in relative_depths(run.depth).items():
            label = f"{run.label}, {part[:-1]}" if part else run.label
            at = [*depths]
            places = [*depths.values()]
            values[label], errors[label] = (each[at].set_axis(places) for each in both)
    when = "runs at their last step" if any(run.has_steps for run in runs) else "final models"
    when += f"{of_rows(metric, runs)}; "
    data = _comparison("profiles", metric, "over relative depth", when, values, errors)
    data.figure.axes[0].set(xlabel="relative depth (1: last block)", xlim=(-0.02, 1.02))
    numbers = pd.concat(
        {
            label: with_errors(each.to_frame(metric), errors[label].to_frame(metric))[0]
            for label, each in values.items()
        },
        names=["run", "depth"],
    )
    alt = f"a line for each of {len(values)}: {', '.join(values)}."
    return data._replace(numbers=numbers, alt=f"{term(metric).name} against relative depth, {alt}")


def _comparison(
    kind: str, metric: str, over: str, what: str, curves: Curves, errors_of: Curves
) -> FigureData:
    """A figure of curves, with a legend of them."""
    named = term(metric)
    count = len(curves)  # no colour twice
    colours: Any = (
        RUNS if count <= len(RUNS) else [hls_to_rgb(i / count, 0.4, 0.8) for i in range(count)]
    )
    values = pd.DataFrame(curves)
    errors = pd.DataFrame(errors_of, values.index, values.columns, dtype=float)
    of_runs = Lines("run", values, colours[:count], errors, width=1.3, markers="osD^vPX*<>")
    figure, ax = new_figure(f"{named.name} {over}".rstrip(), what + named.unit)
    lines(ax, of_runs)
    value_axis(ax, named, values, errors=errors)
    if count > 1:
        legend(ax)
    numbers, bands = with_errors(values, errors)
    text = _last_values(curves) + bands
    return FigureData(f"{metric}-compared-{kind}", figure, numbers, "", text, [of_runs])


def _last_values(curves: Curves) -> str:
    """Between which values the curves end, in words, of those that are defined at their end."""
    last = pd.Series({label: values.iloc[-1] for label, values in curves.items()}).dropna()
    if last.empty:
        return "Undefined."
    return (
        f"Last values: from {number(last.min())} ({last.idxmin()}) to {number(last.max())} "
        f"({last.idxmax()})."
    )
