"""Reading runs and models: the folders of sweeps, monitored runs, and TensorBoard's event files alone."""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from math import nan
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pandas as pd

from embedgeo.formatting import listed
from embedgeo.layer_names import is_along
from embedgeo.report.baseline import SIZES, baseline_values
from embedgeo.report.drawing import Array, thinned
from embedgeo.report.runs import Run, make_run
from embedgeo.report.spectra import read_spectra
from embedgeo.results.folder import SweepFolder, read_cka
from embedgeo.results.loading import monitored_runs
from embedgeo.results.parquet import SCHEMA, read_table
from embedgeo.results.records import groups_of

_OF_LAST = ("projections", "occurrences", "distances")
"""Tables of token types that are read of the last checkpoint alone."""

_LARGEST = 1e100
"""Value of a token type that can be squared."""


def read_runs(folders: Sequence[Path], groups: Mapping[str, str] = MappingProxyType({})) -> list[Run]:
    """The runs of some folders, with distinct labels. A final model has its own name, a run that of its folder.

    Args:
        folders: of sweeps or monitored runs.
        groups: of models, by the name of the model or the label of the run; instead of what the sweep was told.

    Raises:
        FileNotFoundError: a folder that is not there.
        ValueError: a folder that holds no results, a file that cannot be read, or a group of models that are not there.
    """
    runs: list[Run] = []
    for folder in folders:
        found = read_folder(folder)
        name = folder.resolve().name
        for run in found:
            in_folder = f"{name}: {run.label}" if len(found) > 1 else name
            runs.append(replace(run, label=in_folder if run.has_steps else run.label or name))
    labels = [run.label for run in runs]
    runs = [
        replace(
            with_baseline(run),
            label=run.label if labels.count(run.label) == 1 else f"{run.label} ({labels[: i + 1].count(run.label)})",
        )
        for i, run in enumerate(runs)
    ]
    names = [[run.label, *run.checkpoints["model"].unique()] for run in runs]
    told = groups_of(groups, [name for of_run in names for name in of_run if name])
    return [
        replace(run, group=next((told[name] for name in of_run if name in told), run.group))
        for run, of_run in zip(runs, names, strict=True)
    ]


def runs_of_records(records: pd.DataFrame, token_types: pd.DataFrame | None = None) -> list[Run]:
    """The runs in a table of records, labelled by their names, or by their models where these are at the same steps.

    Their baselines are unknown: see `with_baseline`.

    Args:
        records: columns layer, metric and value, and of run, model, revision, step, layer_index, width and stderr those
            that are known, as `embedgeo.load_results` has them. Without steps it is of a final model.
        token_types: the table of token types of the last step: columns layer, token_id, n, Q, M and V.

    Raises:
        ValueError: a column is missing.
    """
    missing = [column for column in ("layer", "metric", "value") if column not in records]
    if missing:
        raise ValueError(
            f"a table of results must have the columns layer, metric and value; {', '.join(missing)} missing."
        )
    has_steps = "step" in records
    unknown: dict[str, Any] = {"run": "", "model": "", "step": 0, "width": nan, "stderr": nan}
    unknown["layer_index"] = pd.factorize(records["layer"])[0]
    records = records.assign(**{name: value for name, value in unknown.items() if name not in records})
    runs = []
    for name, of_run in records.groupby("run", sort=False):
        are_several = of_run["model"].nunique() > 1 and of_run.duplicated(["step", "layer", "metric"]).any()
        for model, part in of_run.groupby("model", sort=False) if are_several else [("", of_run)]:
            runs.append(make_run(str(model or name), part, has_steps=has_steps and not _is_final(part)))
    if token_types is not None and len(runs) == 1 and len(token_types):
        runs[0] = replace(runs[0], tokens={runs[0].steps[-1]: _drawable(token_types, set(runs[0].layers))})
    return runs


def _is_final(records: pd.DataFrame) -> bool:
    """Whether records are of a final model: at step 0, and of a revision that is not called so."""
    revisions = set(records["revision"]) if "revision" in records else {""}
    return bool((records["step"] == 0).all()) and revisions.isdisjoint({"", "step0"})


def with_baseline(run: Run, metric: str | None = None) -> Run:
    """The run with the baseline of a metric; default: of all that it has."""
    values = run.values
    if metric is not None:
        values = values[[name for name in values if name in (metric, *SIZES)]]
    baseline = baseline_values(values, run.widths, _counts(run))
    return replace(run, baseline=baseline.reindex(columns=run.values.columns))


