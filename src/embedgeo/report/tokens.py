"""Figures of token types, from the tables of the checkpoints."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm
from matplotlib.ticker import MaxNLocator

from embedgeo.drawing import (
    ACCENT,
    BASELINE,
    RUNS,
    Array,
    FigureData,
    depth_bar,
    layer_axis,
    legend,
    log_ticks,
    new_figure,
    thinned,
    tick_label,
    value_bar,
)
from embedgeo.formatting import number
from embedgeo.functional import REGRESSION_COUNT_RANGE, least_squares, type_regressions, types_by_frequency
from embedgeo.report.runs import Run

_REGRESSED = "{} ≤ n ≤ {:,} occurrences".format(*REGRESSION_COUNT_RANGE)
_LINE: dict[str, Any] = {"color": ACCENT, "lw": 1.6}
_STATISTICS = {"Q_t_cv": "C.V. of Q", "V_on_M_slope": "slope of V on M", "V_on_M_r2": "R² of V on M"}


class TableData(NamedTuple):
    """A table for the page.

    Attributes:
        name: of its file.
        caption: its title.
        cells: as they are shown.
        numbers: the values.
        text: explanation.
    """

    name: str
    caption: str
    cells: pd.DataFrame
    numbers: pd.DataFrame
    text: str


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
        panel.xaxis.set_major_formatter(tick_label)
        panel.yaxis.set_major_formatter(tick_label)
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
                label=f"step {tick_label(step)}" if run.has_steps else "measured",
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
    regressed = table[table["n"].between(*REGRESSION_COUNT_RANGE)]
    types = {key: torch.tensor(regressed[key].to_numpy(dtype=float)) for key in ("n", "Q", "M", "V")}
    values = type_regressions(types)
    return {**{key: float(values[key]) for key in _STATISTICS}, "token_types_regressed": float(len(regressed))}


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


_LONGEST = 20
"""Letters of a token that is named in a figure."""

_REGRESSED_RANGE = "{} ≤ n ≤ {:,}".format(*REGRESSION_COUNT_RANGE)


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
        ax.xaxis.set_major_formatter(tick_label)
        ax.yaxis.set_major_formatter(tick_label)
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
        f"a point a token type, squared embedding units; lines over the types with {_REGRESSED_RANGE}",
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
        ax.yaxis.set_major_formatter(tick_label)
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
        ax.yaxis.set_major_formatter(tick_label)
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


CONFOUNDED = (
    "Rows are words here, a token type is a word, and |T_w| is how many tokens it is made of. A word's row is the mean "
    "over its tokens, which has a smaller norm than they have: Q, M and V of words of several tokens are smaller for "
    "that reason alone, and rare words have more tokens. Compare words of the same |T_w|; an effect of frequency over "
    "all words may be one of |T_w|."
)
"""What has to be known of words: Yamagiwa & Shimodaira (2025), Appendix J."""

_CLASSES = ("= 1", "= 2", "= 3", "≥ 4")
_COLOURS = (RUNS[0], RUNS[5], RUNS[2], ACCENT)
_LEAST = 2
"""Occurrences of a word: a single one has no variance."""


def has_words(run: Run) -> bool:
    """Whether the token types are words, some of them of several tokens."""
    return any("num_tokens" in table and bool((table["num_tokens"] > 1).any()) for table in run.tokens.values())


def words(run: Run, layer: str) -> FigureData:
    """Q, M and V of the words against log frequency, and V against M, coloured by their number of tokens."""
    step, table = max(run.tokens.items())
    at = table[(table["layer"] == layer) & (table["n"] >= _LEAST) & table["num_tokens"].notna()]
    at = at.set_index("token_id")[["n", "Q", "M", "V", "num_tokens"]]
    at["log10 n"] = np.log10(at["n"].to_numpy())
    sizes = at["num_tokens"].round().clip(1, len(_CLASSES))
    figure, axes = new_figure(
        run.titled(f"Words by their number of tokens |T_w| at {layer}", step),
        f"a point a word with n ≥ {_LEAST} occurrences; squared embedding units",
        panels=4,
    )
    for ax, (x, y) in zip(axes, (("log10 n", "Q"), ("log10 n", "M"), ("log10 n", "V"), ("M", "V")), strict=True):
        for size, (name, colour) in enumerate(zip(_CLASSES, _COLOURS, strict=True), 1):
            of_size = at[sizes == size]
            ax.scatter(of_size[x], of_size[y], s=7, color=colour, alpha=0.6, lw=0, rasterized=True)
            ax.scatter([], [], s=25, color=colour, label=f"|T_w| {name}")
        ax.set_xlabel("log10 n, occurrences" if x != "M" else "M of the word")
        ax.set_ylabel(f"{y} of the word")
        ax.locator_params(nbins=5)
        ax.xaxis.set_major_formatter(tick_label)
        ax.yaxis.set_major_formatter(tick_label)
    legend(figure, axes[0])
    medians = at.groupby(sizes)["Q"].agg(["median", "size"])
    text = ", ".join(
        f"{number(median)} at |T_w| {_CLASSES[int(size) - 1]} ({count:,} words)"
        for size, median, count in medians.itertuples()
    )
    alt = f"Q, M and V of words against log frequency, and V against M, at {layer}, coloured by number of tokens."
    return FigureData(f"words-{layer}", figure, at, alt, f"Median Q: {text or 'no words'}.")


def projection(run: Run) -> FigureData:
    """Means of chosen tokens in the plane of their two directions of largest variance, with the origin."""
    step, table = max(run.projections.items())
    layers = some_layers(run, table)
    figure, axes = new_figure(
        run.titled("Means of chosen tokens", step),
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
            label = repr(str(token.token))[1:-1].replace(" ", "␣")
            ax.annotate(label, (token.pc1, token.pc2), (4, 4), textcoords="offset points", fontsize=7.5)
        ax.set_title(layer, fontsize=8.8)
        ax.set_xlabel("first direction")
    axes[0].set_ylabel("second direction")
    numbers = table[table["layer"].isin(layers)].set_index(["layer", "token_id"]).drop(columns="layer_index")
    text = f"{numbers.groupby('layer').size().max() - 1} tokens at {', '.join(layers)}; the most frequent are named."
    alt = "Means of chosen tokens in the plane of their two directions of largest variance, with the origin."
    return FigureData("tokens-projection", figure, numbers, alt, text)


_LISTED = 10
"""Token types in a list."""

_LEAST_LETTERS = 3
_SYMBOLS = {"distance": "‖μ_t − μ‖²"}
_REGRESSED_RANGE = "{} ≤ n ≤ {:,}".format(*REGRESSION_COUNT_RANGE)


def extremes(run: Run, layer: str) -> TableData:
    """Which token types vary most and least, and lie nearest the mean, at a layer of the last checkpoint."""
    step, table = max(run.tokens.items())
    at = table[(table["layer"] == layer) & table["n"].between(*REGRESSION_COUNT_RANGE)].set_index("token_id")
    by_variance = at.sort_values(["V", "n"], ascending=[False, False], kind="stable")
    lists = {
        "varies most": (by_variance.head(_LISTED), "V"),
        "varies least": (by_variance.tail(_LISTED).iloc[::-1], "V"),
    }
    for distances in run.distances.values():
        of_layer = distances[distances["layer"] == layer].set_index("token_id")["distance"]
        near = at.assign(distance=of_layer).dropna(subset="distance").nsmallest(_LISTED, "distance")
        lists["nearest the mean"] = near, "distance"
    cells, numbers = [], []
    for name, (types, key) in lists.items():
        cells += [
            pd.Series([spelled(token) for token in types["token"]], name=name, dtype=object),
            pd.Series([number(value) for value in types[key]], name=_SYMBOLS.get(key, key), dtype=object),
            pd.Series([number(n) for n in types["n"]], name="n", dtype=object),
        ]
        rows = types[["token", "n", key]].rename(columns={key: "value"})
        numbers.append(rows.assign(list=name, of=key, rank=range(1, len(rows) + 1)))
    text = f"Of the {len(at):,} token types with {_REGRESSED_RANGE} occurrences; squared embedding units. ␣ is a space."
    caption = run.titled(f"Token types at {layer}", step)
    every = pd.concat(numbers).reset_index().set_index(["list", "rank"])
    return TableData(f"tokens-extremes-{layer}", caption, pd.concat(cells, axis=1).fillna(""), every, text)


def chosen_types(run: Run, names: Sequence[str]) -> pd.Index:
    """Ids of the token types with these texts, with or without white space around them; without names, as figure 1."""
    _, table = max(run.tokens.items())
    types = table.drop_duplicates("token_id").set_index("token_id", drop=False)
    texts = types["token"].astype(str)
    if not names:
        if run.occurrences:
            return pd.Index(max(run.occurrences.items())[1]["token_id"].unique())
        is_text = torch.tensor((texts.str.strip().str.len() >= _LEAST_LETTERS).to_numpy() | (not has_texts(types)))
        return types.index[types_by_frequency(torch.tensor(types["n"].to_numpy()), is_text).numpy()]
    return types.index[texts.isin(names) | texts.str.strip().isin(names)]


def examples(run: Run, names: Sequence[str]) -> TableData | None:
    """Q, M and V of chosen token types at the last checkpoint (table 2).

    Args:
        run: with tables of token types.
        names: their texts; none: types of every frequency, as in the figure of occurrences.

    Returns:
        None where there are none of them.
    """
    step, table = max(run.tokens.items())
    layers = two_layers(run, table)
    at = table[table["token_id"].isin(chosen_types(run, names)) & table["layer"].isin(layers)]
    if at.empty:
        return None
    numbers = at.set_index(["token_id", "layer"])[["token", "n", "Q", "M", "V"]]
    wide = at.pivot(index="token_id", columns="layer", values=["Q", "M", "V"])
    first = at.drop_duplicates("token_id").set_index("token_id").sort_values("n", ascending=False, kind="stable")
    cells = {"token": [spelled(token) for token in first["token"]], "n": [number(n) for n in first["n"]]}
    for layer in layers:
        for key in "QMV":
            cells[f"{key} at {layer}"] = [number(value) for value in wide[key, layer].reindex(first.index)]
    text = "Squared embedding units; Q = M + V, and V of a single occurrence is 0. ␣ is a space."
    return TableData("tokens-examples", run.titled("Examples", step), pd.DataFrame(cells), numbers, text)


def of_run(run: Run, names: Sequence[str] | None) -> Iterator[TableData]:
    """The tables of a run with token types: at two layers those at the extremes; and, unless None, examples."""
    for layer in two_layers(run, max(run.tokens.items())[1]):
        yield extremes(run, layer)
    if names is not None and (table := examples(run, names)):
        yield table


def require_examples(runs: Sequence[Run], names: Sequence[str]) -> None:
    """Check that each of the texts is that of a token type of some run.

    Raises:
        ValueError: one is of none, or there are no tables of token types.
    """
    with_types = [run for run in runs if run.tokens]
    if not with_types:
        raise ValueError(
            "examples are token types of a sweep's tables; there are none. Sweep with --token-tables true, or leave "
            "examples out."
        )
    if missing := [name for name in names if not any(len(chosen_types(run, [name])) for run in with_types)]:
        raise ValueError(
            f"examples must be texts of token types that occur; {', '.join(map(repr, missing))} is none. Take texts "
            "from the column token of tokens/*.parquet."
        )


def two_layers(run: Run, table: pd.DataFrame) -> list[str]:
    """The middle block and the last one, of those in a table; without blocks, layers in their place."""
    present = set(table["layer"])
    blocks = [layer for layers in run.blocks.values() for layer in layers if layer in present]
    layers = blocks or list(some_layers(run, table))
    return list(dict.fromkeys((layers[(len(layers) - 1) // 2], layers[-1])))


def has_texts(types: pd.DataFrame) -> bool:
    """Whether the texts of token types are known, and not their ids in place of them."""
    return not bool((types["token"].astype(str) == types["token_id"].astype(str)).all())


def spelled(token: object) -> str:
    """A token as it is shown: what cannot be seen as an escape, spaces as ␣."""
    return repr(str(token))[1:-1].replace(" ", "␣")
