"""The page: one HTML file with the figures inside, readable without a network and without JavaScript."""

import base64
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

import jinja2
import numpy as np
import pandas as pd
from markupsafe import Markup, escape

from embedgeo.formatting import listed, measured, number
from embedgeo.glossary import DRIFT, headlines, in_order, term
from embedgeo.metrics.processing import is_processed
from embedgeo.report import coordinates, drift, figures, spectra, tokens
from embedgeo.report.drawing import FigureData, TableData, save
from embedgeo.report.runs import Run
from embedgeo.results.records import loss_outliers

FEW_POINTS = 1000
"""Distinct rows below which TwoNN shows only trends."""

FEW_ROWS = 10
"""Rows per dimension below which a covariance spectrum is mostly noise."""

FEW_TYPES = 300
"""Token types below which the values over them show only trends."""

BIAS = 0.02
"""How far the plug-in share V_W / V may be below that of pairs before it is pointed out."""


class Flag(NamedTuple):
    """A finding that readers have to know.

    Attributes:
        title: its kind.
        text: what was found, and what follows from it.
        details: a line for each case.
    """

    title: str
    text: str
    details: list[str]


def flags(run: Run) -> list[Flag]:
    """The flags of a run that have cases."""
    checks = (
        *(_models, _failed, _duplicates, _loss_outliers, _nonfinite),
        *(_few_points, _few_rows, _few_types, _biased, _undefined),
    )
    return [flag for flag in (check(run) for check in checks) if flag.details]


def outlier_steps(run: Run) -> list[int]:
    """Steps whose loss is out of line with the losses of their neighbours."""
    if "loss" not in run.model:
        return []
    losses = run.model["loss"].dropna()
    names = {str(step): int(step) for step in losses.index}
    return [names[name] for name in loss_outliers(list(zip(names, losses, strict=True)))]


def _models(run: Run) -> Flag:
    text = (
        "The folder holds checkpoints of models that differ in their widths, depths or classes: they are not one "
        "training run, and each model is drawn apart, as a run of its own."
    )
    return Flag("Different models", text, [f"{series}: {names}" for series, names in run.apart.items()])


def _failed(run: Run) -> Flag:
    text = f"{_count(len(run.failures), 'checkpoint')} could not be measured: left out of all figures."
    return Flag("Failed checkpoints", text, [f"{name}: {reason}" for name, reason in run.failures.items()])


def _duplicates(run: Run) -> Flag:
    about = run.checkpoints.reset_index()
    by_hash = about.groupby("weights_sha256")["revision"].transform("first").where(about["weights_sha256"] != "", "")
    original = about["duplicate_of"].where(about["duplicate_of"] != "", by_hash)
    copies = about.assign(original=original)[(original != "") & (original != about["revision"])]
    groups = copies.groupby("original", sort=False)["revision"]
    text = (
        f"{len(copies)} of {len(about)} checkpoints have the weights of another one: what is drawn at their steps was "
        "measured on other weights than their names say."
    )
    if not run.has_steps:
        text = "The model has the weights of another one."
    return Flag("Duplicate checkpoints", text, [f"{', '.join(names)}: weights of {of}" for of, names in groups])


def _loss_outliers(run: Run) -> Flag:
    steps = outlier_steps(run)
    names, losses = run.checkpoints["revision"], run.model.get("loss", pd.Series(dtype=float))
    details = [f"{names[step]!s}: {losses[step]:.4g} nats per token" for step in steps]
    count = _count(len(steps), "checkpoint")
    text = f"The loss of {count} is out of line with its neighbours: wrong or broken weights?"
    return Flag("Loss outliers", text, details)


def _nonfinite(run: Run) -> Flag:
    rows = run.table("n_nonfinite") if "n_nonfinite" in run.values else pd.DataFrame()
    details = [
        f"{layer}: {_count(int(n.max()), 'row')}" + (f" at most, at {_steps(list(n.index))}" if run.has_steps else "")
        for layer in rows
        if len(n := rows[layer][rows[layer] > 0])
    ]
    text = "Rows with a NaN or an infinity were left out at these layers: a fault in the run."
    return Flag("Non-finite rows", text, details)


def _few_points(run: Run) -> Flag:
    is_known = {"n_points", "intrinsic_dimension"} <= set(run.values)
    details = _where_below(run, run.values["n_points"], FEW_POINTS, "distinct rows") if is_known else []
    text = (
        f"The intrinsic dimension rests on fewer than {FEW_POINTS:,} distinct rows at these layers: read trends only."
    )
    return Flag("Few rows for the intrinsic dimension", text, details)


def _few_rows(run: Run) -> Flag:
    is_known = {"n", "anisotropy"} <= set(run.values)
    details = _where_below(run, run.values["n"] / run.widths, FEW_ROWS, "rows for each dimension") if is_known else []
    text = (
        f"These layers have fewer than {FEW_ROWS} rows for each dimension: noise alone raises the anisotropy and "
        "lowers the participation ratio; compare with the dashed line."
    )
    return Flag("Few rows for the spectrum", text, details)


