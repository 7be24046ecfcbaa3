"""Figures of several runs or models beside each other."""

from collections.abc import Iterator, Mapping, Sequence
from colorsys import hls_to_rgb
from itertools import cycle
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from embedgeo.drawing import (
    DASHES,
    RUNS,
    FigureData,
    Lines,
    band,
    legend,
    new_figure,
    step_axis,
    value_axis,
)
from embedgeo.formatting import number, printable
from embedgeo.glossary import term
from embedgeo.layer_names import relative_depths
from embedgeo.report.figures import trend, with_errors
from embedgeo.report.runs import Run, drawable

_LONGEST_NAME = 60  # letters of a name in a legend


class Curve(NamedTuple):
    """Values of a run or model, their errors, and its group of models."""

    values: pd.Series
    errors: pd.Series
    group: str


Curves = Mapping[str, Curve]


def compare_dynamics(runs: Sequence[Run], metric: str) -> FigureData:
    """Means over blocks of several runs against the step."""
    curves = {}
    for run in runs:
        means, errors = run.means(metric), run.mean_errors(metric)
        for name in means:
            label = f"{run.label}, {name}" if len(run.blocks) > 1 else run.label
            curves[label] = Curve(means[name], errors[name], run.group)
    named = term(metric)
    title = f"{named.name} against step"
    figure, ax, groups = _comparison(title, f"mean over blocks; {named.unit}", metric, curves)
    step_axis(ax, *(run.steps for run in runs))
    lines = _lines(curves)
    numbers, bands = with_errors(lines.values, pd.DataFrame(lines.errors))
    alt = f"{named.name} against optimizer step, a line for each of {len(runs)} runs."
    text = f"{_trends(curves)}{bands}{groups}"
    return FigureData(f"{metric}-compared-dynamics", figure, numbers, alt, text, [lines])


def compare_profiles(runs: Sequence[Run], metric: str) -> FigureData:
    """Models, and runs at their last steps, against relative depth: 0 enters the first block, 1
    leaves the last one.
    """
    curves = {}
    for run in runs:
        last, errors = (run.table(metric, each).iloc[-1] for each in (run.values, run.errors))
        for part, depths in relative_depths(run.depth).items():
            label = f"{run.label}, {part[:-1]}" if part else run.label
            at, places = [*depths], [*depths.values()]
            curves[label] = Curve(last[at].set_axis(places), errors[at].set_axis(places), run.group)
    named = term(metric)
    training = [run.has_steps for run in runs]
    when = "last step; " if all(training) else "runs at their last step; " if any(training) else ""
    title = f"{named.name} over relative depth"
    figure, ax, groups = _comparison(title, f"{when}{named.unit}", metric, curves)
    ax.set(xlabel="relative depth (1: last block)", xlim=(-0.02, 1.02))
    stacked = {
        label: pd.DataFrame({metric: curve.values, "error": curve.errors})
        for label, curve in curves.items()
    }
    table = pd.concat(stacked, names=["run", "depth"])
    numbers, bands = with_errors(table[[metric]], table[["error"]].set_axis([metric], axis=1))
    alt = (
        f"{named.name} against relative depth, a line for each of {len(curves)}: "
        f"{', '.join(curves)}."
    )
    text = f"{_trends(curves)}{bands}{groups}"
    return FigureData(f"{metric}-compared-profiles", figure, numbers, alt, text, [_lines(curves)])


def training_losses(runs: Sequence[Run]) -> Iterator[FigureData]:
    """The training losses of runs against the step, on the axis of what was measured, where any was
    logged.
    """
    named = term("training_loss")
    curves = {}
    for run in runs:
        if "training_loss" in run.model:
            losses = drawable(run.model)["training_loss"].dropna()
            if len(losses):
                curves[run.label] = Curve(losses, losses * np.nan, run.group)
    if not curves:
        return
    title = named.name.capitalize()
    figure, ax, groups = _comparison(title, named.unit, "training_loss", curves)
    measured = [run.steps for run in runs if run.label in curves]
    step_axis(ax, *measured, *(list(curve.values.index) for curve in curves.values()))
    alt = "Training loss against optimizer step, a line a run."
    lines = _lines(curves)
    text = f"{_trends(curves)}{groups}"
    yield FigureData("training-loss", figure, lines.values, alt, text, [lines])


