"""Figures of one run: its metrics over steps and layers."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm, Normalize

from embedgeo import drawing as draw
from embedgeo.drawing import FigureData, Lines
from embedgeo.formatting import number
from embedgeo.glossary import GAUSSIAN, term
from embedgeo.report.runs import ALL_ROWS, ORDINARY, Run, drawable

_THIN = 0.6  # width of lines of all rows beside those without massive ones
_BOTH = f" Lines are {ORDINARY}; thin grey ones are of {ALL_ROWS}."
_PARTS = {
    "M": ("M: offset", "#0072b2"),
    "V_W": ("V_W: context", "#009e73"),
    "V_B": ("V_B: token", "#e69f00"),
    "V": ("V: variance", "#999999"),
}
_ESTIMATES = {  # by the parts, the first of which that are known are drawn
    ("M", "V_W_unbiased", "V_B_unbiased"): ", from pairs in different sequences",
    ("M", "V_W", "V_B"): ", plug-in estimates",
    ("M", "V"): "",
}


def dynamics(run: Run, metric: str, *, has_bar: bool = True) -> FigureData:
    """A metric against the step: a line for each layer, their mean over blocks, and the mean of the
    baseline.

    Without the bar of the layers' colours it is drawn faster; the text then says what they are.
    """
    shown = run.shown(metric)
    named = term(metric)
    means, mean_errors = (
        _of_rows(each, shown.mean_rows) for each in (shown.means, shown.mean_errors)
    )
    of_all = _of_rows(shown.all_rows, ALL_ROWS).drop(columns=means, errors="ignore")
    errors = shown.errors.join(mean_errors)
    gaussian = run.gaussian_means(shown.key)
    figure, ax = draw.new_figure(f"{named.name} against step", named.unit)
    draw.step_axis(ax, run.steps)
    colours = draw.depth_bar(ax, run.layers) if has_bar else draw.depth_colours(len(run.layers))
    lines = [
        Lines("layer", shown.table, colours, shown.errors),
        Lines("mean", means, ["black"], mean_errors, draw.DASHES, 2.0),
    ]
    draw.lines(ax, *lines)
    ax.plot(of_all, color="grey", lw=_THIN)
    values = shown.table.join(means)
    others = {ALL_ROWS: of_all}
    draw.value_axis(ax, named, values, gaussian, run.layers, errors, others)
    draw.legend(ax)
    has_several = len(gaussian.columns) > 1
    baseline = gaussian.rename(
        columns=lambda name: f"{GAUSSIAN}, {name}" if has_several else GAUSSIAN
    )
    lines += [Lines("all", of_all, ["grey"], width=_THIN), _baseline_lines(baseline)]
    numbers = _of_rows(shown.table, shown.rows).join(means)
    numbers, bands = with_errors(numbers, errors.set_axis(numbers.columns, axis=1))
    alt = f"{named.name} against optimizer step, a line for each of {len(run.layers)} layers."
    text = " ".join(
        f"{str(name).capitalize()}: {trend(means[name], run.comparable(means[name], str(side)))}"
        f"{_gaussian_text(gaussian.get(side, pd.Series()))}"
        for side, name in zip(shown.means, means, strict=True)
    )
    text += bands + (_BOTH if shown.rows else "")
    text += "" if has_bar else " Colours: from violet, the first layer, to green, the last."
    numbers = numbers.join([of_all, baseline])
    return FigureData(f"{metric}-dynamics", figure, numbers, alt, text, lines)


def _baseline_lines(values: pd.DataFrame) -> Lines:
    """The dashed lines of the baseline, as far as it is known."""
    known = values.dropna(axis=1, how="all")
    look = draw.BASELINE
    return Lines("gaussian", known, [look["color"]], dashes=[look["ls"]], width=look["lw"])


def profile(run: Run, metric: str) -> FigureData:
    """A metric against the layer: a line for each step, and the baseline at the last step."""
    shown = run.shown(metric)
    named = term(metric)
    tables = (shown.table, shown.errors, shown.all_rows, run.table(shown.key, run.baseline))
    # rows are layers, columns steps
    table, errors, of_all, baselines = (each.reindex(columns=run.axis).T for each in tables)
    of_all = of_all if shown.rows else of_all.iloc[:, :0]
    baseline = baselines.iloc[:, [-1]].set_axis([GAUSSIAN], axis=1)
    has_several_steps = len(run.steps) > 1
    figure, ax = draw.new_figure(f"{named.name} through the layers", named.unit)
    draw.layer_axis(ax, run.axis)
    label = f"step {draw.tick_label(run.steps[-1])}" if run.has_steps else "measured"
    last, last_errors = (each.iloc[:, [-1]].set_axis([label], axis=1) for each in (table, errors))
    look = {"width": 2.0} if has_several_steps else {"width": 1.2, "markers": ["o"]}
    lines = [
        Lines("last", last, ["black"], last_errors, **look),
        Lines("all", of_all.iloc[:, -1:].rename(columns=lambda _: ALL_ROWS), ["grey"], width=_THIN),
    ]
    if has_several_steps:
        lines = [Lines("step", table, draw.time_bar(ax, run.steps), errors), *lines]
    draw.lines(ax, *lines)
    expected = baseline.reset_index(drop=True)
    others = {ALL_ROWS: lines[-1].values}
    draw.value_axis(ax, named, table.T, expected, run.axis, errors.T, others)
    draw.legend(ax)
    columns = {} if run.has_steps else {run.steps[-1]: metric}
    numbers, bands = with_errors(
        *(_of_rows(each.rename(columns=columns), shown.rows) for each in (table, errors))
    )
    numbers = numbers.join([_of_rows(of_all, ALL_ROWS), baseline]).drop("", errors="ignore")
    alt = f"{named.name} against layer" + (
        f", a line for each of {len(run.steps)} steps." if run.has_steps else "."
    )
    text = (f"At step {run.steps[-1]:,}: " if run.has_steps else "") + trend(table.iloc[:, -1])
    text += (_BOTH if shown.rows else "") + bands
    lines.append(_baseline_lines(baseline))
    return FigureData(f"{metric}-profile", figure, numbers, alt, text, lines)


def heatmap(run: Run, metric: str) -> FigureData:
    """A metric as colour over steps and layers; values beyond those of the blocks have the colour
    of the bar's tip.
    """
    table = run.table(metric).reindex(columns=run.axis)
    named = term(metric)
    figure, ax = draw.new_figure(f"{named.name} by step and layer", named.unit)
    draw.step_axis(ax, run.steps)
    draw.layer_axis(ax, run.axis, vertical=True, most=12)
    low, high, extend = draw.colour_range(run.axis, table.to_numpy())
    is_log = named.is_logarithmic(low, high)
    norm = LogNorm(low, high) if is_log else Normalize(low, high)
    ax.set_facecolor(draw.UNKNOWN_COLOUR)
    ax.grid(visible=False)
    scale = ax.xaxis.get_transform()
    at = scale.transform(np.array(run.steps, dtype=float))
    margin = max(0.5, 1e-9 * at[0]) if at[0] == at[-1] else 0  # a single cell has to have a width
    middles = (at[1:] + at[:-1]) / 2
    edges = scale.inverted().transform(np.concatenate((at[:1] - margin, middles, at[-1:] + margin)))
    rows = np.arange(len(run.axis) + 1) - 0.5
    cells = table.T.clip(low, high)
    ax.pcolormesh(edges, rows, cells, norm=norm, cmap="cividis", rasterized=True)
    if "" in run.axis:
        gap = run.axis.index("")
        ax.axhspan(gap - 0.5, gap + 0.5, color="white")
    ax.set_xlim(edges[0], edges[-1])
    label = named.name + (" (log scale)" if is_log else "")
    bar = draw.value_bar(ax, ScalarMappable(norm, "cividis"), label, extend)
    if is_log:
        draw.log_ticks(bar.ax, low, high)
    text = "Undefined everywhere."
    known: Any = table.unstack().dropna()
    if len(known):
        layer, step = known.idxmax()
        text = f"Highest at {layer}, step {step:,}: {number(known.max())}."
    if extend != "neither":
        text += " The colours span the blocks: what lies beyond has the colour of the bar's tip."
    text += f" Of {ALL_ROWS}." if run.shown(metric).rows else ""
    numbers = table.T.drop("", errors="ignore")
    alt = f"{named.name} as colour over steps and layers."
    return FigureData(f"{metric}-heatmap", figure, numbers, alt, text)


def loss_figures(run: Run) -> Iterator[FigureData]:
    """The loss on the measured text, if it is known."""
    values = drawable(run.of_model("loss")).dropna()
    named = term("loss")
    if not run.has_steps or values.empty:
        return
    figure, ax = draw.new_figure(f"{named.name} against step", named.unit)
    draw.value_axis(ax, named, values)
    draw.step_axis(ax, list(values.index))
    numbers = values.to_frame()
    lines = Lines("last", numbers, ["black"], width=1.2, markers=["o"])
    draw.lines(ax, lines)
    yield FigureData(
        "loss", figure, numbers, "Loss against optimizer step.", f"Loss: {trend(values)}", [lines]
    )


def composition(run: Run) -> Iterator[FigureData]:
    """Shares of M, V_W and V_B in Q at each layer of the last step, if they are known."""
    names = _parts(run)
    if not (run.depth and names):
        return
    parts = run.values[[*names]].clip(lower=0)
    total = parts.sum(axis=1, skipna=False)
    shares = parts.div(total.where(total > 0), axis=0).rename(
        columns=lambda part: part.removesuffix("_unbiased")
    )
    shares = shares.reindex(run.depth, level="layer")
    at_last = shares.loc[run.steps[-1]]
    means: Any = at_last[at_last.index.isin(run.all_blocks)].mean(skipna=False)
    title = "What Q is made of" + (f", step {run.steps[-1]:,}" if run.has_steps else "")
    subtitle = f"shares of the mean squared norm{_ESTIMATES[names]}"
    figure, ax = draw.new_figure(title, subtitle)
    heights: Any = at_last.reindex(run.axis).fillna(0)
    bottoms = heights.cumsum(axis=1) - heights
    width = 0.86 if len(heights) <= 12 else 1
    for part in heights:
        label, colour = _PARTS[str(part)]
        bar = np.arange(len(heights)), heights[part], width, bottoms[part]
        ax.bar(*bar, color=colour, label=label)
    draw.layer_axis(ax, run.axis)
    ax.set_ylabel("share of Q")
    ax.set_ylim(0, 1)
    ax.grid(visible=False)
    draw.legend(ax)
    alt = f"Shares of {', '.join(map(str, shares))} in Q, stacked, by layer."
    text = ", ".join(f"{part} {share:.0%}" for part, share in means.items())
    numbers = shares if run.has_steps else shares.droplevel("step")
    yield FigureData("decomposition", figure, numbers, alt, f"Mean over blocks: {text}.")


def _parts(run: Run) -> tuple[str, ...]:
    known = set(run.values.columns[run.values.notna().any()])
    return next((parts for parts in _ESTIMATES if known.issuperset(parts)), ())


def with_errors(numbers: pd.DataFrame, errors: pd.DataFrame) -> tuple[pd.DataFrame, str]:
    """Numbers with the standard errors of those columns that have any; the bands in words."""
    known = errors.dropna(axis=1, how="all")
    if known.empty:
        return numbers, ""
    return numbers.join(known.add_prefix("stderr of ")), " Bands: one standard error to each side."


def _of_rows(values: pd.DataFrame, rows: str) -> pd.DataFrame:
    """Values under names that say of which rows they are."""
    return values.add_suffix(f", {rows}") if rows else values


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
    return place if isinstance(place, str) else f"step {place:,}"


def _gaussian_text(values: pd.Series) -> str:
    last = values.iloc[-1:].dropna()
    return f" Gaussian rows: {number(last.iloc[0])} at the last step." if len(last) else ""
