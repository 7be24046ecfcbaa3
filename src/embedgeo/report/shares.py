"""Figures of the composition of the mean squared norm: common offset, variance within tokens and between them."""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from embedgeo.report.axes import layer_axis, step_axis
from embedgeo.report.drawing import FigureData, legend, new_figure
from embedgeo.report.runs import Run

_PARTS = {
    "M": ("M: offset", "#0072b2"),
    "V_W": ("V_W: context", "#009e73"),
    "V_B": ("V_B: token", "#e69f00"),
    "V": ("V: variance", "#999999"),
}
_KNOWN = (("M", "V_W_unbiased", "V_B_unbiased"), ("M", "V_W", "V_B"), ("M", "V"))


def has_shares(run: Run) -> bool:
    """Whether the composition of the mean squared norm was measured."""
    return bool(run.depth and _parts(run))


def shares_by_layer(run: Run, ax: Axes | None = None) -> FigureData:
    """The shares at each layer, at the last step."""
    unit, shares = _shares(run)
    last = shares.loc[[run.steps[-1]]].droplevel("step").reindex(run.axis)
    figure, (ax,) = new_figure(run.titled("What Q is made of", run.steps[-1]), unit, ax=ax)
    bottom = np.zeros(len(last))
    for part in shares:
        label, colour = _PARTS[str(part)]
        height = last[part].fillna(0).to_numpy()
        ax.bar(np.arange(len(last)), height, 0.86 if len(last) <= 12 else 1, bottom, color=colour, label=label)
        bottom += height
    layer_axis(ax, run.axis)
    _share_axis(figure, ax)
    alt = f"Shares of {_names(shares)} in Q, stacked, by layer."
    text = f"Mean over blocks: {_percent(_means(run, shares), -1)}."
    numbers = shares if run.has_steps else shares.droplevel("step")
    return FigureData("decomposition", figure, numbers, alt, text)


def shares_by_step(run: Run, ax: Axes | None = None) -> FigureData:
    """The shares at each step, averaged over blocks."""
    unit, shares = _shares(run)
    means = _means(run, shares)
    figure, (ax,) = new_figure("What Q is made of, mean over blocks", unit, ax=ax)
    step_axis(ax, run.steps)
    labels, colours = zip(*(_PARTS[str(part)] for part in means), strict=True)
    ax.stackplot(means.index, means.to_numpy().T, labels=labels, colors=colours, lw=0)
    _share_axis(figure, ax)
    alt = f"Shares of {_names(shares)} in Q, stacked, against optimizer step."
    text = f"Mean over blocks, first step: {_percent(means, 0)}; last step: {_percent(means, -1)}."
    return FigureData("decomposition-dynamics", figure, means, alt, text)


def _parts(run: Run) -> list[str]:
    known = (list(parts) for parts in _KNOWN if set(parts) <= set(run.values))
    return next((parts for parts in known if run.values[parts].notna().any().all()), [])


def _shares(run: Run) -> tuple[str, pd.DataFrame]:
    """A subtitle that names the estimates, and the shares at each step and layer."""
    parts = run.values[_parts(run)].clip(lower=0)
    pairs, plug_in = ", from pairs in different sequences", ", plug-in estimates"
    kind = pairs if "V_W_unbiased" in parts else plug_in if "V_W" in parts else ""
    total = parts.sum(axis=1, skipna=False)
    shares = parts.div(total.where(total > 0), axis=0).rename(columns=lambda part: part.removesuffix("_unbiased"))
    return f"shares of the mean squared norm{kind}", shares.reindex(run.depth, level="layer")


def _means(run: Run, shares: pd.DataFrame) -> pd.DataFrame:
    blocks = [block for blocks in run.blocks.values() for block in blocks]
    return shares[shares.index.isin(blocks, "layer")].groupby("step").mean()


def _share_axis(figure: Figure, ax: Axes) -> None:
    ax.set_ylabel("share of Q")
    ax.set_ylim(0, 1)
    ax.grid(visible=False)
    legend(figure, ax)


def _names(shares: pd.DataFrame) -> str:
    return ", ".join(map(str, shares))


def _percent(means: pd.DataFrame, place: int) -> str:
    return ", ".join(f"{part} {share:.0%}" for part, share in means.iloc[place].items())
