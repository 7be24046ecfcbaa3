"""The page: one HTML file with the figures inside, readable without a network and without
JavaScript.

Where there is JavaScript, ``plots.js`` draws figures over steps and depth again, from their
numbers, and answers.
"""

import base64
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from importlib import resources
from itertools import chain, groupby, islice
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

import jinja2
import pandas as pd
from markupsafe import Markup, escape

from embedgeo.drawing import FigureData, resized, save
from embedgeo.formatting import listed
from embedgeo.glossary import headlines, in_order, term
from embedgeo.metrics.processing import is_processed
from embedgeo.report import comparison, figures
from embedgeo.report.plots import Plots
from embedgeo.report.runs import Run
from embedgeo.report.story import stories
from embedgeo.report.summary import (
    Flag,
    apart,
    facts,
    flags,
    num_regressed,
    origins,
    overview,
)

# bytes of pictures and their numbers inside the page; later ones are only linked to
BUDGET = 4_500_000
FIRST = "At a glance"  # the section at the top of the page, beside how to read its figures
ALL_RUNS = "All runs"  # the label of the figures of all runs together
MAIN = 11  # metrics, of those to look at first, that have a section of their own
_IN_FULL = 40  # metrics that have all their figures; of more, all but the headlines have one each
_GLANCE = 5  # metrics that have a small figure at the top
_ORDINARY = 500  # width of most figures in CSS pixels, at most
_LONGEST_NAME = 200  # bytes of a file's name; file systems take 255
_SMALL = 3.1, 3.6  # inches of those figures


class TableData(NamedTuple):
    """A table for the page: the name of its file, its title, its cells as they are shown, their
    values, a text.
    """

    name: str
    caption: str
    cells: pd.DataFrame
    numbers: pd.DataFrame
    text: str


class Section(NamedTuple):
    """Figures and tables that a report is given, under a title of their own: ``draw`` takes the
    runs, and gives each figure with the label of its run, or with "" if it is of all.
    """

    title: str
    draw: Callable[[Sequence[Run]], Iterable[tuple[str, FigureData | TableData]]]
    text: str = ""


class PageFigure(NamedTuple):
    """A figure on the page, or a table in its place, whose caption is ``alt``."""

    name: str
    picture: str  # the PNG in base64; empty where the budget is spent
    width: int  # in CSS pixels
    height: int
    alt: str
    text: str
    table: pd.DataFrame | None = None
    has_plot: bool = False  # its lines are among the page's numbers


# the figures of one run, or of all runs together, under a label
Group = tuple[str, list[PageFigure]]


class Panel(NamedTuple):
    """Groups of figures under one heading."""

    title: str
    metric: str
    text: str
    groups: list[Group]

    @property
    def is_single(self) -> bool:
        """Test for a metric's only figure, of ordinary width: such panels fit beside each other."""
        pictures = [figure for _, group in self.groups for figure in group]
        return bool(self.metric) and len(pictures) == 1 and pictures[0].width <= _ORDINARY


