"""Figures of metrics over steps and layers, for one run and for several."""

from collections.abc import Sequence
from itertools import cycle
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure

from embedgeo.report.axes import (
    ACCENT,
    DASHES,
    RUNS,
    Array,
    depth_bar,
    layer_axis,
    lines,
    run_colours,
    short,
    step_axis,
    time_bar,
    value_bar,
)
from embedgeo.report.drawing import FigureData, legend, legend_below, new_figure
from embedgeo.report.runs import Run, drawable
from embedgeo.report.values import colour_range, log_ticks, value_axis
from embedgeo.results.glossary import is_processed, term
from embedgeo.results.layer_names import relative_depths
from embedgeo.results.wording import number, printable

_BOLD: dict[str, Any] = {"color": "black", "lw": 2.0}


def dynamics(run: Run, metric: str) -> FigureData:
    """A metric against the step: a line for each layer, their mean over blocks, and the mean of the baseline."""
    table, named = run.table(metric), term(metric)
    means, random = run.means(table), run.means(run.table(metric, run.baseline))
    figure, (ax,) = new_figure(f"{named.name} against step", named.unit, sidebar=len(run.layers) > 1)
    step_axis(ax, run.steps)
    colours = depth_bar(ax, run.layers)
    dashes = [":" if layer.endswith("final_norm") else "-" for layer in run.layers]
    lines(ax, table.index.to_numpy(), table.to_numpy().T, colours, dashes)
    for name, line in zip(means, ("-", (0, (3, 1, 1, 1))), strict=False):
        ax.plot(means[name], label=name, ls=line, **_BOLD)
    value_axis(ax, named, table.to_numpy(), random, run.layers)
    if ":" in dashes:
        ax.plot([], label="norm", ls=":", color=colours[dashes.index(":")])
    legend(figure, ax)
    randoms = ["random" if len(means.columns) == 1 else f"random, {name}" for name in random]
    numbers = table.join(means).join(random.set_axis(randoms, axis=1))
    alt = f"{named.name} against optimizer step, a line for each of {len(run.layers)} layers."
    text = " ".join(f"{name.capitalize()}: {_course(means[name])}{_baseline_text(random[name])}" for name in run.blocks)
    return FigureData(f"{metric}-dynamics", figure, numbers, alt, text)


def profile(run: Run, metric: str) -> FigureData:
    """A metric against the layer: a line for each step, and the baseline at the last step."""
    table, random = (run.table(metric, values).reindex(columns=run.axis) for values in (run.values, run.baseline))
    named = term(metric)
    is_course = len(run.steps) > 1
    figure, (ax,) = new_figure(f"{named.name} through the layers", named.unit, sidebar=is_course)
    layer_axis(ax, run.axis)
    x = np.arange(float(len(run.axis)))
    if is_course:
        lines(ax, x, table.to_numpy(), time_bar(ax, run.steps))
    last = table.iloc[-1]
    look = _BOLD if is_course else {**_BOLD, "lw": 1.2, "marker": "o", "ms": 5}
    ax.plot(x, last.to_numpy(), label=f"step {short(run.steps[-1])}", **look)
    value_axis(ax, named, table.to_numpy(), pd.Series(random.iloc[-1].to_numpy(), x), run.axis)
    legend(figure, ax)
    numbers = table.T.assign(random=random.iloc[-1]).drop("", errors="ignore")
    alt = f"{named.name} against layer, a line for each of {len(run.steps)} steps."
    return FigureData(f"{metric}-profile", figure, numbers, alt, f"At step {run.steps[-1]:,}: {_course(last)}")


