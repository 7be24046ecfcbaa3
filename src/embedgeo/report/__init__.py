"""Figures, numbers and one page from the records of runs: the command ``embedgeo report``."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.csv

from embedgeo.report import figures, shares, tokens
from embedgeo.report.drawing import FigureData, style
from embedgeo.report.flags import outlier_steps
from embedgeo.report.page import FigureWriter, Group, Panel, Section, write_page
from embedgeo.report.reading import read_runs
from embedgeo.report.runs import Run
from embedgeo.results.files import make_empty
from embedgeo.results.glossary import in_order, is_processed, term
from embedgeo.results.schema import MODEL

MAIN = 11
"""How many metrics, of those to look at first, have a section of their own."""

_MARK = '<meta name="generator" content="embedgeo report">'


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
    out = out or dirs[0] / "report"
    page = out / "index.html"
    is_earlier = page.is_file() and _MARK in page.read_text(errors="replace")
    unfinished = f"{_MARK}This report is being written, or was cut short.\n"
    make_empty(page, unfinished, "report", is_earlier=is_earlier, remove=["figures"])
    with style():
        sections = list(_sections(runs, FigureWriter(out / "figures")))
    _write_records(out / "metrics.csv", runs)
    write_page(page, runs, sections)
    return page


def _sections(runs: Sequence[Run], writer: FigureWriter) -> Iterator[Section]:
    """The page from top to bottom; the budget for pictures is spent in this order."""

    def by_run(draw: Callable[[Run], Iterable[FigureData]]) -> list[Group]:
        labels = {run.label: run.label if len(runs) > 1 else "" for run in runs}
        groups = [(labels[run.label], [writer.add(data, labels[run.label]) for data in draw(run)]) for run in runs]
        return [group for group in groups if group[1]]

    def section(title: str, draw: Callable[[Run], Iterable[FigureData]], text: str = "") -> Section:
        groups = by_run(draw)
        return Section(title, [Panel("", "", text, groups)] if groups else [])

    def of_metric(metric: str) -> Panel:
        compared = [run for run in runs if run.varies(metric)]
        groups = []
        if len(compared) > 1:
            groups = [("All runs", [writer.add(data) for data in _compared(compared, metric)])]
        groups += by_run(lambda run: _of_metric(run, metric))
        return Panel(term(metric).name, metric, term(metric).meaning, groups)

    varying = in_order(metric for run in runs for metric in run.metrics if run.varies(metric))
    metrics = [metric for metric in varying if term(metric).is_drawn and not is_processed(metric)]
    yield section("Composition", _of_shares)
    yield Section("Metrics", [of_metric(metric) for metric in metrics[:MAIN]])
    yield section(
        "Loss", lambda run: [figures.loss(run, outlier_steps(run))] if "loss" in run.model else [], term("loss").meaning
    )
    yield section(
        "After-processing", lambda run: [figures.after_processing(run)] if figures.processed_metrics(run) else []
    )
    yield section("Token types", _of_tokens)
    yield Section("More metrics", [of_metric(metric) for metric in metrics[MAIN:]])


def _of_shares(run: Run) -> Iterator[FigureData]:
    if shares.has_shares(run):
        if len(run.steps) > 1:
            yield shares.shares_by_step(run)
        yield shares.shares_by_layer(run)


def _of_metric(run: Run, metric: str) -> Iterator[FigureData]:
    if run.varies(metric):
        if len(run.steps) > 1:
            yield figures.dynamics(run, metric)
        if len(run.depth) > 1:
            yield figures.profile(run, metric)
        if len(run.steps) > 1 and len(run.depth) > 1:
            yield figures.heatmap(run, metric)
        if len(run.blocks) > 1:
            yield figures.compare_profiles([run], metric)


def _compared(runs: Sequence[Run], metric: str) -> Iterator[FigureData]:
    if any(len(run.steps) > 1 for run in runs):
        yield figures.compare_dynamics(runs, metric)
    yield figures.compare_profiles(runs, metric)


def _of_tokens(run: Run) -> Iterator[FigureData]:
    if run.tokens:
        yield tokens.mean_against_variance(run)
        yield tokens.statistics(run)
        yield tokens.against_frequency(run)
        yield tokens.histograms(run)
    if run.projections:
        yield tokens.projection(run)


def _write_records(path: Path, runs: Sequence[Run]) -> None:
    """All values, with those of the baseline beside them."""
    parts = []
    for run in runs:
        values, random, model = (frame.stack(future_stack=True) for frame in (run.values, run.baseline, run.model))
        of_model = pd.DataFrame({"value": model}).reset_index().assign(layer=MODEL)
        at_layers = pd.DataFrame({"value": values, "random": random.reindex(values.index)}).reset_index()
        parts += [frame.dropna(subset="value").assign(run=run.label) for frame in (of_model, at_layers)]
    records = pd.concat(parts, ignore_index=True)[["run", "step", "layer", "metric", "value", "random"]]
    table = pa.Table.from_pandas(records, preserve_index=False)
    pyarrow.csv.write_csv(table, path, pyarrow.csv.WriteOptions(quoting_style="needed"))
