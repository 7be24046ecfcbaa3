"""How variance is spread: figures of eigenvalue spectra."""

from collections.abc import Iterator

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from embedgeo import drawing as draw
from embedgeo.drawing import Array, FigureData
from embedgeo.formatting import number
from embedgeo.glossary import GAUSSIAN
from embedgeo.metrics.anisotropy import gaussian_eigenvalues
from embedgeo.report.runs import Run

SPECTRA_TEXT = (
    "The eigenvalues of the covariance in descending order, each over the mean of all (V / d). "
    "Those of Gaussian rows end at the Marchenko-Pastur edge, (1 + √(d / n))²: an eigenvalue "
    "above it is a direction that stands out. A straight line is a power law, whose exponent "
    "α-ReQ is."
)

_EIGENVALUES = 120  # that are drawn of each layer
_WIDEST = 20_000  # width beyond which nothing is simulated
# share of the largest eigenvalue below which others are rounding, and beyond the axis
_DEEPEST = 1e-9
_OVER_MEAN = "λᵢ over their mean, V / d"


def read_spectrum(run: Run) -> tuple[int, pd.DataFrame] | None:
    """The last step of a run that has spectra, and these: see `spectrum_shares`."""
    if (last := run.last_table("spectra")) is None:
        return None
    step, table = last[0], spectrum_shares(last[1])
    return None if table.empty else (step, table)


@np.errstate(over="ignore", invalid="ignore")  # of a mean that is not finite, there are no shares
def spectrum_shares(table: pd.DataFrame) -> pd.DataFrame:
    """Eigenvalues over their mean, ``share``, at some indices, of layers that have any variance;
    with n and width.
    """
    table = table[table["index"] >= 1].drop_duplicates(["layer", "index"])
    of_layers = table.groupby("layer")["eigenvalue"]
    table = table.assign(
        share=table["eigenvalue"] / of_layers.transform("mean"), width=of_layers.transform("size")
    )
    kept = np.geomspace(1, max(1, table["index"].max()), _EIGENVALUES).round()
    is_kept = table["index"].isin(kept) & np.isfinite(table["share"])
    return table.loc[is_kept, ["layer", "index", "share", "n", "width"]]


def spectra_figures(run: Run) -> Iterator[FigureData]:
    """The figure of a run, if it has spectra."""
    if (spectrum := read_spectrum(run)) is not None:
        yield spectra_figure(run, *spectrum)


def spectra_figure(run: Run, step: int, table: pd.DataFrame, ax: Axes | None = None) -> FigureData:
    """The spectra at a step: a line for each layer, and that of Gaussian rows."""
    layers = run.layers_in(table)
    shares = table.pivot(index="index", columns="layer", values="share")
    shares = shares.where(shares > 0).reindex(columns=layers)
    figure, (ax,) = draw.new_figure(run.titled("Eigenvalue spectra", step), _OVER_MEAN, ax=ax)
    gaussian, edge = _draw_spectra(ax, shares, draw.depth_bar(ax, layers), table)
    _spectrum_axes(ax, shares)
    draw.legend(ax)
    last = next((block for block in run.all_blocks[-1:] if block in shares), layers[-1])
    text = f"The largest at {last} is {number(shares[last].iloc[0])} times their mean."
    text += f" Gaussian rows: {number(edge)} times." if np.isfinite(edge) else ""
    alt = (
        "Eigenvalues against their index, both on logarithmic scales, a line for each of "
        f"{len(layers)} layers."
    )
    return FigureData("spectra", figure, shares.join(gaussian), alt, text)


def _draw_spectra(
    ax: Axes, shares: pd.DataFrame, colours: Array, table: pd.DataFrame
) -> tuple[pd.Series, float]:
    """Draw spectra, that of Gaussian rows of the number and width that most layers have, and its
    edge; the last two.
    """
    for name, colour in zip(shares, colours, strict=True):
        ax.plot(shares[name].dropna(), color=colour, lw=1.1, alpha=0.9)
    n, dim = (int(table[name].mode().iloc[-1]) for name in ("n", "width"))
    index = np.unique(table["index"])
    if n < 3 or not 2 <= dim <= _WIDEST:
        return pd.Series(np.nan, index, name=GAUSSIAN), np.nan
    eigenvalues = gaussian_eigenvalues(n - 1, dim)
    values = pd.Series(eigenvalues / eigenvalues.mean(), range(1, dim + 1), name=GAUSSIAN)
    gaussian = values[values > 0].reindex(index)
    edge = float((1 + np.sqrt(dim / (n - 1))) ** 2)
    ax.plot(gaussian, label=GAUSSIAN, **draw.BASELINE)
    label = f"Marchenko-Pastur edge {number(edge)}"
    ax.axhline(edge, label=label, color=draw.ACCENT, ls=":", lw=1.2, zorder=1.5)
    return gaussian, edge


def _spectrum_axes(ax: Axes, shares: pd.DataFrame) -> None:
    finite = shares.to_numpy()[shares.notna().to_numpy()]
    high = finite.max(initial=1.0)
    low = min(finite[finite >= _DEEPEST * high].min(initial=1.0), 0.5)
    ax.set(
        xscale="log", yscale="log", xlabel="index i (log scale)", ylabel="eigenvalue (log scale)"
    )
    ax.set_ylim(low / 1.5, high * 2)
    ax.set_xlim(1, max(2, shares.index.max()))
    draw.log_ticks(ax, low, high)
    ax.xaxis.set_major_formatter(draw.tick_label)
