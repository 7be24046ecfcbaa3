"""Figures of single token types that papers show."""

from pathlib import Path

import numpy as np
import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from embedgeo.functional import REGRESSION_COUNT_RANGE, least_squares
from research.measured import Measured

_LONGEST_NAME = 20  # letters of a token that is named in a figure
_MOST_SIZE = 4  # tokens of a word from which on words are of one colour


def save_figures(measured: Measured, folder: Path, prefix: str, most_layers: int) -> None:
    """Draw a model's token types, where its sweep has tables of them, as files of a folder.

    Names begin with the prefix. Words of several tokens are drawn at so many layers, at most.
    """
    types, found = measured.types, {}
    if len(types):
        present = _present(types, measured)
        found["tokens-histograms"] = histograms(types, present)
        middle = two_layers(present, measured)[0]
        places = np.linspace(0, len(present) - 1, min(most_layers, len(present))).round()
        layers = [present[int(place)] for place in places]
        found["tokens-V-against-M"] = mean_against_variance(types, layers)
        found["tokens-raw-against-frequency"] = raw_against_frequency(types, middle)
        if "num_tokens" in types and (types["num_tokens"] > 1).any():
            for layer in layers:
                found[f"words-{layer}"] = words(types, layer)
    if files := measured.tables.get("occurrences"):
        table = pd.read_parquet(files[max(files)])
        if len(table):
            layers = two_layers(_present(table, measured), measured)
            found["tokens-occurrences"] = occurrences(table, layers)
    folder.mkdir(parents=True, exist_ok=True)
    for name, figure in found.items():
        figure.savefig(folder / f"{prefix}{name}.png", dpi=120)


def _present(table: pd.DataFrame, measured: Measured) -> list[str]:
    present = set(table["layer"])
    return [layer for layer in measured.depth if layer in present]


