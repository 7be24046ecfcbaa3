"""The tables of the page: what was measured of each run or model, and the means over its blocks."""

from collections.abc import Sequence
from typing import NamedTuple

import pandas as pd

from embedgeo.report.runs import Run
from embedgeo.results.glossary import HEADLINES, in_order, term
from embedgeo.results.wording import measured, number

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
    first = [row for row in rows if row[0] in HEADLINES] or rows
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
