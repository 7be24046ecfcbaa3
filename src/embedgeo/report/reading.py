"""Reading runs and models: the folders of sweeps, monitored runs, and TensorBoard's event files alone."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import pandas as pd

from embedgeo.report.axes import Array, thinned
from embedgeo.report.baseline import baseline_values
from embedgeo.report.runs import Run, is_along, make_run
from embedgeo.results.folder import SweepFolder
from embedgeo.results.groups import groups_of
from embedgeo.results.loading import monitored_runs
from embedgeo.results.parquet import SCHEMA, read_table
from embedgeo.results.wording import listed

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
        if not folder.is_dir():
            raise FileNotFoundError(f"report takes folders of runs; {folder} is none.")
        found = list(_read_folder(folder))
        if not found:
            raise ValueError(
                f"report takes the folder of a sweep (checkpoints/*.parquet), of a monitored run (history.parquet) or "
                f"of its TensorBoard event files; {folder} holds no measurements of these kinds."
            )
        name = folder.resolve().name
        for run in found:
            in_folder = f"{name}: {run.label}" if len(found) > 1 else name
            runs.append(replace(run, label=in_folder if run.has_steps else run.label or name))
    labels = [run.label for run in runs]
    runs = [
        replace(
            run,
            label=run.label if labels.count(run.label) == 1 else f"{run.label} ({labels[: i + 1].count(run.label)})",
            baseline=baseline_values(run.values, run.widths, _counts(run)),
        )
        for i, run in enumerate(runs)
    ]
    names = [[run.label, *run.checkpoints["model"].unique()] for run in runs]
    told = groups_of(groups, [name for of_run in names for name in of_run if name])
    return [
        replace(run, group=next((told[name] for name in of_run if name in told), run.group))
        for run, of_run in zip(runs, names, strict=True)
    ]


def _read_folder(folder: Path) -> Iterator[Run]:
    """The runs in a folder, each labelled by what tells it from the others, a final model by its name."""
    sweep = SweepFolder(folder)
    if sweep.done():
        runs = sweep.read_runs()
        about = {name: sweep.about(name) for checkpoints in runs.values() for name in checkpoints}
        finals = {name for name, facts in about.items() if facts.get("has_step") == "false"}
        if not runs:  # no records at all
            yield make_run("", pd.DataFrame(columns=SCHEMA.names), failures=sweep.reasons())
        apart = {
            series: listed(list(checkpoints), 4)
            for series, checkpoints in runs.items()
            if _is_split(sweep, checkpoints)
        }
        failures = sweep.reasons()
        for series, checkpoints in _told_apart(runs, finals):
            records = pd.concat(checkpoints.values(), ignore_index=True)
            facts = about[[*checkpoints][-1]]
            steps = {name: int(frame["step"].iloc[0]) for name, frame in checkpoints.items()}
            tokens, planes = (
                {steps[name]: path for name, path in sorted(sweep.tables(kind).items()) if name in steps}
                for kind in ("tokens", "projections")
            )
            drawn = thinned(len(tokens), 3) if tokens else []
            layers = set(records["layer"])
            yield make_run(
                series,
                records,
                has_steps=not finals & checkpoints.keys(),
                group=facts.get("group", ""),
                num_parameters=float(facts.get("num_parameters") or "nan"),
                tokens=_read_drawable({step: tokens[step] for step in (sorted(tokens)[i] for i in drawn)}, layers),
                projections=_read_drawable({step: planes[step] for step in sorted(planes)[-1:]}, layers),
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
        table = read_table(path)
        numbers = table[table.columns.intersection(["n", "Q", "M", "V", "pc1", "pc2"])]
        is_drawable = (numbers.abs() <= _LARGEST).all(axis=1) & ((table["n"] >= 1) | (table["token_id"] < 0))
        found[step] = table[is_drawable & table["layer"].isin([layer for layer in layers if is_along(layer)])]
    return {step: table for step, table in found.items() if (table["token_id"] >= 0).any()}


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
