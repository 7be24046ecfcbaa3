"""Figures of metrics over steps and layers."""

import re
from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from embedgeo.formatting import number, printable
from embedgeo.glossary import is_processed, term
from embedgeo.layer_names import relative_depths
from embedgeo.report.drawing import (
    ACCENT,
    BASELINE,
    DASHES,
    RUNS,
    Array,
    FigureData,
    band,
    colour_range,
    depth_bar,
    depth_colours,
    few_ticks,
    layer_axis,
    legend,
    legend_below,
    lines,
    log_ticks,
    new_figure,
    run_colours,
    short,
    step_axis,
    time_bar,
    value_axis,
    value_bar,
)
from embedgeo.report.runs import Bands, Run, drawable

_EXPECTED = "‖γ‖² + ‖β‖²"
_BOLD: dict[str, Any] = {"color": "black", "lw": 2.0}


def dynamics(run: Run, metric: str, ax: Axes | None = None, *, has_bar: bool = True) -> FigureData:
    """A metric against the step: a line for each layer, their mean over blocks, and the mean of the baseline.

    Args:
        run: a run.
        metric: one that it has.
        ax: axes to draw in; as for the other figures of one panel. Default: those of a new figure.
        has_bar: name the layers' colours in a bar, and draw all ticks, which is slow; else the text says what they are.
    """
    table, (errors, of_means, is_spread), named = run.table(metric), run.bands(metric), term(metric)
    means, random = run.means(table), run.means(run.table(metric, run.baseline))
    sidebar = has_bar and len(run.layers) > 1
    figure, (ax,) = new_figure(f"{named.name} against step", named.unit, sidebar=sidebar, ax=ax)
    step_axis(ax, run.steps)
    colours = depth_bar(ax, run.layers) if sidebar else depth_colours(len(run.layers))
    dashes = [":" if layer.endswith("final_norm") else "-" for layer in run.layers]
    steps = table.index.to_numpy()
    lines(ax, steps, table.to_numpy().T, colours, dashes, errors.to_numpy().T)
    for name, line in zip(means, ("-", (0, (3, 1, 1, 1))), strict=False):
        ax.plot(means[name], label=name, ls=line, **_BOLD)
        band(ax, steps, means[name].to_numpy(), of_means[name].to_numpy(), "black")
    expected = _expected(run, metric)
    if expected.notna().to_numpy().any():
        lines(ax, steps, expected.to_numpy().T, colours, ["--"] * len(run.layers))
    value_axis(ax, named, np.vstack([table, expected]), random, run.layers, np.vstack([errors, expected * np.nan]))
    if _is_seen(ax, expected):
        ax.plot([], label=_EXPECTED, **BASELINE)
    if not has_bar:
        few_ticks(ax)
    norms = [layer for layer in run.layers if layer.endswith("final_norm")]
    if _is_seen(ax, table[norms]):
        ax.plot([], label="norm", ls=":", color=colours[dashes.index(":")])
    legend(figure, ax)
    randoms = ["random" if len(means.columns) == 1 else f"random, {name}" for name in random]
    numbers = with_errors(table.join(means), errors.join(of_means), is_spread=is_spread)
    numbers = numbers.join(random.set_axis(randoms, axis=1))
    numbers = numbers.join(expected.dropna(axis=1, how="all").add_prefix("expected at "))
    alt = f"{named.name} against optimizer step, a line for each of {len(run.layers)} layers."
    text = " ".join(f"{name.capitalize()}: {course(means[name])}{_baseline_text(random[name])}" for name in run.blocks)
    text += band_text(errors, is_spread=is_spread)
    text += "" if has_bar else " Colours: from violet, the first layer, to green, the last."
    return FigureData(f"{metric}-dynamics", figure, numbers, alt, text)


