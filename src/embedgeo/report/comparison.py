"""Figures of several runs or models beside each other."""

from collections.abc import Iterator, Mapping, Sequence
from colorsys import hls_to_rgb
from itertools import cycle
from typing import Any, NamedTuple

import matplotlib as mpl
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
    new_figure,
    step_axis,
    value_axis,
)
from embedgeo.formatting import listed, number, printable
from embedgeo.glossary import term
from embedgeo.layer_names import relative_depths
from embedgeo.report.figures import trend, with_errors
from embedgeo.report.reference import COLOUR, Band, band_lines, draw_band, reference_band
from embedgeo.report.runs import Bands, Run, drawable

_HALF_A_NAME = 6.6  # letters of half a name in a legend, by inch
# all models are compared by them in one figure
OVER_TYPES = ("Q_t_cv", "V_on_M_slope", "V_on_M_r2")


class Curve(NamedTuple):
    """Values of a run or model, their errors, its group of models, and in what it is not measured
    like the first.
    """

    values: pd.Series
    errors: pd.Series
    group: str
    differences: Mapping[str, tuple[str, str]]


Curves = Mapping[str, Curve]


def compare_dynamics(runs: Sequence[Run], metric: str) -> FigureData:
    """Means over blocks of several runs against the step."""
    curves = {}
    bands = _bands(runs, metric)
    for run, (_, mean_errors, _) in zip(runs, bands, strict=True):
        means = run.means(run.table(metric))
        for name in run.blocks:
            label = f"{run.label}, {name}" if len(run.blocks) > 1 else run.label
            curves[label] = Curve(means[name], mean_errors[name], run.group, run.differences)
    values = pd.DataFrame({label: curve.values for label, curve in curves.items()})
    errors = pd.DataFrame({label: curve.errors for label, curve in curves.items()})
    named = term(metric)
    behind = reference_band(runs[0], metric, next(iter(runs[0].blocks)))
    subtitle = f"mean over blocks; {named.unit}"
    figure, (ax,), groups = _comparison(
        f"{named.name} against step", subtitle, curves, behind=behind
    )
    _draw(ax, metric, curves, behind)
    step_axis(ax, *(run.steps for run in runs))
    numbers, bands_text = with_errors(
        values, errors, is_spread=any(each.is_spread for each in bands)
    )
    if behind is not None:
        numbers = numbers.join(behind.numbers)
        bands_text += behind.describe(next(iter(curves.values())).values).replace(
            "; within", f"; {next(iter(curves))} within"
        )
    alt = f"{named.name} against optimizer step, a line for each of {len(runs)} runs."
    text = f"{_trends(curves)}{bands_text}{groups}"
    lines = [*band_lines({} if behind is None else {"": behind}), _lines(curves)]
    return FigureData(f"{metric}-compared-dynamics", figure, numbers, alt, text, lines)


def compare_profiles(runs: Sequence[Run], metric: str) -> FigureData:
    """Models, and runs at their last steps, against relative depth: 0 enters the first block, 1
    leaves the last one.
    """
    curves, is_spread = _profiles(runs, metric)
    named = term(metric)
    figure, (ax,), groups = _comparison(
        f"{named.name} over relative depth", f"{_last_step(runs)}{named.unit}", curves
    )
    _draw(ax, metric, curves)
    ax.set(xlabel="relative depth (1: last block)", xlim=(-0.02, 1.02))
    numbers, bands_text = with_errors(*_columns(curves, metric), is_spread=is_spread)
    alt = (
        f"{named.name} against relative depth, a line for each of {len(curves)}: "
        f"{', '.join(curves)}."
    )
    text = f"{_trends(curves)}{bands_text}{groups}"
    return FigureData(f"{metric}-compared-profiles", figure, numbers, alt, text, [_lines(curves)])


