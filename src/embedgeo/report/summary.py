"""Flags that readers of a report have to know, and the tables of its overview."""

from collections.abc import Iterable, Iterator, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from embedgeo.formatting import listed, number, with_error
from embedgeo.functional.dimension import FAR_SIGHTED
from embedgeo.glossary import (
    DRIFT,
    FEW_POINTS,
    FEW_ROWS,
    GAUSSIAN,
    headlines,
    in_order,
    is_without,
    term,
)
from embedgeo.report.runs import SETTINGS, Run
from embedgeo.results.findings import KINDS, findings
from embedgeo.results.records import loss_outliers

FEW_TYPES = 300  # token types below which the values over them show only trends
LEAST_TYPES = 150  # token types below which these values are not in the overview
NEIGHBORS = 0.5  # share of rows whose neighbour is of their own kind
# factor by which the dimensions of two scales differ where more than the scale tells them apart
OTHER_DIMENSION = 1.5
# distance of the plug-in share V_W / V below that of pairs from which it is pointed out
BIAS = 0.02
_FEWEST_POINTS = 3  # that have a dimension
_UNKNOWN = "–"
_GAUSSIAN_LAST = f"{GAUSSIAN}, last"
_ROUNDING = 1e-9  # share of V below which V_W is none
# settings that are named at the head of the page
_ORIGIN = ("text", "rows", "sequence length", "sequences begin with", "tokens", "dtype")


class Flag(NamedTuple):
    """A finding that readers have to know: its kind, its consequence, and a line for each case."""

    title: str
    text: str
    details: list[str]


def flags(run: Run) -> list[Flag]:
    """The flags of a run that have cases."""
    every = (*_checkpoint_flags(run), *_row_flags(run), *_estimate_flags(run), _gaps(run))
    return [flag for flag in every if flag.details]


def _checkpoint_flags(run: Run) -> Iterator[Flag]:
    text = (
        "The folder holds checkpoints of models that differ in their widths, depths or classes: "
        "they are not one training run, and each model is drawn apart, as a run of its own."
    )
    yield Flag(
        "Different models",
        text,
        [f"{series}: {names}" for series, names in run.other_models.items()],
    )
    text = (
        f"{_count(len(run.failures), 'checkpoint')} could not be measured: left out of all figures."
    )
    yield Flag(
        "Failed checkpoints", text, [f"{name}: {reason}" for name, reason in run.failures.items()]
    )
    table = run.checkpoints.reset_index()
    by_hash = (
        table.groupby("weights_sha256")["revision"]
        .transform("first")
        .where(table["weights_sha256"] != "", "")
    )
    original = table["duplicate_of"].where(table["duplicate_of"] != "", by_hash)
    copies = table.assign(original=original)[(original != "") & (original != table["revision"])]
    text = (
        f"{len(copies)} of {len(table)} checkpoints have the weights of another one: what is drawn "
        "at their steps was measured on other weights than their names say."
    )
    if not run.has_steps:
        text = "The model has the weights of another one."
    groups = copies.groupby("original", sort=False)["revision"]
    details = [f"{', '.join(names)}: weights of {name}" for name, names in groups]
    yield Flag("Duplicate checkpoints", text, details)
    text = (
        "These checkpoints have a file of weights in common, though their other files differ: "
        "unless its weights are "
        "frozen, at least one of them is put together of the weights of two steps."
    )
    yield Flag(
        "Shared weight files",
        text,
        [f"{file}: {', '.join(names)}" for file, names in run.shared_files],
    )
    steps = outlier_steps(run)
    details = [
        f"{run.checkpoints['revision'][at]}: {run.model['loss'][at]:.4g} nats per token"
        for at in steps
    ]
    count = _count(len(steps), "checkpoint")
    text = f"The loss of {count} is out of line with its neighbours: wrong or broken weights?"
    yield Flag("Loss outliers", text, details)