def two_layers(present: list[str], measured: Measured) -> list[str]:
    """The middle block and the last one, of those that are present; without blocks, layers."""
    layers = [layer for layer in present if layer in measured.blocks] or present
    return list(dict.fromkeys((layers[(len(layers) - 1) // 2], layers[-1])))


def _panels(title: str, count: int) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(3.6 * count, 3.6), layout="constrained")
    figure.suptitle(title)
    return figure, [figure.add_subplot(1, count, i + 1) for i in range(count)]


def raw_against_frequency(types: pd.DataFrame, layer: str) -> Figure:
    """Q, M and V of the token types of a layer against log frequency, with regression lines."""
    at_layer = types[types["layer"] == layer]
    logs = np.log10(at_layer["n"])
    figure, axes = _panels(f"Q, M and V against frequency at {layer}", 3)
    for ax, key in zip(axes, "QMV", strict=True):
        ax.set_title(_regress(ax, at_layer["n"], logs, at_layer[key]), fontsize="small")
        ax.set_xlabel("log10 n, occurrences")
        ax.set_ylabel(f"{key} of the token type")
    return figure


def mean_against_variance(types: pd.DataFrame, layers: list[str]) -> Figure:
    """V against M of the token types of some layers, with regression lines."""
    figure, axes = _panels("V against M", len(layers))
    for ax, layer in zip(axes, layers, strict=True):
        at_layer = types[types["layer"] == layer]
        line = _regress(ax, at_layer["n"], at_layer["M"], at_layer["V"])
        ax.set_title(f"{layer}: {line}", fontsize="small")
        ax.set_xlabel("M of the token type")
    axes[0].set_ylabel("V of the token type")
    return figure


def _regress(ax: Axes, n: pd.Series, x: pd.Series, y: pd.Series) -> str:
    """Scatter ``y`` of token types against ``x``, those outside of the range of the regressions
    pale, and draw the line of the others; its slope and R² in words.
    """
    is_inside = n.between(*REGRESSION_COUNT_RANGE)
    ax.scatter(x, y, s=7, lw=0, c=np.where(is_inside, "C0", "0.8"))
    x, y = x[is_inside], y[is_inside]
    slope, r2 = map(float, least_squares(torch.tensor(x.values), torch.tensor(y.values)))
    if np.isfinite(slope):
        ends = np.array([x.min(), x.max()])
        ax.plot(ends, y.mean() + slope * (ends - x.mean()), color="C3")
    return f"slope {slope:.3g}, R² {r2:.3g}"


def histograms(types: pd.DataFrame, layers: list[str]) -> Figure:
    """Histograms of Q, M and V over token types, a line for each layer."""
    figure, axes = _panels("Q, M and V over token types", 3)
    for ax, key in zip(axes, "QMV", strict=True):
        logs = np.log10(types[key].where(types[key] > 0))
        edges = np.histogram_bin_edges(logs.dropna(), 40)
        for i, layer in enumerate(layers):
            values = logs[types["layer"] == layer].dropna()
            shares = np.histogram(values, edges)[0] / max(1, len(values))
            ax.stairs(shares, edges, color=(i / len(layers), 0.3, 0.6), label=layer)
        ax.set_xlabel(f"log10 {key}, squared embedding units")
    axes[0].set_ylabel("share of token types")
    axes[0].legend(fontsize="xx-small")
    return figure


def words(types: pd.DataFrame, layer: str) -> Figure:
    """Q, M and V of words against log frequency, and V against M, by their number of tokens.

    A word's row is the mean over its tokens, whose norm is smaller than theirs. So Q, M and V of
    words of several tokens are smaller for that reason alone (Yamagiwa 2025, appendix J).
    """
    # a single occurrence has no variance
    known = types[(types["layer"] == layer) & (types["n"] >= 2) & types["num_tokens"].notna()]
    known = known.assign(frequency=np.log10(known["n"]))
    sizes = known["num_tokens"].round().clip(1, _MOST_SIZE)
    figure, axes = _panels(f"Words by their number of tokens at {layer}", 4)
    pairs = (("frequency", "Q"), ("frequency", "M"), ("frequency", "V"), ("M", "V"))
    for ax, (x, y) in zip(axes, pairs, strict=True):
        for size in range(1, _MOST_SIZE + 1):
            of_size = known[sizes == size]
            more = " or more" if size == _MOST_SIZE else ""
            ax.scatter(of_size[x], of_size[y], s=7, lw=0, label=f"{size}{more}")
        ax.set_xlabel("M of the word" if x == "M" else "log10 n, occurrences")
        ax.set_ylabel(f"{y} of the word")
    axes[0].legend(title="tokens", fontsize="x-small")
    return figure


def occurrences(table: pd.DataFrame, layers: list[str]) -> Figure:
    """Occurrences of token types in the plane of their own axes, around the zero vector."""
    figure, axes = _panels("Occurrences of token types of every frequency", len(layers))
    for ax, layer in zip(axes, layers, strict=True):
        rows = table[table["layer"] == layer]
        logs = np.log10(rows["n"])
        look = {"vmin": logs.min(), "vmax": logs.max()}
        points = ax.scatter(rows["pc1"], rows["pc2"], c=logs, s=3, alpha=0.5, lw=0, **look)
        means = rows.groupby("token_id")[["n", "pc1", "pc2"]].mean()
        colours = np.log10(means["n"])
        ax.scatter(means["pc1"], means["pc2"], c=colours, s=20, edgecolor="black", **look)
        texts = rows.drop_duplicates("token_id").set_index("token_id")["token"]
        for token_id, mean in means.iterrows():
            name = str(texts[token_id]).strip()[:_LONGEST_NAME].replace("$", r"\$")
            ax.annotate(name, (mean["pc1"], mean["pc2"]), fontsize="x-small")
        ax.plot(0, 0, ls="", marker="x", color="C3")
        ax.set_aspect("equal", adjustable="datalim")
        ax.set_title(layer, fontsize="small")
        ax.set_xlabel("first direction")
    axes[0].set_ylabel("second direction")
    figure.colorbar(points, ax=axes, label="log10 n, occurrences")
    return figure
