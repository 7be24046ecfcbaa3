"""The pictures of single token types of Yamagiwa & Shimodaira 2025: figures 1, 7, 9 and 10."""

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm
from matplotlib.ticker import MaxNLocator

from embedgeo.functional import REGRESSION_COUNT_RANGE
from embedgeo.report.axes import ACCENT, RUNS, short, value_bar
from embedgeo.report.drawing import FigureData, new_figure
from embedgeo.report.examples import has_texts, spelled, two_layers
from embedgeo.report.runs import Run
from embedgeo.report.tokens import draw_line, fit_text
from embedgeo.report.values import log_ticks
from embedgeo.results.wording import number

_LONGEST = 20
"""Letters of a token that is named in a figure."""

_REGRESSED = "{} ≤ n ≤ {:,}".format(*REGRESSION_COUNT_RANGE)


def occurrences(run: Run) -> FigureData:
    """Occurrences of token types of all frequencies in the plane of their own axes (figure 1)."""
    step, table = max(run.occurrences.items())
    table = table[table["token_id"] >= 0]
    layers = two_layers(run, table)
    figure, axes = new_figure(
        run.titled("Occurrences of token types of every frequency", step),
        "embedding units in the plane in which these rows vary most; × is the zero vector, a ring the mean of a type",
        panels=len(layers),
        sidebar=True,
    )
    shown = table[table["layer"].isin(layers)]
    least, most = shown["n"].min(), max(shown["n"].max(), shown["n"].min() + 1)
    norm = LogNorm(least, most)
    for ax, layer in zip(axes, layers, strict=True):
        at = shown[shown["layer"] == layer]
        look: dict[str, Any] = {"norm": norm, "cmap": "viridis"}
        ax.scatter(at["pc1"], at["pc2"], c=at["n"], s=3, alpha=0.45, lw=0, rasterized=True, **look)
        means = at.groupby("token_id")[["n", "pc1", "pc2"]].mean()
        means["token"] = at.drop_duplicates("token_id").set_index("token_id")["token"]
        ax.scatter(means["pc1"], means["pc2"], c=means["n"], s=20, edgecolor="black", lw=0.6, zorder=3, **look)
        ax.plot(0, 0, ls="", marker="x", ms=9, mew=2.2, color=ACCENT, zorder=4)
        ax.set_aspect("equal", adjustable="datalim")
        _name(ax, means.sort_values("n", ascending=False))
        ax.set_title(layer, fontsize=8.8)
        ax.set_xlabel("first direction")
        ax.xaxis.set_major_locator(MaxNLocator(5))
        ax.xaxis.set_major_formatter(short)
        ax.yaxis.set_major_formatter(short)
    axes[0].set_ylabel("second direction")
    log_ticks(value_bar(axes[-1], ScalarMappable(norm, "viridis"), "occurrences n (log scale)").ax, least, most)
    numbers = shown.set_index(["layer", "token_id"])[["n", "pc1", "pc2", "token"]]
    counts = shown.groupby("layer")["token_id"].agg(["nunique", "size"]).loc[layers[0]]
    text = (
        f"{counts['nunique']} token types out of ten bins of log n, {counts['size']:,} of their rows, at most 50 of "
        "each; a name is left out where it would cover another."
    )
    alt = "Occurrences of token types in the plane of their two directions of largest variance, coloured by frequency."
    return FigureData("tokens-occurrences", figure, numbers, alt, text)


def raw_against_frequency(run: Run) -> FigureData:
    """Q, M and V of the token types, as they are, against how often they occur, at the middle block (figure 7)."""
    step, table = max(run.tokens.items())
    layer = two_layers(run, table)[0]
    at = table[(table["layer"] == layer)].set_index("token_id")[["n", "Q", "M", "V"]]
    logs = np.log10(at["n"])
    is_regressed = at["n"].between(*REGRESSION_COUNT_RANGE)
    figure, axes = new_figure(
        run.titled(f"Q, M and V against frequency at {layer}", step),
        f"a point a token type, squared embedding units; lines over the types with {_REGRESSED}",
        panels=3,
    )
    texts = []
    for ax, key in zip(axes, "QMV", strict=True):
        values = at[key]
        ax.scatter(logs, values, s=7, color=RUNS[0], alpha=0.3, lw=0, rasterized=True)
        slope, r2 = draw_line(ax, *(each[is_regressed].to_numpy(dtype=float) for each in (logs, values)))
        reach = 3 * values.std(ddof=0)
        if reach > 0 and values.min() < values.max():  # rounding may make equal values spread
            low, high = values.mean() - reach, values.mean() + reach
            ax.set_ylim(max(low, values.min() - reach / 60), min(high, values.max() + reach / 60))
        ax.set_title(fit_text(slope, r2), fontsize=8.8)
        ax.set_xlabel("log10 n, occurrences")
        ax.set_ylabel(f"{key} of the token type")
        ax.yaxis.set_major_formatter(short)
        texts.append(f"{key} {number(slope)}")
    alt = "Q, M and V of the token types against log frequency, scattered, with regression lines."
    text = f"Slopes over {int(is_regressed.sum()):,} of {len(at):,} token types: {', '.join(texts)}. "
    text += "Points farther than three standard deviations from the mean are beyond the axes."
    return FigureData("tokens-raw-against-frequency", figure, at, alt, text)


