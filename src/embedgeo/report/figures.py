"""Figures of one run: its metrics over steps and layers."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import cycle
from typing import Any, Literal

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import ListedColormap, LogNorm, Normalize, to_rgba
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, NullLocator

from embedgeo import drawing as draw
from embedgeo.drawing import Array, FigureData, Lines
from embedgeo.formatting import number, printable, short
from embedgeo.glossary import GAUSSIAN, Term, term
from embedgeo.layer_names import blocks_by_side, is_input, layer_labels
from embedgeo.metrics.processing import is_processed
from embedgeo.report.reference import Band, band_lines, draw_band, reference_band
from embedgeo.report.runs import Run, drawable
from embedgeo.report.summary import outlier_steps

SCALES_TEXT = (
    "Intrinsic dimension from the neighbours of rank n₁ and 2 n₁ (GRIDE). Where it is the same at "
    "all scales, it does not depend on the number of rows: with twice as many, each scale would "
    "lie at twice its rank. Where it falls, small scales see noise, or the finer of two "
    "structures; a number from nearest neighbours alone would then grow with the rows. Those of "
    "Gaussian rows fall, too, the wider the more: neighbours of high rank are no longer near."
)
LEDGER_TEXT = (
    "A block's output is the stream that enters it plus what attention, MLP and others write. "
    "Each has a share of M and V with half of each product that it has with another; a share "
    "below 0 cancels others, and all add up to 1. Biases of norms after a sum, and what the "
    "rounding of the model's dtype leaves, are shares of their own."
)
ABLATION_TEXT = (
    "How much worse the model predicts when the rows of one layer are replaced: by themselves "
    "without their offset, their top directions or coordinates, or the mean of their token type; "
    "by that mean alone, which has no context; or by noise of the same mean and covariance. What "
    "they are replaced by is found on half of the sequences, and the loss is that of the others."
)
CKA_TEXT = (
    "Linear CKA, debiased, of the same rows at two steps, or at two layers: 1 where their "
    "geometry is the same but for rotation and scale, 0 where it is unrelated. Blocks along the "
    "diagonal are phases in which little changes."
)

By = Literal["layer", "step"]  # the layers, at the last step, or the steps, averaged over blocks

_EXPECTED = "‖γ‖² + ‖β‖²"
_BOLD: dict[str, Any] = {"color": "black", "lw": 2.0}
_PARTS = {
    "M": ("M: offset", "#0072b2"),
    "V_W": ("V_W: context", "#009e73"),
    "V_B": ("V_B: token", "#e69f00"),
    "V": ("V: variance", "#999999"),
}
_COMPOSITIONS = (("M", "V_W_unbiased", "V_B_unbiased"), ("M", "V_W", "V_B"), ("M", "V"))
_TAKEN_AWAY = {
    "without_offset": ("no offset", "#0072b2", "-"),
    "without_context": ("no context", "#cc79a7", "-"),
    "without_token": ("no token mean", "#e69f00", "-"),
    "as_noise": ("Gaussian rows", "#7a5195", "-"),
}
_REMOVED = {"direction": "#d55e00", "coordinate": "#009e73"}
_BESIDE_CHANGES = {
    "M_over_Q": ("M / Q", "black", "-"),
    "anisotropy": ("anisotropy", "#777777", "-"),
}
_WRITERS = {
    "stream": "#bbbbbb",
    "attention": "#0072b2",
    "mlp": "#e69f00",
    "other": "#009e73",
    "norm_bias": "#cc79a7",
    "rounding": "#7a5195",
}
_SCALE = re.compile(r"intrinsic_dimension_at_(\d+)")
_GRIDE = "dimensions, GRIDE"

_CURVES_SIZE = (3.5, 3.3)  # inches: TensorBoard's image cards are 350 pixels wide
_STRIP_HEIGHT = 0.25  # beside that of the axes above
_FINAL_NORMS = ("final_norm", "encoder.final_norm", "decoder.final_norm")
_LEAST_OF_BLOCKS = 0.6  # share of the height that blocks fill beside a norm that is drawn with them


def dynamics(run: Run, metric: str, ax: Axes | None = None, *, has_bar: bool = True) -> FigureData:
    """A metric against the step: a line for each layer, their mean over blocks, and the mean of the
    baseline.

    Without the bar of the layers' colours, and with fewer ticks, it is drawn faster; the text then
    says what they are.
    """
    table = run.table(metric)
    errors, mean_errors, is_spread = run.bands(metric)
    named = term(metric)
    means = run.means(table)
    gaussian = run.means(run.table(metric, run.baseline))
    has_bar = has_bar and len(run.layers) > 1
    figure, (ax,) = draw.new_figure(f"{named.name} against step", named.unit, ax=ax)
    draw.step_axis(ax, run.steps)
    colours = draw.depth_bar(ax, run.layers) if has_bar else draw.depth_colours(len(run.layers))
    dashes = [":" if layer.endswith("final_norm") else "-" for layer in run.layers]
    steps = table.index.to_numpy()
    draw.lines(ax, steps, table.to_numpy().T, colours, dashes, errors.to_numpy().T)
    draw.mean_lines(ax, means, mean_errors)
    expected = _expected(run, metric)
    if expected.notna().to_numpy().any():
        draw.lines(ax, steps, expected.to_numpy().T, colours, ["--"] * len(run.layers))
    bands_behind = {
        name: band for name in run.blocks if (band := reference_band(run, metric, name))
    }
    behind = _as_rows(bands_behind.values(), len(run.layers))
    shown = np.vstack([table, expected, behind])
    draw.value_axis(
        ax,
        named,
        shown,
        gaussian,
        run.layers,
        np.vstack([errors, expected * np.nan, behind * np.nan]),
    )
    for i, band in enumerate(bands_behind.values()):
        draw_band(ax, band, is_named=i == 0)
    if _is_seen(ax, expected):
        ax.plot([], label=_EXPECTED, **draw.BASELINE)
    if not has_bar:
        draw.few_ticks(ax)
    if _is_seen(ax, table[[layer for layer in run.layers if layer.endswith("final_norm")]]):
        ax.plot([], label="norm", ls=":", color=colours[dashes.index(":")])
    draw.legend(figure, ax)
    numbers, bands = with_errors(table.join(means), errors.join(mean_errors), is_spread=is_spread)
    numbers = numbers.join(_named_gaussian(gaussian))
    numbers = numbers.join(expected.dropna(axis=1, how="all").add_prefix("expected at "))
    for name, band in bands_behind.items():
        numbers = numbers.join(
            band.numbers.add_prefix(f"{name}, " if len(bands_behind) > 1 else "")
        )
        bands += band.describe(means[name])
    alt = f"{named.name} against optimizer step, a line for each of {len(run.layers)} layers."
    text = " ".join(
        f"{name.capitalize()}: {trend(means[name])}{_gaussian_text(gaussian[name])}"
        for name in run.blocks
    )
    text += bands + (
        "" if has_bar else " Colours: from violet, the first layer, to green, the last."
    )
    lines = [
        *band_lines(bands_behind),
        Lines("layer", table, colours, errors, dashes),
        Lines("mean", means, "black", mean_errors, draw.MEAN_DASHES, 2.0),
        *_baseline_lines("gaussian", _named_gaussian(gaussian)),
        *_baseline_lines("expected", expected, colours),
    ]
    return FigureData(f"{metric}-dynamics", figure, numbers, alt, text, lines)


def _baseline_lines(kind: str, values: pd.DataFrame, colours: Array | None = None) -> list[Lines]:
    """Dashed lines of values that measured ones are compared with, as far as they are known."""
    is_known = values.notna().any().to_numpy()
    known = values.loc[:, is_known].add_prefix(f"{_EXPECTED}, " if kind == "expected" else "")
    look = draw.BASELINE
    own = look["color"] if colours is None else colours[is_known]
    return [Lines(kind, known, own, dashes=look["ls"], width=look["lw"])] if is_known.any() else []


def _as_rows(bands: Iterable[Band], count: int) -> Array:
    """The ends of bands as values of so many layers, for the range of an axis."""
    ends = [
        np.repeat(end.to_numpy()[:, None], count, axis=1)
        for band in bands
        for end in (band.low, band.high)
    ]
    return np.vstack(ends) if ends else np.empty((0, count))


def profile(run: Run, metric: str, ax: Axes | None = None) -> FigureData:
    """A metric against the layer: a line for each step, and the baseline at the last step."""
    run = run.where_measured(metric)
    layer_errors, _, is_spread = run.bands(metric)
    tables = (
        run.table(metric),
        layer_errors,
        run.table(metric, run.baseline),
        _expected(run, metric),
    )
    table, errors, gaussian, expected = (each.reindex(columns=run.axis) for each in tables)
    named = term(metric)
    has_several_steps = len(run.steps) > 1
    figure, (ax,) = draw.new_figure(f"{named.name} through the layers", named.unit, ax=ax)
    draw.layer_axis(ax, run.axis)
    x = np.arange(float(len(run.axis)))
    last = table.iloc[-1]
    if has_several_steps:
        draw.lines(ax, x, table.to_numpy(), draw.time_bar(ax, run.steps), errors=errors.to_numpy())
    else:
        draw.band(ax, x, last.to_numpy(), errors.iloc[-1].to_numpy(), "black")
    known = expected.iloc[-1]
    marks = {"marker": "_", "ms": 14, "mew": 1.3, **draw.BASELINE}
    if known.notna().any():
        ax.plot(x, known.to_numpy(), **marks)
    look = _BOLD if has_several_steps else {**_BOLD, "lw": 1.2, "marker": "o", "ms": 5}
    ax.plot(x, last.to_numpy(), label=run.step_label(run.steps[-1]), **look)
    baseline = pd.Series(gaussian.iloc[-1].to_numpy(), x)
    draw.value_axis(
        ax,
        named,
        np.vstack([table, known]),
        baseline,
        run.axis,
        np.vstack([errors, known * np.nan]),
    )
    if _is_seen(ax, known):
        ax.plot([], label=_EXPECTED, **marks)
    draw.legend(figure, ax)
    columns = {} if run.has_steps else {run.steps[-1]: metric}
    values, errors_beside = (
        each.T.drop("", errors="ignore").rename(columns=columns) for each in (table, errors)
    )
    numbers, bands = with_errors(values, errors_beside, is_spread=is_spread)
    numbers = numbers.assign(**{GAUSSIAN: gaussian.iloc[-1].drop("", errors="ignore")})
    alt = f"{named.name} against layer" + (
        f", a line for each of {len(run.steps)} steps." if run.has_steps else "."
    )
    text = (f"At step {run.steps[-1]:,}: " if run.has_steps else "") + trend(last)
    of_last = last.to_frame(run.step_label(run.steps[-1]))
    lines = [
        Lines("last", of_last, "black", errors.iloc[[-1]].T, width=look["lw"]),
        *_baseline_lines("gaussian", gaussian.iloc[-1].to_frame(GAUSSIAN)),
        *_baseline_lines("expected", known.to_frame(run.step_label(run.steps[-1]))),
    ]
    if has_several_steps:
        lines.insert(0, Lines("step", table.T, draw.time_colours(run.steps), errors.T))
    return FigureData(f"{metric}-profile", figure, numbers, alt, text + bands, lines)


def _is_seen(ax: Axes, values: pd.Series | pd.DataFrame) -> bool:
    low, high = ax.get_ylim()
    return bool(((values >= low) & (values <= high)).to_numpy().any())


def _expected(run: Run, metric: str) -> pd.DataFrame:
    """Value that a metric has at a norm's output, at each step (rows) and layer (columns); NaN
    elsewhere.
    """
    is_known = metric == "Q" and "norm_Q_expected" in run.values
    return run.table("norm_Q_expected") if is_known else run.table(metric) * np.nan


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
    bar = draw.value_bar(
        ax, ScalarMappable(norm, "cividis"), named.name + (" (log scale)" if is_log else ""), extend
    )
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
    numbers = table.T.drop("", errors="ignore")
    return FigureData(
        f"{metric}-heatmap", figure, numbers, f"{named.name} as colour over steps and layers.", text
    )


def curves(run: Run, metric: str) -> FigureData:
    """A metric against the step, in a small picture: a line a layer, from dark at the first to
    bright at the last.

    `embed`, and a final norm that would squeeze the lines of the blocks, are in strips below, on
    scales of their own.
    """
    table = run.table(metric)
    errors = run.table(metric, run.errors)
    named = term(metric)
    apart = [layer for layer in run.depth if _is_apart(layer, table, named)]
    apart = apart if len(apart) < len(run.depth) else []
    along = [layer for layer in run.depth if layer not in apart]
    means = [layer for layer in run.layers if layer not in run.depth]
    values = table[along + means].to_numpy()
    unit = f"{named.unit} (log scale)" if named.is_logarithmic(values) else named.unit
    bands = [band for name in run.blocks if (band := reference_band(run, metric, name))]
    subtitle = f"{unit}; grey: {bands[0].label}" if bands else unit
    figure = draw.new_picture(*_CURVES_SIZE, f"{named.name} by layer", subtitle)
    ratios = [1.0, *[_STRIP_HEIGHT] * len(apart)]
    ax, *strips = figure.subplots(len(ratios), 1, squeeze=False, height_ratios=ratios)[:, 0]
    colours = draw.depth_colours(len(along))
    key = draw.value_bar(
        ax, ScalarMappable(Normalize(-0.5, len(along) - 0.5), ListedColormap(colours)), ""
    ).ax
    draw.layer_axis(key, along, vertical=True)
    key.set_ylabel("")
    key.tick_params(length=0, pad=2, labelsize=9.5)
    steps = table.index.to_numpy()
    draw.lines(ax, steps, table[along].to_numpy().T, colours, errors=errors[along].to_numpy().T)
    for mean, dashes in zip(means, cycle(("--", ":", "-.")), strict=False):
        ax.plot(table[mean], color="black", ls=dashes, lw=1.3, label=mean)
    if means:
        ax.legend(loc="best", fontsize=8, handlelength=1.8, borderpad=0.1)
    behind = _as_rows(bands, values.shape[1])
    ends = np.vstack([errors[along + means].to_numpy(), behind * np.nan])
    draw.value_axis(ax, named, np.vstack([values, behind]), errors=ends)
    for band in bands:
        draw_band(ax, band, is_named=False)
    for strip, layer in zip(strips, apart, strict=True):
        line = table[layer].to_numpy()
        draw.lines(strip, steps, line[None], np.array([to_rgba(draw.ACCENT)]))
        draw.value_axis(strip, named, line)
        finite = line[np.isfinite(line)]
        strip.yaxis.set_major_locator(
            FixedLocator(sorted({finite.min(), finite.max()}) if finite.size else [])
        )
        strip.yaxis.set_minor_locator(NullLocator())
        strip.yaxis.set_major_formatter(lambda value, _: short(value, 2))
        strip.tick_params(axis="y", labelsize=8.5)
        (label,), _ = layer_labels([layer])
        size = 9.5 if len(label) <= 6 else 7.5
        place = {"transform": strip.transAxes, "va": "center", "in_layout": False}
        strip.text(1.03, 0.5, label, color=draw.ACCENT, fontsize=size, **place)
    for each in (ax, *strips):
        each.set_ylabel("")
        draw.step_axis(each, run.steps)
    for each in (ax, *strips)[:-1]:
        each.set_xlabel("")
        each.tick_params(labelbottom=False)
    alt = f"{named.name} against optimizer step, a line for each of {len(run.layers)} layers."
    return FigureData(
        f"{metric}-curves", figure, table, alt, "The brighter a line, the deeper its layer."
    )


def _is_apart(layer: str, table: pd.DataFrame, named: Term) -> bool:
    """Test for what enters the first block, or a norm beside which blocks fill less than 60 % of
    the height.
    """
    if layer not in _FINAL_NORMS:
        return is_input(layer)
    blocks = [block for blocks in blocks_by_side(map(str, table)).values() for block in blocks]
    together = table[[*blocks, layer]].to_numpy()
    scaled = np.log10(together) if named.is_logarithmic(together) else together
    return bool(_span(scaled[:, :-1]) < _LEAST_OF_BLOCKS * _span(scaled))


def _span(values: Array) -> float:
    finite = values[np.isfinite(values)]
    return float(np.ptp(finite)) if finite.size else 0.0


def processing_figures(run: Run) -> Iterator[FigureData]:
    """Anisotropy and mean cosine at the last step, before and after each after-processing, if there
    was any.
    """
    if not any(map(is_processed, run.metrics)):
        return
    figure, axes = draw.new_figure(run.titled("After-processing", run.steps[-1]), panels=2)
    values: dict[str, pd.Series] = {}
    errors: dict[str, pd.Series] = {}
    colours = {"as it is": "black"}
    for ax, metric in zip(reversed(axes), ("mean_cosine", "anisotropy"), strict=True):
        keys = [key for key in run.metrics if is_processed(key) and key.startswith(f"{metric}_")]
        for key in ([metric] if metric in run.values else []) + keys:
            values[key] = run.table(key).iloc[-1].reindex(run.axis)
            errors[key] = run.table(key, run.errors).iloc[-1].reindex(run.axis)
            name = (
                term(key).name.removeprefix(f"{term(metric).name}, ")
                if key != metric
                else "as it is"
            )
            colour = colours.setdefault(name, draw.RUNS[(len(colours) - 1) % len(draw.RUNS)])
            ax.plot(values[key].to_numpy(), color=colour, marker="o", ms=3, lw=1.6, label=name)
            draw.band(
                ax,
                np.arange(float(len(run.axis))),
                values[key].to_numpy(),
                errors[key].to_numpy(),
                colour,
            )
        draw.layer_axis(ax, run.axis)
        ax.set_ylabel(term(metric).name)
    draw.legend(figure, axes[-1])
    numbers = with_errors(pd.DataFrame(values), pd.DataFrame(errors))[0].drop("", errors="ignore")
    means = run.means(numbers[[*values]].T)
    text = "; ".join(
        f"{term(str(key)).name} {' and '.join(map(number, row))}" for key, row in means.iterrows()
    )
    alt = "Anisotropy and mean cosine against layer, before and after each after-processing."
    yield FigureData(
        "after-processing",
        figure,
        numbers,
        alt,
        f"{' and '.join(run.blocks).capitalize()}: {text}.",
    )


def ablation_figures(run: Run) -> Iterator[FigureData]:
    """Changes of the loss by ablation, beside M/Q and anisotropy: at each layer of the last step,
    and at each step.
    """
    looks = {
        "without_offset": _TAKEN_AWAY["without_offset"],
        **_looks_of_removed(run),
        **_TAKEN_AWAY,
    }
    changes = {
        f"loss_change_{name}": look
        for name, look in looks.items()
        if f"loss_change_{name}" in run.values
    }
    if changes:
        yield _ablation(run, changes, "layer")
        if len(run.steps) > 1:
            yield _ablation(run, changes, "step")


def _looks_of_removed(run: Run) -> dict[str, tuple[str, str, str]]:
    """Looks of the changes of the loss without the fewest and without the most directions and
    coordinates.
    """
    looks = {}
    for what, colour in _REMOVED.items():
        pattern = re.compile(rf"loss_change_without_(\d+)_{what}s")
        numbers = sorted(int(found[1]) for found in map(pattern.fullmatch, run.metrics) if found)
        for k, dashes in zip(dict.fromkeys(numbers[:1] + numbers[-1:]), "-:", strict=False):
            name = f"no top {what}" if k == 1 else f"no top {k} {what}s"
            looks[f"without_{k}_{what}s"] = (name, colour, dashes)
    return looks


def _ablation(run: Run, changes: dict[str, tuple[str, str, str]], by: By) -> FigureData:
    beside = {metric: look for metric, look in _BESIDE_CHANGES.items() if metric in run.values}
    looks = {**changes, **beside}
    title = "What the loss needs" if by == "layer" else "What the loss needs, mean over blocks"
    key = [
        Line2D([], [], color=colour, ls=dashes, lw=1.6, label=name)
        for name, colour, dashes in looks.values()
    ]
    figure, axes = draw.new_figure(
        run.titled(title, run.steps[-1]) if by == "layer" else title, panels=2, key=key
    )
    values: dict[str, pd.Series] = {}
    errors: dict[str, pd.Series] = {}
    for metric, (_, colour, dashes) in looks.items():
        bands = run.bands(metric, spreads=False)
        if by == "layer":
            values[metric] = run.table(metric).iloc[-1].reindex(run.axis)
            errors[metric] = bands.values.iloc[-1].reindex(run.axis)
        else:
            values[metric] = run.means(run.table(metric)).iloc[:, 0]
            errors[metric] = bands.means.iloc[:, 0]
        x = (
            np.arange(float(len(run.axis)))
            if by == "layer"
            else values[metric].index.to_numpy(dtype=float)
        )
        ax = axes[metric in beside]
        ax.plot(x, values[metric].to_numpy(), color=colour, ls=dashes, marker="o", ms=2.5, lw=1.6)
        draw.band(ax, x, values[metric].to_numpy(), errors[metric].to_numpy(), colour)
    for ax, label in zip(axes, ("change of the loss, nats per token", "share"), strict=True):
        if by == "layer":
            draw.layer_axis(ax, run.axis, most=6)
        else:
            draw.step_axis(ax, run.steps)
        ax.axhline(0, color=draw.GREY, lw=0.8)
        ax.set_ylabel(label)
    numbers, bars = with_errors(pd.DataFrame(values), pd.DataFrame(errors))
    means = (
        run.means(pd.DataFrame(values)[[*changes]].T).iloc[:, 0]
        if by == "layer"
        else pd.DataFrame(values).iloc[-1]
    )
    text = "; ".join(f"{looks[str(metric)][0]} {number(means[metric])}" for metric in changes)
    alt = (
        "Change of the loss without parts of a layer's rows, beside M / Q and anisotropy, against "
        f"{by}."
    )
    name = "ablation" if by == "layer" else "ablation-dynamics"
    return FigureData(
        name,
        figure,
        numbers.drop("", errors="ignore"),
        alt,
        f"Mean over blocks, last: {text}.{bars}",
    )


def loss_figures(run: Run) -> Iterator[FigureData]:
    """The loss on the measured text, if it is known; losses out of line with their neighbours are
    marked.
    """
    if not run.has_steps or "loss" not in run.model or run.model["loss"].isna().all():
        return
    values, named = drawable(run.model[["loss"]])["loss"].dropna(), term("loss")
    figure, (ax,) = draw.new_figure(f"{named.name} against step", named.unit)
    draw.value_axis(ax, named, values.to_numpy())
    draw.step_axis(ax, list(values.index))
    ax.plot(values, marker="o" if len(values) <= 40 else "", ms=2.5, **{**_BOLD, "lw": 1.2})
    outlying = values[values.index.isin(outlier_steps(run))]
    ax.plot(
        outlying,
        ls="",
        marker="x",
        ms=9,
        mew=2,
        color=draw.ACCENT,
        label="out of line with its neighbours",
    )
    if len(outlying):
        ax.legend(loc="best", fontsize=8.5)
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
    means = shares[shares.index.isin(run.all_blocks, "layer")].groupby("step").mean()
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
        heights = (
            shares.loc[[run.steps[-1]]].droplevel("step").reindex(run.axis).fillna(0).to_numpy()
        )
        bottoms = heights.cumsum(axis=1) - heights
        width = 0.86 if len(heights) <= 12 else 1
        for height, bottom, label, colour in zip(
            heights.T, bottoms.T, labels, colours, strict=True
        ):
            ax.bar(np.arange(len(heights)), height, width, bottom, color=colour, label=label)
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
    draw.legend(figure, ax)
    if by == "step":
        return FigureData("decomposition-dynamics", figure, means, alt, text)
    return FigureData(
        "decomposition", figure, shares if run.has_steps else shares.droplevel("step"), alt, text
    )


def _parts(run: Run) -> list[str]:
    known = set(run.values.columns[run.values.notna().any()])
    return next((list(parts) for parts in _COMPOSITIONS if known.issuperset(parts)), [])


def ledger_figures(run: Run) -> Iterator[FigureData]:
    """Shares of each write in M and V of the blocks' outputs: at the last step, and of each write
    at every step.
    """
    for whole, title in (("M", "Who writes the offset"), ("V", "Who writes the variance")):
        known = run.values.columns[run.values.notna().any()]
        names = {str(metric): str(metric).removeprefix(f"{whole}_by_") for metric in known}
        names = {metric: name for metric, name in names.items() if metric != name}
        if names:
            table = run.table(next(iter(names)))
            of_blocks = replace(
                run, layers=[layer for layer in run.layers if table[layer].notna().any()]
            )
            yield _writers(of_blocks, names, whole, title)
            writes = [
                metric for metric, name in names.items() if name not in ("stream", "rounding")
            ]
            yield from (heatmap(of_blocks, metric) for metric in writes if len(run.steps) > 1)


def _writers(run: Run, names: dict[str, str], whole: str, title: str) -> FigureData:
    """Shares of the streams in M or V at each block of the last step, stacked above 0 and, where
    negative, below.
    """
    step = run.steps[-1]
    shares = pd.DataFrame({name: run.table(metric).loc[step] for metric, name in names.items()})
    shares = shares[[name for name in dict.fromkeys((*_WRITERS, *shares)) if name in shares]]
    figure, (ax,) = draw.new_figure(
        run.titled(title, step), f"share of {whole} of a block's output"
    )
    heights = shares.reindex(run.axis).fillna(0)
    colours = dict(zip(shares, cycle(draw.RUNS), strict=False)) | _WRITERS
    width = 0.86 if len(heights) <= 12 else 1
    for is_named, parts in ((True, heights.clip(lower=0)), (False, heights.clip(upper=0))):
        bottoms = parts.cumsum(axis=1) - parts
        for name in parts:
            label = str(name).replace("_", " ") if is_named else None
            ax.bar(
                np.arange(len(parts)),
                parts[name],
                width,
                bottoms[name],
                color=colours[name],
                label=label,
            )
    ax.axhline(0, color=draw.GREY, lw=0.8)
    ax.axhline(1, **draw.BASELINE)
    draw.layer_axis(ax, run.axis)
    ax.set_ylabel(f"share of {whole}")
    draw.legend(figure, ax)
    writes = shares.drop(columns=["stream", "rounding"], errors="ignore").stack()
    text = ""
    if len(writes):
        layer, name = writes.index[int(writes.to_numpy().argmax())]
        text = (
            f"The largest write is that of {str(name).replace('_', ' ')} at {layer}: "
            f"{writes.max():.0%} of {whole}."
        )
    alt = f"Shares of the stream and of each write in {whole} by block, stacked."
    return FigureData(f"{whole}-written", figure, shares, alt, text)


def measured_scales(run: Run) -> dict[int, str]:
    """The metric at each scale, in order, of those at several scales that a run has."""
    matched = {
        metric: _SCALE.fullmatch(metric)
        for metric in run.metrics
        if run.values[metric].notna().any()
    }
    found = sorted((int(match[1]), metric) for metric, match in matched.items() if match)
    return dict(found) if len(found) > 1 else {}


def scales_by_layer(run: Run, ax: Axes | None = None) -> FigureData:
    """The dimension against the scale at the last step: a line for each layer, and the mean of the
    baseline.
    """
    scales = measured_scales(run)
    step = run.steps[-1]

    def at_last(values: pd.DataFrame, ending: str = "") -> pd.DataFrame:
        columns = {
            scale: values.get(f"{key}{ending}", values[key] * np.nan)
            for scale, key in scales.items()
        }
        return (
            pd.DataFrame(columns)
            .loc[[step]]
            .droplevel("step")
            .reindex(run.depth)
            .T.rename_axis("scale")
        )

    table, gaussian = at_last(run.values), run.means(at_last(run.baseline))
    errors = at_last(run.errors).combine_first(at_last(run.values, "_error"))[run.depth]
    means = run.means(table)
    title = run.titled("Intrinsic dimension against scale", step)
    figure, (ax,) = draw.new_figure(title, _GRIDE, ax=ax)
    colours = draw.depth_bar(ax, run.depth)
    draw.lines(
        ax,
        table.index.to_numpy(dtype=float),
        table.to_numpy().T,
        colours,
        errors=errors.to_numpy().T,
    )
    draw.mean_lines(ax, means, run.means(errors))
    draw.value_axis(
        ax, term("intrinsic_dimension"), table.to_numpy(), gaussian, run.depth, errors.to_numpy()
    )
    _scale_axis(ax, list(scales))
    draw.legend(figure, ax)
    numbers, bands = with_errors(table.join(means), errors)
    numbers = numbers.join(_named_gaussian(gaussian))
    alt = f"Intrinsic dimension against scale, a line for each of {len(run.depth)} layers."
    text = " ".join(f"{str(name).capitalize()}: {_ends(means[name])}." for name in means) + bands
    return FigureData("intrinsic-dimension-scales", figure, numbers, alt, text)


def scales_by_step(run: Run, ax: Axes | None = None) -> FigureData:
    """The dimension against the scale, mean over blocks: a line for each step."""
    scales = measured_scales(run)
    table = pd.DataFrame(
        {scale: run.table(key)[run.all_blocks].mean(axis=1) for scale, key in scales.items()}
    )
    title = "Intrinsic dimension against scale, by step"
    figure, (ax,) = draw.new_figure(title, f"{_GRIDE}, mean over blocks", ax=ax)
    draw.lines(
        ax, np.array(list(scales), dtype=float), table.to_numpy(), draw.time_bar(ax, run.steps)
    )
    draw.value_axis(ax, term("intrinsic_dimension"), table.to_numpy())
    _scale_axis(ax, list(scales))
    alt = (
        f"Intrinsic dimension against scale, mean over blocks, a line for each of {len(run.steps)} "
        "steps."
    )
    first, last = (_ends(table.iloc[i]) for i in (0, -1))
    text = f"Step {run.steps[0]:,}: {first}; step {run.steps[-1]:,}: {last}."
    return FigureData("intrinsic-dimension-scales-by-step", figure, table, alt, text)


def _scale_axis(ax: Axes, scales: Sequence[int]) -> None:
    ax.set_xscale("log", base=2)
    ax.set_xlim(scales[0], scales[-1])
    ax.set_xticks(scales, [draw.tick_label(scale) for scale in scales])
    ax.set_xticks([], minor=True)
    ax.set_xlabel("scale: rank n₁ of the neighbour")


def _ends(values: pd.Series) -> str:
    known = values.dropna()
    return (
        ", ".join(
            f"{number(known.iloc[i])} at scale {known.index[i]}" for i in (0, -1) if len(known)
        )
        or "undefined"
    )


def drift_figures(run: Run, metric: str) -> Iterator[FigureData]:
    """A metric of the same rows at two places: over steps or, of one step, over layers."""
    if run.varies(metric):
        is_over_layers = metric.startswith("linearity") or metric.endswith("_to_below")
        draw_over_steps = heatmap if is_over_layers and len(run.depth) > 1 else dynamics
        yield draw_over_steps(run, metric) if len(run.steps) > 1 else profile(run, metric)


def cka_figures(run: Run) -> Iterator[FigureData]:
    """The CKA of steps with steps, at some layers, and of layers with layers, at some steps."""
    yield from (cka_of_steps(run, layer) for layer in layers_over_steps(run))
    yield from (cka_of_layers(run, step) for step in steps_over_layers(run))


def layers_over_steps(run: Run) -> list[str]:
    """The layers at which steps were compared with steps."""
    pairs = run.cka
    compared = {
        *pairs.loc[
            (pairs["layer_a"] == pairs["layer_b"]) & (pairs["step_a"] != pairs["step_b"]), "layer_a"
        ]
    }
    return [layer for layer in run.layers if layer in compared]


def steps_over_layers(run: Run) -> list[int]:
    """The steps at which layers were compared with layers."""
    pairs = run.cka
    compared = pairs.loc[
        (pairs["step_a"] == pairs["step_b"]) & (pairs["layer_a"] != pairs["layer_b"]), "step_a"
    ]
    return [int(step) for step in compared.unique()]


def cka_of_steps(run: Run, layer: str, ax: Axes | None = None) -> FigureData:
    """The CKA of steps with steps at a layer, as a square of colours."""
    pairs = run.cka[(run.cka["layer_a"] == layer) & (run.cka["layer_b"] == layer)]
    steps = sorted({int(step) for step in (*pairs["step_a"], *pairs["step_b"])})
    figure, ax, matrix = _square(
        pairs, "step", steps, f"Similarity of steps at {printable(layer)}", ax
    )
    for axis, most in ((ax.xaxis, 5), (ax.yaxis, 9)):
        named = draw.thinned(len(steps), most)
        axis.set_ticks(named, [draw.tick_label(steps[i]) for i in named])
    ax.set(xlabel="optimizer step", ylabel="optimizer step")
    text = _least_alike(matrix, [f"step {step:,}" for step in steps])
    alt = f"Similarity of steps at {layer} as a square of colours."
    return FigureData(f"cka-steps-{layer}", figure, matrix, alt, text)


def cka_of_layers(run: Run, step: int, ax: Axes | None = None) -> FigureData:
    """The CKA of layers with layers at a step, as a square of colours."""
    pairs = run.cka[(run.cka["step_a"] == step) & (run.cka["step_b"] == step)]
    layers = [layer for layer in run.layers if layer in {*pairs["layer_a"], *pairs["layer_b"]}]
    figure, ax, matrix = _square(
        pairs, "layer", layers, run.titled("Similarity of layers", step), ax
    )
    draw.layer_axis(ax, layers, most=6)
    draw.layer_axis(ax, layers, vertical=True, most=10)
    alt = f"Similarity of {run.titled('layers', step)} as a square of colours."
    return FigureData(f"cka-layers-{step}", figure, matrix, alt, _least_alike(matrix, layers))


def _square(
    pairs: pd.DataFrame, column: str, places: list[Any], title: str, ax: Axes | None
) -> tuple[Figure, Axes, pd.DataFrame]:
    half = pairs.pivot_table(index=f"{column}_a", columns=f"{column}_b", values="cka", dropna=False)
    half = half.reindex(index=places, columns=places)
    matrix = (
        half.combine_first(half.T)
        .reindex(index=places, columns=places)
        .rename_axis(index=column, columns=None)
    )
    subtitle = f"linear CKA, debiased, of {int(pairs['n'].min()):,} rows"
    figure, (ax,) = draw.new_figure(title, subtitle, ax=ax)
    ax.set_facecolor(draw.UNKNOWN_COLOUR)
    ax.grid(visible=False)
    image = ax.imshow(
        np.ma.masked_invalid(matrix), vmin=0, vmax=1, cmap="cividis", origin="lower", aspect="equal"
    )
    ax.set_anchor("E")
    draw.value_bar(ax, image, "CKA")
    return figure, ax, matrix


def _least_alike(matrix: pd.DataFrame, places: Sequence[str]) -> str:
    values = np.where(np.eye(len(matrix), dtype=bool), np.nan, matrix.to_numpy())
    if not np.isfinite(values).any():
        return "Undefined everywhere."
    i, j = divmod(int(np.nanargmin(values)), len(values))
    beside = float(pd.Series(np.diagonal(values, 1)).mean())
    pair = f"{places[i]} and {places[j]}, {number(values[i, j])}"
    return f"Least alike: {pair}; side by side {number(beside)} on average."


def with_errors(
    numbers: pd.DataFrame, errors: pd.DataFrame, *, is_spread: bool = False
) -> tuple[pd.DataFrame, str]:
    """Numbers with the standard errors, or spreads over batches, of those columns that have any;
    the bands in words.
    """
    kind, prefix = (
        ("standard deviation over batches", "std of ")
        if is_spread
        else ("standard error", "stderr of ")
    )
    known = errors.dropna(axis=1, how="all")
    if known.empty:
        return numbers, ""
    return numbers.join(known.add_prefix(prefix)), f" Bands: one {kind} to each side."


def _named_gaussian(values: pd.DataFrame) -> pd.DataFrame:
    """Means of the baseline over blocks, under the names that they have beside those of the
    values.
    """
    has_several = len(values.columns) > 1
    return values.rename(
        columns={name: f"{GAUSSIAN}, {name}" if has_several else GAUSSIAN for name in values}
    )


def trend(values: pd.Series) -> str:
    """The first, last, lowest and highest value of a curve, in words."""
    finite = values.dropna()
    if finite.empty:
        return "undefined."
    first, last, lowest, highest = (
        f"{number(finite.iloc[i])} at {_place(finite.index[int(i)])}"
        for i in (0, -1, finite.argmin(), finite.argmax())
    )
    return f"{first}, {last}; lowest {lowest}, highest {highest}."


def _place(place: object) -> str:
    if isinstance(place, float):
        return f"depth {place:.2g}"
    return place if isinstance(place, str) else f"step {place:,}"


def _gaussian_text(values: pd.Series) -> str:
    known = values.dropna()
    return f" Gaussian rows: {number(known.iloc[-1])} at the last step." if len(known) else ""
