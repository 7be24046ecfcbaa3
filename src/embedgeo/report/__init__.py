"""Figures, numbers and one page from the records of runs: the command ``embedgeo report``."""

import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.csv

from embedgeo.report import figures, shares, tokens
from embedgeo.report.baseline import null_values
from embedgeo.report.drawing import FigureData, style
from embedgeo.report.flags import flags, outlier_steps
from embedgeo.report.page import FigureWriter, PageFigure, Part, Section, write_page
from embedgeo.report.runs import Run, read_runs
from embedgeo.results.glossary import in_order, term
from embedgeo.results.schema import MODEL

__all__ = ["write_report"]

MAIN = 11
"""So many metrics, of those to look at first, have a section of their own."""

_MARK = '<meta name="generator" content="embedgeo report">'
_NOT_DRAWN = {"anisotropy_null", "n", "n_nonfinite", "token_types"}
"""PageFigure as dashes, in the table or as flags."""


def write_report(dirs: Sequence[Path], out: Path | None = None) -> Path:
    """Draw what runs have measured: figures, their numbers and one page, from records only.

    Args:
        dirs: folders of sweeps, or of monitored runs (``history.parquet``, or TensorBoard event files).
        out: the folder to write to; default: ``report`` in the first folder.

    Returns:
        The page.

    Raises:
        ValueError: a folder without measurements, or a file that cannot be read.
        OSError: a folder that is not there, or an ``out`` that cannot be written to or holds something else.
    """
    runs = read_runs(dirs)
    found = [tokens.tables(run) for run in runs]
    nulls = [
        null_values(run.values, tokens.counts(tables[max(tables)]) if tables else None)
        for run, tables in zip(runs, found, strict=True)
    ]
    out = out or dirs[0] / "report"
    _make_empty(out)
    writer = FigureWriter(out / "figures")
    with style():
        sections = list(_sections(runs, nulls, found, writer))
    _write_records(out / "metrics.csv", runs, nulls)
    write_page(out / "index.html", runs, nulls, [flags(run) for run in runs], sections)
    return out / "index.html"


def _sections(
    runs: Sequence[Run], nulls: Sequence[pd.DataFrame], found: Sequence[dict[int, pd.DataFrame]], writer: FigureWriter
) -> Iterator[Section]:
    """The page from top to bottom; what comes first finds room on it."""

    def of_each(draw: Callable[[int], Iterable[FigureData]]) -> list[tuple[str, list[PageFigure]]]:
        groups = []
        for i, run in enumerate(runs):
            label = run.label if len(runs) > 1 else ""
            if shown := [writer.add(drawn, label) for drawn in draw(i)]:
                groups.append((label, shown))
        return groups

    def part(title: str, text: str, groups: list[tuple[str, list[PageFigure]]]) -> list[Part]:
        return [Part(title, "", text, groups)] if groups else []

    def of_metric(metric: str) -> Part:
        compared = [run for run in runs if _varies(run, metric)]
        groups = []
        if len(compared) > 1:
            groups = [("All runs", [writer.add(drawn) for drawn in _compared(compared, metric)])]
        groups += of_each(lambda i: _of_metric(runs[i], nulls[i], metric))
        return Part(term(metric).name, metric, term(metric).meaning, groups)

    metrics = [m for m in in_order([m for run in runs for m in run.metrics if _varies(run, m)]) if m not in _NOT_DRAWN]
    processed = {metric for run in runs for metric in figures.processed_metrics(run)}
    metrics = [metric for metric in metrics if metric not in processed]
    yield Section("Composition", part("", "", of_each(lambda i: _of_shares(runs[i]))))
    yield Section("Metrics", [of_metric(metric) for metric in metrics[:MAIN]])
    losses = of_each(
        lambda i: [figures.loss(runs[i], outlier_steps(runs[i]))] if runs[i].model.get("loss") is not None else []
    )
    yield Section("Loss", part("", term("loss").meaning, losses))
    after = of_each(lambda i: [figures.after_processing(runs[i])] if figures.processed_metrics(runs[i]) else [])
    yield Section("After-processing", part("", "", after))
    yield Section("Token types", part("", "", of_each(lambda i: _of_tokens(runs[i], nulls[i], found[i]))))
    yield Section("More metrics", [of_metric(metric) for metric in metrics[MAIN:]])


def _of_shares(run: Run) -> Iterator[FigureData]:
    if shares.has_shares(run):
        if len(run.steps) > 1:
            yield shares.shares_by_step(run)
        yield shares.shares_by_layer(run)


def _of_metric(run: Run, null: pd.DataFrame, metric: str) -> Iterator[FigureData]:
    if _varies(run, metric):
        if len(run.steps) > 1:
            yield figures.dynamics(run, null, metric)
        if len(run.depth) > 1:
            yield figures.profile(run, null, metric)
        if len(run.steps) > 1 and len(run.depth) > 1:
            yield figures.heatmap(run, metric)
        if len(run.blocks) > 1:
            yield figures.compare_profiles([run], metric)


def _compared(runs: Sequence[Run], metric: str) -> Iterator[FigureData]:
    if any(len(run.steps) > 1 for run in runs):
        yield figures.compare_dynamics(runs, metric)
    yield figures.compare_profiles(runs, metric)


def _of_tokens(run: Run, null: pd.DataFrame, found: dict[int, pd.DataFrame]) -> Iterator[FigureData]:
    if found:
        step = max(found)
        yield tokens.mean_against_variance(run, step, found[step])
        yield tokens.statistics(run, found, null)
        yield tokens.against_frequency(run, step, found[step])
        yield tokens.histograms(run, step, found[step])
    if run.projections:
        yield tokens.projection(run)


def _varies(run: Run, metric: str) -> bool:
    return metric in run.values and run.values[metric].nunique() > 1


def _make_empty(out: Path) -> None:
    """Make the folder; of an earlier report in it, remove everything."""
    page = out / "index.html"
    if out.is_dir() and any(out.iterdir()) and not (page.exists() and _MARK in page.read_text(errors="replace")):
        raise FileExistsError(f"--out must be a new or empty folder, or an earlier report; {out} holds something else.")
    try:
        if (out / "figures").exists():
            shutil.rmtree(out / "figures")
        (out / "figures").mkdir(parents=True)
        page.write_text(f"{_MARK}This report is being written, or was cut short.\n")
    except OSError as error:
        raise OSError(f"--out must be a folder that can be written; {out} is not ({error}).") from error


def _write_records(path: Path, runs: Sequence[Run], nulls: Sequence[pd.DataFrame]) -> None:
    """All values, with those of the null beside them."""
    parts = []
    for run, null in zip(runs, nulls, strict=True):
        values, random, model = (f.stack(future_stack=True) for f in (run.values, null, run.model))
        of_model = pd.DataFrame({"value": model}).reset_index().assign(layer=MODEL)
        at_layers = pd.DataFrame({"value": values, "random": random.reindex(values.index)}).reset_index()
        parts += [frame.dropna(subset="value").assign(run=run.label) for frame in (of_model, at_layers)]
    records = pd.concat(parts, ignore_index=True)[["run", "step", "layer", "metric", "value", "random"]]
    table = pa.Table.from_pandas(records, preserve_index=False)
    pyarrow.csv.write_csv(table, path, pyarrow.csv.WriteOptions(quoting_style="needed"))
