"""Figures of the ablation, for a report."""

import re
from collections.abc import Iterator
from typing import Any

import pandas as pd
from matplotlib.lines import Line2D

from embedgeo import drawing as draw
from embedgeo.drawing import FigureData
from embedgeo.formatting import number
from embedgeo.report.figures import with_errors
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


def ablation_figures(run: Run) -> Iterator[FigureData]:
    """Changes of the loss by ablation, beside M/Q and anisotropy: at each layer of the last
    step.
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
        yield _ablation(run, changes)


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


def _ablation(run: Run, changes: dict[str, tuple[str, str, str]]) -> FigureData:
    beside = {metric: look for metric, look in _BESIDE_CHANGES.items() if metric in run.values}
    looks = {**changes, **beside}
    figure, axes = draw.new_figure(run.titled("What the loss needs", run.steps[-1]), panels=2)
    values, errors = (
        pd.DataFrame({key: run.table(key, each).iloc[-1].reindex(run.axis) for key in looks})
        for each in (run.values, run.errors)
    )
    key = []
    for metric, (name, colour, dashes) in looks.items():
        ax = axes[metric in beside]
        look: dict[str, Any] = {"color": colour, "ls": dashes, "lw": 1.6}
        ax.plot(values[metric].to_numpy(), marker="o", ms=2.5, **look)
        draw.band(ax, values[metric], errors[metric], colour)
        key.append(Line2D([], [], label=name, **look))
    for ax, label in zip(axes, ("change of the loss, nats per token", "share"), strict=True):
        draw.layer_axis(ax, run.axis, most=6)
        ax.axhline(0, color=draw.GREY, lw=0.8)
        ax.set_ylabel(label)
    draw.legend(axes[0], key)
    numbers, bars = with_errors(values, errors)
    means = run.means(values[[*changes]].T).iloc[:, 0]
    text = "; ".join(f"{looks[metric][0]} {number(means[metric])}" for metric in changes)
    alt = "Change of the loss without parts of a layer's rows, beside M / Q and anisotropy."
    numbers = numbers.drop("", errors="ignore")
    return FigureData("ablation", figure, numbers, alt, f"Mean over blocks: {text}.{bars}")
