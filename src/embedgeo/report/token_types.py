"""V against M of token types, from the tables of the checkpoints."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm

from embedgeo import drawing as draw
from embedgeo.drawing import FigureData
from embedgeo.formatting import with_minus
from embedgeo.functional import REGRESSION_COUNT_RANGE, least_squares
from embedgeo.report.runs import Run

_RANGE = "{} ≤ n ≤ {:,}".format(*REGRESSION_COUNT_RANGE)
_LINE: dict[str, Any] = {"color": draw.ACCENT, "lw": 1.6}
_PALE = "#c9ccd1"  # of token types outside of the range of the regressions
_LARGEST = 1e100  # value that can be squared


def types_of(run: Run) -> tuple[int, pd.DataFrame] | None:
    """The last step of a run that has a table of token types, and those that can be drawn, if there
    are any.
    """
    if (last := run.last_table("tokens")) is None:
        return None
    step, table = last
    is_drawable = (table[["n", "Q", "M", "V"]].abs() <= _LARGEST).all(axis=1) & (table["n"] >= 1)
    table = table[is_drawable]
    return (step, table) if len(table) else None


def mean_against_variance(
    run: Run, step: int, table: pd.DataFrame, layers: Sequence[str], ax: Axes | None = None
) -> FigureData:
    """V against M of the token types of a step at some layers, with the regression line.

    Types outside of the range of the regression are pale, and have no room of their own.
    """
    title = run.titled("V against M" if ax is None else f"V against M at {layers[0]}", step)
    subtitle = f"types with {_RANGE} occurrences, others pale; squared embedding units"
    figure, axes = draw.new_figure(title, subtitle, panels=len(layers), ax=ax)
    table = table[table["layer"].isin(layers)]
    is_regressed = table["n"].between(*REGRESSION_COUNT_RANGE)
    regressed = table[is_regressed]
    norm = _count_bar(axes[-1], regressed["n"])
    texts = []
    for panel, layer in zip(axes, layers, strict=True):
        types = regressed[regressed["layer"] == layer]
        others = table[(table["layer"] == layer) & ~is_regressed]
        panel.scatter(
            types["M"],
            types["V"],
            s=7,
            c=types["n"],
            norm=norm,
            cmap="cividis",
            lw=0,
            rasterized=True,
        )
        fit = _draw_line(panel, types["M"], types["V"])
        panel.autoscale_view()  # of the types so far; to be done before it is switched off
        panel.autoscale(len(types) < 2)
        look: dict[str, Any] = {"s": 5, "color": _PALE, "lw": 0, "rasterized": True}
        panel.scatter(others["M"], others["V"], zorder=0.8, **look)
        if types.empty:
            panel.text(0.5, 0.5, "no type occurs so often", ha="center", transform=panel.transAxes)
        if ax is None:
            panel.set_title(f"{layer}: {fit}", fontsize="small")
        else:
            ax.plot([], label=fit, **_LINE)
            draw.legend(ax)
        panel.set_xlabel("M of the token type")
        panel.locator_params(nbins=5)
        for axis in (panel.xaxis, panel.yaxis):
            axis.set_major_formatter(draw.tick_label)
        texts.append(
            f"{layer}: {fit} over "
            f"{'one token type' if len(types) == 1 else f'{len(types)} token types'}"
        )
    axes[0].set_ylabel("V of the token type")
    numbers = table.set_index(["layer", "token_id"])[["n", "Q", "M", "V"]]
    alt = (
        f"V against M of the token types at {len(layers)} layers, scattered, with regression lines."
    )
    return FigureData("tokens-V-against-M", figure, numbers, alt, "; ".join(texts) + ".")


def _count_bar(ax: Axes, counts: pd.Series) -> LogNorm:
    """Add a colour bar for how often token types occur; the scale of its colours."""
    least, most = (counts.min(), counts.max()) if len(counts) else (1.0, 1.0)
    norm = LogNorm(least, max(least + 1, most))
    bar = draw.value_bar(ax, ScalarMappable(norm, "cividis"), "occurrences n (log scale)")
    draw.log_ticks(bar.ax, least, max(least + 1, most))
    return norm


def _draw_line(ax: Axes, x: "pd.Series[float]", y: "pd.Series[float]") -> str:
    """Draw the least-squares line of ``y`` on ``x``, where there is one; its slope and R² in
    words.
    """
    slope, r2 = map(float, least_squares(torch.tensor(x.to_numpy()), torch.tensor(y.to_numpy())))
    if np.isfinite(slope):
        ends = np.array([x.min(), x.max()])
        ax.plot(ends, y.mean() + slope * (ends - x.mean()), **_LINE)
    return with_minus(f"slope {slope:.3g}, R² {r2:.3g}".replace("nan", "undefined"))
