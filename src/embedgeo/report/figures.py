"""Figures of one run: its metrics over steps and layers."""

from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm, Normalize

from embedgeo import drawing as draw
from embedgeo.drawing import FigureData, Lines
from embedgeo.formatting import number
from embedgeo.glossary import GAUSSIAN, WITHOUT_MASSIVE, term
from embedgeo.report.runs import ALL_ROWS, ORDINARY, Run, drawable

By = Literal["layer", "step"]  # the layers, at the last step, or the steps, averaged over blocks

_THIN = 0.6  # width of lines of all rows beside those without massive ones
_BOTH = f" Lines are {ORDINARY}; thin grey ones are of {ALL_ROWS}."
_BOLD: dict[str, Any] = {"color": "black", "lw": 2.0}
_PARTS = {
    "M": ("M: offset", "#0072b2"),
    "V_W": ("V_W: context", "#009e73"),
    "V_B": ("V_B: token", "#e69f00"),
    "V": ("V: variance", "#999999"),
}
_COMPOSITIONS = (("M", "V_W_unbiased", "V_B_unbiased"), ("M", "V_W", "V_B"), ("M", "V"))


def dynamics(run: Run, metric: str, ax: Axes | None = None, *, has_bar: bool = True) -> FigureData:
    """A metric against the step: a line for each layer, their mean over blocks, and the mean of the
    baseline.

    Without the bar of the layers' colours it is drawn faster; the text then says what they are.
    """
    shown = run.shown(metric)
    table, errors = shown.table, shown.errors
    named = term(metric)
    means, mean_errors = (
        _of_rows(each, shown.mean_rows) for each in (shown.means, shown.mean_errors)
    )
    of_all = _of_rows(run.table(metric).join(run.means(metric)), ALL_ROWS)
    of_all = of_all.drop(columns=means if shown.rows else of_all, errors="ignore")
    gaussian = run.gaussian_means(metric + WITHOUT_MASSIVE * bool(shown.rows))
    figure, (ax,) = draw.new_figure(f"{named.name} against step", named.unit, ax=ax)
    draw.step_axis(ax, run.steps)
    colours = draw.depth_bar(ax, run.layers) if has_bar else draw.depth_colours(len(run.layers))
    draw.lines(ax, table, colours, errors)
    ax.plot(of_all, color="grey", lw=_THIN)
    for name, dashes in zip(means, draw.DASHES, strict=False):
        ax.plot(means[name], color="black", lw=2.0, ls=dashes, label=name)
        draw.band(ax, means[name], mean_errors[name], "black")
    baseline = _named_gaussian(gaussian)
    few = means[means.index.isin(run.few_rows.index)]
    if len(few):  # marks of none would be outside of the figure
        ax.plot(few, "o", color="black", mfc="white", clip_on=False)
    every_error = errors.join(mean_errors)
    draw.value_axis(ax, named, table.join(means), gaussian, run.layers, every_error)
    draw.legend(ax)
    numbers = _of_rows(table, shown.rows).join(means)
    numbers, bands = with_errors(numbers, every_error.set_axis(numbers.columns, axis=1))
    alt = f"{named.name} against optimizer step, a line for each of {len(run.layers)} layers."
    text = " ".join(
        f"{str(name).capitalize()}: {trend(means[name], run.comparable(means[name]))}"
        f"{_gaussian_text(gaussian.get(side, pd.Series()))}"
        for side, name in zip(shown.means, means, strict=True)
    )
    text += bands + (" Hollow: steps of few rows." if len(few) else "")
    text += _BOTH if shown.rows else ""
    text += "" if has_bar else " Colours: from violet, the first layer, to green, the last."
    lines = [
        Lines("layer", table, colours, errors),
        Lines("mean", means, "black", mean_errors, draw.DASHES, 2.0),
        Lines("all", of_all, "grey", width=_THIN),
        _baseline_lines(baseline),
        Lines("few", few.add_suffix(", few rows"), "black"),
    ]
    return FigureData(
        f"{metric}-dynamics", figure, numbers.join([of_all, baseline]), alt, text, lines
    )


def _baseline_lines(values: pd.DataFrame) -> Lines:
    """The dashed lines of the baseline, as far as it is known."""
    known = values.dropna(axis=1, how="all")
    look = draw.BASELINE
    return Lines("gaussian", known, look["color"], dashes=look["ls"], width=look["lw"])


