"""Figures of the same rows over time and depth: drift against step, similarity of steps and of layers."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from embedgeo.formatting import number, printable
from embedgeo.report.drawing import FigureData, layer_axis, new_figure, short, thinned, value_bar
from embedgeo.report.figures import dynamics, heatmap, profile
from embedgeo.report.runs import Run

MATRICES = (
    "Linear CKA, debiased, of the same rows at two steps, or at two layers: 1 where their geometry is the same but for "
    "rotation and scale, 0 where it is unrelated. Blocks along the diagonal are phases in which little changes."
)


def of_metric(run: Run, metric: str) -> Iterator[FigureData]:
    """A metric of `embedgeo.glossary.DRIFT`: over steps or, of one step, over layers."""
    if not run.varies(metric):
        return
    is_over_time = not metric.startswith("linearity") and not metric.endswith("_to_below")
    if len(run.steps) < 2:
        yield profile(run, metric)
    elif is_over_time or len(run.depth) < 2:
        yield dynamics(run, metric)
    else:
        yield heatmap(run, metric)


def matrices(run: Run) -> Iterator[FigureData]:
    """The CKA of steps with steps, at some layers, and of layers with layers, at some steps."""
    for layer in layers_over_steps(run):
        yield cka_of_steps(run, layer)
    for step in steps_over_layers(run):
        yield cka_of_layers(run, step)


def layers_over_steps(run: Run) -> list[str]:
    """The layers at which steps were compared with steps."""
    table = run.cka
    compared = {*table.loc[(table["layer_a"] == table["layer_b"]) & (table["step_a"] != table["step_b"]), "layer_a"]}
    return [layer for layer in run.layers if layer in compared]


def steps_over_layers(run: Run) -> list[int]:
    """The steps at which layers were compared with layers."""
    table = run.cka
    of_layers = (table["step_a"] == table["step_b"]) & (table["layer_a"] != table["layer_b"])
    return [int(step) for step in table.loc[of_layers, "step_a"].unique()]


def cka_of_steps(run: Run, layer: str, ax: Axes | None = None) -> FigureData:
    """The CKA of steps with steps at a layer, as a square of colours.

    Args:
        run: whose steps they are.
        layer: one of `layers_over_steps`.
        ax: axes to draw in; default: those of a new figure.
    """
    pairs = run.cka[(run.cka["layer_a"] == layer) & (run.cka["layer_b"] == layer)]
    matrix = _square(pairs, "step", sorted({*pairs["step_a"], *pairs["step_b"]}))
    steps = [int(step) for step in matrix.index]
    figure, ax = _drawn(matrix, f"Similarity of steps at {printable(layer)}", pairs, ax)
    for axis, most in ((ax.xaxis, 5), (ax.yaxis, 9)):
        named = thinned(len(steps), most)
        axis.set_ticks(named, [short(steps[i]) for i in named])
    ax.set(xlabel="optimizer step", ylabel="optimizer step")
    return _described(f"cka-steps-{layer}", figure, matrix, [f"step {step:,}" for step in steps], f"steps at {layer}")


def cka_of_layers(run: Run, step: int, ax: Axes | None = None) -> FigureData:
    """The CKA of layers with layers at a step, as a square of colours.

    Args:
        run: whose layers they are.
        step: one of `steps_over_layers`.
        ax: axes to draw in; default: those of a new figure.
    """
    pairs = run.cka[(run.cka["step_a"] == step) & (run.cka["step_b"] == step)]
    layers = [layer for layer in run.layers if layer in {*pairs["layer_a"], *pairs["layer_b"]}]
    matrix = _square(pairs, "layer", layers)
    figure, ax = _drawn(matrix, run.titled("Similarity of layers", step), pairs, ax)
    layer_axis(ax, layers, most=6)
    layer_axis(ax, layers, vertical=True, most=10)
    where = run.titled("layers", step)
    return _described(f"cka-layers-{step}", figure, matrix, layers, where)


def _square(pairs: pd.DataFrame, column: str, places: list[Any]) -> pd.DataFrame:
    half = pairs.pivot_table(index=f"{column}_a", columns=f"{column}_b", values="cka", dropna=False)
    half = half.reindex(index=places, columns=places)
    return half.combine_first(half.T).reindex(index=places, columns=places).rename_axis(index=column, columns=None)


def _drawn(matrix: pd.DataFrame, title: str, pairs: pd.DataFrame, ax: Axes | None) -> tuple[Figure, Axes]:
    figure, (ax,) = new_figure(title, f"linear CKA, debiased, of {int(pairs['n'].min()):,} rows", sidebar=True, ax=ax)
    norm = Normalize(0, 1)
    ax.set_facecolor("#d0d0d0")
    ax.grid(visible=False)
    ax.imshow(np.ma.masked_invalid(matrix.to_numpy()), norm=norm, cmap="cividis", origin="lower", aspect="equal")
    ax.set_anchor("E")
    value_bar(ax, ScalarMappable(norm, "cividis"), "CKA").ax.yaxis.set_major_formatter(short)
    return figure, ax


def _described(name: str, figure: Figure, matrix: pd.DataFrame, places: Sequence[str], what: str) -> FigureData:
    values = np.where(np.eye(len(matrix), dtype=bool), np.nan, matrix.to_numpy())
    text = "Undefined everywhere."
    if np.isfinite(values).any():
        i, j = divmod(int(np.nanargmin(values)), len(values))
        beside = float(pd.Series(np.diagonal(values, 1)).mean())
        least = f"{places[i]} and {places[j]}, {number(values[i, j])}"
        text = f"Least alike: {least}; side by side {number(beside)} on average."
    return FigureData(name, figure, matrix, f"Similarity of {what} as a square of colours.", text)