def _row_flags(run: Run) -> Iterator[Flag]:
    """Flags on rows that are left out, are few, or make the numbers."""
    rows = run.table("n_nonfinite") if "n_nonfinite" in run.values else pd.DataFrame()
    details = []
    for layer, values_at in rows.items():
        n = values_at[values_at > 0]
        if len(n):
            when = f" at most, at {_steps_text(list(n.index))}" if run.has_steps else ""
            details.append(f"{layer}: {_count(int(n.max()), 'row')}{when}")
    text = "Rows with a NaN or an infinity were left out at these layers: a fault in the run."
    yield Flag("Non-finite rows", text, details)
    details = [f"step {step:,}: {_count(int(n), 'row')}" for step, n in run.few_rows.items()]
    text = (
        f"These steps have far fewer rows than the {number(run.num_rows)} of others, which alone "
        "moves a dimension: their values are not counted as lowest or highest."
    )
    yield Flag("Steps of few rows", text, details)
    points = _values_of(run, "n_points")
    text = (
        f"The intrinsic dimension rests on fewer than {FEW_POINTS:,} distinct rows at these "
        f"layers: read trends only."
    )
    details = _at_layers(run, points[points < FEW_POINTS], "min", "{:,.3g} distinct rows")
    yield Flag("Few rows for the intrinsic dimension", text, details)
    for kind, what in (("type", "token"), ("sequence", "text")):
        share, at_random = (_values_of(run, f"same_{kind}_neighbors{end}") for end in ("", "_null"))
        text = (
            f"The nearest neighbour of more than half of the rows is of the same {what}, twice as "
            "often as at random: the intrinsic dimension of all rows says how near these are, "
            "more than what surface they lie on. Read the dimensions between and within tokens."
        )
        is_far = (share > NEIGHBORS) & (share > 2 * at_random)
        details = _at_layers(run, share[is_far], "max", "up to {:.0%} of the rows")
        yield Flag(f"Neighbours of the same {what}", text, details)
    text = (
        "TwoNN and the dimension at the next scale (GRIDE, neighbours 2 and 4) differ by more "
        f"than three standard errors and a factor of {OTHER_DIMENSION}: near copies, as of one "
        "token in one place, pull TwoNN down, although they count as distinct. Read the next "
        "scale, or more of them: the extra metric scales."
    )
    yield Flag("Near copies in the intrinsic dimension", text, _near_copies(run))
    yield from _few_make_them(run)


def _estimate_flags(run: Run) -> Iterator[Flag]:
    """Flags on numbers that noise or a bias makes."""
    text = (
        f"These layers have fewer than {FEW_ROWS} rows for each dimension: noise alone raises the "
        "anisotropy and lowers the participation ratio; compare with the dashed line."
    )
    if "anisotropy" in run.values:
        per_dimension = _values_of(run, "n") / run.widths
        few = per_dimension[per_dimension < FEW_ROWS]
        details = _at_layers(run, few, "min", "{:,.3g} rows for each dimension")
        yield Flag("Few rows for the spectrum", text, details)
    types = _values_of(run, "token_types_regressed")
    text = (
        f"The C.V. of Q, the slopes and the R² over token types rest on fewer than {FEW_TYPES} "
        "types at these layers: read trends only."
    )
    details = _at_layers(run, types[types < FEW_TYPES], "min", "{:,.3g} token types")
    yield Flag("Few token types in the regressions", text, details)
    off = _values_of(run, "V_W_over_V_unbiased") - _values_of(run, "V_W_over_V")
    text = (
        "The plug-in estimate of V_W / V is too low, for tokens occur only a few times: read the "
        "one from pairs."
    )
    details = _at_layers(run, off[off > BIAS], "max", "up to {:.2g} too low")
    yield Flag("Few occurrences of each token", text, details)


def _gaps(run: Run) -> Flag:
    details = []
    for metric in run.metrics:
        table = run.table(metric)
        missing = table.where(~_undefined_by_design(run, metric), 0).isna()
        layers = [layer for layer in run.layers if missing[layer].any()]
        if layers and metric != "intrinsic_dimension_std":
            where = "all layers" if len(layers) == len(run.layers) else listed(layers, 4)
            steps = list(missing.index[missing.any(axis=1)])
            when = f", {_steps_text(steps)}" if run.has_steps else ""
            details.append(f"{term(metric).name}: {where}{when}")
    text = (
        "These are undefined (rows that do not vary, too few rows) or were not measured: gaps in "
        "the figures."
    )
    return Flag("Missing numbers", text, details)


def _values_of(run: Run, metric: str) -> "pd.Series[float]":
    """A metric by step and layer; NaN where it was not measured."""
    return run.values.get(metric, run.widths * np.nan)


def _at_layers(run: Run, cases: "pd.Series[float]", end: str, text: str) -> list[str]:
    """A line for each layer with cases, on their ``"min"`` or ``"max"``."""
    ends = cases.groupby("layer").agg(end).reindex(run.layers).dropna()
    return [f"{layer}: {text.format(value)}" for layer, value in ends.items()]


