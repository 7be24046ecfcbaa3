"""Training runs and final models: their records, read from folders or tables, as metrics at steps
and layers.
"""

import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import groupby
from math import nan
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pandas as pd

from embedgeo.formatting import listed, number
from embedgeo.glossary import WITHOUT_MASSIVE
from embedgeo.layer_names import blocks_by_side, is_along, side
from embedgeo.metrics.gaussian import GaussianRows, baseline_values
from embedgeo.results.findings import MOVED
from embedgeo.results.folder import SweepFolder, found_results, with_means
from embedgeo.results.parquet import (
    SCHEMA,
    MonitoredRun,
)
from embedgeo.results.records import MEANS, MODEL, is_of_model

Results = str | os.PathLike[str] | pd.DataFrame | Sequence[Mapping[str, Any]] | Any
"""A folder, a table, a history, a monitor or a `embedgeo.Geometry`."""

_Values = TypeVar("_Values", pd.Series, pd.DataFrame)

_LARGEST = 1e300  # value beyond which the length of an axis would be infinite
_OF_CHECKPOINT = ["model", "revision", "weights_sha256"]
_WITHOUT_EFFECT = (  # settings that say what is measured, and change no value
    "model",
    "steps",
    "revisions",
    "jackknife",
    "save_samples",
    "token_tables",
    "spectrum",
    "count_special",  # what texts begin with says it
    "model_class",
    "trust_remote_code",
    "by",
    "date",
    "ranks",
)
SETTINGS = {
    "text_sha256": "text",
    "seq_len": "sequence length",
    "num_tokens": "tokens",
    "begins_with": "sequences begin with",
    "tokens_sha256": "token ids",
    "n": "number of rows",
}
_DIFFERENT_ROWS = 0.1  # share by which numbers of rows differ that are not of the same settings
_USUAL_SHARE = 0.75  # of those that steps have as a rule: fewer than that make other values


ALL_ROWS, ORDINARY = "all rows", "without massive rows"  # what lines and sentences are of


class Shown(NamedTuple):
    """What is drawn and told of a metric, with standard errors: by step and layer, and means over
    blocks by step.

    And of which rows both are, where massive ones move the metric somewhere; else "".
    """

    key: str  # of the metric, or of the metric without massive rows
    table: pd.DataFrame
    errors: pd.DataFrame
    means: pd.DataFrame
    mean_errors: pd.DataFrame
    all_rows: pd.DataFrame  # layers and means of all rows, where the rows differ
    rows: str = ""
    mean_rows: str = ""


