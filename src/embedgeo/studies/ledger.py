"""Figures of who writes what into the residual stream, for a report."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle

import pandas as pd

from embedgeo import drawing as draw
from embedgeo.drawing import FigureData
from embedgeo.report.figures import heatmap
from embedgeo.report.runs import Run

LEDGER_TEXT = (
    "A block's output is the stream that enters it plus what attention, MLP and others write. "
    "Each has a share of M and V with half of each product that it has with another; a share "
    "below 0 cancels others, and all add up to 1. Biases of norms after a sum, and what the "
    "rounding of the model's dtype leaves, are shares of their own."
)

_WRITERS = {
    "stream": "#bbbbbb",
    "attention": "#0072b2",
    "mlp": "#e69f00",
    "other": "#009e73",
    "norm_bias": "#cc79a7",
    "rounding": "#7a5195",
}


def ledger_figures(run: Run) -> Iterator[FigureData]:
    """Shares of each write in M and V of the blocks' outputs: at the last step, and of each write
    at every step.
    """
    for whole, title in (("M", "Who writes the offset"), ("V", "Who writes the variance")):
        known = run.values.columns[run.values.notna().any()]
        names = {str(metric): str(metric).removeprefix(f"{whole}_by_") for metric in known}
        names = {metric: name for metric, name in names.items() if metric != name}
        if names:
            table = run.table(next(iter(names)))
            of_blocks = replace(
                run, layers=[layer for layer in run.layers if table[layer].notna().any()]
            )
            yield _writers(of_blocks, names, whole, title)
            if len(run.steps) > 1:
                writes = [key for key, name in names.items() if name not in ("stream", "rounding")]
                yield from (heatmap(of_blocks, metric) for metric in writes)


def _writers(run: Run, keys: dict[str, str], whole: str, title: str) -> FigureData:
    """Shares of the streams in M or V at each block of the last step, stacked above 0 and, where
    negative, below.
    """
    step = run.steps[-1]
    shares = pd.DataFrame({name: run.table(metric).loc[step] for metric, name in keys.items()})
    shares = shares[[name for name in dict.fromkeys((*_WRITERS, *shares)) if name in shares]]
    figure, (ax,) = draw.new_figure(
        run.titled(title, step), f"share of {whole} of a block's output"
    )
    heights = shares.reindex(run.axis).fillna(0)
    colours = dict(zip(shares, cycle(draw.RUNS), strict=False)) | _WRITERS
    names = [str(name).replace("_", " ") for name in heights]
    draw.stacked_bars(ax, heights, names, [colours[name] for name in heights])
    ax.axhline(0, color=draw.GREY, lw=0.8)
    ax.axhline(1, **draw.BASELINE)
    draw.layer_axis(ax, run.axis)
    ax.set_ylabel(f"share of {whole}")
    draw.legend(ax)
    writes = shares.drop(columns=["stream", "rounding"], errors="ignore").stack()
    text = ""
    if len(writes):
        layer, name = writes.index[int(writes.to_numpy().argmax())]
        text = (
            f"The largest write is that of {str(name).replace('_', ' ')} at {layer}: "
            f"{writes.max():.0%} of {whole}."
        )
    alt = f"Shares of the stream and of each write in {whole} by block, stacked."
    return FigureData(f"{whole}-written", figure, shares, alt, text)