def profile(run: Run, metric: str, ax: Axes | None = None) -> FigureData:
    """A metric against the layer: a line for each step, and the baseline at the last step."""
    run = run.where_measured(metric)
    shown = run.shown(metric)
    gaussian = metric + WITHOUT_MASSIVE * bool(shown.rows)
    tables = (shown.table, shown.errors, run.table(metric), run.table(gaussian, run.baseline))
    table, errors, whole, baselines = (each.reindex(columns=run.axis) for each in tables)
    named = term(metric)
    has_several_steps = len(run.steps) > 1
    figure, (ax,) = draw.new_figure(f"{named.name} through the layers", named.unit, ax=ax)
    draw.layer_axis(ax, run.axis)
    last = table.iloc[-1]
    of_steps = []
    if has_several_steps:
        colours = draw.time_bar(ax, run.steps)
        draw.lines(ax, table.T, colours, errors.T)
        of_steps = [Lines("step", table.T, colours, errors.T)]
    else:
        draw.band(ax, last, errors.iloc[-1], "black")
    look = _BOLD if has_several_steps else {**_BOLD, "lw": 1.2, "marker": "o", "ms": 5}
    ax.plot(last.to_numpy(), label=run.last_label, **look)
    of_all = whole.T if shown.rows else whole.T.iloc[:, :0]
    last_of_all = of_all.iloc[:, -1:].rename(columns=lambda _: ALL_ROWS)
    ax.plot(last_of_all.to_numpy(), color="grey", lw=_THIN, label=ALL_ROWS)
    baseline = baselines.iloc[-1].reset_index(drop=True)
    draw.value_axis(ax, named, table, baseline, run.axis, errors)
    draw.legend(ax)
    columns = {} if run.has_steps else {run.steps[-1]: metric}
    numbers, bands = with_errors(
        *(
            _of_rows(each.T.drop("", errors="ignore").rename(columns=columns), shown.rows)
            for each in (table, errors)
        )
    )
    numbers = numbers.join(_of_rows(of_all, ALL_ROWS)).assign(
        **{GAUSSIAN: baselines.iloc[-1].drop("", errors="ignore")}
    )
    alt = f"{named.name} against layer" + (
        f", a line for each of {len(run.steps)} steps." if run.has_steps else "."
    )
    text = (f"At step {run.steps[-1]:,}: " if run.has_steps else "") + trend(last)
    text += _BOTH if shown.rows else ""
    of_last = last.to_frame(run.last_label)
    lines = [
        *of_steps,
        Lines("last", of_last, "black", errors.iloc[[-1]].T, width=look["lw"]),
        Lines("all", last_of_all, "grey", width=_THIN),
        _baseline_lines(baselines.iloc[-1].to_frame(GAUSSIAN)),
    ]
    return FigureData(f"{metric}-profile", figure, numbers, alt, text + bands, lines)


def heatmap(run: Run, metric: str, ax: Axes | None = None) -> FigureData:
    """A metric as colour over steps and layers; values beyond those of the blocks have the colour
    of the bar's tip.
    """
    run = run.where_measured(metric)
    table, named = run.table(metric).reindex(columns=run.axis), term(metric)
    figure, (ax,) = draw.new_figure(f"{named.name} by step and layer", named.unit, ax=ax)
    draw.step_axis(ax, run.steps)
    draw.layer_axis(ax, run.axis, vertical=True, most=12)
    values = np.ma.masked_invalid(table.to_numpy().T)
    low, high, extend = draw.colour_range(run.axis, table.to_numpy())
    is_log = named.is_logarithmic(np.array([low, high]))
    norm = LogNorm(low, high) if is_log else Normalize(low, high)
    ax.set_facecolor(draw.UNKNOWN_COLOUR)
    ax.grid(visible=False)
    scale = ax.xaxis.get_transform()
    at = scale.transform(np.array(run.steps, dtype=float))
    margin = max(0.5, 1e-9 * at[0]) if at[0] == at[-1] else 0  # a single cell has to have a width
    middles = (at[1:] + at[:-1]) / 2
    edges = scale.inverted().transform(np.concatenate((at[:1] - margin, middles, at[-1:] + margin)))
    rows = np.arange(len(run.axis) + 1) - 0.5
    ax.pcolormesh(edges, rows, values.clip(low, high), norm=norm, cmap="cividis", rasterized=True)
    for gap in np.flatnonzero([not layer for layer in run.axis]):
        ax.axhspan(gap - 0.5, gap + 0.5, color="white")
    ax.set_xlim(edges[0], edges[-1])
    label = named.name + (" (log scale)" if is_log else "")
    bar = draw.value_bar(ax, ScalarMappable(norm, "cividis"), label, extend)
    if is_log:
        draw.log_ticks(bar.ax, low, high)
    text = "Undefined everywhere."
    if values.count():
        layer, step = np.unravel_index(values.argmax(), values.shape)
        text = (
            f"Highest at {run.axis[layer]}, step {run.steps[step]:,}: "
            f"{number(values[layer, step])}."
        )
    if extend != "neither":
        text += " The colours span the blocks: what lies beyond has the colour of the bar's tip."
    text += f" Of {ALL_ROWS}." if run.shown(metric).rows else ""
    numbers = table.T.drop("", errors="ignore")
    alt = f"{named.name} as colour over steps and layers."
    return FigureData(f"{metric}-heatmap", figure, numbers, alt, text)


def loss_figures(run: Run) -> Iterator[FigureData]:
    """The loss on the measured text, if it is known."""
    if not run.has_steps or "loss" not in run.model or run.model["loss"].isna().all():
        return
    values, named = drawable(run.model[["loss"]])["loss"].dropna(), term("loss")
    figure, (ax,) = draw.new_figure(f"{named.name} against step", named.unit)
    draw.value_axis(ax, named, values)
    draw.step_axis(ax, list(values.index))
    ax.plot(values, marker="o" if len(values) <= 40 else "", ms=2.5, color="black", lw=1.2)
    numbers = values.to_frame()
    lines = [Lines("last", numbers, "black", width=1.2)]
    yield FigureData(
        "loss", figure, numbers, "Loss against optimizer step.", f"Loss: {trend(values)}", lines
    )


