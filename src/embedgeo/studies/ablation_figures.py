"""Figures of the ablation, for a report."""

import re
from collections.abc import Iterator

import numpy as np
import pandas as pd
from matplotlib.lines import Line2D

from embedgeo import drawing as draw
from embedgeo.drawing import FigureData
from embedgeo.formatting import number
from embedgeo.report.figures import By, with_errors
from embedgeo.report.page import Section, of_each
from embedgeo.report.runs import Run

ABLATION_TEXT = (
    "How much worse the model predicts when the rows of one layer are replaced: by themselves "
    "without their offset, their top directions or coordinates, or the mean of their token type; "
    "by that mean alone, which has no context; or by noise of the same mean and covariance. What "
    "they are replaced by is found on half of the sequences, and the loss is that of the others."
)

_TAKEN_AWAY = {
    "without_offset": ("no offset", "#0072b2", "-"),
    "without_context": ("no context", "#cc79a7", "-"),
    "without_token": ("no token mean", "#e69f00", "-"),
    "as_noise": ("Gaussian rows", "#7a5195", "-"),
}
_REMOVED = {"direction": "#d55e00", "coordinate": "#009e73"}
_BESIDE_CHANGES = {
    "M_over_Q": ("M / Q", "black", "-"),
    "anisotropy": ("anisotropy", "#777777", "-"),
}


def ablation_section() -> Section:
    """The section of what the loss needs."""
    return Section("What the loss needs", of_each(ablation_figures), ABLATION_TEXT)


def ablation_figures(run: Run) -> Iterator[FigureData]:
    """Changes of the loss by ablation, beside M/Q and anisotropy: at each layer of the last step,
    and at each step.
    """
    looks = {
        "without_offset": _TAKEN_AWAY["without_offset"],
        **_looks_of_removed(run),
        **_TAKEN_AWAY,
    }
    changes = {
        f"loss_change_{name}": look
        for name, look in looks.items()
        if f"loss_change_{name}" in run.values
    }
    if changes:
        yield _ablation(run, changes, "layer")
        if len(run.steps) > 1:
            yield _ablation(run, changes, "step")


def _looks_of_removed(run: Run) -> dict[str, tuple[str, str, str]]:
    """Looks of the changes of the loss without the fewest and without the most directions and
    coordinates.
    """
    looks = {}
    for what, colour in _REMOVED.items():
        pattern = re.compile(rf"loss_change_without_(\d+)_{what}s")
        numbers = sorted(int(found[1]) for found in map(pattern.fullmatch, run.metrics) if found)
        for k, dashes in zip(dict.fromkeys(numbers[:1] + numbers[-1:]), "-:", strict=False):
            name = f"no top {what}" if k == 1 else f"no top {k} {what}s"
            looks[f"without_{k}_{what}s"] = (name, colour, dashes)
    return looks


def _ablation(run: Run, changes: dict[str, tuple[str, str, str]], by: By) -> FigureData:
    beside = {metric: look for metric, look in _BESIDE_CHANGES.items() if metric in run.values}
    looks = {**changes, **beside}
    title = "What the loss needs" if by == "layer" else "What the loss needs, mean over blocks"
    title = run.titled(title, run.steps[-1]) if by == "layer" else title
    figure, axes = draw.new_figure(title, panels=2)
    values: dict[str, pd.Series] = {}
    errors: dict[str, pd.Series] = {}
    for metric, (_, colour, dashes) in looks.items():
        table, of_table = run.table(metric), run.table(metric, run.errors)
        if by == "layer":
            values[metric] = table.iloc[-1].reindex(run.axis)
            errors[metric] = of_table.iloc[-1].reindex(run.axis)
            x = np.arange(float(len(run.axis)))
        else:
            values[metric] = run.means(table).iloc[:, 0]
            errors[metric] = run.mean_errors(table, of_table).iloc[:, 0]
            x = values[metric].index.to_numpy(dtype=float)
        ax = axes[metric in beside]
        ax.plot(x, values[metric].to_numpy(), color=colour, ls=dashes, marker="o", ms=2.5, lw=1.6)
        draw.band(ax, x, values[metric].to_numpy(), errors[metric].to_numpy(), colour)
    for ax, label in zip(axes, ("change of the loss, nats per token", "share"), strict=True):
        if by == "layer":
            draw.layer_axis(ax, run.axis, most=6)
        else:
            draw.step_axis(ax, run.steps)
        ax.axhline(0, color=draw.GREY, lw=0.8)
        ax.set_ylabel(label)
    draw.legend(
        axes[0],
        [
            Line2D([], [], color=colour, ls=dashes, lw=1.6, label=name)
            for name, colour, dashes in looks.values()
        ],
    )
    numbers, bars = with_errors(pd.DataFrame(values), pd.DataFrame(errors))
    means = (
        run.means(pd.DataFrame(values)[[*changes]].T).iloc[:, 0]
        if by == "layer"
        else pd.DataFrame(values).iloc[-1]
    )
    text = "; ".join(f"{looks[str(metric)][0]} {number(means[metric])}" for metric in changes)
    alt = (
        "Change of the loss without parts of a layer's rows, beside M / Q and anisotropy, against "
        f"{by}."
    )
    name = "ablation" if by == "layer" else "ablation-dynamics"
    return FigureData(
        name,
        figure,
        numbers.drop("", errors="ignore"),
        alt,
        f"Mean over blocks, last: {text}.{bars}",
    )