def _undefined_by_design(run: Run, metric: str) -> pd.DataFrame:
    """Places, by step (rows) and layer (columns), at which it is no news that a metric has no
    value.

    It may not be one of a layer; it may compare with a step or layer before, which the first ones
    do not have; over token types that do not vary, as where they enter a model with rotary
    positions, R² is undefined; where token types are few another flag says so; and of a few rows
    between or within token types there is no dimension.
    """
    table = run.table(metric)
    never = [(layer, metric) not in run.recorded for layer in run.layers]
    expected = pd.DataFrame(np.tile(never, (len(table), 1)), table.index, table.columns)
    if metric in DRIFT:
        expected.iloc[:1] = True
    if is_without(metric) or metric == "first_positions_share":
        expected |= table.isna()  # where no row is massive, and without sequences
    is_over_types = term(metric).group == "token types"
    if (is_over_types or metric == "V_W_text_over_V_W") and {"V", "V_W"} <= set(run.values):
        expected |= run.table("V_W") <= _ROUNDING * run.table("V")
    if is_over_types and "token_types_regressed" in run.values:
        expected |= run.table("token_types_regressed") < FEW_TYPES
    points = metric.replace("intrinsic_dimension", "n_points")
    if points != metric and points in run.values:
        expected |= run.table(points) < _FEWEST_POINTS
    return expected


def outlier_steps(run: Run) -> list[int]:
    """Steps whose loss is out of line with the losses of their neighbours."""
    if "loss" not in run.model:
        return []
    losses = run.model["loss"].dropna()
    names = {str(step): int(step) for step in losses.index}
    return [names[name] for name in loss_outliers(list(zip(names, losses, strict=True)))]


def _few_make_them(run: Run) -> Iterator[Flag]:
    """What massive rows or one coordinate make: at each layer where they hold most."""
    known = run.values[[key for key in run.values if is_without(str(key))]]
    cases: list[tuple[float, str, str, str]] = []
    for place in known.index[known.notna().any(axis=1)]:
        step, layer = place
        values = {str(key): value for key, value in run.values.loc[place].dropna().items()}
        errors = {str(key): value for key, value in run.errors.loc[place].dropna().items()}
        when = f" at step {step:,}" if run.has_steps else ""
        for kind, text in findings(values, errors).items():
            share = values.get(KINDS[kind].share, 0.0)
            cases.append((share, kind, layer, f"{layer}{when}: {text}"))
    cases.sort(key=itemgetter(0))
    worst = {(kind, layer): text for _, kind, layer, text in cases}
    for kind, (title, remedy, *_) in KINDS.items():
        text = f"What is left without them has other numbers, by more than a tenth. {remedy}"
        details = [worst[kind, layer] for layer in run.layers if (kind, layer) in worst]
        yield Flag(title, text, details)


def _near_copies(run: Run) -> list[str]:
    keys = ("intrinsic_dimension", "intrinsic_dimension_next_scale", "n_points")
    dimension, at_next, num_points = (_values_of(run, key) for key in keys)
    error = np.sqrt(
        (1.2 * dimension) ** 2 / num_points + at_next**2 / (2 * num_points.clip(upper=FAR_SIGHTED))
    )
    # where TwoNN is the larger one, near copies are not the cause
    factor = at_next / dimension
    found = factor[(factor > OTHER_DIMENSION) & (at_next - dimension > 3 * error)]
    worst: Any = found.groupby("layer").idxmax()
    return [
        f"{layer}: {dimension[worst[layer]]:.3g}, and {at_next[worst[layer]]:.3g} at the next scale"
        + (f" at step {worst[layer][0]:,}" if run.has_steps else "")
        for layer in run.layers
        if layer in worst
    ]


def _steps_text(steps: Sequence[int]) -> str:
    first, last = min(steps), max(steps)
    return f"step {first:,}" if first == last else f"{len(steps)} steps from {first:,} to {last:,}"


def _count(count: int, what: str) -> str:
    return f"{count:,} {what}" + ("s" if count != 1 else "")


def origins(runs: Sequence[Run]) -> pd.DataFrame:
    """Model, text, settings, date and versions of each run, in a row of cells, as far as they are
    known.
    """
    rows = []
    for run in runs:
        own = {SETTINGS.get(key, key): value for key, value in run.settings.items()}
        if files := own.get("text_files"):
            own["text"] = f"{files} ({own['text']})"
        models = listed([model for model in run.checkpoints["model"].unique() if model], 2)
        versions = ", ".join(f"{name} {own[name]}" for name in ("embedgeo", "torch") if name in own)
        cells = {"model": models, **{name: own.get(name, "") for name in _ORIGIN}, "date": run.date}
        rows.append(cells | {"version": versions})
    table = pd.DataFrame(rows, [run.label for run in runs])
    return table.loc[:, (table != "").any()].replace("", _UNKNOWN)