def profile(run: Run, metric: str, ax: Axes | None = None) -> FigureData:
    """A metric against the layer: a line for each step, and the baseline at the last step."""
    of_layers, _, is_spread = run.bands(metric)
    tables = (run.table(metric), of_layers, run.table(metric, run.baseline))
    table, errors, random = (each.reindex(columns=run.axis) for each in tables)
    named = term(metric)
    is_course = len(run.steps) > 1
    figure, (ax,) = new_figure(f"{named.name} through the layers", named.unit, sidebar=is_course, ax=ax)
    layer_axis(ax, run.axis)
    x = np.arange(float(len(run.axis)))
    last = table.iloc[-1]
    if is_course:
        lines(ax, x, table.to_numpy(), time_bar(ax, run.steps), errors=errors.to_numpy())
    else:
        band(ax, x, last.to_numpy(), errors.iloc[-1].to_numpy(), "black")
    known = _expected(run, metric).reindex(columns=run.axis).iloc[-1]
    marks = {"marker": "_", "ms": 14, "mew": 1.3, **BASELINE}
    if known.notna().any():
        ax.plot(x, known.to_numpy(), **marks)
    look = _BOLD if is_course else {**_BOLD, "lw": 1.2, "marker": "o", "ms": 5}
    label = f"step {short(run.steps[-1])}" if run.has_steps else "measured"
    ax.plot(x, last.to_numpy(), label=label, **look)
    spanned, beside_it = np.vstack([table, known]), np.vstack([errors, known * np.nan])
    value_axis(ax, named, spanned, pd.Series(random.iloc[-1].to_numpy(), x), run.axis, beside_it)
    if _is_seen(ax, known):
        ax.plot([], label=_EXPECTED, **marks)
    legend(figure, ax)
    columns = {} if run.has_steps else {run.steps[-1]: metric}
    shown, beside, expected = (each.T.drop("", errors="ignore") for each in (table, errors, random))
    numbers = with_errors(shown.rename(columns=columns), beside.rename(columns=columns), is_spread=is_spread)
    numbers = numbers.assign(random=expected.iloc[:, -1])
    alt = f"{named.name} against layer" + (f", a line for each of {len(run.steps)} steps." if run.has_steps else ".")
    text = (f"At step {run.steps[-1]:,}: " if run.has_steps else "") + course(last)
    return FigureData(f"{metric}-profile", figure, numbers, alt, text + band_text(errors, is_spread=is_spread))


def _is_seen(ax: Axes, values: pd.Series | pd.DataFrame) -> bool:
    """Whether a line of these values is anywhere within the axes."""
    low, high = ax.get_ylim()
    return bool(((values >= low) & (values <= high)).to_numpy().any())


def _expected(run: Run, metric: str) -> pd.DataFrame:
    """What a metric is where a layer is a norm's output, at each step (rows) and layer (columns); NaN elsewhere."""
    is_known = metric == "Q" and "norm_Q_expected" in run.values
    return run.table("norm_Q_expected") if is_known else run.table(metric) * np.nan


def heatmap(run: Run, metric: str, ax: Axes | None = None) -> FigureData:
    """A metric as colour over steps and layers; values beyond those of the blocks have the colour of the bar's tip."""
    table, named = run.table(metric).reindex(columns=run.axis), term(metric)
    figure, (ax,) = new_figure(f"{named.name} by step and layer", named.unit, sidebar=True, ax=ax)
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
    figure, axes = new_figure(run.titled("After-processing", run.steps[-1]), panels=2)
    shown: dict[str, pd.Series] = {}
    errors: dict[str, pd.Series] = {}
    colours: dict[str, str] = {"as it is": "black"}
    for ax, metric in zip(reversed(axes), ("mean_cosine", "anisotropy"), strict=True):
        found = [key for key in processed_metrics(run) if key.startswith(f"{metric}_")]
        for key in (*([metric] if metric in run.values else []), *found):
            shown[key], errors[key] = (
                run.table(key, values).iloc[-1].reindex(run.axis) for values in (run.values, run.errors)
            )
            name = term(key).name.removeprefix(f"{term(metric).name}, ") if key != metric else "as it is"
            colour = colours.setdefault(name, RUNS[(len(colours) - 1) % len(RUNS)])
            ax.plot(shown[key].to_numpy(), color=colour, marker="o", ms=3, lw=1.6, label=name)
            band(ax, np.arange(float(len(run.axis))), shown[key].to_numpy(), errors[key].to_numpy(), colour)
        layer_axis(ax, run.axis)
        ax.set_ylabel(term(metric).name)
    legend(figure, axes[-1])
    numbers = with_errors(pd.DataFrame(shown), pd.DataFrame(errors)).drop("", errors="ignore")
    means = run.means(numbers[[*shown]].T)
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
    return FigureData("loss", figure, values.to_frame(), "Loss against optimizer step.", f"Loss: {course(values)}")


def with_errors(numbers: pd.DataFrame, errors: pd.DataFrame, *, is_spread: bool = False) -> pd.DataFrame:
    """Numbers, and beside them the standard errors, or spreads over batches, of those columns that have any."""
    return numbers.join(errors.dropna(axis=1, how="all").add_prefix("std of " if is_spread else "stderr of "))


