"""Figures of token types, from the tables of the checkpoints."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm

from embedgeo.functional import REGRESSION_COUNT_RANGE, least_squares
from embedgeo.report.axes import (
    ACCENT,
    RUNS,
    Array,
    depth_bar,
    layer_axis,
    short,
    thinned,
    value_bar,
)
from embedgeo.report.baseline import type_statistics
from embedgeo.report.drawing import FigureData, legend, new_figure
from embedgeo.report.runs import Run
from embedgeo.report.values import BASELINE, log_ticks
from embedgeo.results.wording import number

_REGRESSED = "{} ≤ n ≤ {:,} occurrences".format(*REGRESSION_COUNT_RANGE)
_LINE: dict[str, Any] = {"color": ACCENT, "lw": 1.6}
_STATISTICS = {"Q_t_cv": "C.V. of Q", "V_on_M_slope": "slope of V on M", "V_on_M_r2": "R² of V on M"}


def mean_against_variance(run: Run, layers: Sequence[str] = (), ax: Axes | None = None) -> FigureData:
    """V against M of the token types at some layers of the last checkpoint, with the regression line.

    Args:
        run: a run with tables of token types.
        layers: that have a panel; default: at most four.
        ax: axes to draw in, where there is one layer. Default: those of a new figure.
    """
    step, table = max(run.tokens.items())
    layers = layers or some_layers(run, table)
    figure, axes = new_figure(
        run.titled("V against M" if ax is None else f"V against M at {layers[0]}", step),
        f"types with {_REGRESSED}; squared embedding units",
        panels=len(layers),
        sidebar=True,
        ax=ax,
    )
    regressed = table[table["n"].between(*REGRESSION_COUNT_RANGE) & table["layer"].isin(layers)]
    least = REGRESSION_COUNT_RANGE[0]
    most = max(least + 1, regressed["n"].max() if len(regressed) else 0)
    norm = LogNorm(least, most)
    texts = []
    for panel, layer in zip(axes, layers, strict=True):
        types = regressed[regressed["layer"] == layer]
        panel.scatter(types["M"], types["V"], s=7, c=types["n"], norm=norm, cmap="cividis", lw=0, rasterized=True)
        slope, r2 = draw_line(panel, types["M"].to_numpy(), types["V"].to_numpy())
        if types.empty:
            panel.text(0.5, 0.5, "no type occurs so often", ha="center", transform=panel.transAxes)
        if ax is None:
            panel.set_title(f"{layer}: {fit_text(slope, r2)}", fontsize=8.8)
        else:
            ax.plot([], label=fit_text(slope, r2), **_LINE)
            legend(figure, ax)
        panel.set_xlabel("M of the token type")
        panel.locator_params(nbins=5)
        panel.xaxis.set_major_formatter(short)
        panel.yaxis.set_major_formatter(short)
        texts.append(f"{layer}: {fit_text(slope, r2)} over {len(types)} token types")
    axes[0].set_ylabel("V of the token type")
    bar = value_bar(axes[-1], ScalarMappable(norm, "cividis"), "occurrences n (log scale)")
    log_ticks(bar.ax, least, most)
    numbers = regressed.set_index(["layer", "token_id"])[["n", "Q", "M", "V"]]
    alt = f"V against M of the token types at {len(layers)} layers, scattered, with regression lines."
    return FigureData("tokens-V-against-M", figure, numbers, alt, "; ".join(texts) + ".")


def statistics(run: Run) -> FigureData:
    """C.V. of Q, and slope and R² of V on M, at each layer of the first, a middle and the last checkpoint."""
    rows = {
        (step, layer): _statistics(table[table["layer"] == layer])
        for step, table in run.tokens.items()
        for layer in run.depth
    }
    found = pd.DataFrame.from_dict(rows, orient="index").rename_axis(["step", "layer"])
    subtitle = f"over the token types with {_REGRESSED}"
    figure, axes = new_figure("Token types through the layers", subtitle, panels=3)
    texts = []
    for ax, (key, name) in zip(axes, _STATISTICS.items(), strict=True):
        for step, colour, marker in zip(run.tokens, (RUNS[0], RUNS[2], RUNS[6]), "o^s", strict=False):
            at = found[key].unstack("layer").loc[step].reindex(run.axis)
            ax.plot(
                at.to_numpy(),
                color=colour,
                marker=marker,
                ms=3.5,
                label=f"step {short(step)}" if run.has_steps else "measured",
            )
        if key in run.baseline:
            random = run.table(key, run.baseline).iloc[-1].reindex(run.axis)
            ax.plot(random.to_numpy(), label="random", **BASELINE)
        layer_axis(ax, run.axis, most=6)
        ax.set_ylabel(name)
        texts.append(f"{name} from {at.min():.3g} to {at.max():.3g}")
    legend(figure, axes[0])
    alt = "C.V. of Q, slope and R² of V on M against layer."
    step = max(run.tokens)
    regressed = found["token_types_regressed"].loc[step]
    start = f"At step {step:,}, regressed" if run.has_steps else "Regressed"
    text = f"{start} over {number(regressed.max())} token types: {', '.join(texts)}."
    numbers = found if run.has_steps else found.droplevel("step")
    return FigureData("tokens-statistics", figure, numbers, alt, text)


def against_frequency(run: Run) -> FigureData:
    """Q, M and V of the token types against how often they occur, at the last block of the last checkpoint."""
    step, table = max(run.tokens.items())
    layer = _last_block(run)
    at = table[(table["layer"] == layer) & table["n"].between(*REGRESSION_COUNT_RANGE)]
    logs = (at.set_index("token_id")[["Q", "M", "V"]] + 1).apply(np.log10)
    logs["n"] = np.log10(at["n"].to_numpy())
    figure, axes = new_figure(
        run.titled(f"Q, M and V against frequency at {layer}", step),
        f"token types with {_REGRESSED}; squared embedding units, logarithms",
        panels=3,
    )
    texts = []
    for ax, key in zip(axes, "QMV", strict=True):
        ax.scatter(logs["n"], logs[key], s=7, color=RUNS[0], alpha=0.5, lw=0, rasterized=True)
        slope, r2 = draw_line(ax, logs["n"].to_numpy(), logs[key].to_numpy())
        ax.set_title(fit_text(slope, r2), fontsize=8.8)
        ax.set_xlabel("log10 n, occurrences")
        ax.set_ylabel(f"log10(1 + {key})")
        texts.append(f"{key} {slope:.3g}")
    alt = "Q, M and V of the token types against log frequency, scattered, with regression lines."
    return FigureData("tokens-against-frequency", figure, logs, alt, f"Slopes: {', '.join(texts)}.")


def histograms(run: Run) -> FigureData:
    """Histograms of Q, M and V over token types at the last checkpoint: a line for each layer."""
    step, table = max(run.tokens.items())
    present = [layer for layer in run.depth if (table["layer"] == layer).any()]
    figure, axes = new_figure(
        run.titled("Q, M and V over token types", step),
        "share of the token types in each bin; at most nine of the layers are drawn",
        panels=3,
        sidebar=True,
    )
    colours = depth_bar(axes[-1], present)
    shares = {}
    drawn = set(thinned(len(present), 9))
    for ax, key in zip(axes, "QMV", strict=True):
        logs = np.log10(table[key].where(table[key] > 0))
        edges = np.histogram_bin_edges(logs.dropna(), 40)
        for i, layer in enumerate(present):
            values = logs[table["layer"] == layer].dropna()
            counts = np.histogram(values, edges)[0] / max(1, len(values))
            if i in drawn:
                ax.stairs(counts, edges, color=colours[i], lw=1.2)
            shares[key, layer] = pd.Series(counts, (edges[1:] + edges[:-1]) / 2)
        ax.set_xlabel(f"log10 {key}, squared embedding units", fontsize=8.8)
        ax.set_ylim(bottom=0)
    axes[0].set_ylabel("share of token types")
    numbers = pd.concat({key: share for key, share in shares.items() if len(share)}, names=["value", "layer", "log10"])
    medians = table[table["layer"] == _last_block(run)][["Q", "M", "V"]].median()
    text = ", ".join(f"{key} {value:.3g}" for key, value in medians.items())
    alt = "Histograms of Q, M and V over token types, a line for each layer."
    return FigureData(
        "tokens-histograms", figure, numbers.rename("share").to_frame(), alt, f"Medians at {_last_block(run)}: {text}."
    )


def _statistics(table: pd.DataFrame) -> dict[str, float]:
    regressed = float(table["n"].between(*REGRESSION_COUNT_RANGE).sum())
    values = type_statistics(table)
    return {**{key: values[key] for key in _STATISTICS}, "token_types_regressed": regressed}


def draw_line(ax: Axes, x: Array, y: Array) -> tuple[float, float]:
    """Draw the least-squares line of ``y`` on ``x``, where there is one; its slope and R²."""
    slope, r2 = (float(value) for value in least_squares(torch.tensor(x), torch.tensor(y)))
    if np.isfinite(slope):
        ends = np.array([x.min(), x.max()])
        ax.plot(ends, y.mean() + slope * (ends - x.mean()), **_LINE)
    return slope, r2


def fit_text(slope: float, r2: float) -> str:
    """Slope and R² in words."""
    return ", ".join(
        f"{name} {value:.3g}" if np.isfinite(value) else f"{name} undefined"
        for name, value in (("slope", slope), ("R²", r2))
    )


def some_layers(run: Run, table: pd.DataFrame) -> Sequence[str]:
    """At most four layers, evenly spaced over the depth."""
    present = set(table["layer"])
    layers = [layer for layer in run.depth if layer in present]
    layers = [layer for layer in layers if not layer.endswith("final_norm")] or layers
    return [layers[i] for i in thinned(len(layers), 4)]


def _last_block(run: Run) -> str:
    return list(run.blocks.values())[-1][-1]