def _few_types(run: Run) -> Flag:
    is_known = "token_types_regressed" in run.values
    details = _where_below(run, run.values["token_types_regressed"], FEW_TYPES, "token types") if is_known else []
    text = (
        f"The C.V. of Q, the slopes and the R² over token types rest on fewer than {FEW_TYPES} types at these layers: "
        "read trends only."
    )
    return Flag("Few token types in the regressions", text, details)


def _biased(run: Run) -> Flag:
    of_pairs, plug_in = (run.values.get(key, run.widths * np.nan) for key in ("V_W_over_V_unbiased", "V_W_over_V"))
    off = (of_pairs - plug_in).groupby("layer").max().reindex(run.layers)
    details = [f"{layer}: up to {value:.2g} too low" for layer, value in off.items() if value > BIAS]
    text = "The plug-in estimate of V_W / V is too low, for tokens occur only a few times: read the one from pairs."
    return Flag("Few occurrences of each token", text, details)


def _undefined(run: Run) -> Flag:
    details = []
    for metric in run.metrics:
        missing = run.table(metric).isna()
        if metric == "intrinsic_dimension_std" or not missing.to_numpy().any():
            continue
        layers = [layer for layer in run.layers if missing[layer].any()]
        where = "all layers" if len(layers) == len(run.layers) else listed(layers, 4)
        when = f", {_steps(list(missing.index[missing.any(axis=1)]))}" if run.has_steps else ""
        details.append(f"{term(metric).name}: {where}{when}")
    text = "These are undefined (rows that do not vary, too few rows) or were not measured: gaps in the figures."
    return Flag("Missing numbers", text, details)


def _where_below(run: Run, values: pd.Series, least: float, what: str) -> list[str]:
    low = values[values < least].groupby("layer").min()
    return [f"{layer}: {low[layer]:,.3g} {what}" for layer in run.layers if layer in low]


def _steps(steps: Sequence[int]) -> str:
    first, last = min(steps), max(steps)
    return f"step {first:,}" if first == last else f"{len(steps)} steps from {first:,} to {last:,}"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}" + ("s" if number != 1 else "")


_UNKNOWN = "–"
_COLUMNS = ["first", "lowest (step)", "highest (step)", "last", "random, last"]
_ONE_STEP = ["last", "random, last"]
_FINAL = ["value", "random"]


Row = tuple[str, str, list[list[str]]]


class Overview(NamedTuple):
    """The table of means over blocks: groups of columns, what stands above them and each of them, and the rows.

    A row is the key of a metric, its name, and the cells of each group. Those to look at first are by themselves.
    """

    groups: list[tuple[str, list[str]]]
    rows: list[Row]
    more: list[Row]


def about(runs: Sequence[Run]) -> pd.DataFrame:
    """What was measured: a row of cells for each run; without steps or groups where no run has any."""
    table = pd.DataFrame([_about(run) for run in runs], [run.label for run in runs])
    without = [] if any(run.has_steps for run in runs) else ["measurements", "steps"]
    return table.drop(columns=without if any(run.group for run in runs) else [*without, "group"])


def _about(run: Run) -> dict[str, str]:
    steps = [f"{step:,}" for step in run.steps if run.has_steps]
    token_types, rows = (run.values.get(key, pd.Series(dtype=float)) for key in ("token_types", "n"))
    return {
        "group": run.group or _UNKNOWN,
        "measurements": f"{len(run.steps):,}",
        "steps": " to ".join(dict.fromkeys((steps[0], steps[-1]))) if steps else _UNKNOWN,
        "layers": f"{len(run.layers)}: {run.layers[0]} to {run.layers[-1]}" if run.layers else _UNKNOWN,
        "width": _span(run.widths),
        "parameters": _span(pd.Series([run.num_parameters])),
        "token types": _span(token_types),
        "rows each": _span(rows),
    }


def _span(values: pd.Series) -> str:
    known = values.dropna()
    return " to ".join(dict.fromkeys((f"{known.min():,.0f}", f"{known.max():,.0f}"))) if len(known) else _UNKNOWN


def overview(runs: Sequence[Run], *, has_errors: bool) -> Overview:
    """Means over blocks, the runs side by side; where that would be too wide, only the first and the last value.

    A final model has one value.
    """
    parts = {
        f"{run.label}: {name}" if len(run.blocks) > 1 or len(runs) == 1 else run.label: (run, _means(run, name))
        for run in runs
        for name in run.blocks
    }
    is_narrow = len(parts) <= (1 if has_errors else 2)
    shown = _COLUMNS if is_narrow else ["first", "last"]
    if all(len(run.steps) <= 1 for run in runs):
        shown = _ONE_STEP
    columns = [shown if run.has_steps else _FINAL if is_narrow else _FINAL[:1] for run, _ in parts.values()]
    nothing = dict.fromkeys([*_COLUMNS, *_FINAL], _UNKNOWN)
    rows = [
        (
            metric,
            term(metric).name,
            [
                [means.get(metric, nothing)[column] for column in each]
                for (_, means), each in zip(parts.values(), columns, strict=True)
            ],
        )
        for metric in in_order({metric for _, means in parts.values() for metric in means} - {"anisotropy_null"})
    ]
    first = [row for row in rows if row[0] in headlines()] or rows
    more = [row for row in rows if row not in first]
    return Overview(list(zip(parts, columns, strict=True)), first, more)


