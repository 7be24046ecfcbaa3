"""The report's figures of one run, in a notebook or in axes of your own.

What was measured may be given as:

- a folder: of ``embedgeo sweep``, of `embedgeo.Geometry.save`, or of a monitored run,
- a monitor, or its ``history``,
- a table: of `embedgeo.load_results`, or of `embedgeo.Geometry.to_frame`,
- a `embedgeo.Geometry`; where there are several processes, every one must then call the function.

Each function returns a `matplotlib.figure.Figure`, which is no figure of pyplot's: a notebook shows it, once, as the
last value of a cell, and ``figure.savefig("name.png")`` writes it. With ``ax=`` it draws into these axes instead, where
the colour bar takes some of their room, and returns their figure: ``plt.show()`` shows that if ``plt.subplots()`` has
made it. The settings of the session (``matplotlib.rcParams``) stay as they are.
"""

from embedgeo.extras import require_extra

require_extra("report", "embedgeo.plot")

from collections.abc import Callable
from functools import partial
from typing import Literal

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from embedgeo.plot.given import Results, chosen_run, drawn, metrics_of, require_known
from embedgeo.plot.on_request import scales as scales
from embedgeo.plot.on_request import similarity as similarity
from embedgeo.plot.on_request import spectrum as spectrum
from embedgeo.report import figures, shares
from embedgeo.report import tokens as token_figures
from embedgeo.report.drawing import FigureData
from embedgeo.report.reading import with_baseline
from embedgeo.report.runs import Run
from embedgeo.results.glossary import term


def dynamics(
    results: Results, metric: str, *, ax: Axes | None = None, run: str | None = None, model: str | None = None
) -> Figure:
    """A metric against the step: a line for each layer, their mean over blocks, and that of random embeddings.

    The dashed line is what isotropic Gaussian embeddings of the same number, width and size show. As in the other
    figures it is there where it can be told from the numbers: a table without ``width``, such as that of
    `embedgeo.Geometry.to_frame`, gives it for few metrics.

    Args:
        results: what was measured: see `embedgeo.plot`.
        metric: the key of a metric.
        ax: axes to draw into; default: a new figure.
        run: which run, where there are several: its name.
        model: which model, where there are several.

    Returns:
        The figure.

    Raises:
        TypeError: ``results`` or ``ax`` is something else.
        ValueError: nothing was measured, not this metric, or of several runs.
        FileNotFoundError: there is no such folder.
    """
    return _of_metric(figures.dynamics, results, metric, ax, run, model)


def profile(
    results: Results, metric: str, *, ax: Axes | None = None, run: str | None = None, model: str | None = None
) -> Figure:
    """A metric against the layer: a line for each step, the last one in black; arguments as of `dynamics`."""
    return _of_metric(figures.profile, results, metric, ax, run, model)


def heatmap(
    results: Results, metric: str, *, ax: Axes | None = None, run: str | None = None, model: str | None = None
) -> Figure:
    """A metric as colour over steps and layers; arguments as of `dynamics`."""
    return _of_metric(figures.heatmap, results, metric, ax, run, model)


def composition(
    results: Results,
    by: Literal["layer", "step"] = "layer",
    *,
    ax: Axes | None = None,
    run: str | None = None,
    model: str | None = None,
) -> Figure:
    """What the mean squared norm Q is made of: the shares of M, V_W and V_B; other arguments as of `dynamics`.

    Args:
        results: what was measured: see `embedgeo.plot`.
        by: ``"layer"``, at the last step; or ``"step"``, averaged over blocks.
        ax: axes to draw into; default: a new figure.
        run: which run, where there are several: its name.
        model: which model, where there are several.

    Raises:
        TypeError, ValueError, FileNotFoundError: as `dynamics` does; M and V were not measured.
    """
    draw = {"layer": shares.shares_by_layer, "step": shares.shares_by_step}.get(by)
    if draw is None:
        raise ValueError(f'by must be "layer" or "step"; got {by!r}.')
    chosen = chosen_run(results, run, model)
    if not shares.has_shares(chosen):
        raise ValueError(f"composition needs M and V, as EmbeddingMoments has them; there are {metrics_of(chosen)}.")
    return drawn(partial(draw, chosen), ax)


def tokens(
    results: Results,
    layer: str | None = None,
    *,
    ax: Axes | None = None,
    run: str | None = None,
    model: str | None = None,
) -> Figure:
    """V against M, a point a token type, with the regression line, at the last step; other arguments as of `dynamics`.

    Args:
        results: a `Geometry` with `embedgeo.TokenMoments`, a folder with tables of token types (``--token-tables
            true``, ``token_tables=True``), or such a table: of `embedgeo.Geometry.token_tables`, or
            ``pd.DataFrame(metric.table())``.
        layer: which layer; default: at most four, side by side, and with ``ax`` the last block.
        ax: axes to draw into; default: a new figure.
        run: which run, where there are several: its name.
        model: which model, where there are several.

    Raises:
        TypeError, ValueError, FileNotFoundError: as `dynamics` does; there is no table of token types, or not of this
            layer.
    """
    chosen = chosen_run(results, run, model, token_types=True)
    if not chosen.tokens:
        raise ValueError(
            "tokens needs a table of token types: a Geometry with TokenMoments and token ids, its token_tables(), or a "
            "folder with tokens/ (--token-tables true, token_tables=True); there is none."
        )
    layers = [name for name in chosen.depth if name in set(chosen.tokens[max(chosen.tokens)]["layer"])]
    if layer is not None:
        require_known("layer", layer, layers)
    elif ax is not None:
        blocks = [block for blocks in chosen.blocks.values() for block in blocks if block in layers]
        layer = (blocks or layers)[-1]
    return drawn(partial(token_figures.mean_against_variance, chosen, [layer] if layer else ()), ax)


def _of_metric(
    draw: Callable[[Run, str, Axes | None], FigureData],
    results: Results,
    metric: str,
    ax: Axes | None,
    run: str | None,
    model: str | None,
) -> Figure:
    chosen = chosen_run(results, run, model, token_types=term(metric).group == "token types")
    if metric not in chosen.values:
        raise ValueError(f"metric must be one that was measured at layers: {metrics_of(chosen)}; got {metric!r}.")
    return drawn(partial(draw, with_baseline(chosen, metric), metric), ax)
