"""Figures that compare runs and models: their means over blocks against the step, their last values over the depth."""

from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from embedgeo.report.axes import DASHES, band, run_colours, step_axis
from embedgeo.report.drawing import FigureData, legend_below, new_figure
from embedgeo.report.figures import band_text, course, with_errors
from embedgeo.report.runs import Bands, Run
from embedgeo.report.values import value_axis
from embedgeo.results.glossary import term
from embedgeo.results.layer_names import relative_depths
from embedgeo.results.wording import number, printable

OVER_TYPES = ("Q_t_cv", "V_on_M_slope", "V_on_M_r2")
"""Values over token types that all models are compared by in one figure."""

_DEPTH = "relative depth (1: output of the last block)"

Curves = dict[str, pd.Series]


def compare_dynamics(runs: Sequence[Run], metric: str) -> FigureData:
    """Means over blocks of several runs against the step."""
    curves: Curves = {}
    errors: Curves = {}
    groups: dict[str, str] = {}
    bands = _bands(runs, metric)
    for run, (_, of_means, _) in zip(runs, bands, strict=True):
        means = run.means(run.table(metric))
        for name in run.blocks:
            label = f"{run.label}, {name}" if len(run.blocks) > 1 else run.label
            curves[label], errors[label], groups[label] = means[name], of_means[name], run.group
    is_spread = bands[0].is_spread
    numbers = with_errors(pd.DataFrame(curves), pd.DataFrame(errors), is_spread=is_spread)
    named = term(metric)
    figure, (ax,), text = _compared(f"{named.name} against step", f"{named.unit}; mean over blocks", groups)
    _draw(ax, metric, curves, errors, groups)
    step_axis(ax, *(run.steps for run in runs))
    alt = f"{named.name} against optimizer step, a line for each of {len(runs)} runs."
    text = f"{_courses(curves)}{band_text(pd.DataFrame(errors), is_spread=is_spread)}{text}"
    return FigureData(f"{metric}-compared-dynamics", figure, numbers, alt, text)


def compare_profiles(runs: Sequence[Run], metric: str) -> FigureData:
    """Models, and runs at their last steps, against relative depth: 0 enters the first block, 1 leaves the last one."""
    curves, errors, groups, is_spread = _profiles(runs, metric)
    named = term(metric)
    figure, (ax,), text = _compared(f"{named.name} over relative depth", f"{named.unit}{_last_step(runs)}", groups)
    _draw(ax, metric, curves, errors, groups)
    _depth_axis(ax, _DEPTH)
    columns, of_columns = (pd.concat(found, names=["run", "depth"]).to_frame(metric) for found in (curves, errors))
    numbers = with_errors(columns, of_columns, is_spread=is_spread)
    alt = f"{named.name} against relative depth, a line for each of {len(curves)}: {', '.join(curves)}."
    text = f"{_courses(curves)}{band_text(of_columns, is_spread=is_spread)}{text}"
    return FigureData(f"{metric}-compared-profiles", figure, numbers, alt, text)


def compare_types(runs: Sequence[Run]) -> FigureData:
    """C.V. of Q, and slope and R² of V on M, over token types, of all models against relative depth."""
    found = {metric: _profiles(runs, metric) for metric in OVER_TYPES}
    groups = found[OVER_TYPES[0]][2]
    subtitle = f"over the token types in the regressions{_last_step(runs)}"
    figure, axes, text = _compared("Token types of all models over relative depth", subtitle, groups, panels=3)
    parts, ranges = [], []
    for ax, (metric, (curves, errors, _, is_spread)) in zip(axes, found.items(), strict=True):
        _draw(ax, metric, curves, errors, groups)
        _depth_axis(ax, "relative depth (1: last block)")
        columns, of_columns = (pd.concat(each, names=["run", "depth"]).to_frame(metric) for each in (curves, errors))
        parts.append(with_errors(columns, of_columns, is_spread=is_spread))
        known = columns[metric].dropna()
        known_range = f"from {number(known.min())} to {number(known.max())}" if len(known) else "undefined"
        ranges.append(f"{term(metric).name} {known_range}")
    numbers = pd.concat(parts, axis=1)
    alt = f"C.V. of Q, slope and R² of V on M against relative depth, a line for each of {len(groups)} models."
    words = f"{', '.join(ranges)}.{band_text(numbers.filter(like='stderr of '))}{text}"
    return FigureData("token-types-compared", figure, numbers, alt, words)


