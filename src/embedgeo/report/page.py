"""The page: one HTML file with the figures inside, readable without a network and without JavaScript."""

import base64
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jinja2
import pandas as pd

from embedgeo.report.drawing import FigureData, save
from embedgeo.report.flags import flags
from embedgeo.report.runs import Run
from embedgeo.results.glossary import in_order, term
from embedgeo.results.wording import number

BUDGET = 4_500_000
"""Bytes of pictures inside the page; later ones are only linked to."""


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


class Section(NamedTuple):
    """An entry of the table of contents."""

    title: str
    panels: list[Panel]

    @property
    def id(self) -> str:
        """The anchor."""
        return re.sub(r"\W+", "-", self.title.lower())


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
        name = wanted = "-".join(word for word in words if word)
        while name.lower() in self._names:
            name = f"{wanted}-{len(self._names)}"
        self._names.add(name.lower())
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
    page = environment.get_template("page.html.jinja").render(
        title=f"Geometry of the embeddings: {', '.join(run.label for run in runs)}",
        about=[{"label": run.label, "cells": _about(run)} for run in runs],
        flags=[(run.label, flags(run)) for run in runs],
        overview=[
            (f"{run.label}: {name}", _overview(run, blocks)) for run in runs for name, blocks in run.blocks.items()
        ],
        linked={panel.metric for section in sections for panel in section.panels},
        sections=[section for section in sections if section.panels],
        glossary=[term(metric) for metric in in_order(metric for run in runs for metric in run.metrics)],
    )
    path.write_text(page, encoding="utf-8")


def _about(run: Run) -> list[str]:
    steps = run.steps
    rows = run.values["n"].dropna() if "n" in run.values else pd.Series(dtype=float)
    return [
        f"{len(steps):,}",
        f"{steps[0]:,} to {steps[-1]:,}",
        f"{len(run.layers)}: {run.layers[0]} to {run.layers[-1]}",
        _span(rows),
        _span(run.widths.dropna()),
    ]


def _span(values: pd.Series) -> str:
    if values.empty:
        return "unknown"
    low, high = f"{values.min():,.0f}", f"{values.max():,.0f}"
    return low if low == high else f"{low} to {high}"


def _overview(run: Run, blocks: Sequence[str]) -> list[list[str]]:
    """For each metric its key, name, and means over blocks: first, lowest, highest, last, and that of the baseline."""
    rows = []
    for metric in in_order(set(run.metrics) - {"anisotropy_null"}):
        tables = (run.table(metric, values) for values in (run.values, run.baseline))
        mean, random = (table[blocks].mean(axis=1).dropna() for table in tables)
        if len(mean):
            places = (int(mean.argmin()), int(mean.argmax()))
            extremes = [f"{number(mean.iloc[i])} ({mean.index[i]:,})" for i in places]
            between = extremes if mean.nunique() > 1 else ["–", "–"]
            first, last = (number(mean.iloc[i]) for i in (0, -1))
            expected = number(random.iloc[-1]) if len(random) else "–"
            rows.append([metric, term(metric).name, first, *between, last, expected])
    return rows
