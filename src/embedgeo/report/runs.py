"""Training runs and final models: their records, read from folders or tables, as metrics at steps
and layers.
"""

import json
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from math import nan
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from embedgeo.drawing import StepAxis, thinned, tick_label
from embedgeo.formatting import listed, number
from embedgeo.glossary import term
from embedgeo.layer_names import LEDGER, blocks_by_side, is_along, side
from embedgeo.metrics.gaussian import GaussianRows, baseline_values
from embedgeo.results.events import read_training_loss
from embedgeo.results.folder import CKA, SweepFolder, read_cka
from embedgeo.results.groups import groups_of
from embedgeo.results.parquet import (
    SCHEMA,
    MonitoredRun,
    is_history,
    monitored_runs,
    read_table,
    require_numbers,
)
from embedgeo.results.records import MEANS, MODEL

_LARGEST = 1e300  # value beyond which the length of an axis would be infinite
_LARGEST_OF_TYPE = 1e100  # value of a token type that can be squared
_OF_CHECKPOINT = ["model", "revision", "weights_sha256", "duplicate_of"]
_MOST_LOSSES = 512  # points of a curve of the training loss
_WITHOUT_EFFECT = (  # settings that say what is measured, and change no value
    *(
        "model",
        "steps",
        "revisions",
        "layers",
        "jackknife",
        "save_samples",
        "save_means",
        "token_tables",
        "spectrum",
    ),
    *(
        "extra",
        "after_processing",
        "model_class",
        "trust_remote_code",
        "by",
        "date",
    ),
)
SETTINGS = {
    "text_sha256": "text",
    "seq_len": "sequence length",
    "num_tokens": "tokens",
    "n": "number of rows",
}
_OF_BLOCKS = "n", "Q", "M", "V", "V_W", "V_W_unbiased"  # that a ledger has, too
_DIFFERENT_ROWS = 0.1  # share by which numbers of rows differ that are not of the same settings
_SPECTRA, _EIGENVALUES = 9, 120  # steps whose spectra are drawn, and eigenvalues of each


class Bands(NamedTuple):
    """Widths of a metric's bands, and of those of its means over blocks: standard errors, or
    spreads over batches.
    """

    values: pd.DataFrame
    means: pd.DataFrame
    is_spread: bool


