"""The page: one HTML file with the figures inside, readable without a network and without JavaScript."""

import base64
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import pandas as pd

from embedgeo.report.baseline import widths
from embedgeo.report.drawing import FigureData, save
from embedgeo.report.flags import Flag
from embedgeo.report.runs import Run
from embedgeo.results.glossary import in_order, term
from embedgeo.results.wording import number

BUDGET = 4_500_000
"""Bytes of pictures inside the page; later ones are only linked to."""


class PageFigure(NamedTuple):
    """A figure on the page."""

    name: str
    data: str
    width: int
    height: int
    alt: str
    text: str


class Part(NamedTuple):
    """Some figures under a heading, in groups: of a run each, or of all."""

    title: str
    metric: str
    text: str
    groups: list[tuple[str, list[PageFigure]]]


class Section(NamedTuple):
    """What the table of contents names."""

    title: str
    parts: list[Part]

    @property
    def id(self) -> str:
        """The anchor."""
        return re.sub(r"\W+", "-", self.title.lower())


class FigureWriter:
    """Saves figures, and takes them onto the page while there is room.

    Args:
        folder: where the files go.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._left = BUDGET
        self._names: set[str] = set()

    def add(self, drawn: FigureData, label: str = "") -> PageFigure:
        """Save a figure under its name and that of its run."""
        parts = (re.sub(r"[^\w.-]+", "-", part).strip("-") for part in (label, drawn.name))
        name = wanted = "-".join(part for part in parts if part)
        while name.lower() in self._names:
            name = f"{wanted}-{len(self._names)}"
        self._names.add(name.lower())
        data = base64.b64encode(save(drawn._replace(name=name), self.folder)).decode()
        if len(data) > self._left:
            data = ""
        self._left -= len(data)
        width, height = (round(96 * inches) for inches in drawn.figure.get_size_inches())
        return PageFigure(name, data, width, height, f"{drawn.alt} {drawn.text}", drawn.text)


def write_page(
    path: Path,
    runs: Sequence[Run],
    nulls: Sequence[pd.DataFrame],
    flags: Sequence[list[Flag]],
    sections: Sequence[Section],
) -> None:
    """Write ``index.html``."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("embedgeo.report", "."), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    labels = [run.label for run in runs]
    metrics = in_order([metric for run in runs for metric in run.metrics])
    page = environment.get_template("page.html.jinja").render(
        title=f"Geometry of the embeddings: {', '.join(labels)}",
        about=[{"label": run.label, "cells": _about(run)} for run in runs],
        flags=list(zip(labels, flags, strict=True)),
        overview=[
            (f"{run.label}: {name}", _overview(run, null, blocks))
            for run, null in zip(runs, nulls, strict=True)
            for name, blocks in run.blocks.items()
        ],
        linked={part.metric for section in sections for part in section.parts},
        sections=[section for section in sections if section.parts],
        glossary=[term(metric) for metric in metrics],
    )
    path.write_text(page, encoding="utf-8")


def _about(run: Run) -> list[str]:
    steps = run.steps
    dim = widths(run.values).dropna()
    rows = run.values["n"].dropna() if "n" in run.values else pd.Series(dtype=float)
    return [
        f"{len(steps):,}",
        f"{steps[0]:,} to {steps[-1]:,}",
        f"{len(run.layers)}: {run.layers[0]} to {run.layers[-1]}",
        _span(rows),
        _span(dim),
    ]


def _span(values: pd.Series) -> str:
    if values.empty:
        return "unknown"
    low, high = f"{values.min():,.0f}", f"{values.max():,.0f}"
    return low if low == high else f"{low} to {high}"


def _overview(run: Run, null: pd.DataFrame, blocks: Sequence[str]) -> list[list[Any]]:
    rows = []
    for metric in in_order(set(run.metrics) - {"anisotropy_null"}):
        mean = run.table(metric)[blocks].mean(axis=1).dropna()
        random = run.table(metric, null)[blocks].mean(axis=1).dropna()
        if len(mean):
            places = mean.argmin(), mean.argmax()
            between = [f"{number(mean.iloc[at])} ({mean.index[int(at)]:,})" for at in places]
            between = between if mean.nunique() > 1 else ["–", "–"]
            ends = [number(mean.iloc[at]) for at in (0, -1)]
            last = number(random.iloc[-1]) if len(random) else "–"
            rows.append([metric, term(metric).name, ends[0], *between, ends[1], last])
    return rows