def compare_types(runs: Sequence[Run]) -> FigureData:
    """C.V. of Q, and slope and R² of V on M, over token types, of all models against relative
    depth.
    """
    profiles = {metric: _profiles(runs, metric) for metric in OVER_TYPES}
    labels = profiles[OVER_TYPES[0]][0]
    subtitle = f"{_last_step(runs)}over the token types in the regressions"
    figure, axes, groups = _comparison(
        "Token types of all models over relative depth", subtitle, labels, panels=3
    )
    parts = []
    ranges = []
    lines = list[Lines]()
    for ax, (metric, (curves, is_spread)) in zip(axes, profiles.items(), strict=True):
        _draw(ax, metric, curves)
        ax.set(xlabel="relative depth (1: last block)", xlim=(-0.02, 1.02))
        values, errors = _columns(curves, metric)
        parts.append(with_errors(values, errors, is_spread=is_spread))
        lines.append(_lines(curves)._replace(panel=len(lines)))
        known = values[metric].dropna()
        known_range = (
            f"from {number(known.min())} to {number(known.max())}" if len(known) else "undefined"
        )
        ranges.append(f"{term(metric).name} {known_range}")
    numbers, bands_texts = zip(*parts, strict=True)
    alt = (
        "C.V. of Q, slope and R² of V on M against relative depth, a line for each of "
        f"{len(labels)} models."
    )
    text = f"{', '.join(ranges)}.{max(bands_texts)}{groups}"
    return FigureData("token-types-compared", figure, pd.concat(numbers, axis=1), alt, text, lines)


def training_losses(runs: Sequence[Run]) -> Iterator[FigureData]:
    """The training losses of runs against the step, on the axis of what was measured, where any was
    logged.
    """
    named = term("training_loss")
    losses = {
        run.label: drawable(run.model)["training_loss"].dropna()
        for run in runs
        if "training_loss" in run.model
    }
    logged = [run for run in runs if len(losses.get(run.label, ()))]
    if not logged:
        return
    curves = {
        run.label: Curve(losses[run.label], losses[run.label] * np.nan, run.group, run.differences)
        for run in logged
    }
    title = named.name.capitalize()
    if len(curves) > 1:
        figure, (ax,), groups = _comparison(title, named.unit, curves)
    else:
        figure, (ax,) = new_figure(title, named.unit)
        groups = ""
    _draw(ax, "training_loss", curves)
    step_axis(
        ax, *(run.steps for run in logged), *(list(losses[run.label].index) for run in logged)
    )
    alt = "Training loss against optimizer step, a line a run."
    yield FigureData(
        "training-loss",
        figure,
        pd.DataFrame(losses),
        alt,
        f"{_trends(curves)}{groups}",
        [_lines(curves)],
    )


def _bands(runs: Sequence[Run], metric: str) -> list[Bands]:
    """The bands of each run: of one kind, standard errors where any run has them."""
    has_errors = any(run.errors[metric].notna().any() for run in runs)
    return [run.bands(metric, spreads=not has_errors) for run in runs]


def _profiles(runs: Sequence[Run], metric: str) -> tuple[Curves, bool]:
    """Curves of the last values over relative depth, and whether their bands are spreads."""
    curves = {}
    bands = _bands(runs, metric)
    for run, each in zip(runs, bands, strict=True):
        last, last_errors = (table.iloc[-1] for table in (run.table(metric), each.values))
        for part, depths in relative_depths(run.depth).items():
            values, errors = (
                pd.Series(row[[*depths]].to_numpy(), [*depths.values()])
                for row in (last, last_errors)
            )
            label = f"{run.label}, {part[:-1]}" if part else run.label
            curves[label] = Curve(values, errors, run.group, run.differences)
    return curves, any(each.is_spread for each in bands)


def _columns(curves: Curves, metric: str) -> list[pd.DataFrame]:
    """The values of curves over relative depth in one column, and their errors in another."""
    values = {label: curve.values for label, curve in curves.items()}
    errors = {label: curve.errors for label, curve in curves.items()}
    return [pd.concat(each, names=["run", "depth"]).to_frame(metric) for each in (values, errors)]


def _last_step(runs: Sequence[Run]) -> str:
    training = [run.has_steps for run in runs]
    return "last step; " if all(training) else "runs at their last step; " if any(training) else ""