@dataclass(frozen=True)
class Run:
    """One training run, or one final model, whose tables are by step."""

    label: str
    layers: list[str]  # in forward order
    values: pd.DataFrame  # a column per metric; the index is (step, layer)
    errors: pd.DataFrame  # standard errors, shaped as values; NaN where unknown
    widths: pd.Series  # d at each row of values; NaN where unknown
    baseline: pd.DataFrame  # of Gaussian rows, shaped as values; NaN where unknown
    # a column per metric of the whole model, such as the loss; the index is the step
    model: pd.DataFrame
    # layers and metrics of which there are records, defined or not
    recorded: frozenset[tuple[str, str]]
    # model, revision, weights_sha256, duplicate_of, where known; the index is the step
    checkpoints: pd.DataFrame
    # of the first, a middle and the last one of any
    tokens: dict[int, pd.DataFrame] = field(default_factory=dict)
    # chosen tokens in the plane, at the last step
    projections: dict[int, pd.DataFrame] = field(default_factory=dict)
    # of some steps: see `read_spectra`
    spectra: dict[int, pd.DataFrame] = field(default_factory=dict)
    # the largest, of all steps that have any
    coordinates: dict[int, pd.DataFrame] = field(default_factory=dict)
    # in their plane, at the last step
    occurrences: dict[int, pd.DataFrame] = field(default_factory=dict)
    # of token types from the mean, at the last step
    distances: dict[int, pd.DataFrame] = field(default_factory=dict)
    # texts by tokens; none where of one length, or unknown
    text_lengths: dict[int, int] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)  # reasons, by name of the checkpoint
    other_models: dict[str, str] = field(default_factory=dict)  # in its series: checkpoints by run
    # of weights, and the checkpoints with them
    shared_files: list[tuple[str, list[str]]] = field(default_factory=list)
    cka: pd.DataFrame = field(default_factory=lambda: pd.DataFrame(columns=CKA.names))
    has_steps: bool = True  # a final model is of no step, and stands at step 0
    group: str = ""  # of models, if it is in one
    num_parameters: float = np.nan  # of the last checkpoint's model; NaN where unknown
    # of the jackknife's groups, by metric
    deviations: dict[str, pd.DataFrame] = field(default_factory=dict)
    # that values depend on, as far as recorded
    settings: dict[str, str] = field(default_factory=dict)
    date: str = ""  # when it was measured, if known
    # in its settings from the first of the runs
    differences: dict[str, tuple[str, str]] = field(default_factory=dict)
    references: tuple["Run", ...] = ()  # earlier runs, behind its curves
    # layers, at most, at which token types and spectra are drawn, evenly spaced over the depth
    num_drawn: int = 4
    # of a token type, at the end of the scale of colours; default: those that it has
    most_occurrences: float = np.nan

    @property
    def metrics(self) -> list[str]:
        """Names of the layers' metrics."""
        return [str(metric) for metric in self.values]

    @property
    def steps(self) -> list[int]:
        """Measured steps."""
        return [int(step) for step in self.values.index.unique("step").sort_values()]

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

    def where_measured(self, metric: str) -> "Run":
        """The run without the sides of the model on which a metric has no value."""
        table = self.table(metric)
        sides = {side(layer) for layer in self.layers if table[layer].notna().any()}
        layers = [layer for layer in self.layers if side(layer) in sides]
        return replace(self, layers=layers) if layers else self

    @property
    def token_types(self) -> tuple[int, pd.DataFrame]:
        """The step and the table of token types of the last checkpoint that has one."""
        return max(self.tokens.items())

    def layers_in(self, table: pd.DataFrame) -> list[str]:
        """Those of `depth` that a table has rows of."""
        present = set(table["layer"])
        return [layer for layer in self.depth if layer in present]

    def table(self, metric: str, values: pd.DataFrame | None = None) -> pd.DataFrame:
        """A metric at each step (rows) and layer (columns)."""
        column = (self.values if values is None else values)[metric].to_numpy()
        steps, places = self._places
        known = column[places] if len(column) else np.empty(places.shape)
        return pd.DataFrame(
            np.where(places < 0, np.nan, known), steps, pd.Index(self.layers, name="layer")
        )

    @cached_property
    def _places(self) -> tuple[pd.Index, NDArray[np.intp]]:
        """The measured steps, and the row of ``values`` of each (rows) at each layer; -1 where
        there is none.
        """
        steps = self.values.index.unique("step").sort_values()
        rows = self.values.index.get_indexer(pd.MultiIndex.from_product([steps, self.layers]))
        return steps, rows.reshape(len(steps), len(self.layers))

    def means(self, table: pd.DataFrame) -> pd.DataFrame:
        """Means over blocks, of encoder and decoder apart, at each row of a table of layers
        (columns).
        """
        return pd.DataFrame(
            {name: table[blocks].mean(axis=1) for name, blocks in self.blocks.items()}
        )

    def mean_errors(self, table: pd.DataFrame, errors: pd.DataFrame) -> pd.DataFrame:
        """Upper bounds of the standard errors of `means`: the means of the blocks' own, for blocks
        may err together.
        """
        return self.means(errors.fillna(np.inf).where(table.notna())).replace(np.inf, np.nan)

    def deviations_of_blocks(
        self, metric: str, steps: Sequence[int]
    ) -> dict[str, NDArray[np.float64]]:
        """The `deviations` by side, shape (steps, groups, blocks), where they are known of all of
        its `blocks`.
        """
        if metric not in self.deviations:
            return {}
        # a column for each group and layer
        table = pd.DataFrame(self.deviations[metric].unstack("layer"))
        groups = [*table.columns.unique(0)]
        known = {}
        for name, blocks in self.blocks.items():
            columns = pd.MultiIndex.from_product([groups, blocks])
            of_blocks = table.reindex(index=[*steps], columns=columns).to_numpy(dtype=float)
            if len(groups) > 1 and np.isfinite(of_blocks).all():
                known[name] = of_blocks.reshape(len(steps), len(groups), len(blocks))
        return known

    def bands(self, metric: str, *, spreads: bool = True) -> Bands:
        """The bands around the values of a metric: standard errors; else, if wanted, spreads over
        batches.
        """
        table = self.table(metric)
        errors = self.table(metric, self.errors)
        std = term(metric).spread
        is_spread = False
        if spreads and std in self.values and not errors.notna().to_numpy().any():
            spread = self.table(std)
            errors = spread.where(table.notna() & (spread >= 0))
            is_spread = bool(errors.notna().to_numpy().any())
        return Bands(errors, self.mean_errors(table, errors), is_spread=is_spread)

    @property
    def num_rows(self) -> float:
        """Rows at a layer, as a rule; NaN where unknown."""
        return float(self.values["n"].median()) if "n" in self.values else nan

    def differences_of(self, other: "Run") -> dict[str, tuple[str, str]]:
        """The settings, by name, in which another run was not measured like this one, and both
        values of each.
        """
        # named otherwise, it is the same text
        shared = self.settings.keys() & other.settings.keys() - {"text_files"}
        known = {
            key: (self.settings[key], other.settings[key]) for key in self.settings if key in shared
        }
        few, many = sorted((self.num_rows, other.num_rows))
        if "num_tokens" not in known and many > (1 + _DIFFERENT_ROWS) * few:
            known["n"] = (number(self.num_rows), number(other.num_rows))
        return {
            SETTINGS.get(key, key.replace("_", " ")): each
            for key, each in known.items()
            if each[0] != each[1]
        }

    def titled(self, title: str, step: int) -> str:
        """A title with the step, of which a final model has none."""
        return f"{title}, step {step:,}" if self.has_steps else title

    def step_label(self, step: int) -> str:
        """The name of a step in a legend."""
        return f"step {tick_label(step)}" if self.has_steps else "measured"

    def varies(self, metric: str) -> bool:
        """Test for more than one value of a metric."""
        return metric in self.values and self.values[metric].nunique() > 1