def heatmap(run: Run, metric: str) -> FigureData:
    """A metric as colour over steps and layers; values beyond those of the blocks have the colour of the bar's tip."""
    table, named = run.table(metric).reindex(columns=run.axis), term(metric)
    figure, (ax,) = new_figure(f"{named.name} by step and layer", named.unit, sidebar=True)
    step_axis(ax, run.steps)
    layer_axis(ax, run.axis, vertical=True, most=12)
    values = np.ma.masked_invalid(table.to_numpy().T)
    low, high, extend = colour_range(run.axis, table.to_numpy())
    is_log = named.is_logarithmic(np.array([low, high]))
    norm = LogNorm(low, high) if is_log else Normalize(low, high)
    ax.set_facecolor("#d0d0d0")
    ax.grid(visible=False)
    edges = _edges(ax, run.steps)
    rows = np.arange(len(run.axis) + 1) - 0.5
    ax.pcolormesh(edges, rows, values.clip(low, high), norm=norm, cmap="cividis", rasterized=True)
    for gap in np.flatnonzero([not layer for layer in run.axis]):
        ax.axhspan(gap - 0.5, gap + 0.5, color="white")
    ax.set_xlim(edges[0], edges[-1])
    bar = value_bar(ax, ScalarMappable(norm, "cividis"), named.name + (" (log scale)" if is_log else ""), extend)
    if is_log:
        log_ticks(bar.ax, low, high)
    bar.ax.yaxis.set_major_formatter(short)
    text = "Undefined everywhere."
    if values.count():
        layer, step = np.unravel_index(values.argmax(), values.shape)
        text = f"Highest at {run.axis[layer]}, step {run.steps[step]:,}: {number(values[layer, step])}."
    text += " The colours span the blocks: what lies beyond has the colour of the bar's tip." * (extend != "neither")
    numbers = table.T.drop("", errors="ignore")
    return FigureData(f"{metric}-heatmap", figure, numbers, f"{named.name} as colour over steps and layers.", text)


def _edges(ax: Axes, steps: Sequence[int]) -> Array:
    """Borders between the cells of a heatmap: halfway between steps, as the axis shows them."""
    transform = ax.xaxis.get_transform()
    at = transform.transform(np.array(steps, dtype=float))
    margin = max(0.5, 1e-9 * at[0]) if at[0] == at[-1] else 0  # a single cell has to have a width
    return transform.inverted().transform(np.concatenate((at[:1] - margin, (at[1:] + at[:-1]) / 2, at[-1:] + margin)))


def after_processing(run: Run) -> FigureData:
    """Anisotropy and mean cosine at the last step, before and after each after-processing."""
    figure, axes = new_figure("After-processing", f"step {run.steps[-1]:,}", panels=2)
    shown: dict[str, pd.Series] = {}
    colours: dict[str, str] = {"as it is": "black"}
    for ax, metric in zip(reversed(axes), ("mean_cosine", "anisotropy"), strict=True):
        found = [key for key in processed_metrics(run) if key.startswith(f"{metric}_")]
        for key in (*([metric] if metric in run.values else []), *found):
            shown[key] = run.table(key).iloc[-1].reindex(run.axis)
            name = term(key).name.removeprefix(f"{term(metric).name}, ") if key != metric else "as it is"
            colour = colours.setdefault(name, RUNS[(len(colours) - 1) % len(RUNS)])
            ax.plot(shown[key].to_numpy(), color=colour, marker="o", ms=3, lw=1.6, label=name)
        layer_axis(ax, run.axis)
        ax.set_ylabel(term(metric).name)
    legend(figure, axes[-1])
    numbers = pd.DataFrame(shown).drop("", errors="ignore")
    means = run.means(numbers.T)
    text = "; ".join(
        f"{term(str(key)).name} {' and '.join(map(number, values))}"
        for key, values in zip(means.index, means.to_numpy(), strict=True)
    )
    alt = "Anisotropy and mean cosine against layer, before and after each after-processing."
    return FigureData("after-processing", figure, numbers, alt, f"{' and '.join(run.blocks).capitalize()}: {text}.")


def processed_metrics(run: Run) -> list[str]:
    """Names of the metrics that describe the rows after processing."""
    return [metric for metric in run.metrics if is_processed(metric)]


def loss(run: Run, outliers: Sequence[int]) -> FigureData:
    """The loss on the measured text; losses out of line with their neighbours are marked."""
    values, named = drawable(run.model[["loss"]])["loss"].dropna(), term("loss")
    figure, (ax,) = new_figure(f"{named.name} against step", named.unit)
    value_axis(ax, named, values.to_numpy())
    step_axis(ax, list(run.model.index))
    ax.plot(values, marker="o" if len(values) <= 40 else "", ms=2.5, **{**_BOLD, "lw": 1.2})
    outlying = values[values.index.isin(outliers)]
    ax.plot(outlying, ls="", marker="x", ms=9, mew=2, color=ACCENT, label="out of line with its neighbours")
    if len(outlying):
        ax.legend(loc="best")
    return FigureData("loss", figure, values.to_frame(), "Loss against optimizer step.", f"Loss: {_course(values)}")


