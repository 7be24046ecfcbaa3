"""The page: one HTML file with the figures inside, readable without a network and without
JavaScript.

Where there is JavaScript, ``plots.js`` draws figures over steps and depth again, from their
numbers, and answers.
"""

import base64
import re
from collections.abc import Iterable, Sequence
from importlib import resources
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

import jinja2
import pandas as pd
from markupsafe import Markup, escape

from embedgeo.drawing import FigureData, save
from embedgeo.formatting import listed, number
from embedgeo.glossary import in_order, term
from embedgeo.report.blocks import last_ratios, ratios
from embedgeo.report.plots import Plots
from embedgeo.report.runs import Run
from embedgeo.report.summary import WORDS, Flag, facts, origins, overview, unlike_settings

# bytes of pictures and their numbers inside the page; later ones are only linked to
BUDGET = 4_500_000
FIRST = "At a glance"  # the section at the top of the page, beside how to read its figures
ALL_RUNS = "All runs"  # the label of the figures of all runs together
_ORDINARY = 500  # width of most figures in CSS pixels, at most
_LONGEST_NAME = 200  # bytes of a file's name; file systems take 255


class PageFigure(NamedTuple):
    """A figure on the page."""

    name: str
    picture: str  # the PNG in base64; empty where the budget is spent
    width: int  # in CSS pixels
    height: int
    alt: str
    text: str
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
    """Saves figures in a new folder, and puts them onto the page until the budget is spent."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder = folder
        self.plots = Plots()
        self._left = BUDGET
        self._names: set[str] = set()

    def add(self, data: FigureData, label: str = "") -> PageFigure:
        """Save a figure under its name and the label of its run."""
        words = (re.sub(r"[^\w.-]+", "-", word).strip("-") for word in (label, data.name))
        whole = "-".join(filter(None, words)).encode()[:_LONGEST_NAME].decode(errors="ignore")
        numbered = (whole, *(f"{whole}-{number}" for number in range(2, len(self._names) + 3)))
        name = next(name for name in numbered if name.lower() not in self._names)
        self._names.add(name.lower())
        picture = base64.b64encode(save(data._replace(name=name), self.folder)).decode()
        before = self.plots.size
        picture = picture if len(picture) <= self._left else ""
        has_plot = bool(picture) and self.plots.add(name, data)
        self._left -= len(picture) + self.plots.size - before
        width, height = (round(96 * inches) for inches in data.figure.get_size_inches())
        alt = f"{data.alt} {data.text}".strip()
        return PageFigure(name, picture, width, height, alt, data.text, has_plot=has_plot)


def write_page(
    path: Path,
    runs: Sequence[Run],
    panels: Iterable[tuple[str, Panel]],
    plots: Plots,
    found: Sequence[list[Flag]],
    told: Sequence[list[str]],
    comparison: tuple[list[str], pd.DataFrame] | None = None,
) -> None:
    """Write ``index.html`` with panels, each under the title of its section, the numbers of their
    figures, and what flags were ``found`` in each run and what story is ``told`` of it; of two runs
    it begins with their `verdicts`.
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
    for run, of_run in zip(runs, found, strict=True):
        by_text.setdefault(repr(of_run), ([], of_run))[0].append(run.label)
    metrics = in_order(metric for run in runs for metric in run.metrics)
    has_errors = any(run.errors.notna().to_numpy().any() for run in runs)
    page = environment.get_template("page.html.jinja").render(
        title=f"Geometry of the embeddings: {listed([run.label for run in runs], 3)}",
        origins=origins(runs),
        unlike_settings=unlike_settings(runs),
        facts=facts(runs),
        words=WORDS,
        flags=[(", ".join(labels), of_runs) for labels, of_runs in by_text.values()],
        sound=[
            label
            for labels, of_runs in by_text.values()
            for label in labels
            if all(flag.level != "broken" for flag in of_runs)
        ],
        overview=overview(runs),
        blocks=[
            (run.label, last_ratios(of_side).map(number)) for run in runs for of_side in ratios(run)
        ],
        names={metric: term(metric).name for metric in metrics},
        has_errors=has_errors,
        has_steps=any(run.has_steps for run in runs),
        drawn={panel.metric for _, panel in drawn},
        first=[section for section in sections if section[0] == FIRST],
        sections=[section for section in sections if section[0] != FIRST],
        all_runs=ALL_RUNS,
        glossary=[term(metric) for metric in metrics],
        stories=[(run.label, each) for run, each in zip(runs, told, strict=True) if each],
        comparison=comparison,
        numbers=plots.json(),
        choices=plots.choices,
        extent=plots.extent,
        source=lambda name: (
            resources.files("embedgeo.report").joinpath(name).read_text(encoding="utf-8")
        ),
    )
    path.write_text(page, encoding="utf-8", errors="replace")