def _name_of_mean(part: str) -> str:
    """The name of the mean over the blocks of a side, or over what is inside of them."""
    if not part:
        return "mean over blocks"
    name = part.rstrip(".")
    return f"{name} mean" if name in ("encoder", "decoder") else name.replace(".", " ")


def make_run(label: str, records: pd.DataFrame) -> Run:
    """A run from records in a table; infinite values at layers are undefined."""
    # they are of the layers here
    records = records[~(records["layer"].isin(MEANS) & (records["layer_index"] < 0))]
    blocks = records["layer"].astype(str).str.removesuffix(f".{LEDGER}")
    is_again = (
        (blocks != records["layer"])
        & blocks.isin(set(records["layer"]))
        & records["metric"].isin(_OF_BLOCKS)
    )
    # a ledger is of its block, which may be there, too
    records = records.assign(layer=blocks)[~is_again]
    of_model = records["layer"] == MODEL
    at_layers = records[~of_model]
    layers = at_layers.drop_duplicates("layer").sort_values("layer_index")["layer"]
    values = drawable(_wide(at_layers, ["step", "layer"]))
    errors = drawable(_wide(at_layers, ["step", "layer"], "stderr"))
    widths = (
        at_layers.groupby(["step", "layer"])["width"].last().reindex(values.index).astype(float)
    )
    checkpoints = records.drop_duplicates("step", keep="last").set_index("step").sort_index()
    checkpoints = checkpoints.reindex(columns=_OF_CHECKPOINT).astype(object)
    checkpoints = checkpoints.where(checkpoints.notna(), "")
    places = at_layers[["layer", "metric"]].drop_duplicates()
    revisions = checkpoints["revision"]
    checkpoints["revision"] = revisions.where(
        revisions != "", "step" + checkpoints.index.astype(str)
    )
    return Run(
        label=label,
        layers=[str(layer) for layer in layers],
        values=values,
        errors=errors.where((errors >= 0) & values.notna()),
        widths=widths.where(widths > 0),
        baseline=values * np.nan,
        model=_wide(records[of_model], ["step"]),
        recorded=frozenset(zip(places["layer"], places["metric"], strict=True)),
        checkpoints=checkpoints,
    )


def drawable(values: pd.DataFrame) -> pd.DataFrame:
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
    counts = None
    if run.tokens:
        _, table = run.token_types
        counts = table.loc[table["layer"] == table["layer"].iloc[0], "n"].to_numpy(dtype=float)
    rows = GaussianRows(
        keys=frozenset(map(str, values) if metric is None else [metric]),
        measured={str(name): column.to_numpy(dtype=float) for name, column in values.items()},
        widths=run.widths.to_numpy(dtype=float),
        counts=None if counts is None else counts[counts >= 1],
    )
    known = baseline_values(rows)
    columns = {name: known.get(str(name), np.full(len(values), nan)) for name in values}
    return replace(run, baseline=pd.DataFrame(columns, index=values.index, columns=values.columns))


