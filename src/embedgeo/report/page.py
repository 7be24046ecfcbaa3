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

from embedgeo.report.drawing import FigureData, save
from embedgeo.report.flags import flags
from embedgeo.report.runs import Run
from embedgeo.results.glossary import in_order, term
from embedgeo.results.wording import listed, measured, number

BUDGET = 4_500_000
"""Bytes of pictures inside the page; later ones are only linked to."""


FIRST = "At a glance"
"""The section at the top of the page, beside how to read its figures."""

ALL_RUNS = "All runs"
"""The label of the figures of all runs together."""


_LONGEST_NAME = 200
"""Bytes of a file's name; file systems take 255."""


class PageFigure(NamedTuple):
    """A figure on the page: its PNG in base64, empty where the budget is spent, its size in CSS pixels, its texts."""

    name: str
    picture: str
    width: int
    height: int
    alt: str
    text: str


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
        folder: where the files go; must not be there yet.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder = folder
        self._left = BUDGET
        self._names: set[str] = set()

    def add(self, data: FigureData, label: str = "") -> PageFigure:
        """Save a figure under its name and the label of its run."""
        words = (re.sub(r"[^\w.-]+", "-", word).strip("-") for word in (label, data.name))
        name = wanted = "-".join(word for word in words if word).encode()[:_LONGEST_NAME].decode(errors="ignore")
        while name.lower() in self._names:
            name = f"{wanted}-{len(self._names)}"
        self._names.add(name.lower())
        picture = base64.b64encode(save(data._replace(name=name), self.folder)).decode()
        if len(picture) > self._left:
            picture = ""
        self._left -= len(picture)
        width, height = (round(96 * inches) for inches in data.figure.get_size_inches())
        return PageFigure(name, picture, width, height, f"{data.alt} {data.text}", data.text)


class Overview(NamedTuple):
    """The table of means over blocks: what stands above groups of columns, the columns of a group, and the rows.

    A row is the key of a metric, its name, and the cells of each group.
    """

    groups: list[str]
    columns: list[str]
    rows: list[tuple[str, str, list[str]]]


def write_page(path: Path, runs: Sequence[Run], sections: Sequence[Section]) -> None:
    """Write ``index.html``."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("embedgeo.report", "."), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    has_errors = any(run.errors.notna().to_numpy().any() for run in runs)
    environment.filters["code"] = lambda text: Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))
    page = environment.get_template("page.html.jinja").render(
        title=f"Geometry of the embeddings: {listed([run.label for run in runs], 3)}",
        about=[{"label": run.label, "cells": _about(run)} for run in runs],
        flags=[(run.label, flags(run)) for run in runs],
        overview=_overview(runs, has_errors=has_errors),
        has_errors=has_errors,
        anchors={panel.metric: panel.id for section in sections for panel in section.panels if panel.metric},
        first=[section for section in sections if section.title == FIRST],
        sections=[section for section in sections if section.title != FIRST],
        all_runs=ALL_RUNS,
        glossary=[term(metric) for metric in in_order(metric for run in runs for metric in run.metrics)],
    )
    path.write_text(page, encoding="utf-8", errors="replace")


def _about(run: Run) -> list[str]:
    steps = run.steps
    if not steps:
        return ["0", "–", "–", "–", "–"]
    rows = run.values["n"].dropna() if "n" in run.values else pd.Series(dtype=float)
    return [
        f"{len(steps):,}",
        " to ".join(dict.fromkeys((f"{steps[0]:,}", f"{steps[-1]:,}"))),
        f"{len(run.layers)}: {run.layers[0]} to {run.layers[-1]}",
        _span(rows),
        _span(run.widths.dropna()),
    ]


def _span(values: pd.Series) -> str:
    if values.empty:
        return "unknown"
    low, high = f"{values.min():,.0f}", f"{values.max():,.0f}"
    return low if low == high else f"{low} to {high}"


_COLUMNS = ["first", "lowest (step)", "highest (step)", "last", "random, last"]


def _overview(runs: Sequence[Run], *, has_errors: bool) -> Overview:
    """Means over blocks, the runs side by side; where that would be too wide, only the first and the last value."""
    parts = {
        f"{run.label}: {name}" if len(run.blocks) > 1 or len(runs) == 1 else run.label: _means(run, name)
        for run in runs
        for name in run.blocks
    }
    shown = _COLUMNS if len(parts) <= (1 if has_errors else 2) else ["first", "last"]
    if all(len(run.steps) <= 1 for run in runs):
        shown = ["last", "random, last"]
    nothing = dict.fromkeys(_COLUMNS, "–")
    rows = [
        (metric, term(metric).name, [part.get(metric, nothing)[column] for part in parts.values() for column in shown])
        for metric in in_order({metric for part in parts.values() for metric in part} - {"anisotropy_null"})
    ]
    return Overview(list(parts), shown, rows)


def _means(run: Run, name: str) -> dict[str, dict[str, str]]:
    """For each metric one of its means over blocks, by the columns of the overview."""
    blocks = run.blocks[name]
    cells = {}
    for metric in run.metrics:
        tables = (run.table(metric, values) for values in (run.values, run.baseline))
        mean, random = (table[blocks].mean(axis=1).dropna() for table in tables)
        errors = run.mean_errors(metric)[name].reindex(mean.index)
        if len(mean):
            at = [measured(value, error) for value, error in zip(mean, errors, strict=True)]
            extremes = [f"{at[i]} ({mean.index[i]:,})" for i in (int(mean.argmin()), int(mean.argmax()))]
            between = extremes if mean.nunique() > 1 else ["–", "–"]
            first, last = at[0], at[-1]
            expected = number(random.iloc[-1]) if len(random) else "–"
            cells[metric] = dict(zip(_COLUMNS, [first, *between, last, expected], strict=True))
    return cells