def _means(run: Run, name: str) -> dict[str, dict[str, str]]:
    """For each metric one of its means over blocks, by the columns of the overview."""
    blocks = run.blocks[name]
    cells = {}
    for metric in run.metrics:
        tables = (run.table(metric, values) for values in (run.values, run.baseline))
        mean, random = (table[blocks].mean(axis=1).dropna() for table in tables)
        errors = run.mean_errors(metric)[name].reindex(mean.index)
        if len(mean):
            places = (0, int(mean.argmin()), int(mean.argmax()), -1)
            first, lowest, highest, last = (measured(mean.iloc[i], errors.iloc[i]) for i in places)
            extremes = [f"{at} ({mean.index[i]:,})" for at, i in zip((lowest, highest), places[1:3], strict=True)]
            between = extremes if mean.nunique() > 1 else [_UNKNOWN, _UNKNOWN]
            expected = number(random.iloc[-1]) if len(random) else _UNKNOWN
            of_step = dict(zip(_COLUMNS, [first, *between, last, expected], strict=True))
            cells[metric] = of_step | dict(zip(_FINAL, [last, expected], strict=True))
    return cells


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
        in_full = metric in headlines() or len(metrics) <= _IN_FULL
        groups += by_run(lambda run: _of_metric(run, metric) if in_full else islice(_in_short(run, metric), 1))
        return Panel(term(metric).name, metric, term(metric).meaning, groups)

    def of_metrics(title: str, metrics: Sequence[str]) -> Plan:
        return [(title, partial(of_metric, metric)) for metric in metrics]

    def of_drift(metric: str) -> Panel:
        return Panel(term(metric).name, metric, term(metric).meaning, by_run(lambda run: drift.of_metric(run, metric)))

    def over_types() -> Panel:
        compared = [run for run in runs if all(run.varies(metric) for metric in figures.OVER_TYPES)]
        groups = [("", [writer.add(figures.compare_types(compared))])] if len(compared) > 1 else []
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
        *section("Intrinsic dimension over scales", _of_scales, figures.READING),
        *section("Loss", _of_loss, term("loss").meaning),
        *section("After-processing", _of_processed),
        *section("Spectrum", spectra.figures_of, spectra.ABOUT),
        *((_SAME_ROWS, partial(of_drift, metric)) for metric in varying if metric in DRIFT),
        *section(_SAME_ROWS, drift.matrices, drift.MATRICES),
        *section(
            "Token types",
            partial(_of_tokens, names=names),
            tokens.CONFOUNDED if any(map(tokens.has_words, runs)) else "",
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
    if figures.measured_scales(run):
        yield figures.scales_by_layer(run)
        if len(run.steps) > 1:
            yield figures.scales_by_step(run)


def _of_processed(run: Run) -> Iterator[FigureData]:
    if figures.processed_metrics(run):
        yield figures.after_processing(run)


def _of_shares(run: Run) -> Iterator[FigureData]:
    if figures.has_shares(run):
        if len(run.steps) > 1:
            yield figures.shares_by_step(run)
        yield figures.shares_by_layer(run)


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


def _in_short(run: Run, metric: str) -> Iterator[FigureData]:
    if run.varies(metric) and len(run.steps) > 1:
        yield figures.dynamics(run, metric, has_bar=False)
    yield from _of_metric(run, metric)


def _compared(runs: Sequence[Run], metric: str) -> Iterator[FigureData]:
    training = [run for run in runs if run.has_steps]
    if len(training) > 1 and any(len(run.steps) > 1 for run in training):
        yield figures.compare_dynamics(training, metric)
    yield figures.compare_profiles(runs, metric)


def _of_tokens(run: Run, names: Sequence[str] | None) -> Iterator[FigureData | TableData]:
    if run.tokens:
        yield tokens.mean_against_variance(run)
        yield tokens.statistics(run)
        yield tokens.against_frequency(run)
        yield tokens.histograms(run)
    if tokens.has_words(run):
        for layer in tokens.some_layers(run, run.tokens[max(run.tokens)]):
            yield tokens.words(run, layer)
    if run.projections:
        yield tokens.projection(run)
    if run.occurrences:
        yield tokens.occurrences(run)
    if run.tokens:
        yield tokens.raw_against_frequency(run)
        yield tokens.lengths_and_frequencies(run)
        yield from tokens.of_run(run, names)