def _comparison(title: str, subtitle: str, metric: str, curves: Curves) -> tuple[Figure, Axes, str]:
    """A figure of curves, with a legend of them and of their groups; the groups in words."""
    looks, by_group = _looks(curves)
    figure, (ax,) = new_figure(title, subtitle)
    values, errors = (
        np.concatenate(each) for each in zip(*(curve[:2] for curve in curves.values()), strict=True)
    )
    value_axis(ax, term(metric), values, errors=errors)
    alpha = max(0.06, min(0.2, 0.5 / len(curves)))
    for label, curve in curves.items():
        every = 1 if len(curve.values) <= 40 else 0.06  # of the diagonal
        ax.plot(curve.values.dropna(), markevery=every, **looks[label])
        band(ax, curve.values, curve.errors, looks[label]["color"], alpha)
    # the space: a label that begins with "_" would be hidden
    key = [
        Line2D([], [], label=f" {_shortened(printable(label))}", **look)
        for label, look in looks.items()
    ]
    for group, dashes in by_group.items():
        label = f" {printable(group) or 'in no group'}"
        key.append(Line2D([], [], label=label, color="black", ls=dashes, lw=1.3))
    if len(key) > 1:
        legend(ax, key)
    members = {
        group: ", ".join(label for label, curve in curves.items() if curve.group == group)
        for group in by_group
    }
    text = "; ".join(f"{group or 'no group'}: {labels}" for group, labels in members.items())
    return figure, ax, f" Line styles are by group: {text}." if members else ""


def _shortened(name: str) -> str:
    half = _LONGEST_NAME // 2
    return name if len(name) <= _LONGEST_NAME else f"{name[: half - 1]}…{name[-half:]}"


def _looks(curves: Curves) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """The look of each curve, and the dashes of each group (in none: the last), where there are
    groups.
    """
    found = dict.fromkeys(curve.group for curve in curves.values())
    groups = sorted(found, key=lambda group: not group)
    by_group = dict(zip(groups, cycle(DASHES), strict=False)) if any(groups) else {}
    count = len(curves)  # no colour twice
    colours = (
        RUNS if count <= len(RUNS) else [hls_to_rgb(i / count, 0.4, 0.8) for i in range(count)]
    )
    looks = {}
    for label, colour, marker in zip(curves, colours, cycle("osD^vPX*<>"), strict=False):
        dashes = by_group.get(curves[label].group, "-")
        looks[label] = {"color": colour, "marker": marker, "ls": dashes, "ms": 3.5, "lw": 1.3}
    return looks, by_group


def _lines(curves: Curves) -> Lines:
    """The curves as lines, for a page that draws them again."""
    values = pd.DataFrame({label: curve.values for label, curve in curves.items()})
    errors = pd.DataFrame({label: curve.errors for label, curve in curves.items()})
    looks = _looks(curves)[0].values()
    colours, dashes = ([look[name] for look in looks] for name in ("color", "ls"))
    return Lines("run", values, colours, errors, dashes, 1.3)


def _trends(curves: Curves) -> str:
    """Each of a few curves in words; of many, at which values they end."""
    if len(curves) <= 3:
        return " ".join(f"{label}: {trend(curve.values)}" for label, curve in curves.items())
    ends = {label: curve.values.dropna() for label, curve in curves.items()}
    last = pd.Series({label: values.iloc[-1] for label, values in ends.items() if len(values)})
    if last.empty:
        return "undefined."
    return (
        f"Last values: from {number(last.min())} ({last.idxmin()}) to {number(last.max())} "
        f"({last.idxmax()})."
    )
