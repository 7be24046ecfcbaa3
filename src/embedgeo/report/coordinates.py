"""Figures of single coordinates, which hold the most at each layer, and of massive activations."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.cm import ScalarMappable
from matplotlib.colors import PowerNorm

from embedgeo.drawing import (
    ACCENT,
    BASELINE,
    HEIGHT,
    RUNS,
    FigureData,
    Picture,
    layer_axis,
    legend,
    new_figure,
    step_axis,
    thinned,
    tick_label,
    value_axis,
    value_bar,
)
from embedgeo.formatting import listed, number
from embedgeo.glossary import term
from embedgeo.layer_names import layer_labels
from embedgeo.report.runs import Run
from embedgeo.report.tokens import some_layers

NAMED = 10
"""How many coordinates of a layer are named."""

MEANING = (
    "A coordinate is an entry of the hidden state, numbered from 0. In trained models a few of them may hold most of "
    "the variance, or of the mean cosine, which then say little about all the others. Massive activations are entries "
    "thousands of times as large as most, often at the first position of every sequence, where attention sinks are."
)

_SHARES = {"share_of_V": "share of V", "share_of_cosine": "share of the mean cosine"}
_MOST_LAYERS = 36
_FOLLOWED = 8
_COMPARED = ("max_abs", "massive_fraction", "kurtosis")
_LOOKS: dict[str, dict[str, Any]] = {
    "_first": {"color": ACCENT, "marker": "o", "ms": 3, "lw": 1.6, "label": "first positions"},
    "_rest": {"color": RUNS[0], "marker": "s", "ms": 3, "lw": 1.6, "label": "the rest"},
}


def coordinate_figures(run: Run) -> Iterator[FigureData]:
    """All of them that there are numbers for."""
    if run.coordinates:
        yield largest(run)
        if len(run.coordinates) > 1:
            yield followed(run)
    keys = [f"{key}{suffix}" for key in _COMPARED for suffix in _LOOKS]
    if set(keys) <= set(run.values) and run.values["max_abs_rest"].notna().any():
        if len(run.depth) > 1:
            yield massive(run)
        if len(run.steps) > 1:
            yield massive_by_step(run)


def largest(run: Run) -> FigureData:
    """The ten coordinates with the largest share of V and of the mean cosine at each layer, at the last step."""
    step, table = max(run.coordinates.items())
    by_share = {share: _ranked(table, share) for share in _SHARES}
    ranked = pd.concat(by_share, names=["by"])
    present = [layer for layer in run.depth if (table["layer"] == layer).any()]
    drawn = [present[i] for i in thinned(len(present), _MOST_LAYERS)]
    columns = int(ranked["rank"].max())
    width, height = 7.6, 1.34 + 0.17 * len(drawn)
    figure = Picture(figsize=(width, height))
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, 2)
    figure.subplots_adjust(0.88 / width, 0.46 / height, 1 - 0.86 / width, 1 - 0.74 / height, wspace=0.1)
    title = run.titled(f"The {columns} largest coordinates", step)
    figure.text(0.12 / width, 1 - 0.07 / height, title, va="top", fontsize=10.5, weight="bold")
    subtitle = "numbers of coordinates, from 0, by rank; the colour is the share"
    figure.text(0.12 / width, 1 - 0.27 / height, subtitle, va="top", fontsize=8.5, color="#444444")
    norm = PowerNorm(0.5, 0, max(0.01, float(ranked["share"].max())))
    labels, _ = layer_labels(drawn)
    for ax, (share, name) in zip(axes, _SHARES.items(), strict=True):
        cells = by_share[share][by_share[share]["layer"].isin(drawn)]
        grid = cells.pivot_table("share", "layer", "rank").reindex(index=drawn, columns=range(1, columns + 1))
        ax.imshow(grid.to_numpy(dtype=float), norm=norm, cmap="YlOrBr", aspect="auto")
        for layer, rank, coordinate, size in cells.itertuples(index=False):
            look: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 6.5 if coordinate < 10_000 else 5.5}
            colour = "white" if norm(size) > 0.6 else "black"
            ax.text(rank - 1, drawn.index(layer), f"{coordinate:.0f}", color=colour, **look)
        ax.set_title(f"by {name}", fontsize=8.8)
        ax.set_xticks(range(columns), [str(rank + 1) for rank in range(columns)], fontsize=7.5)
        ax.set_yticks(range(len(drawn)), labels if ax is axes[0] else [""] * len(drawn), fontsize=7.5)
        ax.set_xlabel("rank")
        ax.grid(visible=False)
        ax.tick_params(length=0)
        ax.spines[:].set_visible(False)
    bar = value_bar(axes[-1], ScalarMappable(norm, "YlOrBr"), "share")
    bar.ax.yaxis.set_major_formatter(tick_label)
    by_variance = by_share["share_of_V"]
    layer, _, coordinate, size = next(by_variance.nlargest(1, "share").itertuples(index=False))
    often = by_variance["coordinate"].value_counts()
    common = [f"{each:.0f} ({count} of {len(present)})" for each, count in often.items() if count > 1]
    text = f"Largest share of V: {number(size)}, coordinate {coordinate:.0f} at {layer}."
    text += f" Most often among those of a layer: {listed(common[:5])}." if common else ""
    alt = f"Numbers of the {columns} coordinates with the largest shares at each layer, coloured by share."
    numbers = ranked.reset_index("by").set_index(["by", "layer", "rank"])
    return FigureData("coordinates-largest", figure, numbers, alt, text)


def followed(run: Run) -> FigureData:
    """The share of V of the coordinates that are the largest at the last step, at each step, at some layers."""
    last = max(run.coordinates)
    layers = some_layers(run, run.coordinates[last])
    of_layers = {step: table[table["layer"].isin(layers)] for step, table in run.coordinates.items()}
    every = pd.concat(of_layers, names=["step"]).droplevel(1).reset_index()
    chosen = _ranked(of_layers[last], "share_of_V")
    wanted = every.merge(chosen[["layer", "coordinate"]])
    shares = wanted.pivot_table("share_of_V", "step", ["layer", "coordinate"]).reindex(sorted(run.coordinates))
    most = _FOLLOWED if len(layers) > 1 else 3
    coloured = list(chosen.sort_values("share", ascending=False)["coordinate"].unique()[:most])
    colours = dict(zip(coloured, RUNS, strict=False))
    figure, axes = new_figure(
        "The largest coordinates against step",
        f"share of V of the {NAMED} coordinates with the largest one at the last step; a coordinate has one colour, "
        "and a gap where it was not among the largest",
        panels=len(layers),
    )
    for ax, layer in zip(axes, layers, strict=True):
        of_layer = shares[[layer]].droplevel(0, axis=1)
        for coordinate in reversed(of_layer.columns):
            colour = colours.get(coordinate)
            look: dict[str, Any] = {"marker": "o" if len(of_layer) <= 40 else "", "ms": 2.5}
            look |= {"color": colour or "#b8b8b8", "lw": 1.5 if colour else 0.8, "zorder": 3 if colour else 2}
            ax.plot(of_layer[coordinate], **look)
        if "top_dim_share" in run.baseline:
            ax.plot(run.table("top_dim_share", run.baseline)[layer], label="random, the largest", **BASELINE)
        step_axis(ax, list(shares.index))
        ax.set_title(layer, fontsize=8.8)
        ax.set_ylim(0, None)
        ax.locator_params(axis="y", nbins=6)
        ax.yaxis.set_major_formatter(tick_label)
    for coordinate in coloured:
        axes[0].plot([], color=colours[coordinate], lw=2, label=f"{coordinate:.0f}")
    if len(chosen["coordinate"].unique()) > len(coloured):
        axes[0].plot([], color="#b8b8b8", lw=1, label="others")
    axes[0].set_ylabel("share of V in the coordinate")
    place = (0.04 / figure.get_size_inches()[0], 1 - 0.43 / HEIGHT)
    row: dict[str, Any] = {"ncols": _FOLLOWED + 2, "columnspacing": 1.0, "handlelength": 1.2, "borderpad": 0}
    figure.legend(*axes[0].get_legend_handles_labels(), loc="upper left", bbox_to_anchor=place, **row)
    text = "; ".join(_course(layer, shares[[layer]].droplevel(0, axis=1)) for layer in layers)
    alt = f"Share of V in single coordinates against optimizer step, at {len(layers)} layers."
    return FigureData("coordinates-followed", figure, shares, alt, f"{text}.")


def _course(layer: str, shares: pd.DataFrame) -> str:
    """The coordinate that is the largest at the last step, and its share where it is first known."""
    top = shares[shares.iloc[-1].idxmax()].dropna()
    return (
        f"{layer}: coordinate {top.name:.0f} from {number(top.iloc[0])} at step {top.index[0]:,} "
        f"to {number(top.iloc[-1])}"
    )


def massive(run: Run) -> FigureData:
    """Largest entries, massive rows and kurtosis through the layers at the last step: first positions, and the rest."""
    last = pd.DataFrame(run.values.xs(run.steps[-1], level="step")).reindex(run.axis)
    last.index = pd.Index(run.axis, name="layer")
    random = run.baseline.xs(run.steps[-1], level="step").reindex(run.axis)
    figure, axes = new_figure(
        run.titled("Massive activations: first positions against the rest", run.steps[-1]),
        "the first row of each sequence that counts, and all others",
        panels=3,
    )
    for ax, key in zip(axes, _COMPARED, strict=True):
        for suffix, look in _LOOKS.items():
            ax.plot(np.arange(len(last)), last[key + suffix].to_numpy(), **look)
        values = last[[key + suffix for suffix in _LOOKS]].to_numpy().T
        value_axis(ax, term(key), values, pd.Series(random[key].to_numpy()))
        layer_axis(ax, run.axis, most=6)
    legend(figure, axes[0])
    numbers = last[[key + suffix for key in _COMPARED for suffix in _LOOKS]].reindex(run.depth)
    alt = (
        "Largest entry, share of massive rows and kurtosis of coordinates against layer: first positions and the rest."
    )
    return FigureData("massive-activations", figure, numbers, alt, _in_words(numbers.max()))


def massive_by_step(run: Run) -> FigureData:
    """The same against the step, of the layer where each is largest."""
    keys = [key + suffix for key in _COMPARED for suffix in _LOOKS]
    numbers = run.values[keys][run.values.index.isin(run.depth, "layer")].groupby("step").max()
    figure, axes = new_figure(
        "Massive activations against step: first positions against the rest",
        "each at the layer where it is largest at that step",
        panels=3,
    )
    for ax, key in zip(axes, _COMPARED, strict=True):
        for suffix, look in _LOOKS.items():
            ax.plot(numbers[key + suffix], **{**look, "marker": look["marker"] if len(numbers) <= 40 else ""})
        value_axis(ax, term(key), numbers[[key + suffix for suffix in _LOOKS]].to_numpy().T)
        step_axis(ax, run.steps)
    legend(figure, axes[0])
    alt = "Largest entry, share of massive rows and kurtosis of coordinates against step: first positions and the rest."
    return FigureData("massive-activations-dynamics", figure, numbers, alt, _in_words(numbers.iloc[-1]))


def _in_words(values: pd.Series) -> str:
    entries, rows = (
        " and ".join(number(values[f"{key}{suffix}"]) for suffix in _LOOKS) for key in ("max_abs", "massive_fraction")
    )
    return f"At first positions and the rest, largest entry: {entries}; share of massive rows: {rows}."


def _ranked(table: pd.DataFrame, share: str) -> pd.DataFrame:
    """The coordinates with the largest share at each layer: layer, rank from 1, coordinate and share."""
    order = table.dropna(subset=share).sort_values(share, ascending=False, kind="stable")
    ranks = order.groupby("layer").cumcount() + 1
    ranked = order.assign(rank=ranks, share=order[share])[["layer", "rank", "coordinate", "share"]]
    return ranked[ranked["rank"] <= NAMED]