def read_runs(
    folders: Sequence[Path], groups: Mapping[str, str] = MappingProxyType({})
) -> list[Run]:
    """The runs of some folders, with distinct labels. A final model has its own name, a run that of
    its folder.

    Groups of models are by the name of the model or the label of the run; instead of what the sweep
    was told.
    """
    runs: list[Run] = []
    for folder in folders:
        in_folder = read_folder(folder)
        name = folder.resolve().name
        is_swept = bool(SweepFolder(folder).done())
        for run in in_folder:
            label = f"{name}: {run.label}" if len(in_folder) > 1 else name
            runs.append(
                replace(run, label=label if run.has_steps and is_swept else run.label or name)
            )
    labels = [run.label for run in runs]
    for i, run in enumerate(runs):
        place = f" ({labels[: i + 1].count(run.label)})" if labels.count(run.label) > 1 else ""
        runs[i] = replace(with_baseline(run), label=run.label + place)
    names = [[run.label, *run.checkpoints["model"].unique()] for run in runs]
    group_of = groups_of(groups, [name for names_of_run in names for name in names_of_run if name])
    return [
        replace(
            run,
            group=next((group_of[name] for name in names_of_run if name in group_of), run.group),
            differences=runs[0].differences_of(run),
        )
        for run, names_of_run in zip(runs, names, strict=True)
    ]


def runs_of_records(records: pd.DataFrame, token_types: pd.DataFrame | None = None) -> list[Run]:
    """The runs in a table of records, labelled by their names, or by their models where these are
    at the same steps.

    Their baselines are unknown: see `with_baseline`. A table without steps is of a final model;
    token types are those of the last step.
    """
    missing = [column for column in ("layer", "metric", "value") if column not in records]
    if missing:
        raise ValueError(
            f"a table of results must have the columns layer, metric and value; "
            f"{', '.join(missing)} missing."
        )
    has_steps = "step" in records
    defaults: dict[str, Any] = {"run": "", "model": "", "step": 0, "width": nan, "stderr": nan}
    defaults["layer_index"] = pd.factorize(records["layer"])[0]
    records = records.assign(
        **{name: value for name, value in defaults.items() if name not in records}
    )
    require_numbers(records, "a table of results")
    runs = []
    for name, of_run in records.groupby("run", sort=False):
        are_several = (
            of_run["model"].nunique() > 1 and of_run.duplicated(["step", "layer", "metric"]).any()
        )
        for model, part in of_run.groupby("model", sort=False) if are_several else [("", of_run)]:
            runs.append(
                replace(
                    make_run(str(model or name), part), has_steps=has_steps and not _is_final(part)
                )
            )
    if token_types is not None and len(runs) == 1 and len(token_types):
        runs[0] = replace(
            runs[0], tokens={runs[0].steps[-1]: _drawable_types(token_types, runs[0].depth)}
        )
    return runs


def _is_final(records: pd.DataFrame) -> bool:
    """Test for a final model: at step 0, and of a revision that is not called so."""
    revisions = set(records["revision"]) if "revision" in records else {""}
    return bool((records["step"] == 0).all()) and revisions.isdisjoint({"", "step0"})


def read_folder(folder: Path) -> list[Run]:
    """The runs in a folder, each labelled by what tells it from the others, without baselines: see
    `with_baseline`.
    """
    if not folder.is_dir() and not is_history(folder):
        raise FileNotFoundError(f"report takes folders of runs; {folder} is none.")
    sweep = SweepFolder(folder)
    runs = list(_runs_of_sweep(sweep) if sweep.done() else map(_monitored, monitored_runs(folder)))
    if not runs:
        raise ValueError(
            f"report takes the folder of a sweep (checkpoints/*.parquet), of a monitored run "
            f"(history.parquet) or "
            f"of its TensorBoard event files; {folder} holds no measurements of these kinds."
        )
    return runs


def _monitored(monitored: MonitoredRun) -> Run:
    """The run of a monitor, with the loss of its training where the loop has logged it."""
    run = make_run(monitored.name, monitored.records)
    path = monitored.path
    loss = pd.Series(read_training_loss(path.parent if path.is_file() else path), dtype=float)
    kept = loss.iloc[thinned(len(loss), _MOST_LOSSES)].rename_axis("step").to_frame("training_loss")
    model = run.model.join(kept, how="outer").rename_axis("step") if len(kept) else run.model
    return replace(
        run, model=model, settings=_settings(monitored.origin), date=_date(monitored.origin, [path])
    )


def _date(recorded: Mapping[str, Any], paths: Sequence[Path]) -> str:
    """The recorded date; where there is none, that of the files, which a copy of them may have
    changed.
    """
    written = time.gmtime(max(path.stat().st_mtime for path in paths))
    return str(recorded.get("date") or time.strftime("%Y-%m-%d", written))


