"""What the page shows, and in which order."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice

from embedgeo.report import (
    chosen,
    comparison,
    coordinates,
    drift,
    examples,
    figures,
    scales,
    shares,
    spectra,
    tokens,
    types,
)
from embedgeo.report.drawing import FigureData, TableData
from embedgeo.report.flags import outlier_steps
from embedgeo.report.page import ALL_RUNS, FIRST, FigureWriter, Group, Panel
from embedgeo.report.runs import Run
from embedgeo.results.drift_terms import DRIFT
from embedgeo.results.glossary import HEADLINES, in_order, is_processed, term

MAIN = 11
"""How many metrics, of those to look at first, have a section of their own."""

_IN_FULL = 40
"""How many metrics have all their figures; of more, all but the headlines have one each."""

_SAME_ROWS = "The same rows over time and depth"

_OF_BATCHES = "anisotropy_batch_mean"

_OVER_TYPES = (
    "How unequal the Q of token types are (C.V.), and how well a token type's M tells its V. Where Q is nearly the "
    "same for all types, the slope of V on M is near −1 and R² near 1: what the norm of a token's mean gains, its "
    "variance loses."
)

Plan = list[tuple[str, Callable[[], Panel]]]
"""What draws each panel, with the title of its section."""


def page_plan(runs: Sequence[Run], writer: FigureWriter, names: Sequence[str] | None) -> Plan:
    """The page from top to bottom, each panel with its section; the budget for pictures is spent in this order."""

    def by_run(draw: Callable[[Run], Iterable[FigureData | TableData]]) -> list[Group]:
        labels = {run.label: run.label if len(runs) > 1 else "" for run in runs}
        groups = [(labels[run.label], [writer.add(data, labels[run.label]) for data in draw(run)]) for run in runs]
        groups = [group for group in groups if group[1]]
        return groups if any(run.has_steps for run in runs) else _side_by_side(groups)

    def section(title: str, draw: Callable[[Run], Iterable[FigureData | TableData]], text: str = "") -> Plan:
        return [(title, lambda: Panel("", "", text, by_run(draw)))]

    def of_metric(metric: str) -> Panel:
        compared = [run for run in runs if run.varies(metric)]
        groups = []
        if len(compared) > 1:
            groups = [(ALL_RUNS, [writer.add(data) for data in _compared(compared, metric)])]
        in_full = metric in HEADLINES or len(metrics) <= _IN_FULL
        groups += by_run(lambda run: _of_metric(run, metric) if in_full else islice(_in_short(run, metric), 1))
        return Panel(term(metric).name, metric, term(metric).meaning, groups)

    def of_metrics(title: str, metrics: Sequence[str]) -> Plan:
        return [(title, partial(of_metric, metric)) for metric in metrics]

    def of_drift(metric: str) -> Panel:
        return Panel(term(metric).name, metric, term(metric).meaning, by_run(lambda run: drift.of_metric(run, metric)))

    def over_types() -> Panel:
        compared = [run for run in runs if all(run.varies(metric) for metric in comparison.OVER_TYPES)]
        groups = [("", [writer.add(comparison.compare_types(compared))])] if len(compared) > 1 else []
        return Panel("", "", _OVER_TYPES, groups)

    varying = in_order(metric for run in runs for metric in run.metrics if run.varies(metric))
    metrics = [
        metric for metric in varying if term(metric).is_drawn and not is_processed(metric) and metric not in DRIFT
    ]
    if {_OF_BATCHES, "anisotropy"} <= set(metrics):
        metrics.remove(_OF_BATCHES)
        metrics.insert(metrics.index("anisotropy") + 1, _OF_BATCHES)
    return [
        *of_metrics(FIRST, metrics[:1]),
        *section("Composition", _of_shares),
        ("Mean and variance over token types", over_types),
        *of_metrics("Metrics", metrics[1:MAIN]),
        *section("Intrinsic dimension over scales", _of_scales, scales.READING),
        *section("Loss", _of_loss, term("loss").meaning),
        *section("After-processing", _of_processed),
        *section("Spectrum", spectra.figures_of, spectra.ABOUT),
        *((_SAME_ROWS, partial(of_drift, metric)) for metric in varying if metric in DRIFT),
        *section(_SAME_ROWS, drift.matrices, drift.MATRICES),
        *section(
            "Token types",
            partial(_of_tokens, names=names),
            chosen.CONFOUNDED if any(map(chosen.has_words, runs)) else "",
        ),
        *section("Outlier coordinates", coordinates.coordinate_figures, coordinates.MEANING),
        *of_metrics("More metrics", metrics[MAIN:]),
    ]


def _side_by_side(groups: list[Group]) -> list[Group]:
    """The figures of final models in one group, where each has only one: its text then says whose it is."""
    if len(groups) < 2 or any(len(figures) > 1 for _, figures in groups):
        return groups
    said = [
        figure._replace(text=f"{label}: {figure.text}", alt=f"{label}: {figure.alt}") for label, (figure,) in groups
    ]
    return [("", said)]


def _of_loss(run: Run) -> Iterator[FigureData]:
    if run.has_steps and "loss" in run.model and run.model["loss"].notna().any():
        yield figures.loss(run, outlier_steps(run))


def _of_scales(run: Run) -> Iterator[FigureData]:
    if scales.measured_scales(run):
        yield scales.by_layer(run)
        if len(run.steps) > 1:
            yield scales.by_step(run)


def _of_processed(run: Run) -> Iterator[FigureData]:
    if figures.processed_metrics(run):
        yield figures.after_processing(run)


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
            yield comparison.compare_profiles([run], metric)


def _in_short(run: Run, metric: str) -> Iterator[FigureData]:
    if run.varies(metric) and len(run.steps) > 1:
        yield figures.dynamics(run, metric, has_bar=False)
    yield from _of_metric(run, metric)


def _compared(runs: Sequence[Run], metric: str) -> Iterator[FigureData]:
    training = [run for run in runs if run.has_steps]
    if len(training) > 1 and any(len(run.steps) > 1 for run in training):
        yield comparison.compare_dynamics(training, metric)
    yield comparison.compare_profiles(runs, metric)


def _of_tokens(run: Run, names: Sequence[str] | None) -> Iterator[FigureData | TableData]:
    if run.tokens:
        yield tokens.mean_against_variance(run)
        yield tokens.statistics(run)
        yield tokens.against_frequency(run)
        yield tokens.histograms(run)
    if chosen.has_words(run):
        for layer in tokens.some_layers(run, run.tokens[max(run.tokens)]):
            yield chosen.words(run, layer)
    if run.projections:
        yield chosen.projection(run)
    if run.occurrences:
        yield types.occurrences(run)
    if run.tokens:
        yield types.raw_against_frequency(run)
        yield types.lengths_and_frequencies(run)
        yield from examples.of_run(run, names)
