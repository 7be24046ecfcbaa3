"""Figures, numbers and one page from the records of runs: the command ``embedgeo report``."""

from embedgeo.extras import require_extra

require_extra("report", "embedgeo.report")

from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from rich.console import Console
from rich.progress import Progress

from embedgeo.drawing import style
from embedgeo.formatting import listed, write_csv
from embedgeo.report.page import FigureWriter, write_page
from embedgeo.report.plan import page_plan
from embedgeo.report.reference import require_like
from embedgeo.report.runs import Run, read_runs
from embedgeo.report.story import story
from embedgeo.report.summary import flag_lines, flags
from embedgeo.report.verdicts import verdicts
from embedgeo.results.files import replacing_contents
from embedgeo.results.parquet import is_history
from embedgeo.results.records import MODEL

__all__ = ["write_report"]


def write_report(
    dirs: Sequence[Path], out: Path | None = None, reference: Sequence[Path] = ()
) -> Path:
    """Draw what runs and models have shown: figures, their numbers and one page, which is returned,
    from records only.

    It is written beside an earlier report and takes its place at the end. On a terminal a bar shows
    how far it is. What happened is also said on stderr.

    Args:
        dirs: folders of sweeps, or of monitored runs (``history.parquet``).
        out: the folder to write to; default: ``report`` in the folder. Several folders, and a
            history itself, have none.
        reference: folders of earlier runs, whose range stands behind the means over blocks.

    Raises:
        ValueError: an option does not fit the runs; a reference was not measured like them.
        OSError: a folder is not there, or cannot be written.
    """
    console = Console(stderr=True)
    if out is None and (len(dirs) > 1 or is_history(dirs[0])):
        what = "several folders" if len(dirs) > 1 else "a history itself"
        raise ValueError(
            f"a report of {what} needs a folder of its own; got {listed(dirs, 2)} without one. "
            f"Give --out FOLDER."
        )
    out = out or dirs[0] / "report"
    page = out / "index.html"
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        reading = progress.add_task("Reading records", total=None)
        runs = read_runs(dirs)
        references = read_runs(reference)
        require_like(references, runs)
        comparison = verdicts(runs[0], runs[1], references) if len(runs) == 2 else None
        progress.remove_task(reading)
        try:
            with replacing_contents(out, "report") as new, style():
                writer = FigureWriter(new / "figures")
                plan = page_plan(runs, writer, references)
                drawn = progress.track(plan, description="Drawing figures")
                panels = [(title, draw()) for title, draw in drawn]
                _write_records(new / "metrics.csv", runs)
                found = [flags(run) for run in runs]
                told = [story(run) for run in runs]
                write_page(new / page.name, runs, panels, writer.plots, found, told, comparison)
        except FileExistsError:
            raise
        except OSError as error:
            reason = error.strerror or error
            raise OSError(
                f"--out must be a folder that can be written; {out} is not ({reason}). What was "
                f"there is as it was."
            ) from error
    for sentence in comparison[0] if comparison else ():
        console.print(sentence, markup=False, highlight=False, soft_wrap=True)
    for run, sentences, of_run in zip(runs, told, found, strict=True):
        for sentence in (*sentences, *flag_lines(of_run)):
            line = f"{run.label}: {sentence}" if len(runs) > 1 else sentence
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    return page


def _write_records(path: Path, runs: Sequence[Run]) -> None:
    """All values, with their standard errors and those of the baseline beside them."""
    columns = ["run", "step", "layer", "metric", "value", "stderr", "gaussian"]
    for run in runs:
        model = run.model.assign(layer=MODEL).set_index("layer", append=True)
        known = {
            "value": pd.concat([model, run.values, run.means_recorded]),
            "stderr": pd.concat([run.errors, run.mean_errors_recorded]),
            "gaussian": run.baseline,
        }
        stacked = {
            name: frame.rename_axis(columns="metric").stack(future_stack=True).dropna()
            for name, frame in known.items()
        }
        records = pd.DataFrame(stacked, stacked["value"].index)
        records = records.reset_index().assign(run=run.label)[columns]
        with path.open("a", encoding="utf-8", newline="") as file:
            write_csv(records, file, index=False, header=not file.tell())
