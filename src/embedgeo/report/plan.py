"""Which figures and tables a report has, in their order."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, islice

from embedgeo.drawing import FigureData, resized
from embedgeo.glossary import headlines, in_order, term
from embedgeo.report import comparison, figures
from embedgeo.report.page import ALL_RUNS, FIRST, FigureWriter, Group, Panel
from embedgeo.report.reference import REFERENCE_TEXT, before_band
from embedgeo.report.runs import Run

MAIN = 11  # metrics, of those to look at first, that have a section of their own
_IN_FULL = 40  # metrics that are drawn in full; of more, the headlines
_FEW_RUNS = 4  # each of which has all its figures
_GLANCE = 5  # metrics that have a small figure at the top
_SMALL = 3.1, 3.6  # inches of those figures

Plan = list[tuple[str, Callable[[], Panel]]]  # drawing of each panel, with the title of its section


def page_plan(runs: Sequence[Run], writer: FigureWriter, references: Sequence[Run]) -> Plan:
    """Each panel from top to bottom, with the title of its section.

    A writer takes the figures, and spends its budget for pictures in the order of the page.

    Args:
        runs: what is drawn.
        writer: takes the figures.
        references: earlier runs, whose range stands behind the means of the runs.
    """
    varying = in_order(metric for run in runs for metric in run.metrics if run.varies(metric))
    drawn = [metric for metric in varying if term(metric).is_drawn]

    def section(title: str, draw: Callable[[Run], Iterable[FigureData]], text: str = "") -> Plan:
        """A section of one panel, with the figures of each run."""
        return [(title, lambda: Panel("", "", text, _groups(runs, writer, draw)))]

    def of_metrics(title: str, metrics: Sequence[str]) -> Plan:
        in_full = metrics if len(drawn) <= _IN_FULL else headlines()
        return [
            (title, partial(_metric_panel, runs, writer, key, key in in_full)) for key in metrics
        ]

    def beside_earlier(run: Run) -> Iterator[FigureData]:
        return chain.from_iterable(before_band(run, metric, references) for metric in drawn)

    earlier = section("Beside earlier runs", beside_earlier, REFERENCE_TEXT) if references else []
    return [
        (FIRST, partial(_glance, runs, writer, drawn)),
        *section("Composition", figures.composition),
        *of_metrics("Metrics", drawn[:MAIN]),
        *section("Loss", figures.loss_figures, term("loss").meaning),
        *earlier,
        *of_metrics("More metrics", drawn[MAIN:]),
    ]


def _glance(runs: Sequence[Run], writer: FigureWriter, metrics: Sequence[str]) -> Panel:
    """Small figures of the metrics to look at first."""
    first = sorted(metrics, key=lambda key: key not in headlines())[:_GLANCE]
    with resized(*_SMALL):
        data = [*chain.from_iterable(_small_figures(runs, key) for key in first)]
    small = [
        writer.add(
            each._replace(
                name=f"{each.name}-small", alt=f"In short: {each.alt} {each.text}", text=""
            )
        )
        for each in data
    ]
    return Panel("", "", "", [("", small)] if small else [])


def _metric_panel(runs: Sequence[Run], writer: FigureWriter, metric: str, in_full: bool) -> Panel:
    """The runs beside each other, and the figures of each, of which many runs have one.

    A metric that is not drawn in full has one figure of all runs, or of a single one.
    """
    compared = [run for run in runs if run.varies(metric)]
    groups: list[Group] = []
    most = None if in_full and len(runs) <= _FEW_RUNS else 1
    if len(compared) > 1:
        drawn = islice(_comparisons(compared, metric), None if in_full else 1)
        groups.append((ALL_RUNS, [writer.add(data) for data in drawn]))
        most = most if in_full else 0
    groups += _groups(runs, writer, lambda run: islice(_metric_figures(run, metric), most))
    return Panel(term(metric).name, metric, term(metric).meaning, groups)


def _groups(
    runs: Sequence[Run], writer: FigureWriter, draw: Callable[[Run], Iterable[FigureData]]
) -> list[Group]:
    """The figures of each run that has any, under its label if there are several."""
    labels = [run.label if len(runs) > 1 else "" for run in runs]
    groups = [
        (label, [writer.add(data, label) for data in draw(run)])
        for label, run in zip(labels, runs, strict=True)
    ]
    return [group for group in groups if group[1]]


def _small_figures(runs: Sequence[Run], metric: str) -> Iterator[FigureData]:
    """A metric in one figure, if it varies: against the step, or of models through the layers."""
    varying = [run for run in runs if run.varies(metric)]
    if len(varying) > 1:
        yield next(_comparisons(varying, metric))
    elif varying:
        (run,) = varying
        yield (
            figures.dynamics(run, metric, has_bar=False)
            if len(run.steps) > 1
            else figures.profile(run, metric)
        )


def _metric_figures(run: Run, metric: str) -> Iterator[FigureData]:
    if run.varies(metric):
        if len(run.steps) > 1:
            yield figures.dynamics(run, metric)
        if run.values[metric].isna().all():
            return
        if len(run.depth) > 1:
            yield figures.profile(run, metric)
        if len(run.steps) > 1 and len(run.depth) > 1:
            yield figures.heatmap(run, metric)


def _comparisons(runs: Sequence[Run], metric: str) -> Iterator[FigureData]:
    training = [run for run in runs if run.has_steps]
    if len(training) > 1 and any(len(run.steps) > 1 for run in training):
        yield comparison.compare_dynamics(training, metric)
    yield comparison.compare_profiles(runs, metric)
