"""Figures of single token types, from the tables of a checkpoint."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm

from embedgeo.report.axes import (
    ACCENT,
    NULL,
    RUNS,
    Array,
    depth_bar,
    layer_axis,
    log_ticks,
    short,
    thinned,
    value_bar,
)
from embedgeo.report.baseline import REGRESSED
from embedgeo.report.drawing import FigureData, legend, new_figure
from embedgeo.report.runs import Run, read_projection, read_tokens
from embedgeo.results.wording import number

_REGRESSED = f"{REGRESSED[0]} ≤ n ≤ {REGRESSED[1]:,} occurrences"
_LINE: dict[str, Any] = {"color": ACCENT, "lw": 1.6}
_STATISTICS = {"Q_t_cv": "C.V. of Q", "V_on_M_slope": "slope of V on M", "V_on_M_r2": "R² of V on M"}


def tables(run: Run) -> dict[int, pd.DataFrame]:
    """The tables of the first, a middle and the last checkpoint that have one, by step."""
    steps = sorted(run.tokens)
    return {step: read_tokens(run.tokens[step]) for step in [steps[i] for i in thinned(len(steps), 3)]} if steps else {}


def mean_against_variance(run: Run, step: int, table: pd.DataFrame) -> FigureData:
    """V against M of the token types at some layers, with the regression line."""
    layers = _some_layers(run, table)
    figure, axes = new_figure(
        f"V against M, step {step:,}",
        f"a point a token type with {_REGRESSED}; squared embedding units",
        panels=len(layers),
        sidebar=True,
    )
    regressed = table[table["n"].between(*REGRESSED) & table["layer"].isin(layers)]
    most = max(REGRESSED[0] + 1, regressed["n"].max() if len(regressed) else 0)
    norm = LogNorm(REGRESSED[0], most)
    texts = []
    for ax, layer in zip(axes, layers, strict=True):
        found = regressed[regressed["layer"] == layer]
        ax.scatter(found["M"], found["V"], s=7, c=found["n"], norm=norm, cmap="cividis", lw=0, rasterized=True)
        slope, r2 = _draw_line(ax, found["M"].to_numpy(), found["V"].to_numpy())
        ax.set_title(f"{layer}: {_fit(slope, r2)}", fontsize=8.8)
        ax.set_xlabel("M of the token type")
        _few_ticks(ax)
        texts.append(f"{layer}: {_fit(slope, r2)} over {len(found)} token types")
    axes[0].set_ylabel("V of the token type")
    bar = value_bar(axes[-1], ScalarMappable(norm, "cividis"), "occurrences n (log scale)")
    log_ticks(bar.ax, REGRESSED[0], most)
    numbers = regressed.set_index(["layer", "token_id"])[["n", "Q", "M", "V"]]
    alt = f"V against M of the token types at {len(layers)} layers, scattered, with regression lines."
    return FigureData("tokens-V-against-M", figure, numbers, alt, "; ".join(texts) + ".")


def statistics(run: Run, found: dict[int, pd.DataFrame], null: pd.DataFrame) -> FigureData:
    """C.V. of Q, and slope and R² of V on M, at each layer."""
    rows = {
        (step, layer): _statistics(table[table["layer"] == layer])
        for step, table in found.items()
        for layer in run.depth
    }
    numbers = pd.DataFrame.from_dict(rows, orient="index").rename_axis(["step", "layer"])
    subtitle = f"C.V. over all token types, least squares over those with {_REGRESSED}"
    figure, axes = new_figure("Token types through the layers", subtitle, panels=3)
    texts = []
    for ax, (key, name) in zip(axes, _STATISTICS.items(), strict=True):
        for step, colour, marker in zip(found, (RUNS[0], RUNS[2], RUNS[6]), "o^s", strict=False):
            at = numbers[key].unstack("layer").loc[step].reindex(run.axis)
            ax.plot(at.to_numpy(), color=colour, marker=marker, ms=3.5, label=f"step {short(step)}")
        if key in null:
            ax.plot(run.table(key, null).iloc[-1].reindex(run.axis).to_numpy(), label="random", **NULL)
        layer_axis(ax, run.axis, most=6)
        ax.set_ylabel(name)
        texts.append(f"{name} from {at.min():.3g} to {at.max():.3g}")
    legend(figure, axes[0])
    alt = "C.V. of Q, slope and R² of V on M against layer."
    regressed = numbers["token_types_regressed"].loc[max(found)]
    text = f"At step {max(found):,}, regressed over {number(regressed.max())} token types: {', '.join(texts)}."
    return FigureData("tokens-statistics", figure, numbers, alt, text)


def against_frequency(run: Run, step: int, table: pd.DataFrame) -> FigureData:
    """Q, M and V of the token types against how often they occur, at the last block."""
    layer = _last_block(run)
    at = table[(table["layer"] == layer) & table["n"].between(*REGRESSED)]
    logs = (at.set_index("token_id")[["Q", "M", "V"]] + 1).apply(np.log10)
    logs["n"] = np.log10(at["n"].to_numpy())
    figure, axes = new_figure(
        f"Q, M and V against frequency at {layer}, step {step:,}",
        f"a point a token type with {_REGRESSED}; squared embedding units, logarithms",
        panels=3,
    )
    texts = []
    for ax, key in zip(axes, "QMV", strict=True):
        ax.scatter(logs["n"], logs[key], s=7, color=RUNS[0], alpha=0.5, lw=0, rasterized=True)
        slope, r2 = _draw_line(ax, logs["n"].to_numpy(), logs[key].to_numpy())
        ax.set_title(_fit(slope, r2), fontsize=8.8)
        ax.set_xlabel("log10 n, occurrences")
        ax.set_ylabel(f"log10(1 + {key})")
        texts.append(f"{key} {slope:.3g}")
    alt = "Q, M and V of the token types against log frequency, scattered, with regression lines."
    return FigureData("tokens-against-frequency", figure, logs, alt, f"Slopes: {', '.join(texts)}.")


def histograms(run: Run, step: int, table: pd.DataFrame) -> FigureData:
    """How Q, M and V are spread over token types: a line a layer."""
    present = [layer for layer in run.depth if (table["layer"] == layer).any()]
    figure, axes = new_figure(
        f"Q, M and V over token types, step {step:,}",
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
    alt = "Histograms of Q, M and V over token types, a line a layer."
    return FigureData(
        "tokens-histograms", figure, numbers.rename("share").to_frame(), alt, f"Medians at {_last_block(run)}: {text}."
    )


def projection(run: Run) -> FigureData:
    """Chosen tokens in the plane of their two largest directions, with the origin, at some layers."""
    step = max(run.projections)
    table = read_projection(run.projections[step])
    layers = _some_layers(run, table)
    figure, axes = new_figure(
        f"Means of chosen tokens, step {step:,}",
        "embedding units along the two directions of largest variance; × is the origin; frequent tokens are larger",
        panels=len(layers),
    )
    for ax, layer in zip(axes, layers, strict=True):
        at = table[table["layer"] == layer]
        tokens, origin = at[at["token_id"] >= 0], at[at["token_id"] < 0]
        size = 6 + 60 * np.sqrt(tokens["n"] / tokens["n"].max())
        ax.scatter(tokens["pc1"], tokens["pc2"], s=size, color=RUNS[0], alpha=0.45, lw=0)
        ax.plot(origin["pc1"], origin["pc2"], ls="", marker="x", ms=10, mew=2.2, color=ACCENT)
        for token in tokens.nlargest(8, "n").itertuples():
            text = str(getattr(token, "token", token.token_id))
            label = repr(text)[1:-1].replace(" ", "␣")
            ax.annotate(label, (token.pc1, token.pc2), (4, 4), textcoords="offset points", fontsize=7.5)
        ax.set_title(layer, fontsize=8.8)
        ax.set_xlabel("first component")
    axes[0].set_ylabel("second component")
    numbers = table[table["layer"].isin(layers)].set_index(["layer", "token_id"]).drop(columns="layer_index")
    text = f"{numbers.groupby('layer').size().max() - 1} tokens at {', '.join(layers)}; the most frequent are named."
    alt = "Means of chosen tokens in the plane of their two principal components, with the origin."
    return FigureData("tokens-projection", figure, numbers, alt, text)


def counts(table: pd.DataFrame) -> Array:
    """Occurrences of each token type: those of the first layer."""
    return table[table["layer"] == table["layer"].iloc[0]]["n"].to_numpy(dtype=float)


def _statistics(table: pd.DataFrame) -> dict[str, float]:
    regressed = table[table["n"].between(*REGRESSED)]
    slope, _, r2 = _least_squares(regressed["M"].to_numpy(), regressed["V"].to_numpy())
    cv = float(table["Q"].std(ddof=0) / table["Q"].mean()) if len(table) else np.nan
    return {"Q_t_cv": cv, "V_on_M_slope": slope, "V_on_M_r2": r2, "token_types_regressed": float(len(regressed))}


def _least_squares(x: Array, y: Array) -> tuple[float, float, float]:
    """Slope, intercept and R²; NaN where there are fewer than two abscissae."""
    dx, dy = x - x.mean() if len(x) else x, y - y.mean() if len(y) else y
    if not dx @ dx:
        return np.nan, np.nan, np.nan
    slope = dx @ dy / (dx @ dx)
    r2 = slope * (dx @ dy) / (dy @ dy) if dy @ dy else np.nan
    return float(slope), float(y.mean() - slope * x.mean()), float(r2)


def _draw_line(ax: Axes, x: Array, y: Array) -> tuple[float, float]:
    slope, intercept, r2 = _least_squares(x, y)
    if np.isfinite(slope):
        ends = np.array([x.min(), x.max()])
        ax.plot(ends, intercept + slope * ends, **_LINE)
    return slope, r2


def _fit(slope: float, r2: float) -> str:
    return ", ".join(
        f"{name} {value:.3g}" if np.isfinite(value) else f"{name} undefined"
        for name, value in (("slope", slope), ("R²", r2))
    )


def _some_layers(run: Run, table: pd.DataFrame) -> Sequence[str]:
    """Four layers over the depth."""
    present = set(table["layer"])
    layers = [layer for layer in run.depth if layer in present and not layer.endswith("final_norm")]
    return [layers[i] for i in thinned(len(layers), 4)]


def _last_block(run: Run) -> str:
    return list(run.blocks.values())[-1][-1]


def _few_ticks(ax: Axes) -> None:
    ax.locator_params(nbins=5)
    ax.xaxis.set_major_formatter(short)
    ax.yaxis.set_major_formatter(short)