def lengths_and_frequencies(run: Run) -> FigureData:
    """How long the texts and the token types are, and how often the types occur (figures 9 and 10)."""
    step, table = max(run.tokens.items())
    types = table[table["layer"] == table["layer"].iloc[0]]
    counted = {"frequency": (np.log10(types["n"]), "log10 n, occurrences of the token type", "token types")}
    if has_texts(types):
        letters = types["token"].astype(str).str.strip().str.len()
        counted = {"letters": (letters, "characters of the token type", "token types"), **counted}
    if run.text_lengths:
        lengths = pd.Series(run.text_lengths).sort_index()
        lengths = pd.Series(np.repeat(lengths.index.to_numpy(), lengths.to_numpy()))
        counted = {"length": (lengths, "tokens in the text", "texts"), **counted}
    figure, axes = new_figure(
        run.titled("Lengths and frequencies", step), "numbers of texts and token types in each bin", panels=len(counted)
    )
    numbers = {}
    for ax, (name, (values, label, what)) in zip(axes, counted.items(), strict=True):
        whole = name != "frequency"
        most = int(values.max()) if whole else 0
        width = max(1, -(-most // 40))
        edges = np.arange(0.5, most + width + 0.5, width) if whole else np.histogram_bin_edges(values, 30)
        counts = np.histogram(values, edges)[0]
        ax.stairs(counts, edges, fill=True, color=RUNS[0], alpha=0.75)
        if name == "length":
            ax.set_yscale("log")
            ax.set_ylim(0.7)
        ax.set_xlabel(label)
        ax.set_ylabel(what)
        ax.yaxis.set_major_formatter(short)
        numbers[name] = pd.Series(counts, (edges[1:] + edges[:-1]) / 2)
    least, most = REGRESSION_COUNT_RANGE
    share = types["n"].between(least, most).mean()
    text = f"{len(types):,} token types; {share:.0%} occur {least} to {most:,} times."
    if run.text_lengths:
        mean = number(lengths.mean())
        text += f" {len(lengths):,} texts of {lengths.min():,} to {lengths.max():,} tokens, {mean} on average."
    together = pd.concat(numbers, names=["of", "bin"]).rename("count").to_frame()
    alt = "Histograms of the lengths of texts and token types, and of the log frequency of token types."
    return FigureData("tokens-lengths-and-frequencies", figure, together, alt, text)


def _name(ax: Axes, means: pd.DataFrame) -> None:
    """Names beside the means of token types, most frequent first, but for those that would cover another one."""
    ax.apply_aspect()
    points = 72 / ax.figure.dpi
    rings = ax.transData.transform(means[["pc1", "pc2"]].to_numpy()) * points
    frame = ax.get_window_extent()
    zero = ax.transData.transform((0, 0)) * points
    taken = [(x - 3, y - 3, x + 3, y + 3) for x, y in (*rings, zero)]
    for token, at, (x, y) in zip(means["token"], means[["pc1", "pc2"]].to_numpy(), rings, strict=True):
        label = spelled(token).strip("␣")[:_LONGEST]
        width, height = 4.4 * len(label), 7.0
        for dx, dy in ((4, 3), (-4, 3), (4, -8), (-4, -8)):
            left, low = x + dx - (width if dx < 0 else 0), y + dy
            is_free = not any(
                left < x1 and x0 < left + width and low < y1 and y0 < low + height for x0, y0, x1, y1 in taken
            )
            if is_free and frame.x0 * points <= left and left + width <= frame.x1 * points:
                taken.append((left, low, left + width, low + height))
                ha = "right" if dx < 0 else "left"
                ax.annotate(label, (at[0], at[1]), (dx, dy), textcoords="offset points", fontsize=7, ha=ha, zorder=5)
                break