def _settings(recorded: Mapping[str, Any]) -> dict[str, str]:
    """Settings that values depend on, as texts; of a version, what numbers it."""
    known = {key: value for key, value in recorded.items() if key not in _WITHOUT_EFFECT}
    texts = {
        key: f"{value:,}" if type(value) is int else str(value) for key, value in known.items()
    }
    return texts | {
        name: texts[name].partition("+")[0] for name in ("embedgeo", "torch") if name in texts
    }


def _settings_of_sweep(sweep: SweepFolder, model: str) -> dict[str, str]:
    """The settings that the values of a model depend on, and the text, as the manifest has them."""
    manifest = sweep.manifest()
    asked = dict(manifest.get("asked", {}))
    if isinstance(asked.get("metrics"), list):  # of `Geometry.save`, which has them in another form
        del asked["metrics"]
    text = manifest.get("text", {})
    of_model = text if "sha256" in text else text.get(model, {})
    used = of_model.get("num_tokens", 0)
    if used and used + asked["seq_len"] <= asked["num_tokens"]:
        asked["num_tokens"] = used  # all that the text has
    if "seq_len" in of_model:
        # of a model with fewer positions than were asked for by default
        asked["seq_len"] = of_model["seq_len"]
    if "text_sha256" in asked:
        asked["text_sha256"] = asked["text_sha256"][:8]
    if files := manifest.get("text_files", []):
        asked["text_files"] = listed([Path(file).name for file in files], 2)
    versions = manifest.get("versions", {})
    return _settings(
        asked | {name: versions[name] for name in ("embedgeo", "torch") if name in versions}
    )


def _runs_of_sweep(sweep: SweepFolder) -> Iterator[Run]:
    """The runs and final models of a sweep; the first of them has the failures."""
    by_series = sweep.runs()
    facts = {name: sweep.facts(name) for checkpoints in by_series.values() for name in checkpoints}
    finals = {
        name for name, of_checkpoint in facts.items() if of_checkpoint.get("has_step") == "false"
    }
    other_models = {}
    for run, found in by_series.items():
        name, records = next(iter(found.items()))
        # other models are in its series
        if str(sweep.read(name)["series"].iloc[0]) != str(records["series"].iloc[0]):
            other_models[run] = listed(list(found), 4)
    failures = sweep.failures()
    shared = sweep.shared_files()
    cka = read_cka(sweep.path)
    if not by_series:
        yield replace(make_run("", pd.DataFrame(columns=SCHEMA.names)), failures=failures)
    for series, checkpoints in _told_apart(by_series, finals):
        records = pd.concat(checkpoints.values(), ignore_index=True)
        layers = [layer for layer in records["layer"].unique() if is_along(layer)]
        steps = {name: int(frame["step"].iloc[0]) for name, frame in checkpoints.items()}
        tables = {
            kind: dict(
                sorted(
                    (steps[name], path)
                    for name, path in sweep.tables(kind).items()
                    if name in steps
                )
            )
            for kind in (
                "tokens",
                "projections",
                "occurrences",
                "distances",
                "spectra",
                "coordinates",
                "jackknife",
            )
        }
        last = facts[[*checkpoints][-1]]
        yield replace(
            make_run(series, records),
            has_steps=not finals & checkpoints.keys(),
            group=last.get("group", ""),
            num_parameters=float(last.get("num_parameters") or "nan"),
            tokens=_read_types(tables["tokens"], layers, most=3),
            projections=_read_types(tables["projections"], layers),
            occurrences=_read_types(tables["occurrences"], layers),
            distances=_read_types(tables["distances"], layers),
            spectra=read_spectra(tables["spectra"], layers),
            coordinates=_read_coordinates(tables["coordinates"], layers),
            deviations=_read_deviations(tables["jackknife"], layers),
            cka=cka[cka["checkpoint_a"].isin(checkpoints) & cka["checkpoint_b"].isin(checkpoints)],
            text_lengths={
                int(length): count
                for length, count in json.loads(last.get("text_lengths", "{}")).items()
            },
            failures=failures,
            shared_files=[
                (file, names) for file, names in shared if not checkpoints.keys().isdisjoint(names)
            ],
            other_models=other_models if series in other_models else {},
            settings=_settings_of_sweep(sweep, str(records["model"].iloc[-1])),
            date=_date(
                sweep.manifest(), [sweep.checkpoints / f"{name}.parquet" for name in checkpoints]
            ),
        )
        failures = {}