def apart(runs: Sequence[Run]) -> str:
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
    columns = {
        "group": [run.group or _UNKNOWN for run in runs],
        "measurements": [f"{len(run.steps):,}" if run.has_steps else _UNKNOWN for run in runs],
        "steps": [_range_text(run.steps if run.has_steps else []) for run in runs],
        "layers": [
            f"{len(run.layers)}: {run.layers[0]} to {run.layers[-1]}" if run.layers else _UNKNOWN
            for run in runs
        ],
        "width": [_range_text(run.widths) for run in runs],
        "parameters": [
            _range_text([float(run.facts.get("num_parameters") or "nan")]) for run in runs
        ],
        "token types": [_range_text(run.values.get("token_types", [])) for run in runs],
        "rows each": [_range_text(run.values.get("n", [])) for run in runs],
    }
    table = pd.DataFrame(columns, [run.label for run in runs])
    return table.loc[:, (table != _UNKNOWN).any()]


def num_regressed(metric: str, runs: Sequence[Run]) -> str:
    """A sentence on how many token types a number over these rests on; empty of another one."""
    known = [n for run in runs for n in run.values.get("token_types_regressed", [])]
    is_over_types = term(metric).group == "token types"
    return f"Of {_range_text(known)} token types." if is_over_types and known else ""


def _range_text(values: Iterable[float]) -> str:
    known = pd.Series([*values], dtype=float).dropna()
    return (
        " to ".join(dict.fromkeys((f"{known.min():,.0f}", f"{known.max():,.0f}")))
        if len(known)
        else _UNKNOWN
    )


class BlockMeans(NamedTuple):
    """Means over blocks of a run: their label, the columns of the overview, and cells by metric and
    column.
    """

    label: str
    columns: list[str]
    cells: dict[str, dict[str, str]]


class Overview(NamedTuple):
    """The means over blocks of all runs, and their metrics: those to look at first, and more of
    them.
    """

    parts: list[BlockMeans]
    metrics: list[str]
    more: list[str]


def overview(runs: Sequence[Run], *, has_errors: bool) -> Overview:
    """Means over blocks, the runs side by side; where that would be too wide, only the first and
    the last value.

    A final model has one value.
    """
    labels = {
        f"{run.label}: {name}" if len(run.blocks) > 1 or len(runs) == 1 else run.label: (run, name)
        for run in runs
        for name in run.blocks
    }
    is_narrow = len(labels) <= (1 if has_errors else 2)
    of_steps = (
        ["first", "lowest (step)", "highest (step)", "last", _GAUSSIAN_LAST]
        if is_narrow
        else ["first", "last"]
    )
    if all(len(run.steps) <= 1 for run in runs):
        of_steps = ["last", _GAUSSIAN_LAST]
    of_model = ["value", GAUSSIAN] if is_narrow else ["value"]
    parts = [
        BlockMeans(label, of_steps if run.has_steps else of_model, _cells(run, name))
        for label, (run, name) in labels.items()
    ]
    found = {metric for part in parts for metric in part.cells} - {"anisotropy_null"}
    metrics = in_order(metric for metric in found if not is_without(metric))
    first = [metric for metric in metrics if metric in headlines()] or metrics
    return Overview(parts, first, [metric for metric in metrics if metric not in first])


def _cells(run: Run, name: str) -> dict[str, dict[str, str]]:
    """A mean over blocks of each metric, by the columns of the overview."""
    cells = {}
    for metric in run.metrics:
        if name not in run.means(metric):
            continue
        mean = run.means(metric)[name]
        if term(metric).group == "token types" and "token_types_regressed" in run.values:
            types = run.table("token_types_regressed")[run.blocks[name]]
            mean = mean[(types >= LEAST_TYPES).all(axis=1)]
        mean = mean.dropna()
        gaussian = run.gaussian_means(metric)[name].dropna()
        errors = run.mean_errors(metric)[name]
        if len(mean):
            comparable = run.comparable(mean)
            steps = {
                "first": mean.index[0],
                "lowest (step)": comparable.idxmin(),
                "highest (step)": comparable.idxmax(),
                "last": mean.index[-1],
            }
            of_metric = {
                column: with_error(mean[step], errors[step]) for column, step in steps.items()
            }
            for column in ("lowest (step)", "highest (step)"):
                step = f" ({steps[column]:,})"
                of_metric[column] = of_metric[column] + step if mean.nunique() > 1 else _UNKNOWN
            at_last = number(gaussian.iloc[-1]) if len(gaussian) else _UNKNOWN
            cells[metric] = of_metric | {
                "value": of_metric["last"],
                GAUSSIAN: at_last,
                _GAUSSIAN_LAST: at_last,
            }
    return cells
