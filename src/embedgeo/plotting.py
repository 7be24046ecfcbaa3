"""The report's figures of one run, from whatever holds its results."""

from embedgeo.extras import require_extra

require_extra("report", "embedgeo.plot")

from typing import Literal

from matplotlib.figure import Figure

from embedgeo import drawing
from embedgeo.formatting import did_you_mean, listed
from embedgeo.glossary import in_order
from embedgeo.report import figures
from embedgeo.report.runs import Results, Run, runs_in, with_baseline

Kind = Literal["dynamics", "profile", "heatmap"]

_DRAWING = {
    "dynamics": figures.dynamics,
    "profile": figures.profile,
    "heatmap": figures.heatmap,
}


def plot(results: Results, kind: Kind, metric: str) -> Figure:
    """Draw one figure of one run.

    The kinds are:

    - ``"dynamics"``: a metric against the step, a line for each layer, and the mean over
      blocks. The dashed line is what isotropic Gaussian embeddings of the same number, width
      and size show, where that can be told from the numbers: a table without ``width``, such
      as that of `embedgeo.Geometry.to_frame`, gives it for few metrics.
    - ``"profile"``: a metric against the layer, a line for each step, the last one in black.
    - ``"heatmap"``: a metric as colour over steps and layers.

    Args:
        results: what was measured: a folder, a table, a history, a monitor or a `Geometry`. Of
            several runs, the rows of one, by the column ``run`` of `embedgeo.load_results`.
        kind: the kind of figure.
        metric: the key of the metric that is drawn.

    Returns:
        The figure, in the report's look.

    Raises:
        TypeError: ``results`` is something else.
        ValueError: there is no such kind; the metric was not measured; there are several runs.
        FileNotFoundError: there is no such folder.
    """
    if kind not in _DRAWING:
        raise ValueError(f"kind must be one of {listed([*_DRAWING])}; got {kind!r}.")
    run = _only_run(results)
    if metric not in run.values:
        raise ValueError(
            f"metric must be one that was measured at layers: {listed(in_order(run.metrics), 50)}; "
            f"got {metric!r}.{did_you_mean(metric, run.metrics)}"
        )
    with drawing.style():
        figure = _DRAWING[kind](with_baseline(run, metric), metric).figure
        figure.draw_without_rendering()  # the ticks are made now, in this look
    return figure


def _only_run(results: Results) -> Run:
    """The run of the results; ValueError where they have none, or several."""
    runs = [run for run in runs_in(results) if run.layers]
    if not runs:
        raise ValueError("results must hold values at layers; nothing was measured yet.")
    if len(runs) > 1:
        raise ValueError(
            f"a figure is of one run; results has {len(runs)}. Give the rows of one: "
            "table[table['run'] == name], where table = embedgeo.load_results(folder) and name is "
            "one of table['run']."
        )
    return runs[0]
