"""Findings that readers of a report have to know, and tables of what was measured and of means over blocks."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd

from embedgeo.formatting import listed, measured, number
from embedgeo.glossary import headlines, in_order, term
from embedgeo.report.runs import Run
from embedgeo.results.records import loss_outliers

FEW_POINTS = 1000
"""Distinct rows below which TwoNN shows only trends."""

FEW_ROWS = 10
"""Rows per dimension below which a covariance spectrum is mostly noise."""

FEW_TYPES = 300
"""Token types below which the values over them show only trends."""

BIAS = 0.02
"""How far the plug-in share V_W / V may be below that of pairs before it is pointed out."""


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
    """The flags of a run that have cases."""
    checks = (
        *(_models, _failed, _duplicates, _loss_outliers, _nonfinite),
        *(_few_points, _few_rows, _few_types, _biased, _undefined),
    )
    return [flag for flag in (check(run) for check in checks) if flag.details]


def outlier_steps(run: Run) -> list[int]:
    """Steps whose loss is out of line with the losses of their neighbours."""
    if "loss" not in run.model:
        return []
    losses = run.model["loss"].dropna()
    names = {str(step): int(step) for step in losses.index}
    return [names[name] for name in loss_outliers(list(zip(names, losses, strict=True)))]


def _models(run: Run) -> Flag:
    text = (
        "The folder holds checkpoints of models that differ in their widths, depths or classes: they are not one "
        "training run, and each model is drawn apart, as a run of its own."
    )
    return Flag("Different models", text, [f"{series}: {names}" for series, names in run.apart.items()])


def _failed(run: Run) -> Flag:
    text = f"{_count(len(run.failures), 'checkpoint')} could not be measured: left out of all figures."
    return Flag("Failed checkpoints", text, [f"{name}: {reason}" for name, reason in run.failures.items()])


def _duplicates(run: Run) -> Flag:
    about = run.checkpoints.reset_index()
    by_hash = about.groupby("weights_sha256")["revision"].transform("first").where(about["weights_sha256"] != "", "")
    original = about["duplicate_of"].where(about["duplicate_of"] != "", by_hash)
    copies = about.assign(original=original)[(original != "") & (original != about["revision"])]
    groups = copies.groupby("original", sort=False)["revision"]
    text = (
        f"{len(copies)} of {len(about)} checkpoints have the weights of another one: what is drawn at their steps was "
        "measured on other weights than their names say."
    )
    if not run.has_steps:
        text = "The model has the weights of another one."
    return Flag("Duplicate checkpoints", text, [f"{', '.join(names)}: weights of {of}" for of, names in groups])


def _loss_outliers(run: Run) -> Flag:
    steps = outlier_steps(run)
    names, losses = run.checkpoints["revision"], run.model.get("loss", pd.Series(dtype=float))
    details = [f"{names[step]!s}: {losses[step]:.4g} nats per token" for step in steps]
    count = _count(len(steps), "checkpoint")
    text = f"The loss of {count} is out of line with its neighbours: wrong or broken weights?"
    return Flag("Loss outliers", text, details)


def _nonfinite(run: Run) -> Flag:
    rows = run.table("n_nonfinite") if "n_nonfinite" in run.values else pd.DataFrame()
    details = [
        f"{layer}: {_count(int(n.max()), 'row')}" + (f" at most, at {_steps(list(n.index))}" if run.has_steps else "")
        for layer in rows
        if len(n := rows[layer][rows[layer] > 0])
    ]
    text = "Rows with a NaN or an infinity were left out at these layers: a fault in the run."
    return Flag("Non-finite rows", text, details)


def _few_points(run: Run) -> Flag:
    is_known = {"n_points", "intrinsic_dimension"} <= set(run.values)
    details = _where_below(run, run.values["n_points"], FEW_POINTS, "distinct rows") if is_known else []
    text = (
        f"The intrinsic dimension rests on fewer than {FEW_POINTS:,} distinct rows at these layers: read trends only."
    )
    return Flag("Few rows for the intrinsic dimension", text, details)


def _few_rows(run: Run) -> Flag:
    is_known = {"n", "anisotropy"} <= set(run.values)
    details = _where_below(run, run.values["n"] / run.widths, FEW_ROWS, "rows for each dimension") if is_known else []
    text = (
        f"These layers have fewer than {FEW_ROWS} rows for each dimension: noise alone raises the anisotropy and "
        "lowers the participation ratio; compare with the dashed line."
    )
    return Flag("Few rows for the spectrum", text, details)


def _few_types(run: Run) -> Flag:
    is_known = "token_types_regressed" in run.values
    details = _where_below(run, run.values["token_types_regressed"], FEW_TYPES, "token types") if is_known else []
    text = (
        f"The C.V. of Q, the slopes and the R² over token types rest on fewer than {FEW_TYPES} types at these layers: "
        "read trends only."
    )
    return Flag("Few token types in the regressions", text, details)


def _biased(run: Run) -> Flag:
    of_pairs, plug_in = (run.values.get(key, run.widths * np.nan) for key in ("V_W_over_V_unbiased", "V_W_over_V"))
    off = (of_pairs - plug_in).groupby("layer").max().reindex(run.layers)
    details = [f"{layer}: up to {value:.2g} too low" for layer, value in off.items() if value > BIAS]
    text = "The plug-in estimate of V_W / V is too low, for tokens occur only a few times: read the one from pairs."
    return Flag("Few occurrences of each token", text, details)


def _undefined(run: Run) -> Flag:
    details = []
    for metric in run.metrics:
        missing = run.table(metric).isna()
        if metric == "intrinsic_dimension_std" or not missing.to_numpy().any():
            continue
        layers = [layer for layer in run.layers if missing[layer].any()]
        where = "all layers" if len(layers) == len(run.layers) else listed(layers, 4)
        when = f", {_steps(list(missing.index[missing.any(axis=1)]))}" if run.has_steps else ""
        details.append(f"{term(metric).name}: {where}{when}")
    text = "These are undefined (rows that do not vary, too few rows) or were not measured: gaps in the figures."
    return Flag("Missing numbers", text, details)


def _where_below(run: Run, values: pd.Series, least: float, what: str) -> list[str]:
    low = values[values < least].groupby("layer").min()
    return [f"{layer}: {low[layer]:,.3g} {what}" for layer in run.layers if layer in low]


def _steps(steps: Sequence[int]) -> str:
    first, last = min(steps), max(steps)
    return f"step {first:,}" if first == last else f"{len(steps)} steps from {first:,} to {last:,}"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}" + ("s" if number != 1 else "")


_UNKNOWN = "–"
_COLUMNS = ["first", "lowest (step)", "highest (step)", "last", "random, last"]
_ONE_STEP = ["last", "random, last"]
_FINAL = ["value", "random"]


Row = tuple[str, str, list[list[str]]]


class Overview(NamedTuple):
    """The table of means over blocks: groups of columns, what stands above them and each of them, and the rows.

    A row is the key of a metric, its name, and the cells of each group. Those to look at first are by themselves.
    """

    groups: list[tuple[str, list[str]]]
    rows: list[Row]
    more: list[Row]


def about(runs: Sequence[Run]) -> pd.DataFrame:
    """What was measured: a row of cells for each run; without steps or groups where no run has any."""
    table = pd.DataFrame([_about(run) for run in runs], [run.label for run in runs])
    without = [] if any(run.has_steps for run in runs) else ["measurements", "steps"]
    return table.drop(columns=without if any(run.group for run in runs) else [*without, "group"])


def _about(run: Run) -> dict[str, str]:
    steps = [f"{step:,}" for step in run.steps if run.has_steps]
    token_types, rows = (run.values.get(key, pd.Series(dtype=float)) for key in ("token_types", "n"))
    return {
        "group": run.group or _UNKNOWN,
        "measurements": f"{len(run.steps):,}",
        "steps": " to ".join(dict.fromkeys((steps[0], steps[-1]))) if steps else _UNKNOWN,
        "layers": f"{len(run.layers)}: {run.layers[0]} to {run.layers[-1]}" if run.layers else _UNKNOWN,
        "width": _span(run.widths),
        "parameters": _span(pd.Series([run.num_parameters])),
        "token types": _span(token_types),
        "rows each": _span(rows),
    }


def _span(values: pd.Series) -> str:
    known = values.dropna()
    return " to ".join(dict.fromkeys((f"{known.min():,.0f}", f"{known.max():,.0f}"))) if len(known) else _UNKNOWN


def overview(runs: Sequence[Run], *, has_errors: bool) -> Overview:
    """Means over blocks, the runs side by side; where that would be too wide, only the first and the last value.

    A final model has one value.
    """
    parts = {
        f"{run.label}: {name}" if len(run.blocks) > 1 or len(runs) == 1 else run.label: (run, _means(run, name))
        for run in runs
        for name in run.blocks
    }
    is_narrow = len(parts) <= (1 if has_errors else 2)
    shown = _COLUMNS if is_narrow else ["first", "last"]
    if all(len(run.steps) <= 1 for run in runs):
        shown = _ONE_STEP
    columns = [shown if run.has_steps else _FINAL if is_narrow else _FINAL[:1] for run, _ in parts.values()]
    nothing = dict.fromkeys([*_COLUMNS, *_FINAL], _UNKNOWN)
    rows = [
        (
            metric,
            term(metric).name,
            [
                [means.get(metric, nothing)[column] for column in each]
                for (_, means), each in zip(parts.values(), columns, strict=True)
            ],
        )
        for metric in in_order({metric for _, means in parts.values() for metric in means} - {"anisotropy_null"})
    ]
    first = [row for row in rows if row[0] in headlines()] or rows
    more = [row for row in rows if row not in first]
    return Overview(list(zip(parts, columns, strict=True)), first, more)


def _means(run: Run, name: str) -> dict[str, dict[str, str]]:
    """For each metric one of its means over blocks, by the columns of the overview."""
    blocks = run.blocks[name]
    cells = {}
    for metric in run.metrics:
        tables = (run.table(metric, values) for values in (run.values, run.baseline))
        mean, random = (table[blocks].mean(axis=1).dropna() for table in tables)
        errors = run.mean_errors(metric)[name].reindex(mean.index)
        if len(mean):
            places = (0, int(mean.argmin()), int(mean.argmax()), -1)
            first, lowest, highest, last = (measured(mean.iloc[i], errors.iloc[i]) for i in places)
            extremes = [f"{at} ({mean.index[i]:,})" for at, i in zip((lowest, highest), places[1:3], strict=True)]
            between = extremes if mean.nunique() > 1 else [_UNKNOWN, _UNKNOWN]
            expected = number(random.iloc[-1]) if len(random) else _UNKNOWN
            of_step = dict(zip(_COLUMNS, [first, *between, last, expected], strict=True))
            cells[metric] = of_step | dict(zip(_FINAL, [last, expected], strict=True))
    return cells