def band_text(errors: pd.DataFrame, *, is_spread: bool = False) -> str:
    """What the bands are, where there are any."""
    if not errors.notna().to_numpy().any():
        return ""
    return f" Bands: one {'standard deviation over batches' if is_spread else 'standard error'} to each side."


def course(values: pd.Series) -> str:
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


_PARTS = {
    "M": ("M: offset", "#0072b2"),
    "V_W": ("V_W: context", "#009e73"),
    "V_B": ("V_B: token", "#e69f00"),
    "V": ("V: variance", "#999999"),
}
_KNOWN = (("M", "V_W_unbiased", "V_B_unbiased"), ("M", "V_W", "V_B"), ("M", "V"))


def has_shares(run: Run) -> bool:
    """Whether the composition of the mean squared norm was measured."""
    return bool(run.depth and _parts(run))


def shares_by_layer(run: Run, ax: Axes | None = None) -> FigureData:
    """The shares at each layer, at the last step."""
    unit, shares = _shares(run)
    last = shares.loc[[run.steps[-1]]].droplevel("step").reindex(run.axis)
    figure, (ax,) = new_figure(run.titled("What Q is made of", run.steps[-1]), unit, ax=ax)
    bottom = np.zeros(len(last))
    for part in shares:
        label, colour = _PARTS[str(part)]
        height = last[part].fillna(0).to_numpy()
        ax.bar(np.arange(len(last)), height, 0.86 if len(last) <= 12 else 1, bottom, color=colour, label=label)
        bottom += height
    layer_axis(ax, run.axis)
    _share_axis(figure, ax)
    alt = f"Shares of {_names(shares)} in Q, stacked, by layer."
    text = f"Mean over blocks: {_percent(_means(run, shares), -1)}."
    numbers = shares if run.has_steps else shares.droplevel("step")
    return FigureData("decomposition", figure, numbers, alt, text)


def shares_by_step(run: Run, ax: Axes | None = None) -> FigureData:
    """The shares at each step, averaged over blocks."""
    unit, shares = _shares(run)
    means = _means(run, shares)
    figure, (ax,) = new_figure("What Q is made of, mean over blocks", unit, ax=ax)
    step_axis(ax, run.steps)
    labels, colours = zip(*(_PARTS[str(part)] for part in means), strict=True)
    ax.stackplot(means.index, means.to_numpy().T, labels=labels, colors=colours, lw=0)
    _share_axis(figure, ax)
    alt = f"Shares of {_names(shares)} in Q, stacked, against optimizer step."
    text = f"Mean over blocks, first step: {_percent(means, 0)}; last step: {_percent(means, -1)}."
    return FigureData("decomposition-dynamics", figure, means, alt, text)


def _parts(run: Run) -> list[str]:
    known = (list(parts) for parts in _KNOWN if set(parts) <= set(run.values))
    return next((parts for parts in known if run.values[parts].notna().any().all()), [])


def _shares(run: Run) -> tuple[str, pd.DataFrame]:
    """A subtitle that names the estimates, and the shares at each step and layer."""
    parts = run.values[_parts(run)].clip(lower=0)
    pairs, plug_in = ", from pairs in different sequences", ", plug-in estimates"
    kind = pairs if "V_W_unbiased" in parts else plug_in if "V_W" in parts else ""
    total = parts.sum(axis=1, skipna=False)
    shares = parts.div(total.where(total > 0), axis=0).rename(columns=lambda part: part.removesuffix("_unbiased"))
    return f"shares of the mean squared norm{kind}", shares.reindex(run.depth, level="layer")


def _means(run: Run, shares: pd.DataFrame) -> pd.DataFrame:
    blocks = [block for blocks in run.blocks.values() for block in blocks]
    return shares[shares.index.isin(blocks, "layer")].groupby("step").mean()


def _share_axis(figure: Figure, ax: Axes) -> None:
    ax.set_ylabel("share of Q")
    ax.set_ylim(0, 1)
    ax.grid(visible=False)
    legend(figure, ax)


def _names(shares: pd.DataFrame) -> str:
    return ", ".join(map(str, shares))


def _percent(means: pd.DataFrame, place: int) -> str:
    return ", ".join(f"{part} {share:.0%}" for part, share in means.iloc[place].items())


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


def scales_by_layer(run: Run, ax: Axes | None = None) -> FigureData:
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


def scales_by_step(run: Run, ax: Axes | None = None) -> FigureData:
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
