"""Reading runs: from the folders of sweeps, from monitored runs, and from TensorBoard's event files alone."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pandas as pd

from embedgeo.report.axes import Array, thinned
from embedgeo.report.baseline import baseline_values
from embedgeo.report.runs import Run, make_run
from embedgeo.results.events import EVENTS, read_events
from embedgeo.results.folder import SweepFolder
from embedgeo.results.history import read_histories
from embedgeo.results.parquet import read_table


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """The runs of some folders, with distinct labels.

    Raises:
        FileNotFoundError: a folder that is not there.
        ValueError: a folder that holds no results, or a file that cannot be read.
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
        runs += [replace(run, label=f"{name}: {run.label}" if len(found) > 1 else name) for run in found]
    labels = [run.label for run in runs]
    return [
        replace(
            run,
            label=run.label if labels.count(run.label) == 1 else f"{run.label} ({labels[: i + 1].count(run.label)})",
            baseline=baseline_values(run.values, run.widths, _counts(run)),
        )
        for i, run in enumerate(runs)
    ]


def _read_folder(folder: Path) -> Iterator[Run]:
    """The runs in a folder, each labelled by what tells it from the others."""
    sweep = SweepFolder(folder)
    if sweep.done():
        for series, checkpoints in sweep.read_runs().items():
            records = pd.concat(checkpoints.values(), ignore_index=True)
            steps = {name: int(frame["step"].iloc[0]) for name, frame in checkpoints.items()}
            tokens, planes = (
                {steps[name]: path for name, path in sorted(sweep.tables(kind).items()) if name in steps}
                for kind in ("tokens", "projections")
            )
            drawn = thinned(len(tokens), 3) if tokens else []
            yield make_run(
                series,
                records,
                tokens={step: read_table(tokens[step]) for step in (sorted(tokens)[i] for i in drawn)},
                projections={step: read_table(planes[step]) for step in sorted(planes)[-1:]},
                failures=sweep.reasons(),
            )
    elif histories := list(read_histories(folder)):
        for path, prefix, records in histories:
            yield make_run(f"{os.path.relpath(path, folder)} {prefix}".removeprefix(". "), records)
    else:
        for events in sorted({path.parent for path in folder.rglob(f"{EVENTS}*")}):
            for prefix, written in read_events(events):
                yield make_run(f"{os.path.relpath(events, folder)} {prefix}", pd.DataFrame(written))


def _counts(run: Run) -> Array | None:
    """Occurrences of each token type, at the first layer of the last table."""
    if not run.tokens:
        return None
    table = run.tokens[max(run.tokens)]
    return table[table["layer"] == table["layer"].iloc[0]]["n"].to_numpy(dtype=float)