def compare_dynamics(runs: Sequence[Run], metric: str) -> FigureData:
    """Means over blocks of several runs against the step."""
    curves: dict[str, pd.Series] = {}
    for run in runs:
        means = run.means(run.table(metric))
        curves |= {f"{run.label}, {name}" if len(run.blocks) > 1 else run.label: means[name] for name in run.blocks}
    numbers = pd.DataFrame(curves)
    figure, ax, text = _draw_runs(curves, metric, "against step", "mean over blocks")
    step_axis(ax, *(run.steps for run in runs))
    alt = f"{term(metric).name} against optimizer step, a line for each of {len(runs)} runs."
    return FigureData(f"{metric}-compared-dynamics", figure, numbers, alt, text)


def compare_profiles(runs: Sequence[Run], metric: str) -> FigureData:
    """Several runs at their last steps against relative depth: 0 enters the first block, 1 leaves the last one."""
    curves: dict[str, pd.Series] = {}
    for run in runs:
        last = run.table(metric).iloc[-1]
        for part, depths in relative_depths(run.depth).items():
            label = f"{run.label}, {part[:-1]}" if part else run.label
            curves[label] = pd.Series(last[[*depths]].to_numpy(), [*depths.values()])
    figure, ax, text = _draw_runs(curves, metric, "over relative depth", "last step")
    ax.set_xlabel("relative depth (1: output of the last block)")
    ax.set_xlim(-0.02, 1.02)
    numbers = pd.concat({label: curve.rename(metric) for label, curve in curves.items()}, names=["run", "depth"])
    alt = f"{term(metric).name} against relative depth, a line for each of {len(curves)}: {', '.join(curves)}."
    return FigureData(f"{metric}-compared-profiles", figure, numbers.to_frame(), alt, text)


def _draw_runs(curves: dict[str, pd.Series], metric: str, over: str, note: str) -> tuple[Figure, Axes, str]:
    """A figure with a line for each curve, its axes, and the curves in words."""
    named = term(metric)
    names = [label if len(label) <= 60 else f"{label[:29]}…{label[-30:]}" for label in map(printable, curves)]
    figure, (ax,) = new_figure(f"{named.name} {over}", f"{named.unit}; {note}", names=names)
    value_axis(ax, named, np.concatenate([curve.to_numpy() for curve in curves.values()]))
    styles = zip(run_colours(len(curves)), cycle("osD^vPX*<>"), cycle(DASHES), strict=False)
    for curve, (colour, marker, dashes) in zip(curves.values(), styles, strict=False):
        every = 1 if len(curve) <= 40 else 0.06  # of the diagonal
        ax.plot(curve.dropna(), color=colour, marker=marker, ms=3.5, markevery=every, ls=dashes, lw=1.3)
    legend_below(figure, ax.lines, names)
    return figure, ax, _courses(curves)


def _courses(curves: dict[str, pd.Series]) -> str:
    """Each of a few curves in words; of many, at which values they end."""
    if len(curves) <= 3:
        return " ".join(f"{label}: {_course(curve)}" for label, curve in curves.items())
    last = pd.Series({label: curve.dropna().iloc[-1] for label, curve in curves.items() if curve.notna().any()})
    if last.empty:
        return "undefined."
    return f"Last values: from {number(last.min())} ({last.idxmin()}) to {number(last.max())} ({last.idxmax()})."


def _course(values: pd.Series) -> str:
    """The first, last, lowest and highest value of a curve, in words."""
    finite = values.dropna()
    if finite.empty:
        return "undefined."
    first, last, lowest, highest = (
        f"{number(finite.iloc[i])} at {_place(finite.index[int(i)])}" for i in (0, -1, finite.argmin(), finite.argmax())
    )
    return f"{first}, {last}; lowest {lowest}, highest {highest}."


def _place(place: object) -> str:
    if isinstance(place, float):
        return f"depth {place:.2g}"
    return place if isinstance(place, str) else f"step {place:,}"


def _baseline_text(random: pd.Series) -> str:
    known = random.dropna()
    return f" Random embeddings: {number(known.iloc[-1])} at the last step." if len(known) else ""
