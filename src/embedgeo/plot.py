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

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from embedgeo.geometry import Geometry
from embedgeo.report import figures, shares
from embedgeo.report import tokens as token_figures
from embedgeo.report.drawing import FigureData, style
from embedgeo.report.reading import read_folder, runs_of_records, with_baseline
from embedgeo.report.runs import Run
from embedgeo.results.glossary import in_order, term
from embedgeo.results.wording import listed

Results = str | os.PathLike[str] | pd.DataFrame | Sequence[Mapping[str, Any]] | Geometry | Any
"""A folder, a table, a history, a `Geometry` or a monitor."""

_RULE = "results must be a folder, a table, a history, a monitor or a Geometry"


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
    chosen = _chosen(results, run, model)
    if not shares.has_shares(chosen):
        raise ValueError(f"composition needs M and V, as EmbeddingMoments has them; there are {_metrics(chosen)}.")
    return _drawn(partial(draw, chosen), ax)


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
    chosen = _chosen(results, run, model, token_types=True)
    if not chosen.tokens:
        raise ValueError(
            "tokens needs a table of token types: a Geometry with TokenMoments and token ids, its token_tables(), or a "
            "folder with tokens/ (--token-tables true, token_tables=True); there is none."
        )
    layers = [name for name in chosen.depth if name in set(chosen.tokens[max(chosen.tokens)]["layer"])]
    if layer is not None and layer not in layers:
        raise ValueError(f"layer must be one of {listed(layers)}; got {layer!r}.")
    if layer is None and ax is not None:
        blocks = [block for blocks in chosen.blocks.values() for block in blocks if block in layers]
        layer = (blocks or layers)[-1]
    return _drawn(partial(token_figures.mean_against_variance, chosen, [layer] if layer else ()), ax)


def _of_metric(
    draw: Callable[[Run, str, Axes | None], FigureData],
    results: Results,
    metric: str,
    ax: Axes | None,
    run: str | None,
    model: str | None,
) -> Figure:
    chosen = _chosen(results, run, model, token_types=term(metric).group == "token types")
    if metric not in chosen.values:
        raise ValueError(f"metric must be one that was measured at layers: {_metrics(chosen)}; got {metric!r}.")
    return _drawn(partial(draw, with_baseline(chosen, metric), metric), ax)


def _drawn(draw: Callable[..., FigureData], ax: Axes | None) -> Figure:
    if ax is not None and not isinstance(ax, Axes):
        raise TypeError(f"ax must be one of matplotlib's Axes; got {type(ax).__name__}.")
    with style():
        return draw(ax=ax).figure


def _chosen(results: Results, run: str | None, model: str | None, *, token_types: bool = False) -> Run:
    """The one run that is meant."""
    found = [each for each in _runs(results, token_types=token_types) if each.layers]
    if not found:
        raise ValueError("results must hold values at layers; nothing was measured yet.")
    for option, name, names_of in (("run", run, _labels), ("model", model, _models)):
        if name is not None:
            left = [each for each in found if name in names_of(each)]
            if not left:
                known = listed(list(dict.fromkeys(names_of(each)[0] or "one without a name" for each in found)))
                raise ValueError(f"{option} must be one of those in results: {known}; got {name!r}.")
            found = left
    if len(found) > 1:
        labels, models = ([names_of(each)[0] for each in found] for names_of in (_labels, _models))
        option, names = ("run", labels) if len(set(labels)) > 1 else ("model", models)
        raise ValueError(
            f"a figure is of one run, and results has {len(found)}: choose one by {option}=, of {listed(names)}."
        )
    return found[0]


def _labels(run: Run) -> list[str]:
    return [run.label]


def _models(run: Run) -> list[str]:
    """The names of the models in a run, with and without their authors."""
    models = [str(model) for model in run.checkpoints["model"].unique()]
    return [*models, *(Path(model).name for model in models)]


def _metrics(run: Run) -> str:
    return listed(in_order(run.metrics), 50)


def _runs(results: Results, *, token_types: bool) -> list[Run]:
    if isinstance(results, str | os.PathLike):
        folder = Path(results)
        if not folder.is_dir():
            raise FileNotFoundError(f"{_RULE}; there is no folder {folder}.")
        return read_folder(folder)
    if isinstance(results, Geometry):
        types = results.token_tables() if token_types else None
        return _of_records(results.records(), types)
    if isinstance(results, pd.DataFrame):
        return _of_token_types(results) if "token_id" in results else runs_of_records(results)
    records = getattr(results, "history", results)
    if not isinstance(records, Sequence) or not all(isinstance(record, Mapping) for record in records):
        raise TypeError(f"{_RULE}; got {type(results).__name__}.")
    return _of_records(records)


def _of_records(records: Sequence[Mapping[str, Any]], token_types: pd.DataFrame | None = None) -> list[Run]:
    return runs_of_records(pd.DataFrame(list(records)), token_types) if len(records) else []


def _of_token_types(table: pd.DataFrame) -> list[Run]:
    """A run of which only the table of token types is known."""
    missing = [column for column in ("n", "Q", "M", "V") if column not in table]
    if missing:
        raise ValueError(f"a table of token types must have n, Q, M and V; {', '.join(missing)} missing.")
    table = table if "layer" in table else table.assign(layer="all rows")
    counts = table.groupby("layer", sort=False)["n"].sum()
    records = pd.DataFrame({"layer": counts.index, "metric": "n", "value": counts.to_numpy()})
    return runs_of_records(records, table)
