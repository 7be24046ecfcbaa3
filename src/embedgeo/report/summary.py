"""Flags that readers of a report have to know, and the tables of its overview."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from math import isnan
from typing import Any, Literal, NamedTuple

import numpy as np
import pandas as pd

from embedgeo.formatting import listed, number, with_error
from embedgeo.glossary import (
    GAUSSIAN,
    headlines,
    in_order,
    is_without,
    term,
)
from embedgeo.report.runs import SETTINGS, Run
from embedgeo.results.findings import KINDS, MORE_ROWS, few_rows, finding
from embedgeo.results.records import loss_outliers

FEW_TYPES = 300  # token types below which the values over them show only trends
NEIGHBORS = 0.5  # share of rows whose neighbour is of their own kind
_UNKNOWN = "–"
# settings that are named at the head of the page
_ORIGIN = ("text", "rows", "sequence length", "sequences begin with", "tokens", "dtype")


Level = Literal["broken", "care", "note"]
"""The run is broken; its numbers are to be read with care; good to know."""


WORDS: dict[Level, str] = {"broken": "Broken", "care": "Read with care", "note": "Note"}


class Flag(NamedTuple):
    """A finding that readers have to know: how bad it is, its kind, its consequence, and a line for
    each case.
    """

    level: Level
    title: str
    text: str
    details: list[str]


def flags(run: Run) -> list[Flag]:
    """The flags of a run that have cases, the worst first."""
    every = (Flag(level, title, text, cases(run)) for level, title, text, cases in _FLAGS)
    return [flag for flag in every if flag.details]


def flag_lines(found: Iterable[Flag]) -> list[str]:
    """A line for each flag but notes: its first case, and how many more there are."""
    return [
        f"{WORDS[flag.level]}: {flag.title}: {listed(flag.details, 1)}."
        for flag in found
        if flag.level != "note"
    ]


Cases = Callable[[Run], list[str]]


def _failures(run: Run) -> list[str]:
    return [f"{name}: {reason}" for name, reason in run.failures.items()]


def _duplicates(run: Run) -> list[str]:
    table = run.checkpoints
    known = table[table["weights_sha256"] != ""]
    alike = [[*names] for _, names in known.groupby("weights_sha256", sort=False)["revision"]]
    return [f"{', '.join(names[1:])}: weights of {names[0]}" for names in alike if names[1:]]


def _shared_files(run: Run) -> list[str]:
    return [f"{file}: {', '.join(names)}" for file, names in run.shared_files]


def _loss_outliers(run: Run) -> list[str]:
    losses = run.of_model("loss")
    revisions = run.checkpoints["revision"]
    outliers = map(int, loss_outliers([(str(step), loss) for step, loss in losses.items()]))
    return [f"{revisions[step]}: {losses[step]:.4g} nats per token" for step in outliers]


def _nonfinite_rows(run: Run) -> list[str]:
    details = []
    table = run.table("n_nonfinite") if "n_nonfinite" in run.values else pd.DataFrame()
    for layer, counts in table.items():
        n = counts[counts > 0]
        if len(n):
            when = f" at most, at {_steps_text(list(n.index))}" if run.has_steps else ""
            details.append(f"{layer}: {_rows(n.max())}{when}")
    return details


def _steps_of_few_rows(run: Run) -> list[str]:
    return [
        f"step {step:,}{f' ({name})' * (len(run.blocks) > 1)}: {_rows(n)}, not {usual:,.0f}"
        for name in run.blocks
        for usual in [run.rows(name).median()]
        for step, n in run.few_rows(name).items()
    ]


def _least(metric: str, below: float, text: str, run: Run) -> list[str]:
    """The least value of a metric at each layer that has any below a limit."""
    values = _values_of(run, metric)
    return _worst(values[values < below], "idxmin", text, run)


def _worst(found: pd.Series, end: str, text: str, run: Run) -> list[str]:
    worst = found.groupby("layer").agg(end).reindex(run.layers).dropna()
    return [f"{at[1]}: {text.format(found[at])}{_at_step(run, at[0])}" for at in worst]


def _near_rows_of_one(kind: str, run: Run) -> list[str]:
    """The share of rows whose nearest neighbour is of the same type or sequence, where most are."""
    share, at_random = (_values_of(run, f"same_{kind}_neighbors{end}") for end in ("", "_null"))
    are_most = (share > NEIGHBORS) & (share > 2 * at_random)
    return _worst(share[are_most], "idxmax", "{:.0%} of the rows", run)


def _few_rows(run: Run) -> list[str]:
    """A line for all layers that lack rows for the same metrics."""
    layers = dict[str, list[str]]()
    known = pd.DataFrame({"n": _values_of(run, "n"), "width": run.widths}).dropna()
    for layer, n, width in known.groupby("layer").min().reindex(run.layers).dropna().itertuples():
        if few := few_rows(n, width, run.metrics):
            layers.setdefault(f"{_rows(n)}, too few for {few}", []).append(layer)
    return [f"{listed(each, 4)}: {text}" for text, each in layers.items()]


def _moved(kind: str, run: Run) -> list[str]:
    """What massive rows or one coordinate make: at each layer where they hold most."""
    worst: dict[str, tuple[float, str]] = {}
    known = run.values[[key for key in run.values if str(key).endswith(KINDS[kind].after)]]
    is_known = known.notna().any(axis=1)
    values: Any = run.values[is_known].to_dict("index")
    errors: Any = run.errors[is_known].to_dict("index")
    for (step, layer), own in values.items():
        share = own.get(KINDS[kind].share, 0.0)
        text = finding(own, errors[step, layer], kind)
        if text and not share < worst.get(layer, (0.0, ""))[0]:
            worst[layer] = share, f"{layer}{_at_step(run, step)}: {text}"
    return [worst[layer][1] for layer in run.layers if layer in worst]


def _gaps(run: Run, *, of_layers: bool = False) -> list[str]:
    """Steps at which a number that was there before is missing, of all numbers but that of rows, or
    of that one, which all layers have.
    """
    details = []
    for metric in [metric for metric in run.metrics if (metric == "n") is of_layers]:
        table = run.table(metric)
        missing = table.isna() & table.ffill().notna()
        layers = [layer for layer in run.layers if missing[layer].any()]
        if layers and not is_without(metric):  # where no row is massive there is no such number
            where = "all layers" if len(layers) == len(run.layers) else listed(layers, 4)
            steps = list(missing.index[missing.any(axis=1)])
            details.append(f"{term(metric).name}: {where}, {_steps_text(steps)}")
    return details


_FLAGS: tuple[tuple[Level, str, str, Cases], ...] = (  # level, title, text, cases
    (
        "broken",
        "Failed checkpoints",
        "These checkpoints could not be measured: they are left out of all figures.",
        _failures,
    ),
    (
        "broken",
        "Duplicate checkpoints",
        "These checkpoints have the weights of another one: what is drawn of them was measured on "
        "other weights than their names say.",
        _duplicates,
    ),
    (
        "broken",
        "Shared weight files",
        "These checkpoints have a file of weights in common, though their other files differ: "
        "unless its weights are frozen, at least one of them is put together of the weights of two "
        "steps.",
        _shared_files,
    ),
    (
        "broken",
        "Loss outliers",
        "The loss of these checkpoints is out of line with their neighbours: wrong or broken "
        "weights?",
        _loss_outliers,
    ),
    (
        "broken",
        "Non-finite rows",
        "Rows with a NaN or an infinity were left out at these layers: a fault in the run.",
        _nonfinite_rows,
    ),
    (
        "broken",
        "Missing layers",
        "These layers were measured at an earlier step, and not here.",
        partial(_gaps, of_layers=True),
    ),
    (
        "care",
        "Steps of few rows",
        "These steps have far fewer rows than others, which alone moves a dimension: their values "
        "are not counted as lowest or highest.",
        _steps_of_few_rows,
    ),
    (
        "care",
        "Few rows",
        f"Each number needs so many random rows for an error under 5 %. {MORE_ROWS}",
        _few_rows,
    ),
    (
        "care",
        "Near copies in the intrinsic dimension",
        "The dimension of all rows is below 1, and no surface has that: near copies, as of one "
        "token in one place, pull TwoNN down, although they count as distinct. Read the dimension "
        "between tokens.",
        partial(_least, "intrinsic_dimension", 1, "{:.2g}"),
    ),
    *(
        (
            "care",
            kind.title,
            f"What is left without them has other numbers, by more than a tenth. {kind.remedy}",
            partial(_moved, name),
        )
        for name, kind in KINDS.items()
    ),
    (
        "care",
        "Few token types in the regressions",
        f"The C.V. of Q, the slopes and the R² over token types rest on fewer than {FEW_TYPES} "
        "types at these layers: read trends only.",
        partial(_least, "token_types_regressed", FEW_TYPES, "{:,.3g} token types"),
    ),
    *(
        (
            "note",
            f"Neighbours of the same {what}",
            f"The nearest neighbour of more than half of the rows is of the same {what}, twice as "
            "often as at random: the intrinsic dimension of all rows says how near these are, "
            "more than what surface they lie on. Read the dimensions between and within tokens.",
            partial(_near_rows_of_one, kind),
        )
        for kind, what in (("type", "token"), ("sequence", "text"))
    ),
    (
        "note",
        "Missing numbers",
        "These were defined at an earlier step. Here rows do not vary or are too few, or a value "
        "is not finite: gaps in the figures.",
        _gaps,
    ),
)


def _values_of(run: Run, metric: str) -> "pd.Series[float]":
    """A metric by step and layer; NaN where it was not measured."""
    return run.values.get(metric, run.widths * np.nan)


def _steps_text(steps: Sequence[int]) -> str:
    first = min(steps)
    last = max(steps)
    return f"step {first:,}" if first == last else f"{len(steps)} steps from {first:,} to {last:,}"


def _at_step(run: Run, step: int) -> str:
    return f" at step {step:,}" if run.has_steps else ""


def _rows(count: float) -> str:
    return f"{count:,.0f} row" + ("s" if count != 1 else "")


def origins(runs: Sequence[Run]) -> pd.DataFrame:
    """Model, text, settings, date and versions of each run, in a row of cells, as far as they are
    known.
    """

    def cells(run: Run) -> dict[str, str]:
        own = {SETTINGS.get(key, key): value for key, value in run.settings.items()}
        if files := own.get("text_files"):
            own["text"] = f"{files} ({own['text']})"
        versions = ", ".join(f"{name} {own[name]}" for name in ("embedgeo", "torch") if name in own)
        return {
            "model": listed(run.models, 2),
            **{name: own.get(name, "") for name in _ORIGIN},
            "date": run.date,
            "version": versions,
        }

    return _table(runs, cells)


def _table(runs: Sequence[Run], cells: Callable[[Run], dict[str, str]]) -> pd.DataFrame:
    """A row of cells for each run, without the columns that are empty everywhere."""
    table = pd.DataFrame([*map(cells, runs)], [run.label for run in runs])
    return table.loc[:, (table != "").any()].replace("", _UNKNOWN)


def unlike_settings(runs: Sequence[Run]) -> str:
    """Sentences on the settings in which runs were not measured alike, and on their curves; empty
    if there are none.
    """
    others = [run for run in runs if run.differences]
    if not others:
        return ""
    values: dict[str, list[str]] = {}
    for run in others:
        for name, (first, own) in run.differences.items():
            values[name] = list(dict.fromkeys([*values.get(name, [first]), own]))
    settings = "; ".join(
        f"{name} {', '.join(each[:-1])} and {each[-1]}" for name, each in values.items()
    )
    labels = listed([run.label for run in others], 4)
    return (
        f"These runs are not measured alike: {settings}. Compare the curves of {labels} with those "
        "of others with care."
    )


def facts(runs: Sequence[Run]) -> pd.DataFrame:
    """Sizes of what was measured: a row of cells for each run, as far as they are known."""

    def cells(run: Run) -> dict[str, str]:
        steps = run.steps if run.has_steps else []
        layers = run.layers
        return {
            "measurements": f"{len(steps):,}" if run.has_steps else "",
            "steps": _range_text(steps),
            "layers": f"{len(layers)}: {layers[0]} to {layers[-1]}" if layers else "",
            "width": _range_text(run.widths),
            "parameters": _range_text([float(run.facts.get("num_parameters") or "nan")]),
            "token types": _range_text(run.values.get("token_types", [])),
            "rows each": _range_text(run.values.get("n", [])),
        }

    return _table(runs, cells)


def _range_text(values: Iterable[float]) -> str:
    known = pd.Series([*values], dtype=float).dropna()
    return (
        " to ".join(dict.fromkeys((f"{known.min():,.0f}", f"{known.max():,.0f}")))
        if len(known)
        else ""
    )


def overview(runs: Sequence[Run]) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Means over blocks, cells by metric, and by the label of their run and what they are: of the
    metrics to look at first, and of all others.

    A run has the first and the last value, with the step where that is not the run's first or last
    one; a final model has one. A single run or model has those of Gaussian rows, too.
    """
    labels = {
        f"{run.label}: {name}" if len(run.blocks) > 1 or len(runs) == 1 else run.label: (run, name)
        for run in runs
        for name in run.blocks
    }
    of_steps = ["last"] if all(len(run.steps) <= 1 for run in runs) else ["first", "last"]
    gaussian = [GAUSSIAN] if len(runs) == 1 else []
    tables = {
        label: _cells(run, name).reindex(
            columns=[*(of_steps if run.has_steps else ["value"]), *gaussian]
        )
        for label, (run, name) in labels.items()
    }
    table = pd.concat(tables, axis=1).astype(object).fillna(_UNKNOWN)
    table = table.drop("anisotropy_null", errors="ignore")
    metrics = in_order(metric for metric in table.index if not is_without(metric))
    first = [metric for metric in metrics if metric in headlines()] or metrics
    return table.loc[first], table.loc[[metric for metric in metrics if metric not in first]]


def _cells(run: Run, name: str) -> pd.DataFrame:
    """A mean over blocks of each metric (rows), in words, by the columns of the overview."""
    cells = {}
    for metric in run.metrics:
        means = run.means(metric)
        if name not in means:
            continue
        mean = means[name].dropna()
        errors = run.mean_errors(metric)[name][mean.index]
        first, last = (
            with_error(mean[step], errors[step]) + ("" if step == own else f" (step {step:,})")
            for at in (0, -1)
            for step, own in [(mean.index[at], run.steps[at])]
        )
        cells[metric] = {"first": first, "last": last, "value": last}
        gaussian = run.gaussian_means(metric)[name][mean.index[-1]]
        if not isnan(gaussian):
            cells[metric][GAUSSIAN] = number(gaussian)
    return pd.DataFrame.from_dict(cells, orient="index")