def has_composition(run: Run) -> bool:
    """Test for the parts of the mean squared norm."""
    return bool(run.depth and _parts(run))


def composition(run: Run, by: By, ax: Axes | None = None) -> FigureData:
    """Shares of M, V_W and V_B in Q: at each layer of the last step, or at each step, averaged over
    blocks.
    """
    parts = run.values[_parts(run)].clip(lower=0)
    total = parts.sum(axis=1, skipna=False)
    shares = parts.div(total.where(total > 0), axis=0).rename(
        columns=lambda part: part.removesuffix("_unbiased")
    )
    shares = shares.reindex(run.depth, level="layer")
    of_blocks = shares[shares.index.isin(run.all_blocks, "layer")].groupby("step")
    means: Any = of_blocks.apply(pd.DataFrame.mean, skipna=False)
    estimates = ", plug-in estimates" if "V_W" in parts else ""
    estimates = ", from pairs in different sequences" if "V_W_unbiased" in parts else estimates
    title = (
        run.titled("What Q is made of", run.steps[-1])
        if by == "layer"
        else "What Q is made of, mean over blocks"
    )
    figure, (ax,) = draw.new_figure(title, f"shares of the mean squared norm{estimates}", ax=ax)
    labels, colours = zip(*(_PARTS[str(part)] for part in shares), strict=True)
    first, last = (
        ", ".join(f"{part} {share:.0%}" for part, share in means.iloc[i].items()) for i in (0, -1)
    )
    alt = f"Shares of {', '.join(map(str, shares))} in Q, stacked, "
    if by == "layer":
        heights = shares.loc[[run.steps[-1]]].droplevel("step").reindex(run.axis).fillna(0)
        bottoms = heights.cumsum(axis=1) - heights
        width = 0.86 if len(heights) <= 12 else 1
        for part, label, colour in zip(heights, labels, colours, strict=True):
            bar = np.arange(len(heights)), heights[part], width, bottoms[part]
            ax.bar(*bar, color=colour, label=label)
        draw.layer_axis(ax, run.axis)
        alt += "by layer."
        text = f"Mean over blocks: {last}."
    else:
        draw.step_axis(ax, run.steps)
        ax.stackplot(means.index, means.to_numpy().T, labels=labels, colors=colours, lw=0)
        alt += "against optimizer step."
        text = f"Mean over blocks, first step: {first}; last step: {last}."
    ax.set_ylabel("share of Q")
    ax.set_ylim(0, 1)
    ax.grid(visible=False)
    draw.legend(ax)
    if by == "step":
        return FigureData("decomposition-dynamics", figure, means, alt, text)
    numbers = shares if run.has_steps else shares.droplevel("step")
    return FigureData("decomposition", figure, numbers, alt, text)


def _parts(run: Run) -> list[str]:
    known = set(run.values.columns[run.values.notna().any()])
    return next((list(parts) for parts in _COMPOSITIONS if known.issuperset(parts)), [])


def with_errors(numbers: pd.DataFrame, errors: pd.DataFrame) -> tuple[pd.DataFrame, str]:
    """Numbers with the standard errors of those columns that have any; the bands in words."""
    known = errors.dropna(axis=1, how="all")
    if known.empty:
        return numbers, ""
    return numbers.join(known.add_prefix("stderr of ")), " Bands: one standard error to each side."


def _of_rows(values: pd.DataFrame, rows: str) -> pd.DataFrame:
    """Values under names that say of which rows they are."""
    return values.add_suffix(f", {rows}") if rows else values


def _named_gaussian(values: pd.DataFrame) -> pd.DataFrame:
    """Means of the baseline over blocks, under the names that they have beside those of the
    values.
    """
    has_several = len(values.columns) > 1
    return values.rename(
        columns={name: f"{GAUSSIAN}, {name}" if has_several else GAUSSIAN for name in values}
    )


def trend(values: pd.Series, comparable: pd.Series | None = None) -> str:
    """The first, last, lowest and highest value of a curve, in words; the last two among the
    comparable ones.
    """
    finite = values.dropna()
    if finite.empty:
        return "undefined."
    among = finite if comparable is None else comparable
    places: Any = finite.index[0], finite.index[-1], among.idxmin(), among.idxmax()
    first, last, lowest, highest = (f"{number(finite[at])} at {_place(at)}" for at in places)
    return f"{first}, {last}; lowest {lowest}, highest {highest}."


def _place(place: object) -> str:
    if isinstance(place, float):
        return f"depth {place:.2g}"
    return place if isinstance(place, str) else f"step {place:,}"


def _gaussian_text(values: pd.Series) -> str:
    known = values.dropna()
    return f" Gaussian rows: {number(known.iloc[-1])} at the last step." if len(known) else ""