def _bands(runs: Sequence[Run], metric: str) -> list[Bands]:
    """The bands of each run: of one kind, standard errors where any run has them."""
    bands = [run.bands(metric) for run in runs]
    kinds = {each.is_spread for each in bands if each.values.notna().to_numpy().any()}
    is_spread = kinds == {True}
    return [
        each if each.is_spread == is_spread else Bands(each.values * np.nan, each.means * np.nan, is_spread=is_spread)
        for each in bands
    ]


def _profiles(runs: Sequence[Run], metric: str) -> tuple[Curves, Curves, dict[str, str], bool]:
    """Curves of the last values over relative depth, their bands, their groups, and whether the bands are spreads."""
    curves: Curves = {}
    errors: Curves = {}
    groups: dict[str, str] = {}
    bands = _bands(runs, metric)
    for run, (of_values, *_) in zip(runs, bands, strict=True):
        last, last_errors = (table.iloc[-1] for table in (run.table(metric), of_values))
        for part, depths in relative_depths(run.depth).items():
            label = f"{run.label}, {part[:-1]}" if part else run.label
            curves[label], errors[label] = (
                pd.Series(each[[*depths]].to_numpy(), [*depths.values()]) for each in (last, last_errors)
            )
            groups[label] = run.group
    return curves, errors, groups, bands[0].is_spread


def _last_step(runs: Sequence[Run]) -> str:
    training = [run.has_steps for run in runs]
    return "; last step" if all(training) else "; runs at their last step" if any(training) else ""


def _depth_axis(ax: Axes, label: str) -> None:
    ax.set_xlabel(label)
    ax.set_xlim(-0.02, 1.02)


def _compared(title: str, subtitle: str, groups: Mapping[str, str], panels: int = 1) -> tuple[Figure, list[Axes], str]:
    """A figure with a legend of curves and of their groups, and the groups in words."""
    names = [label if len(label) <= 60 else f"{label[:29]}…{label[-30:]}" for label in map(printable, groups)]
    looks = [Line2D([], [], **look) for look in _looks(groups).values()]
    members: dict[str, list[str]] = {}
    for label, group in groups.items():
        members.setdefault(group, []).append(label)
    members = {group: members[group] for group in _in_order(groups)} if any(groups.values()) else {}
    for group, dashes in zip(members, cycle(DASHES), strict=False):
        names.append(printable(group) or "in no group")
        looks.append(Line2D([], [], color="black", ls=dashes, lw=1.3))
    figure, axes = new_figure(title, subtitle, panels=panels, names=names)
    legend_below(figure, looks, names)
    listed = "; ".join(f"{group or 'no group'}: {', '.join(labels)}" for group, labels in members.items())
    return figure, axes, f" Line styles are by group: {listed}." if members else ""


def _in_order(groups: Mapping[str, str]) -> list[str]:
    """The groups, as they come; at the end that of the curves in none."""
    return sorted(dict.fromkeys(groups.values()), key=lambda group: not group)


def _looks(groups: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """The look of each curve: colour and marker are its own; the dashes are its group's, where there are groups."""
    by_group = dict(zip(_in_order(groups), cycle(DASHES), strict=False))
    own = zip(groups, run_colours(len(groups)), cycle("osD^vPX*<>"), cycle(DASHES), strict=False)
    return {
        label: {
            "color": colour,
            "marker": marker,
            "ls": by_group[groups[label]] if any(by_group) else dashes,
            "ms": 3.5,
            "lw": 1.3,
        }
        for label, colour, marker, dashes in own
    }


def _draw(ax: Axes, metric: str, curves: Curves, errors: Curves, groups: Mapping[str, str]) -> None:
    """Draw a line and a band for each curve, and the axis of values."""
    values, spread = (np.concatenate([each.to_numpy() for each in found.values()]) for found in (curves, errors))
    value_axis(ax, term(metric), values, errors=spread)
    most, share = (13, 0.12) if any(groups.values()) else (40, 0.06)  # dashes have to be seen between the markers
    for label, look in _looks(groups).items():
        curve = curves[label]
        every = 1 if len(curve) <= most else share  # of the diagonal
        ax.plot(curve.dropna(), markevery=every, **look)
        beside = (curve.to_numpy(), errors[label].to_numpy())
        band(ax, curve.index.to_numpy(), *beside, look["color"], alpha=max(0.06, min(0.2, 0.5 / len(curves))))


def _courses(curves: Curves) -> str:
    """Each of a few curves in words; of many, at which values they end."""
    if len(curves) <= 3:
        return " ".join(f"{label}: {course(curve)}" for label, curve in curves.items())
    last = pd.Series({label: curve.dropna().iloc[-1] for label, curve in curves.items() if curve.notna().any()})
    if last.empty:
        return "undefined."
    return f"Last values: from {number(last.min())} ({last.idxmin()}) to {number(last.max())} ({last.idxmax()})."
