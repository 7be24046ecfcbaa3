"""Figures of the same rows compared at two steps or layers, for a report: see `drift`."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from embedgeo import drawing as draw
from embedgeo.drawing import FigureData
from embedgeo.formatting import number, printable
from embedgeo.report.runs import Run
from embedgeo.results.folder import CKA

CKA_TEXT = (
    "Linear CKA, debiased, of the same rows at two steps, or at two layers: 1 where their "
    "geometry is the same but for rotation and scale, 0 where it is unrelated. Blocks along the "
    "diagonal are phases in which little changes."
)


def compared(run: Run) -> pd.DataFrame:
    """The similarities of a run, a row a pair of places."""
    steps = run.steps_of("cka")
    return run.read("cka", steps[-1]) if steps else pd.DataFrame(columns=CKA.names)


def cka_figures(run: Run) -> Iterator[FigureData]:
    """The CKA of steps with steps, at some layers, and of layers with layers, at some steps."""
    yield from (cka_of_steps(run, layer) for layer in layers_over_steps(run))
    yield from (cka_of_layers(run, step) for step in steps_over_layers(run))


def layers_over_steps(run: Run) -> list[str]:
    """The layers at which steps were compared with steps."""
    pairs = compared(run)
    found = set(pairs.query("layer_a == layer_b and step_a != step_b")["layer_a"])
    return [layer for layer in run.layers if layer in found]


def steps_over_layers(run: Run) -> list[int]:
    """The steps at which layers were compared with layers."""
    pairs = compared(run)
    found = pairs.query("step_a == step_b and layer_a != layer_b")["step_a"]
    return [int(step) for step in found.unique()]


def cka_of_steps(run: Run, layer: str, ax: Axes | None = None) -> FigureData:
    """The CKA of steps with steps at a layer, as a square of colours."""
    pairs = compared(run).query("layer_a == @layer and layer_b == @layer")
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
    pairs = compared(run).query("step_a == @step and step_b == @step")
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