def read_folder(folder: Path) -> list[Run]:
    """The runs in a folder, each labelled by what tells it from the others, a final model by its name.

    Their baselines are unknown: see `with_baseline`.

    Raises:
        FileNotFoundError: it is not there.
        ValueError: it holds no results, or a file that cannot be read.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"report takes folders of runs; {folder} is none.")
    found = list(_read_folder(folder))
    if not found:
        raise ValueError(
            f"report takes the folder of a sweep (checkpoints/*.parquet), of a monitored run (history.parquet) or "
            f"of its TensorBoard event files; {folder} holds no measurements of these kinds."
        )
    return found


def _read_folder(folder: Path) -> Iterator[Run]:
    sweep = SweepFolder(folder)
    if sweep.done():
        runs = sweep.runs()
        about = {name: sweep.facts(name) for checkpoints in runs.values() for name in checkpoints}
        finals = {name for name, facts in about.items() if facts.get("has_step") == "false"}
        if not runs:  # no records at all
            yield make_run("", pd.DataFrame(columns=SCHEMA.names), failures=sweep.failures())
        apart = {
            series: listed(list(checkpoints), 4)
            for series, checkpoints in runs.items()
            if _is_split(sweep, checkpoints)
        }
        failures, cka = sweep.failures(), read_cka(folder)
        for series, checkpoints in _told_apart(runs, finals):
            records = pd.concat(checkpoints.values(), ignore_index=True)
            facts = about[[*checkpoints][-1]]
            steps = {name: int(frame["step"].iloc[0]) for name, frame in checkpoints.items()}
            tokens, spectra, coordinates, *others = (
                {steps[name]: path for name, path in sorted(sweep.tables(kind).items()) if name in steps}
                for kind in ("tokens", "spectra", "coordinates", *_OF_LAST)
            )
            drawn = thinned(len(tokens), 3) if tokens else []
            layers = set(records["layer"].unique())
            of_last = (_read_drawable({step: paths[step] for step in sorted(paths)[-1:]}, layers) for paths in others)
            lengths = json.loads(facts.get("text_lengths", "{}"))
            yield make_run(
                series,
                records,
                has_steps=not finals & checkpoints.keys(),
                group=facts.get("group", ""),
                num_parameters=float(facts.get("num_parameters") or "nan"),
                tokens=_read_drawable({step: tokens[step] for step in (sorted(tokens)[i] for i in drawn)}, layers),
                **dict(zip(_OF_LAST, of_last, strict=True)),
                spectra=read_spectra(spectra, set(filter(is_along, layers))),
                coordinates=_read_coordinates(coordinates, layers),
                cka=cka[cka["checkpoint_a"].isin(checkpoints) & cka["checkpoint_b"].isin(checkpoints)],
                text_lengths={int(length): count for length, count in lengths.items()},
                failures=failures,
                apart=apart if series in apart else {},
            )
            failures = {}  # said once
    else:
        for name, records in monitored_runs(folder):
            yield make_run(name, records)


def _read_drawable(paths: Mapping[int, Path], layers: Collection[str]) -> dict[int, pd.DataFrame]:
    """Tables of token types that have any: what lies at layers of the model, and can be drawn."""
    found = {}
    for step, path in paths.items():
        found[step] = _drawable(read_table(path), layers)
    return {step: table for step, table in found.items() if (table["token_id"] >= 0).any()}


def _read_coordinates(paths: Mapping[int, Path], layers: Collection[str]) -> dict[int, pd.DataFrame]:
    """Tables of coordinates that have any, in the order of steps: those of known shares at layers of the model."""
    found = {step: read_table(paths[step]) for step in sorted(paths)}
    along = [layer for layer in layers if is_along(layer)]
    for step, table in found.items():
        table["share_of_cosine"] = table["share_of_cosine"].where(table["share_of_cosine"].between(0, 1))
        is_known = table["share_of_V"].between(0, 1) & (table["coordinate"] >= 0) & table["layer"].isin(along)
        found[step] = table[is_known].drop_duplicates(["layer", "coordinate"])
    return {step: table for step, table in found.items() if len(table)}


def _drawable(table: pd.DataFrame, layers: Collection[str]) -> pd.DataFrame:
    numbers = table[table.columns.intersection(["n", "Q", "M", "V", "pc1", "pc2", "distance"])]
    is_origin = (table["token_id"] < 0) & ("pc1" in table)
    is_drawable = (numbers.abs() <= _LARGEST).all(axis=1) & ((table["n"] >= 1) | is_origin)
    return table[is_drawable & table["layer"].isin([layer for layer in layers if is_along(layer)])]


def _told_apart(
    runs: Mapping[str, Mapping[str, pd.DataFrame]], finals: Collection[str]
) -> Iterator[tuple[str, Mapping[str, pd.DataFrame]]]:
    """The runs by their series without the final models, each of which follows by itself, under its own name."""
    models = {
        name: str(records["model"].iloc[0] or "").rstrip("/") or name
        for checkpoints in runs.values()
        for name, records in checkpoints.items()
        if name in finals
    }
    last = [Path(model).name for model in models.values()]
    labels = {name: short if last.count(short) == 1 else models[name] for name, short in zip(models, last, strict=True)}
    for series, checkpoints in runs.items():
        if training := {name: records for name, records in checkpoints.items() if name not in finals}:
            yield series, training
        for name, records in checkpoints.items():
            if name in finals:
                yield labels[name], {name: records}


def _is_split(sweep: SweepFolder, checkpoints: Mapping[str, pd.DataFrame]) -> bool:
    """Whether the series of some checkpoints has other models, too, from which they are kept apart."""
    name, records = next(iter(checkpoints.items()))
    return str(sweep.read(name)["series"].iloc[0]) != str(records["series"].iloc[0])


def _counts(run: Run) -> Array | None:
    """Occurrences of each token type, at the first layer of the last table."""
    if not run.tokens:
        return None
    table = run.tokens[max(run.tokens)]
    counts = table[table["layer"] == table["layer"].iloc[0]]["n"].to_numpy(dtype=float)
    return counts[counts >= 1]