@dataclass(frozen=True)
class Run:
    """One training run, or one final model, whose tables are by step."""

    label: str
    layers: list[str]  # in forward order
    values: pd.DataFrame  # a column per metric; the index is each (step, layer), ascending
    errors: pd.DataFrame  # standard errors, shaped as values; NaN where unknown
    widths: pd.Series  # d at each row of values; NaN where unknown
    # over blocks; shaped as values, with layers of `MEANS`
    means_recorded: pd.DataFrame
    mean_errors_recorded: pd.DataFrame
    # of the groups of the jackknife from these means: a column for each metric and mean, by step
    # and group
    deviations: pd.DataFrame
    baseline: pd.DataFrame  # of Gaussian rows, shaped as values; NaN where unknown
    # a column per metric of the whole model, such as the loss; the index is the step
    model: pd.DataFrame
    # model, revision, weights_sha256, where known; the index is the step
    checkpoints: pd.DataFrame
    failures: dict[str, str] = field(default_factory=dict)  # reasons, by name of the checkpoint
    # of weights, and the checkpoints with them
    shared_files: list[tuple[str, list[str]]] = field(default_factory=list)
    has_steps: bool = True  # a final model is of no step, and stands at step 0
    facts: dict[str, str] = field(default_factory=dict)  # of the last checkpoint, as it was written
    # that values depend on, as far as recorded
    settings: dict[str, str] = field(default_factory=dict)
    date: str = ""  # when it was measured, if known
    # in its settings from the first of the runs
    differences: dict[str, tuple[str, str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # many figures ask for them, and none changes them
        for each in (self.shown, self.means, self.mean_errors):
            vars(self)[each.__name__] = cache(each)

    @property
    def metrics(self) -> list[str]:
        """Names of the layers' metrics."""
        return [str(metric) for metric in self.values]

    @property
    def models(self) -> list[str]:
        """Names of the models of the checkpoints, where they are known."""
        return [str(model) for model in self.checkpoints["model"].unique() if model]

    @property
    def steps(self) -> list[int]:
        """Measured steps."""
        return [int(step) for step in self.values.index.unique("step")]

    @property
    def depth(self) -> list[str]:
        """The layers that lie along the model, without means over several."""
        return [layer for layer in self.layers if is_along(layer)]

    @property
    def axis(self) -> list[str]:
        """`depth` with a gap, named "", between an encoder and its decoder."""
        return [layer for _, layers in groupby(self.depth, side) for layer in ("", *layers)][1:]

    @property
    def blocks(self) -> dict[str, list[str]]:
        """The blocks by the name of their mean, of encoder and decoder apart; all layers where no
        layer is a block.
        """
        blocks = blocks_by_side(self.depth) or {"": self.depth}
        return {_name_of_mean(part): layers for part, layers in blocks.items()}

    @property
    def all_blocks(self) -> list[str]:
        """The `blocks` of encoder and decoder together."""
        return [block for blocks in self.blocks.values() for block in blocks]

    def of_model(self, metric: str) -> pd.Series:
        """The known values of a metric of the whole model, by step."""
        values: pd.Series = self.model.get(metric, pd.Series(dtype=float)).dropna()
        return values

    def table(self, metric: str, values: pd.DataFrame | None = None) -> pd.DataFrame:
        """A metric at each step (rows) and layer (columns)."""
        column = (self.values if values is None else values)[metric]
        steps, layers = (column.index.unique(level) for level in ("step", "layer"))
        rows = column.to_numpy().reshape(len(steps), len(layers))
        return pd.DataFrame(rows, steps, layers)[self.layers]

    def shown(self, metric: str) -> Shown:
        """A metric without massive rows, with the values of all rows where none is massive; of all
        rows where it moves nowhere by more than a tenth.

        Means are of all rows, too, where some of the blocks alone have massive ones.
        """
        whole = self.table(metric)
        means = self.means(metric)
        errors, mean_errors = self.table(metric, self.errors), self.mean_errors(metric)
        of_all = whole.join(means)
        key = metric + WITHOUT_MASSIVE
        known = self.table(key) if key in self.values else whole * nan
        if not ((known - whole).abs() > MOVED * whole.abs()).any(axis=None):
            return Shown(metric, whole, errors, means, mean_errors, of_all.iloc[:, :0])
        errors = self.table(key, self.errors).where(known.notna(), errors)
        table = known.fillna(whole)
        own = self.means(key).reindex_like(means)
        for name in means:
            has_massive = known[self.blocks.get(str(name), [])].notna().any(axis=1)
            own[name] = own[name].where(has_massive, means[name])
        if (own.isna() & means.notna()).any(axis=None):
            return Shown(key, table, errors, means, mean_errors, of_all, ORDINARY, ALL_ROWS)
        own_errors = self._over_blocks(errors, metric, own)
        return Shown(key, table, errors, own, own_errors, of_all, ORDINARY, ORDINARY)

    def means(self, metric: str) -> pd.DataFrame:
        """Means over blocks of a metric as they are recorded, of encoder and decoder apart, by
        step; without a column where there is none.
        """
        means = self._recorded(self.means_recorded, metric)
        in_order = sorted(means, key=[*self.blocks, *means].index)
        return means[in_order].dropna(axis=1, how="all")

    def _recorded(self, table: pd.DataFrame, metric: str) -> pd.DataFrame:
        recorded = table.get(metric, pd.Series(index=table.index[:0]))
        of_means = recorded.unstack("layer").reindex(self.steps)
        return of_means.rename(columns=_name_of_mean)

    def mean_errors(self, metric: str) -> pd.DataFrame:
        """The standard errors of `means`, where they are recorded; else upper bounds: the means of
        the blocks' own, for blocks may err together.
        """
        bounds = self._over_blocks(self.table(metric, self.errors), metric, self.means(metric))
        recorded = self._recorded(self.mean_errors_recorded, metric)
        return recorded.reindex_like(bounds).fillna(bounds)

    def gaussian_means(self, metric: str) -> pd.DataFrame:
        """Means of the baseline over the blocks that a metric is recorded of."""
        return self._over_blocks(self.table(metric, self.baseline), metric, self.blocks)

    def _over_blocks(self, table: pd.DataFrame, metric: str, names: Iterable[Any]) -> pd.DataFrame:
        """Means of what no record is of, over the blocks with values of the metric."""
        known = table[self.table(metric).dropna(axis=1, how="all").columns]
        of_side = {name: known.columns.intersection(self.blocks.get(name, [])) for name in names}
        return pd.DataFrame(
            {name: known[blocks].mean(axis=1, skipna=False) for name, blocks in of_side.items()},
            table.index,
        )

    @property
    def num_rows(self) -> float:
        """Rows at a layer, as a rule; NaN where unknown."""
        return float(self.values["n"].median()) if "n" in self.values else nan

    def rows(self, name: str) -> pd.Series:
        """Rows of the blocks of a mean, of that which has the most, by step."""
        known = self.table("n")[self.blocks[name]] if "n" in self.values else pd.DataFrame()
        return known.max(axis=1)

    def few_rows(self, name: str) -> pd.Series:
        """The `rows` of the steps that have far fewer than others."""
        rows = self.rows(name)
        return rows[rows < _USUAL_SHARE * rows.median()]

    def comparable(self, means: pd.Series, name: str) -> pd.Series:
        """The means by step that are known, without those of few rows, which are no extremes; given
        the name of the mean in `blocks`.
        """
        known = means.dropna()
        kept = known.drop(self.few_rows(name).index, errors="ignore")
        return kept if len(kept) else known

    def differences_of(self, other: "Run") -> dict[str, tuple[str, str]]:
        """The settings, by name, in which another run was not measured like this one, and both
        values of each.
        """
        ours = self.settings
        theirs = other.settings
        # named otherwise, it is the same text
        shared = ours.keys() & theirs.keys() - {"text_files", "embedgeo"}
        known = {key: (ours[key], theirs[key]) for key in ours if key in shared}
        few, many = sorted((self.num_rows, other.num_rows))
        if "num_tokens" not in known and many > (1 + _DIFFERENT_ROWS) * few:
            known["n"] = (number(self.num_rows), number(other.num_rows))
        return {
            SETTINGS.get(key, key.replace("_", " ")): each
            for key, each in known.items()
            if each[0] != each[1]
        }

    def varies(self, metric: str) -> bool:
        """Test for more than one value of a metric, at layers or over blocks."""
        every = (self.values, self.means_recorded)
        return any(metric in each and each[metric].nunique() > 1 for each in every)


def of_rows(metric: str, runs: Iterable[Run]) -> str:
    """Say that a metric is of all rows, where massive ones move it somewhere."""
    return f", {ALL_ROWS}" if any(run.shown(metric).rows for run in runs) else ""


def _name_of_mean(part: str) -> str:
    """The name of the mean over the blocks of a side, from its layer or what that begins with."""
    part = part.removesuffix("mean").rstrip(".")
    return f"{part} mean" if part else "mean over blocks"


def make_run(label: str, records: pd.DataFrame) -> Run:
    """A run from records in a table; infinite values at layers are undefined."""
    are_means = records["layer"].isin(MEANS) & (records["layer_index"] < 0)
    means, of_means = (
        drawable(_wide(records[are_means], ["step", "layer"], column))
        for column in ("value", "stderr")
    )
    index = ["step", "layer", "metric"]
    known = records[are_means].drop_duplicates(index, keep="last")
    of_groups = known.reindex(columns=[*index, "deviations"]).dropna().explode("deviations")
    of_groups["group"] = of_groups.groupby(level=0).cumcount()
    records = records[~are_means]
    of_model = is_of_model(records)
    at_layers = records[~of_model]
    layers = at_layers.drop_duplicates("layer").sort_values("layer_index")["layer"]
    values = drawable(_wide(at_layers, ["step", "layer"]))
    steps = values.index.unique("step")
    every = pd.MultiIndex.from_product([steps, sorted(layers)], names=["step", "layer"])
    values = values.reindex(every, columns=values.columns.union(means.columns))
    errors = drawable(_wide(at_layers, ["step", "layer"], "stderr")).reindex_like(values)
    widths = (
        at_layers.groupby(["step", "layer"])["width"].last().reindex(values.index).astype(float)
    )
    checkpoints = records.drop_duplicates("step", keep="last").set_index("step").sort_index()
    checkpoints = checkpoints.reindex(columns=_OF_CHECKPOINT).astype(object).fillna("")
    is_unnamed = checkpoints["revision"] == ""
    checkpoints.loc[is_unnamed, "revision"] = "step" + checkpoints.index[is_unnamed].astype(str)
    return Run(
        label=label,
        layers=[str(layer) for layer in layers],
        values=values,
        errors=errors.where((errors >= 0) & values.notna()),
        widths=widths.where(widths > 0),
        means_recorded=means,
        mean_errors_recorded=of_means,
        deviations=of_groups.pivot(
            index=["step", "group"], columns=["metric", "layer"], values="deviations"
        ).rename(columns=_name_of_mean, level="layer"),
        baseline=values * np.nan,
        model=_wide(records[of_model], ["step"]),
        checkpoints=checkpoints,
    )


def drawable(values: _Values) -> _Values:
    """Values, undefined where they are infinite, or so large that the length of an axis would
    be.
    """
    return values.where(values.abs() <= _LARGEST)


def _wide(records: pd.DataFrame, index: list[str], column: str = "value") -> pd.DataFrame:
    """A column of records as one for each metric; of what is there twice, the last."""
    last = records.drop_duplicates([*index, "metric"], keep="last")
    return last.pivot(index=index, columns="metric", values=column).sort_index().astype(float)


def with_baseline(run: Run, metric: str | None = None) -> Run:
    """The run with the baseline of a metric; default: of all that it has."""
    values = run.values
    rows = GaussianRows(
        keys=frozenset(run.metrics if metric is None else [metric, metric + WITHOUT_MASSIVE]),
        measured={str(name): column.to_numpy() for name, column in values.items()},
        widths=run.widths.to_numpy(),
    )
    baseline = pd.DataFrame(baseline_values(rows), values.index, values.columns, dtype=float)
    return replace(run, baseline=drawable(baseline))


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """The runs of some folders, with distinct labels. A final model has its own name, a run that of
    its folder.
    """
    runs: list[Run] = []
    for folder in folders:
        in_folder = read_folder(folder)
        name = folder.resolve().name
        is_swept = bool(SweepFolder(folder).done())
        for run in in_folder:
            label = f"{name}: {run.label}" if len(in_folder) > 1 else name
            label = label if run.has_steps and is_swept else run.label or name
            runs.append(replace(run, label=label))
    labels = [run.label for run in runs]
    for i, run in enumerate(runs):
        place = f" ({labels[: i + 1].count(run.label)})" if labels.count(run.label) > 1 else ""
        runs[i] = replace(with_baseline(run), label=run.label + place)
    return [replace(run, differences=runs[0].differences_of(run)) for run in runs]


def runs_of_records(records: pd.DataFrame) -> list[Run]:
    """The runs in a table of records, labelled by their names, or by their models where these are
    at the same steps.

    Their baselines are unknown: see `with_baseline`. A table without steps is of a final model.
    """
    missing = [column for column in ("layer", "metric", "value") if column not in records]
    if missing:
        raise ValueError(
            f"a table of results must have the columns layer, metric and value; "
            f"{', '.join(missing)} missing."
        )
    has_steps = "step" in records
    defaults: dict[str, Any] = {"run": "", "model": "", "step": 0, "width": nan, "stderr": nan}
    layers = records["layer"]
    defaults["layer_index"] = pd.factorize(layers.mask(layers.isin({*MEANS, MODEL})))[0]
    records = records.assign(
        **{name: value for name, value in defaults.items() if name not in records}
    )
    runs = []
    for name, of_run in records.groupby("run", sort=False):
        are_several = (
            of_run["model"].nunique() > 1 and of_run.duplicated(["step", "layer", "metric"]).any()
        )
        for model, part in of_run.groupby("model", sort=False) if are_several else [("", of_run)]:
            has_means = (part["layer"].isin(MEANS) & (part["layer_index"] < 0)).any()
            whole = part if has_means else with_means(each for _, each in part.groupby("step"))
            runs.append(
                replace(
                    make_run(str(model or name), whole), has_steps=has_steps and not _is_final(part)
                )
            )
    return runs


def runs_in(results: Results) -> list[Run]:
    """The runs in what holds them, without baselines: see `with_baseline`."""
    if isinstance(results, str | os.PathLike):
        return read_folder(Path(results))
    if isinstance(results, pd.DataFrame):
        return runs_of_records(results)
    holder: Any = results
    records = holder.records() if hasattr(holder, "records") else getattr(holder, "history", holder)
    if not isinstance(records, Sequence) or not all(isinstance(each, Mapping) for each in records):
        raise TypeError(
            "results must be a folder, a table, a history, a monitor or a Geometry; got "
            f"{type(results).__name__}."
        )
    if not len(records):
        return []
    origin = getattr(holder, "origin", {})
    if callable(origin):
        origin = origin() | holder.origin_of_metrics()
    runs = runs_of_records(pd.DataFrame(list(records)))
    return [replace(run, settings=_settings(origin)) for run in runs]


def _is_final(records: pd.DataFrame) -> bool:
    """Test for a final model: at step 0, and of a revision that is not called so."""
    revisions = set(records["revision"]) if "revision" in records else {""}
    return bool((records["step"] == 0).all()) and revisions.isdisjoint({"", "step0"})


def read_folder(folder: Path) -> list[Run]:
    """The runs in a folder, each labelled by what tells it from the others, without baselines: see
    `with_baseline`.
    """
    found = found_results(folder)
    if isinstance(found, SweepFolder):
        return [*_runs_of_sweep(found)]
    return [*map(_monitored, found)]


def _monitored(monitored: MonitoredRun) -> Run:
    """The run of a monitor."""
    run = make_run(monitored.name, monitored.records)
    return replace(
        run,
        settings=_settings(monitored.origin),
        date=monitored.origin.get("date", ""),
    )


def _settings(recorded: Mapping[str, Any]) -> dict[str, str]:
    """Settings that values depend on, as texts; of a version, what numbers it."""
    texts = {}
    for key, value in recorded.items():
        text = f"{value:,}" if type(value) is int else str(value)
        texts[key] = text.partition("+")[0] if key in ("embedgeo", "torch") else text
    return {key: text for key, text in texts.items() if key not in _WITHOUT_EFFECT}


def _settings_of_sweep(sweep: SweepFolder, model: str) -> dict[str, str]:
    """The settings that the values of a model depend on, and the text, as the manifest has them."""
    manifest = sweep.manifest()
    asked = dict(manifest.get("asked", {}))
    text = manifest.get("text", {})
    of_model = text if "sha256" in text else text.get(model, {})
    used = of_model.get("num_tokens", 0)
    if used and used + asked["seq_len"] <= asked["num_tokens"]:
        asked["num_tokens"] = used  # all that the text has
    # a model may have fewer positions than were asked for by default
    own = "seq_len", "begins_with", "tokens_sha256"
    asked |= {key: of_model[key] for key in own if key in of_model}
    asked |= {key: asked[key][:8] for key in ("text_sha256", "tokens_sha256") if key in asked}
    if files := manifest.get("text_files", []):
        asked["text_files"] = listed([Path(file).name for file in files], 2)
    versions = manifest.get("versions", {})
    return _settings(
        asked
        | {name: versions[name] for name in ("embedgeo", "torch") if name in versions}
        | {"definitions": str(manifest.get("definitions", 1))}
    )


def _runs_of_sweep(sweep: SweepFolder) -> Iterator[Run]:
    """The runs and final models of a sweep; the first of them has the failures."""
    by_series = sweep.runs()
    facts = {name: sweep.facts(name) for checkpoints in by_series.values() for name in checkpoints}
    finals = {
        name for name, of_checkpoint in facts.items() if of_checkpoint.get("has_step") == "false"
    }
    failures = sweep.failures()
    shared = sweep.shared_files()
    if not by_series:
        yield replace(make_run("", pd.DataFrame(columns=SCHEMA.names)), failures=failures)
    for series, checkpoints in _with_finals_alone(by_series, finals):
        records = sweep.with_means(checkpoints)
        yield replace(
            make_run(series, records),
            has_steps=finals.isdisjoint(checkpoints),
            facts=facts[[*checkpoints][-1]],
            failures=failures,
            shared_files=[each for each in shared if not checkpoints.keys().isdisjoint(each[1])],
            settings=_settings_of_sweep(sweep, str(records["model"].iloc[-1])),
            date=str(sweep.manifest().get("date", "")),
        )
        failures = {}


def _with_finals_alone(
    by_series: Mapping[str, Mapping[str, pd.DataFrame]], finals: Collection[str]
) -> Iterator[tuple[str, Mapping[str, pd.DataFrame]]]:
    """The runs by their series without the final models, each of which follows by itself, under its
    own name.
    """
    models = {
        name: str(records["model"].iloc[0]).rstrip("/")
        for checkpoints in by_series.values()
        for name, records in checkpoints.items()
        if name in finals
    }
    without_author = [Path(model).name for model in models.values()]
    for series, checkpoints in by_series.items():
        if training := {
            name: records for name, records in checkpoints.items() if name not in finals
        }:
            yield series, training
        for name in [name for name in checkpoints if name in finals]:
            own = Path(models[name]).name
            yield own if without_author.count(own) == 1 else models[name], {name: checkpoints[name]}