def _comparison(
    title: str, subtitle: str, curves: Curves, panels: int = 1, behind: Band | None = None
) -> tuple[Figure, list[Axes], str]:
    """A figure with a legend of curves and of their groups; the groups, and what cannot be
    compared, in words.
    """
    looks, by_group = _looks(curves)
    reasons = [
        f" (other {listed([*curve.differences], 2)})" if curve.differences else ""
        for curve in curves.values()
    ]
    names = [printable(label) + reason for label, reason in zip(curves, reasons, strict=True)]
    half = int(mpl.rcParams["figure.figsize"][0] * _HALF_A_NAME)
    names = [
        name if len(name) <= 2 * half else f"{name[: half - 1]}…{name[-half:]}" for name in names
    ]
    key = [
        Line2D([], [], label=f" {name}", **look)
        for name, look in zip(names, looks.values(), strict=True)
    ]
    # the space: a label that begins with "_" would be hidden
    for group, dashes in by_group.items():
        key.append(
            Line2D(
                [],
                [],
                label=f" {printable(group) or 'in no group'}",
                color="black",
                ls=dashes,
                lw=1.3,
            )
        )
    key += (
        []
        if behind is None
        else [Line2D([], [], label=f" {behind.label}", color=COLOUR, lw=6, alpha=0.4)]
    )
    figure, axes = new_figure(title, subtitle, panels=panels, key=key)
    members = {
        group: [label for label, curve in curves.items() if curve.group == group]
        for group in by_group
    }
    text = "; ".join(
        f"{group or 'no group'}: {', '.join(labels)}" for group, labels in members.items()
    )
    text = f" Line styles are by group: {text}." if members else ""
    return figure, axes, text + _apart(curves, "Hollow marks" if members else "Dashed")


def _apart(curves: Curves, look: str) -> str:
    """Words on the curves that cannot be compared with the first one, and why."""
    apart = {label: curve.differences for label, curve in curves.items() if curve.differences}
    why = (
        f"{label}, "
        + ", ".join(
            f"{name} {own} in place of {first}" for name, (first, own) in differences.items()
        )
        for label, differences in apart.items()
    )
    return f" {look}, for not measured like the first run: {'; '.join(why)}." if apart else ""


def _looks(curves: Curves) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """The look of each curve, and the dashes of each group (in none: the last), where there are
    groups.
    """
    groups = sorted(
        dict.fromkeys(curve.group for curve in curves.values()), key=lambda group: not group
    )
    by_group = dict(zip(groups, cycle(DASHES), strict=False)) if any(groups) else {}
    count = len(curves)  # no colour twice
    colours = (
        RUNS if count <= len(RUNS) else [hls_to_rgb(i / count, 0.4, 0.8) for i in range(count)]
    )
    looks = {}
    for label, colour, marker in zip(curves, colours, cycle("osD^vPX*<>"), strict=False):
        is_apart = bool(curves[label].differences)
        ls = by_group.get(curves[label].group, DASHES[is_apart])
        looks[label] = {"color": colour, "marker": marker, "ls": ls, "ms": 3.5, "lw": 1.3}
        looks[label] |= {"mfc": "white"} if is_apart else {}
    return looks, by_group


def _draw(ax: Axes, metric: str, curves: Curves, behind: Band | None = None) -> None:
    ends = [] if behind is None else [behind.low.to_numpy(), behind.high.to_numpy()]
    values = np.concatenate([*(curve.values.to_numpy() for curve in curves.values()), *ends])
    errors = np.concatenate(
        [*(curve.errors.to_numpy() for curve in curves.values()), *(end * np.nan for end in ends)]
    )
    value_axis(ax, term(metric), values, errors=errors)
    if behind is not None:
        draw_band(ax, behind, is_named=False)
    looks, by_group = _looks(curves)
    most, share = (13, 0.12) if by_group else (40, 0.06)  # dashes are seen between the markers
    alpha = max(0.06, min(0.2, 0.5 / len(curves)))
    for label, curve in curves.items():
        every = 1 if len(curve.values) <= most else share  # of the diagonal
        ax.plot(curve.values.dropna(), markevery=every, **looks[label])
        x = curve.values.index.to_numpy()
        band(
            ax,
            x,
            curve.values.to_numpy(),
            curve.errors.to_numpy(),
            looks[label]["color"],
            alpha=alpha,
        )


def _lines(curves: Curves) -> Lines:
    """The curves as lines, for a page that draws them again."""
    values = pd.DataFrame({label: curve.values for label, curve in curves.items()})
    errors = pd.DataFrame({label: curve.errors for label, curve in curves.items()})
    looks = _looks(curves)[0]
    colours, dashes = ([look[name] for look in looks.values()] for name in ("color", "ls"))
    hollow = [label for label, look in looks.items() if "mfc" in look]
    return Lines("run", values, colours, errors, dashes, 1.3, hollow)


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
