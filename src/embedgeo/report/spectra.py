"""Figures of eigenvalue spectra: at all layers of the last step, and over steps at some layers."""

from collections.abc import Iterator, Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from embedgeo import drawing as draw
from embedgeo.drawing import Array, FigureData
from embedgeo.formatting import number, printable
from embedgeo.metrics.anisotropy import gaussian_eigenvalues
from embedgeo.report.runs import Run
from embedgeo.report.tokens import some_layers

SPECTRA_TEXT = (
    "The eigenvalues of the covariance in descending order, each over the mean of all (V / d). Those of random "
    "embeddings end at the Marchenko-Pastur edge, (1 + √(d / n))²: an eigenvalue above it is a direction that stands "
    "out. A straight line is a power law, whose exponent α-ReQ is."
)

_WIDEST = 20_000  # width beyond which nothing is simulated
_DEEPEST = 1e-9  # share of the largest eigenvalue below which others are rounding, and beyond the axis
_UNIT = "λᵢ over their mean, V / d"


def spectra_figures(run: Run) -> Iterator[FigureData]:
    """The figures of a run, if it has spectra."""
    if run.spectra:
        yield spectra_by_layer(run)
        if len(run.spectra) > 1:
            yield spectra_by_step(run)


def spectra_by_layer(run: Run, ax: Axes | None = None) -> FigureData:
    """The spectra at the last step: a line for each layer, and that of random embeddings."""
    step, table = max(run.spectra.items())
    layers = run.layers_in(table)
    shares = _wide(table, "layer").reindex(columns=layers)
    figure, (ax,) = draw.new_figure(run.titled("Eigenvalue spectra", step), _UNIT, sidebar=len(layers) > 1, ax=ax)
    random, edge = _draw(ax, shares, draw.depth_bar(ax, layers), table)
    _set_axes(ax, shares)
    draw.legend(figure, ax)
    last = next((block for block in run.all_blocks[-1:] if block in shares), layers[-1])
    text = f"The largest at {last} is {number(shares[last].iloc[0])} times their mean."
    text += f" Random embeddings: {number(edge)} times." if np.isfinite(edge) else ""
    alt = f"Eigenvalues against their index, both on logarithmic scales, a line for each of {len(layers)} layers."
    return FigureData("spectra", figure, shares.join(random), alt, text)


def spectra_by_step(run: Run, layers: Sequence[str] = (), ax: Axes | None = None) -> FigureData:
    """The spectra at some layers: a line for each of some steps, and that of random embeddings at the last."""
    steps = sorted(run.spectra)
    layers = layers or some_layers(run, run.spectra[steps[-1]])
    title = "Eigenvalue spectra by step" if len(layers) > 1 else f"Eigenvalue spectra at {printable(layers[0])}"
    figure, axes = draw.new_figure(title, _UNIT, panels=len(layers), sidebar=True, ax=ax)
    colours = draw.time_bar(axes[-1], steps)
    every = pd.concat([table.assign(step=step) for step, table in run.spectra.items()])
    by_layer = {}
    for panel, layer in zip(axes, layers, strict=True):
        of_layer = every[every["layer"] == layer]
        by_layer[layer] = _wide(of_layer, "step").reindex(columns=steps)
        _draw(panel, by_layer[layer], colours, of_layer[of_layer["step"] == steps[-1]])
        if len(layers) > 1:
            panel.set_title(layer, fontsize=8.8)
    numbers = pd.concat(by_layer, names=["layer"]).sort_index()
    for panel in axes:
        _set_axes(panel, numbers)
        panel.minorticks_off()
    draw.legend(figure, axes[0])
    first, final = (number(by_layer[layers[-1]][step].iloc[0]) for step in (steps[0], steps[-1]))
    text = f"The largest at {layers[-1]}: {first} times their mean at step {steps[0]:,}, {final} at step {steps[-1]:,}."
    alt = f"Eigenvalues against their index, a line for each of {len(steps)} steps, at {', '.join(layers)}."
    return FigureData("spectra-steps", figure, numbers, alt, text)


def _wide(table: pd.DataFrame, by: str) -> pd.DataFrame:
    """The shares by index, a column for each layer or step; nothing where they are 0."""
    shares = table.pivot(index="index", columns=by, values="share")
    return shares.where(shares > 0)


def _draw(ax: Axes, shares: pd.DataFrame, colours: Array, table: pd.DataFrame) -> tuple["pd.Series[float]", float]:
    """Draw spectra, that of random rows of the number and width that most layers have, and its edge; the last two."""
    for name, colour in zip(shares, colours, strict=True):
        ax.plot(shares[name].dropna(), color=colour, lw=1.1, alpha=0.9)
    n, dim = (int(table[name].mode().iloc[-1]) for name in ("n", "width"))
    index = np.unique(table["index"])
    if n < 3 or not 2 <= dim <= _WIDEST:
        return pd.Series(np.nan, index, name="random"), np.nan
    eigenvalues = gaussian_eigenvalues(n - 1, dim)
    random = pd.Series(eigenvalues / eigenvalues.mean(), np.arange(1, dim + 1), name="random").reindex(index)
    random = random.where(random > 0)
    edge = float((1 + np.sqrt(dim / (n - 1))) ** 2)
    ax.plot(random, label="random", **draw.BASELINE)
    ax.axhline(edge, label=f"Marchenko-Pastur edge {number(edge)}", color=draw.ACCENT, ls=":", lw=1.2, zorder=1.5)
    return random, edge


def _set_axes(ax: Axes, shares: pd.DataFrame) -> None:
    finite = shares.to_numpy()[shares.notna().to_numpy()]
    high = finite.max(initial=1.0)
    low = min(finite[finite >= _DEEPEST * high].min(initial=1.0), 0.5)
    ax.set(xscale="log", yscale="log", xlabel="index i (log scale)", ylabel="eigenvalue (log scale)")
    ax.set_ylim(low / 1.5, high * 2)
    ax.set_xlim(1, max(2, shares.index.get_level_values("index").max()))
    draw.log_ticks(ax, low, high)
    ax.xaxis.set_major_formatter(draw.tick_label)
