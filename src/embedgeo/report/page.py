"""The page: one HTML file with the figures inside, readable without a network and without JavaScript."""

import base64
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

import jinja2
import pandas as pd
from markupsafe import Markup, escape

from embedgeo.report.drawing import FigureData, TableData
from embedgeo.report.flags import Flag, flags
from embedgeo.report.overview import about, overview
from embedgeo.report.runs import Run
from embedgeo.report.saving import save
from embedgeo.results.glossary import in_order, term
from embedgeo.results.wording import listed

BUDGET = 4_500_000
"""Bytes of pictures inside the page; later ones are only linked to."""


FIRST = "At a glance"
"""The section at the top of the page, beside how to read its figures."""

ALL_RUNS = "All runs"
"""The label of the figures of all runs together."""


_ORDINARY = 500
"""Width of most figures in CSS pixels, at most."""

_LONGEST_NAME = 200
"""Bytes of a file's name; file systems take 255."""


class PageFigure(NamedTuple):
    """A figure on the page: its PNG in base64, empty where the budget is spent, its size in CSS pixels, its texts.

    Or a table in its place, whose caption is ``alt``.
    """

    name: str
    picture: str
    width: int
    height: int
    alt: str
    text: str
    table: pd.DataFrame | None = None


Group = tuple[str, list[PageFigure]]
"""The figures of one run, or of all runs together, under a label."""


class Panel(NamedTuple):
    """Groups of figures under one heading."""

    title: str
    metric: str
    text: str
    groups: list[Group]

    @property
    def id(self) -> str:
        """The anchor of a metric."""
        return f"metric-{_anchor(self.metric)}"

    @property
    def is_single(self) -> bool:
        """Whether a metric has one figure, of ordinary width, so that panels fit beside each other."""
        figures = [figure for _, figures in self.groups for figure in figures]
        return bool(self.metric) and len(figures) == 1 and figures[0].width <= _ORDINARY


class Section(NamedTuple):
    """An entry of the table of contents."""

    title: str
    panels: list[Panel]

    @property
    def id(self) -> str:
        """The anchor."""
        return _anchor(self.title.lower())


def _anchor(name: str) -> str:
    """A name as an id: other names give other ids, and none needs quoting in a link.

    >>> _anchor("token types"), _anchor("M_over_Q")
    ('token-20types', 'M_over_Q')
    """
    return quote(name, safe="").replace("%", "-").replace("~", "-7E")


class FigureWriter:
    """Saves figures, and puts them onto the page until the budget is spent.

    Args:
        folder: where the files go, those of tables into ``tables`` beside it; must not be there yet.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder = folder
        self._left = BUDGET
        self._names: set[str] = set()

    def add(self, data: FigureData | TableData, label: str = "") -> PageFigure:
        """Save a figure or a table under its name and the label of its run."""
        words = (re.sub(r"[^\w.-]+", "-", word).strip("-") for word in (label, data.name))
        name = wanted = "-".join(word for word in words if word).encode()[:_LONGEST_NAME].decode(errors="ignore")
        while name.lower() in self._names:
            name = f"{wanted}-{len(self._names)}"
        self._names.add(name.lower())
        if isinstance(data, TableData):
            tables = self.folder.with_name("tables")
            tables.mkdir(exist_ok=True)
            data.numbers.to_csv(tables / f"{name}.csv", lineterminator="\n")
            return PageFigure(name, "", 0, 0, data.caption, data.text, data.cells)
        picture = base64.b64encode(save(data._replace(name=name), self.folder)).decode()
        if len(picture) > self._left:
            picture = ""
        self._left -= len(picture)
        width, height = (round(96 * inches) for inches in data.figure.get_size_inches())
        return PageFigure(name, picture, width, height, f"{data.alt} {data.text}", data.text)


def write_page(path: Path, runs: Sequence[Run], sections: Sequence[Section]) -> None:
    """Write ``index.html``."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("embedgeo.report", "."), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    has_errors = any(run.errors.notna().to_numpy().any() for run in runs)
    environment.filters["code"] = lambda text: Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))
    page = environment.get_template("page.html.jinja").render(
        title=f"Geometry of the embeddings: {listed([run.label for run in runs], 3)}",
        about=about(runs),
        flags=_flags(runs),
        overview=overview(runs, has_errors=has_errors),
        has_errors=has_errors,
        has_spreads=any(run.bands(metric).is_spread for run in runs for metric in run.metrics),
        has_steps=any(run.has_steps for run in runs),
        anchors={panel.metric: panel.id for section in sections for panel in section.panels if panel.metric},
        first=[section for section in sections if section.title == FIRST],
        sections=[section for section in sections if section.title != FIRST],
        all_runs=ALL_RUNS,
        glossary=[term(metric) for metric in in_order(metric for run in runs for metric in run.metrics)],
    )
    path.write_text(page, encoding="utf-8", errors="replace")


def _flags(runs: Sequence[Run]) -> list[tuple[str, list[Flag]]]:
    """The flags of runs, those of several runs that have the same ones once, under the names of all of them."""
    found: dict[str, tuple[list[str], list[Flag]]] = {}
    for run in runs:
        of_run = flags(run)
        found.setdefault(repr(of_run), ([], of_run))[0].append(run.label)
    return [(", ".join(labels), of_runs) for labels, of_runs in found.values()]