def _told_apart(
    by_series: Mapping[str, Mapping[str, pd.DataFrame]], finals: Collection[str]
) -> Iterator[tuple[str, Mapping[str, pd.DataFrame]]]:
    """The runs by their series without the final models, each of which follows by itself, under its
    own name.
    """
    models = {
        name: str(records["model"].iloc[0] or "").rstrip("/") or name
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


def _read_types(
    paths: Mapping[int, Path], layers: Collection[str], most: int = 1
) -> dict[int, pd.DataFrame]:
    """Tables of token types, that of the last step among them: what lies at layers, and can be
    drawn.
    """
    steps = [*paths]
    chosen = [steps[i] for i in thinned(len(steps), most)] if most > 1 else steps[-1:]
    tables = {step: _drawable_types(read_table(paths[step]), layers) for step in chosen}
    return {step: table for step, table in tables.items() if (table["token_id"] >= 0).any()}


def _drawable_types(table: pd.DataFrame, layers: Collection[str]) -> pd.DataFrame:
    numbers = table[table.columns.intersection(["n", "Q", "M", "V", "pc1", "pc2", "distance"])]
    is_origin = (table["token_id"] < 0) & ("pc1" in table)
    is_drawable = (numbers.abs() <= _LARGEST_OF_TYPE).all(axis=1) & ((table["n"] >= 1) | is_origin)
    return table[is_drawable & table["layer"].isin(layers)]


def _read_coordinates(
    paths: Mapping[int, Path], layers: Collection[str]
) -> dict[int, pd.DataFrame]:
    """Tables of coordinates that have any, in the order of steps: those of known shares at some
    layers.
    """
    tables = {step: read_table(paths[step]) for step in sorted(paths)}
    for step, table in tables.items():
        table["share_of_cosine"] = table["share_of_cosine"].where(
            table["share_of_cosine"].between(0, 1)
        )
        is_known = (
            table["share_of_V"].between(0, 1)
            & (table["coordinate"] >= 0)
            & table["layer"].isin(layers)
        )
        tables[step] = table[is_known].drop_duplicates(["layer", "coordinate"])
    return {step: table for step, table in tables.items() if len(table)}


def _read_deviations(paths: Mapping[int, Path], layers: Collection[str]) -> dict[str, pd.DataFrame]:
    """Deviations of the jackknife's groups by metric: a row for each step and layer, and a column
    for each group.
    """
    parts = {}
    for step, path in paths.items():
        table = read_table(path)
        table = table[table["layer"].isin(layers)].drop_duplicates(["layer", "metric", "group"])
        parts[step] = table.pivot(index=["metric", "layer"], columns="group", values="deviation")
    if not parts:
        return {}
    of_metrics = pd.concat(parts, names=["step"]).groupby("metric")
    return {str(metric): of_metric.droplevel("metric") for metric, of_metric in of_metrics}


def read_spectra(paths: Mapping[int, Path], layers: Collection[str]) -> dict[int, pd.DataFrame]:
    """The spectra of some steps, evenly spaced on their axis: see `spectrum_shares`."""
    if not paths:
        return {}
    steps = np.array(sorted(paths))
    at = StepAxis(steps.tolist()).position(steps.tolist())
    chosen = sorted(
        {int(steps[np.abs(at - place).argmin()]) for place in np.linspace(0, 1, _SPECTRA)}
    )
    tables = {step: spectrum_shares(read_table(paths[step]), layers) for step in chosen}
    return {step: table for step, table in tables.items() if len(table)}


@np.errstate(over="ignore", invalid="ignore")  # of a mean that is not finite, there are no shares
def spectrum_shares(table: pd.DataFrame, layers: Collection[str]) -> pd.DataFrame:
    """Eigenvalues over their mean, ``share``, at some indices, of layers that have any variance;
    with n and width.
    """
    table = table[table["layer"].isin(layers) & (table["index"] >= 1)].drop_duplicates(
        ["layer", "index"]
    )
    of_layers = table.groupby("layer")["eigenvalue"]
    table = table.assign(
        share=table["eigenvalue"] / of_layers.transform("mean"), width=of_layers.transform("size")
    )
    kept = np.geomspace(1, max(1, table["index"].max() if len(table) else 1), _EIGENVALUES).round()
    is_kept = table["index"].isin(kept) & np.isfinite(table["share"])
    return table.loc[is_kept, ["layer", "index", "share", "n", "width"]]
