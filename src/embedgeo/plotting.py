"""The report's figures of one run, from whatever holds its results."""

from embedgeo.extras import require_extra

require_extra("report", "embedgeo.plot")

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from matplotlib.figure import Figure

from embedgeo import drawing
from embedgeo.drawing import FigureData
from embedgeo.formatting import did_you_mean, listed
from embedgeo.glossary import in_order
from embedgeo.report import figures
from embedgeo.report.runs import Results, Run, runs_in, with_baseline

Kind = Literal["dynamics", "profile", "heatmap", "composition"]

_OF_METRIC = {
    "dynamics": figures.dynamics,
    "profile": figures.profile,
    "heatmap": figures.heatmap,
}


def plot(
    results: Results,
    kind: Kind,
    metric: str = "",
    *,
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
      the last step.

    Args:
        results: what was measured: a folder, a table, a history, a monitor or a `Geometry`.
        kind: the kind of figure.
        metric: the key of the metric that is drawn, of the first three kinds.
        run: which run, where there are several: its name, or that of its model.

    Returns:
        The figure, in the report's look.

    Raises:
        TypeError: ``results`` is something else.
        ValueError: there is no such kind; what it shows was not measured, or of several runs.
        FileNotFoundError: there is no such folder.
    """
    kinds = [*_OF_METRIC, "composition"]
    if kind not in kinds:
        raise ValueError(f"kind must be one of {listed(kinds)}; got {kind!r}.")
    chosen = _chosen_run(runs_in(results), run)
    with drawing.style():
        figure = _draw(chosen, kind, metric).figure
        figure.draw_without_rendering()  # the ticks are made now, in this look
    return figure


def _draw(run: Run, kind: Kind, metric: str) -> FigureData:
    measured = listed(in_order(run.metrics), 50)
    if kind in _OF_METRIC:
        if metric not in run.values:
            raise ValueError(
                f"metric must be one that was measured at layers: {measured}; "
                f"got {metric!r}.{did_you_mean(metric, run.metrics)}"
            )
        return _OF_METRIC[kind](with_baseline(run, metric), metric)
    if not figures.has_composition(run):
        raise ValueError(
            f"{kind} needs M and V, as EmbeddingMoments has them; there are {measured}."
        )
    return figures.composition(run)


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
