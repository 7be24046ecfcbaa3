"""Figures of metrics over steps and layers."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm, Normalize

from embedgeo.report.axes import (
    ACCENT,
    RUNS,
    Array,
    band,
    depth_bar,
    depth_colours,
    few_ticks,
    layer_axis,
    lines,
    short,
    step_axis,
    time_bar,
    value_bar,
)
from embedgeo.report.drawing import FigureData, legend, new_figure
from embedgeo.report.runs import Run, drawable
from embedgeo.report.values import BASELINE, colour_range, log_ticks, value_axis
from embedgeo.results.glossary import is_processed, term
from embedgeo.results.wording import number

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