class FigureWriter:
    """Saves figures in a new folder (tables beside it), and puts them onto the page until the
    budget is spent.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder = folder
        self.plots = Plots()
        self._left = BUDGET
        self._names: set[str] = set()

    def add(self, data: FigureData | TableData, label: str = "") -> PageFigure:
        """Save a figure or a table under its name and the label of its run."""
        words = (re.sub(r"[^\w.-]+", "-", word).strip("-") for word in (label, data.name))
        whole = (
            "-".join(word for word in words if word)
            .encode()[:_LONGEST_NAME]
            .decode(errors="ignore")
        )
        name = whole
        while name.lower() in self._names:
            name = f"{whole}-{len(self._names)}"
        self._names.add(name.lower())
        if isinstance(data, TableData):
            tables = self.folder.with_name("tables")
            tables.mkdir(exist_ok=True)
            data.numbers.to_csv(tables / f"{name}.csv", lineterminator="\n")
            return PageFigure(name, "", 0, 0, data.caption, data.text, data.cells)
        picture = base64.b64encode(save(data._replace(name=name), self.folder)).decode()
        before = self.plots.size
        picture = picture if len(picture) <= self._left else ""
        has_plot = bool(picture) and self.plots.add(name, data)
        self._left -= len(picture) + self.plots.size - before
        width, height = (round(96 * inches) for inches in data.figure.get_size_inches())
        alt = f"{data.alt} {data.text}".strip()
        return PageFigure(name, picture, width, height, alt, data.text, has_plot=has_plot)


Plan = list[tuple[str, Callable[[], Panel]]]  # drawing of each panel, with the title of its section


def of_each(
    draw: Callable[[Run], Iterable[FigureData | TableData]],
) -> Callable[[Sequence[Run]], Iterator[tuple[str, FigureData | TableData]]]:
    """The figures of each run, for a `Section`, from a function of one run."""
    return lambda runs: ((run.label, data) for run in runs for data in draw(run))


def page_plan(
    runs: Sequence[Run],
    writer: FigureWriter,
    sections: Sequence[Section] = (),
    only: Sequence[str] = (),
) -> Plan:
    """The page from top to bottom, each panel with its section; the budget for pictures is spent in
    this order.

    With ``only``, it has the figures of these metrics and the sections alone.
    """

    def groups_of(section: Section) -> list[Group]:
        labels = {run.label: run.label if len(runs) > 1 else "" for run in runs}
        added: dict[str, list[PageFigure]] = {}
        for label, data in section.draw(runs):
            of_run = labels.get(label, "")
            added.setdefault(of_run, []).append(writer.add(data, of_run))
        if (
            len(added) < 2
            or any(run.has_steps for run in runs)
            or max(map(len, added.values())) > 1
        ):
            return [*added.items()]
        # final models with one figure each: in one group, where its text says whose a figure is
        whose = [
            figure._replace(text=f"{label}: {figure.text}", alt=f"{label}: {figure.alt}")
            for label, (figure,) in added.items()
        ]
        return [("", whose)]

    def drawn_by(section: Section) -> Plan:
        return [(section.title, lambda: Panel("", "", section.text, groups_of(section)))]

    def draw_metric(metric: str) -> Panel:
        compared = [run for run in runs if run.varies(metric)]
        together = (
            [writer.add(data) for data in _comparisons(compared, metric)]
            if len(compared) > 1
            else []
        )
        in_full = metric in headlines() or len(metrics) <= _IN_FULL
        most = None if in_full else 1
        by_itself = of_each(lambda run: islice(_metric_figures(run, metric, in_full), most))
        groups = [(ALL_RUNS, together)] if together else []
        groups += groups_of(Section("", by_itself))
        text = f"{term(metric).meaning} {num_regressed(metric, runs)}".rstrip()
        return Panel(term(metric).name, metric, text, groups)

    def of_metrics(title: str, keys: Sequence[str]) -> Plan:
        return [(title, partial(draw_metric, key)) for key in keys]

    def glance() -> Panel:
        first = sorted(metrics, key=lambda key: key not in headlines())[:_GLANCE]
        with resized(*_SMALL):
            data = [*chain.from_iterable(_small_figures(runs, key) for key in first)]
            data += [] if only else comparison.training_losses(runs)
        small = [
            writer.add(
                each._replace(
                    name=f"{each.name}-small", alt=f"In short: {each.alt} {each.text}", text=""
                )
            )
            for each in data
        ]
        return Panel("", "", "", [("", small)] if small else [])

    given = [panel for section in sections for panel in drawn_by(section)]
    if only:
        metrics = in_order(only)
        return [(FIRST, glance), *of_metrics("Metrics", metrics), *given]
    varying = in_order(metric for run in runs for metric in run.metrics if run.varies(metric))
    metrics = [key for key in varying if term(key).is_drawn and not is_processed(key)]
    for metric in [metric for metric in metrics if term(metric).follows in metrics]:
        metrics.remove(metric)
        metrics.insert(metrics.index(term(metric).follows) + 1, metric)
    return [
        (FIRST, glance),
        *drawn_by(Section("Composition", of_each(_composition_figures))),
        *of_metrics("Metrics", metrics[:MAIN]),
        *drawn_by(Section("Loss", of_each(figures.loss_figures), term("loss").meaning)),
        *given,
        *of_metrics("More metrics", metrics[MAIN:]),
    ]


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


def _metric_figures(run: Run, metric: str, has_bar: bool) -> Iterator[FigureData]:
    if run.varies(metric):
        if len(run.steps) > 1:
            yield figures.dynamics(run, metric, has_bar=has_bar)
        if len(run.depth) > 1:
            yield figures.profile(run, metric)
        if len(run.steps) > 1 and len(run.depth) > 1:
            yield figures.heatmap(run, metric)
        if len(run.blocks) > 1:
            yield comparison.compare_profiles([run], metric)


def _comparisons(runs: Sequence[Run], metric: str) -> Iterator[FigureData]:
    training = [run for run in runs if run.has_steps]
    if len(training) > 1 and any(len(run.steps) > 1 for run in training):
        yield comparison.compare_dynamics(training, metric)
    yield comparison.compare_profiles(runs, metric)


def _composition_figures(run: Run) -> Iterator[FigureData]:
    if figures.has_composition(run):
        if len(run.steps) > 1:
            yield figures.composition(run, "step")
        yield figures.composition(run, "layer")


def write_page(
    path: Path, runs: Sequence[Run], panels: Iterable[tuple[str, Panel]], plots: Plots
) -> None:
    """Write ``index.html`` with panels, each under the title of its section, and the numbers of
    their figures.
    """
    drawn = [(title, panel) for title, panel in panels if panel.groups]
    sections = [
        (title, [panel for _, panel in group]) for title, group in groupby(drawn, key=itemgetter(0))
    ]
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("embedgeo.report", "."),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    # a name as an id: other names give other ids, and none needs quoting in a link
    environment.filters["anchor"] = lambda name: (
        quote(name, safe="").replace("%", "-").replace("~", "-7E")
    )
    environment.filters["code"] = lambda text: Markup(
        re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text)))
    )
    by_text: dict[str, tuple[list[str], list[Flag]]] = {}  # runs with the same flags share them
    for run in runs:
        of_run = flags(run)
        by_text.setdefault(repr(of_run), ([], of_run))[0].append(run.label)
    metrics = in_order(metric for run in runs for metric in run.metrics)
    has_errors = any(run.errors.notna().to_numpy().any() for run in runs)
    page = environment.get_template("page.html.jinja").render(
        title=f"Geometry of the embeddings: {listed([run.label for run in runs], 3)}",
        origins=origins(runs),
        apart=apart(runs),
        facts=facts(runs),
        flags=[(", ".join(labels), of_runs) for labels, of_runs in by_text.values()],
        overview=overview(runs, has_errors=has_errors),
        names={metric: term(metric).name for metric in metrics},
        has_errors=has_errors,
        has_steps=any(run.has_steps for run in runs),
        drawn={panel.metric for _, panel in drawn},
        first=[section for section in sections if section[0] == FIRST],
        sections=[section for section in sections if section[0] != FIRST],
        all_runs=ALL_RUNS,
        glossary=[term(metric) for metric in metrics],
        stories=stories(runs),
        numbers=plots.json(),
        choices=plots.choices,
        extent=plots.extent,
        source=lambda name: (
            resources.files("embedgeo.report").joinpath(name).read_text(encoding="utf-8")
        ),
    )
    path.write_text(page, encoding="utf-8", errors="replace")
