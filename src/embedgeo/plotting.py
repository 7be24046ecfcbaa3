"""The report's figures of one run, from whatever holds its results."""

from embedgeo.extras import require_extra

require_extra("report", "embedgeo.plot")

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import matplotlib as mpl
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from embedgeo import drawing
from embedgeo.drawing import FigureData
from embedgeo.formatting import did_you_mean, listed
from embedgeo.geometry import Geometry
from embedgeo.glossary import in_order, term
from embedgeo.report import figures
from embedgeo.report.runs import Run, read_folder, runs_of_records, with_baseline
from embedgeo.report.token_types import mean_against_variance, types_of
from embedgeo.report.variance import read_spectrum, spectra_figure

Results = str | os.PathLike[str] | pd.DataFrame | Sequence[Mapping[str, Any]] | Geometry | Any
"""A folder, a table, a history, a `Geometry` or a monitor."""

Kind = Literal["dynamics", "profile", "heatmap", "composition", "tokens", "spectrum"]

_RULE = "results must be a folder, a table, a history, a monitor or a Geometry"
_OF_METRIC = {
    "dynamics": figures.dynamics,
    "profile": figures.profile,
    "heatmap": figures.heatmap,
}
_NEEDS = {
    "composition": "M and V, as EmbeddingMoments has them",
    "tokens": (
        "a table of token types: a Geometry with TokenMoments and token ids, or a folder with "
        "tokens/ (--token-tables true, token_tables=True)"
    ),
    "spectrum": (
        "all eigenvalues: a Geometry with Anisotropy(spectrum=True), or a folder with spectra/ "
        "(--spectrum true)"
    ),
}


def plot(
    results: Results,
    kind: Kind,
    metric: str = "",
    *,
    by: figures.By = "layer",
    layer: str | None = None,
    ax: Axes | None = None,
    run: str | None = None,
) -> Figure:
    """Draw one figure of one run.

    The kinds are:

    - ``"dynamics"``: a metric against the step, a line for each layer, and the mean over
      blocks. The dashed line is what isotropic Gaussian embeddings of the same number, width
      and size show, where that can be told from the numbers: a table without ``width``, such
      as that of `embedgeo.Geometry.to_frame`, gives it for few metrics.
    - ``"profile"``: a metric against the layer, a line for each step, the last one in black.
    - ``"heatmap"``: a metric as colour over steps and layers.
    - ``"composition"``: the shares of M, V_W and V_B in the mean squared norm Q, by layer at
      the last step, or ``by="step"``, averaged over blocks.
    - ``"tokens"``: V against M at the last step, a point for each token type, with the
      regression line. ``results`` are a `Geometry` with `embedgeo.TokenMoments`, or a folder with
      tables of token types.
    - ``"spectrum"``: the eigenvalues of the covariance in descending order, beside those of
      Gaussian rows: a line for each layer at the last step.

    Args:
        results: what was measured: a folder, a table, a history, a monitor or a `Geometry`.
        kind: the kind of figure.
        metric: the key of the metric that is drawn, of the first three kinds.
        by: of composition, what stands side by side.
        layer: of tokens, the only layer to draw. Token types without it are drawn
            at four layers; in given axes at the last block.
        ax: axes to draw into; default: a new figure in the report's look. Texts in given axes have
            the fonts and sizes of ``matplotlib.rcParams``.
        run: which run, where there are several: its name, or that of its model.

    Returns:
        The figure.

    Raises:
        TypeError: ``results`` is something else.
        ValueError: there is no such kind; what it shows was not measured, or of several runs.
        FileNotFoundError: there is no such folder.
    """
    _require_known("kind", kind, [*_OF_METRIC, *_NEEDS])
    _require_known("by", by, ["layer", "step"])
    has_types = kind == "tokens" or (kind in _OF_METRIC and term(metric).group == "token types")
    tables = "tokens" if has_types else "spectra" if kind == "spectrum" else ""
    chosen = _chosen_run(_runs(results, tables), run)
    if ax is not None:
        with mpl.rc_context({"text.parse_math": False}):
            return _draw(chosen, kind, metric, by, layer, ax).figure
    with drawing.style():
        figure = _draw(chosen, kind, metric, by, layer, None).figure
        figure.draw_without_rendering()  # the ticks are made now, in this look
    return figure


def _draw(
    run: Run, kind: Kind, metric: str, by: figures.By, layer: str | None, ax: Axes | None
) -> FigureData:
    measured = listed(in_order(run.metrics), 50)
    if kind in _OF_METRIC:
        if metric not in run.values:
            raise ValueError(
                f"metric must be one that was measured at layers: {measured}; "
                f"got {metric!r}.{did_you_mean(metric, run.metrics)}"
            )
        return _OF_METRIC[kind](with_baseline(run, metric), metric, ax)
    if kind == "composition" and figures.has_composition(run):
        return figures.composition(run, by, ax)
    if kind == "spectrum" and (spectrum := read_spectrum(run)):
        return spectra_figure(run, *spectrum, ax)
    if kind == "tokens" and (types := types_of(run)):
        present = run.layers_in(types[1])
        layers = run.layers_to_draw(types[1])
        if layer is not None:
            _require_known("layer", layer, present)
            layers = [layer]
        elif ax is not None:
            layers = ([name for name in present if name in run.all_blocks] or present)[-1:]
        return mean_against_variance(run, *types, layers, ax)
    raise ValueError(f"{kind} needs {_NEEDS[kind]}; there are {measured}.")


def _require_known(option: str, value: object, known: Sequence[object]) -> None:
    if value not in known:
        raise ValueError(
            f"{option} must be one of {listed(known, 50) or 'none that are there'}; got {value!r}."
        )


def _chosen_run(runs: Sequence[Run], name: str | None) -> Run:
    """The one run that is meant, by its label or by the name of its model."""
    runs = [run for run in runs if run.layers]
    if not runs:
        raise ValueError("results must hold values at layers; nothing was measured yet.")
    known = listed(list(dict.fromkeys(each for run in runs for each in _names(run))))
    if name is not None:
        runs = [run for run in runs if name in _names(run)]
        if not runs:
            raise ValueError(f"run must be one of those in results: {known}; got {name!r}.")
    if len(runs) > 1:
        raise ValueError(
            f"a figure is of one run, and results has {len(runs)}: choose one by run=, of {known}."
        )
    return runs[0]


def _names(run: Run) -> list[str]:
    return [run.label, *run.models, *(Path(model).name for model in run.models)]


def _runs(results: Results, tables: str) -> list[Run]:
    """The runs in results, with those tables that a `Geometry` has to make, if they are named."""
    if isinstance(results, str | os.PathLike):
        return read_folder(Path(results))
    made = dict[str, pd.DataFrame]()
    if isinstance(results, Geometry):
        if tables:
            made = (
                {tables: results.token_tables()} if tables == "tokens" else results.layer_tables()
            )
        results = results.records()
    if isinstance(results, pd.DataFrame):
        return runs_of_records(results)
    records = getattr(results, "history", results)
    if not isinstance(records, Sequence) or not all(
        isinstance(record, Mapping) for record in records
    ):
        raise TypeError(f"{_RULE}; got {type(results).__name__}.")
    return runs_of_records(pd.DataFrame(list(records)), **made) if len(records) else []
