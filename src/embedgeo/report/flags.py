"""Suspicious findings in a run, in plain words."""

from collections.abc import Sequence
from typing import NamedTuple

import pandas as pd

from embedgeo.report.runs import Run
from embedgeo.results.glossary import term
from embedgeo.results.outliers import loss_outliers
from embedgeo.results.wording import listed

FEW_POINTS = 1000
"""Distinct rows below which TwoNN shows only trends."""

FEW_ROWS = 10
"""Rows for each dimension below which a covariance spectrum is largely that of noise."""

BIAS = 0.02
"""Difference between the plug-in and the unbiased share V_W / V that is pointed out."""


class Flag(NamedTuple):
    """A finding that readers have to know.

    Attributes:
        title: its kind.
        text: what was found, and what follows from it.
        details: a line for each case.
    """

    title: str
    text: str
    details: list[str]


def flags(run: Run) -> list[Flag]:
    """All flags of a run."""
    checks = (_failed, _duplicates, _loss_outliers, _nonfinite, _few_points, _few_rows, _biased, _undefined)
    return [flag for check in checks if (flag := check(run)) is not None]


def outlier_steps(run: Run) -> list[int]:
    """Steps whose loss is out of line with their neighbours'."""
    if "loss" not in run.model:
        return []
    losses = run.model["loss"].dropna()
    names = {str(step): int(step) for step in losses.index}
    return [names[name] for name in loss_outliers(list(zip(names, losses, strict=True)))]


def _failed(run: Run) -> Flag | None:
    if not run.failures:
        return None
    text = f"{_count(len(run.failures), 'checkpoint')} could not be measured: left out of all figures."
    return Flag("Failed checkpoints", text, [f"{name}: {reason}" for name, reason in run.failures.items()])


def _duplicates(run: Run) -> Flag | None:
    about = run.checkpoints.reset_index()
    by_hash = about.groupby("weights_sha256")["revision"].transform("first").where(about["weights_sha256"] != "", "")
    original = about["duplicate_of"].where(about["duplicate_of"] != "", by_hash)
    copies = about.assign(original=original)[(original != "") & (original != about["revision"])]
    if copies.empty:
        return None
    details = [
        f"{', '.join(group['revision'])}: weights of {original}"
        for original, group in copies.groupby("original", sort=False)
    ]
    text = (
        f"{len(copies)} of {len(about)} checkpoints have the weights of another one: what is drawn at their steps was "
        "measured on other weights than their names say."
    )
    return Flag("Duplicate checkpoints", text, details)


def _loss_outliers(run: Run) -> Flag | None:
    steps = outlier_steps(run)
    if not steps:
        return None
    details = [f"{_revision(run, step)}: {run.model['loss'][step]:.4g} nats per token" for step in steps]
    text = (
        f"The loss of {_count(len(steps), 'checkpoint')} is out of line with its neighbours: wrong or broken weights?"
    )
    return Flag("Loss outliers", text, details)


def _nonfinite(run: Run) -> Flag | None:
    if "n_nonfinite" not in run.values:
        return None
    rows = run.table("n_nonfinite")
    details = [
        f"{layer}: {_count(int(n.max()), 'row')} at most, at {_steps(list(n.index))}"
        for layer in run.layers
        if len(n := rows[layer][rows[layer] > 0])
    ]
    text = "Rows with a NaN or an infinity were left out at these layers: a fault in the run."
    return Flag("Non-finite rows", text, details) if details else None


def _few_points(run: Run) -> Flag | None:
    if not {"n_points", "intrinsic_dimension"} <= set(run.values):
        return None
    details = _where_below(run, run.values["n_points"], FEW_POINTS, "distinct rows")
    text = (
        f"The intrinsic dimension rests on fewer than {FEW_POINTS:,} distinct rows at these layers: read trends only."
    )
    return Flag("Few rows for the intrinsic dimension", text, details) if details else None


def _few_rows(run: Run) -> Flag | None:
    if "anisotropy" not in run.values:
        return None
    rows = run.values.get("n", pd.Series(dtype=float)) / run.widths
    details = _where_below(run, rows, FEW_ROWS, "rows for each dimension")
    text = (
        f"These layers have fewer than {FEW_ROWS} rows for each dimension: noise alone raises the anisotropy and "
        "lowers the participation ratio; compare with the dashed line."
    )
    return Flag("Few rows for the spectrum", text, details) if details else None


def _biased(run: Run) -> Flag | None:
    keys = ("V_W_over_V_unbiased", "V_W_over_V")
    if not set(keys) <= set(run.values):
        return None
    off = (run.values[keys[0]] - run.values[keys[1]]).groupby("layer").max().reindex(run.layers)
    details = [f"{layer}: up to {value:.2g} too low" for layer, value in off.items() if value > BIAS]
    text = "The plug-in estimate of V_W / V is too low, for tokens occur only a few times: read the unbiased one."
    return Flag("Few occurrences of each token", text, details) if details else None


def _undefined(run: Run) -> Flag | None:
    details = []
    for metric in run.metrics:
        missing = run.table(metric).isna()
        if metric == "intrinsic_dimension_std" or not missing.to_numpy().any():
            continue
        layers = [layer for layer in run.layers if missing[layer].any()]
        where = "all layers" if len(layers) == len(run.layers) else listed(layers, 4)
        details.append(f"{term(metric).name}: {where}, {_steps(list(missing.index[missing.any(axis=1)]))}")
    text = "These are undefined (rows that do not vary, too few rows) or were not measured: gaps in the figures."
    return Flag("Missing numbers", text, details) if details else None


def _where_below(run: Run, values: pd.Series, least: float, what: str) -> list[str]:
    low = values[values < least].groupby("layer").min()
    return [f"{layer}: {low[layer]:,.3g} {what}" for layer in run.layers if layer in low]


def _revision(run: Run, step: int) -> str:
    return str(run.checkpoints.loc[step, "revision"])


def _steps(steps: Sequence[int]) -> str:
    first, last = min(steps), max(steps)
    return f"step {first:,}" if first == last else f"{len(steps)} steps from {first:,} to {last:,}"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}" + ("s" if number != 1 else "")
