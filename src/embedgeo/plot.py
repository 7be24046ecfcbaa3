"""From what a figure is given to the one run that it shows, and to the figure."""

from embedgeo.extras import require_extra

require_extra("report", "embedgeo.plot")

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from embedgeo.drawing import FigureData, style
from embedgeo.formatting import listed
from embedgeo.geometry import Geometry
from embedgeo.glossary import in_order, term
from embedgeo.report import figures, spectra
from embedgeo.report import tokens as token_figures
from embedgeo.report.runs import Run, read_folder, runs_of_records, spectrum_shares, with_baseline

Results = str | os.PathLike[str] | pd.DataFrame | Sequence[Mapping[str, Any]] | Geometry | Any
"""A folder, a table, a history, a `Geometry` or a monitor."""

_RULE = "results must be a folder, a table, a history, a monitor or a Geometry"


def chosen_run(
    results: Results, run: str | None, model: str | None, *, token_types: bool = False, spectra: bool = False
) -> Run:
    """The one run that is meant.

    Args:
        results: what was measured.
        run: which run, where there are several: its name.
        model: which model, where there are several.
        token_types: whether tables of token types are needed, which a `Geometry` has to make.
        spectra: likewise.

    Raises:
        TypeError: ``results`` is something else.
        ValueError: nothing was measured, or it is of several runs.
        FileNotFoundError: there is no such folder.
    """
    found = [each for each in _runs(results, token_types=token_types, spectra=spectra) if each.layers]
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


def metrics_of(run: Run) -> str:
    """The names of the metrics of a run, for an error."""
    return listed(in_order(run.metrics), 50)


def _runs(results: Results, *, token_types: bool, spectra: bool) -> list[Run]:
    if isinstance(results, str | os.PathLike):
        folder = Path(results)
        if not folder.is_dir():
            raise FileNotFoundError(f"{_RULE}; there is no folder {folder}.")
        return read_folder(folder)
    if isinstance(results, Geometry):
        types = results.token_tables() if token_types else None
        runs = _of_records(results.records(), types)
        return [replace(each, spectra=_spectra(results, each)) for each in runs] if spectra else runs
    if isinstance(results, pd.DataFrame):
        return _of_token_types(results) if "token_id" in results else runs_of_records(results)
    records = getattr(results, "history", results)
    if not isinstance(records, Sequence) or not all(isinstance(record, Mapping) for record in records):
        raise TypeError(f"{_RULE}; got {type(results).__name__}.")
    return _of_records(records)


def _of_records(records: Sequence[Mapping[str, Any]], token_types: pd.DataFrame | None = None) -> list[Run]:
    return runs_of_records(pd.DataFrame(list(records)), token_types) if len(records) else []


def _spectra(geometry: Geometry, run: Run) -> dict[int, pd.DataFrame]:
    table = geometry.layer_tables().get("spectra")
    shares = None if table is None else spectrum_shares(table, run.depth)
    return {} if shares is None or shares.empty else {run.steps[-1]: shares}


def _of_token_types(table: pd.DataFrame) -> list[Run]:
    """A run of which only the table of token types is known."""
    missing = [column for column in ("n", "Q", "M", "V") if column not in table]
    if missing:
        raise ValueError(f"a table of token types must have n, Q, M and V; {', '.join(missing)} missing.")
    table = table if "layer" in table else table.assign(layer="all rows")
    counts = table.groupby("layer", sort=False)["n"].sum()
    records = pd.DataFrame({"layer": counts.index, "metric": "n", "value": counts.to_numpy()})
    return runs_of_records(records, table)


def drawn(draw: Callable[..., FigureData], ax: Axes | None) -> Figure:
    """The figure that a function of the report draws, into axes if there are any.

    Raises:
        TypeError: ``ax`` is something else.
    """
    if ax is not None and not isinstance(ax, Axes):
        raise TypeError(f"ax must be one of matplotlib's Axes; got {type(ax).__name__}.")
    with style():
        return draw(ax=ax).figure


def require_known(option: str, given: object, known: Sequence[object]) -> None:
    """Check an option: ValueError if it is none of the known ones, which are named."""
    if given not in known:
        raise ValueError(f"{option} must be one of {listed(known, 50) or 'none that are there'}; got {given!r}.")


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
    if by not in ("layer", "step"):
        raise ValueError(f'by must be "layer" or "step"; got {by!r}.')
    chosen = chosen_run(results, run, model)
    if not figures.has_composition(chosen):
        raise ValueError(f"composition needs M and V, as EmbeddingMoments has them; there are {metrics_of(chosen)}.")
    return drawn(partial(figures.composition, chosen, by), ax)


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


def spectrum(
    results: Results,
    layer: str | None = None,
    *,
    ax: Axes | None = None,
    run: str | None = None,
    model: str | None = None,
) -> Figure:
    """The eigenvalues of the covariance in descending order, beside those of random embeddings and their edge.

    Args:
        results: a `Geometry` with ``Anisotropy(spectrum=True)``, or a folder with spectra (``--spectrum true``).
        layer: a line for each step at this layer; default: a line for each layer at the last step.
        ax: axes to draw into; default: a new figure.
        run: which run, where there are several: its name.
        model: which model, where there are several.

    Raises:
        TypeError, ValueError, FileNotFoundError: as `dynamics` does; there are no spectra, or not of this layer.
    """
    chosen = chosen_run(results, run, model, spectra=True)
    if not chosen.spectra:
        raise ValueError(
            "spectrum needs all eigenvalues: a Geometry with Anisotropy(spectrum=True), or a folder with spectra/ "
            "(--spectrum true); there are none."
        )
    if layer is None:
        return drawn(partial(spectra.spectra_by_layer, chosen), ax)
    require_known("layer", layer, [x for x in chosen.depth if x in set(chosen.spectra[max(chosen.spectra)]["layer"])])
    return drawn(partial(spectra.spectra_by_step, chosen, [layer]), ax)


def scales(
    results: Results,
    by: Literal["layer", "step"] = "layer",
    *,
    ax: Axes | None = None,
    run: str | None = None,
    model: str | None = None,
) -> Figure:
    """The intrinsic dimension against the scale at which it is measured; other arguments as of `dynamics`.

    Args:
        results: what was measured: see `embedgeo.plot`; with ``IntrinsicDimension(estimator="gride")``.
        by: a line for each ``"layer"``, at the last step; or for each ``"step"``, averaged over blocks.
        ax: axes to draw into; default: a new figure.
        run: which run, where there are several: its name.
        model: which model, where there are several.

    Raises:
        TypeError, ValueError, FileNotFoundError: as `dynamics` does; the dimension was not measured at scales.
    """
    require_known("by", by, ["layer", "step"])
    chosen = chosen_run(results, run, model)
    if not figures.measured_scales(chosen):
        raise ValueError(
            'scales needs the intrinsic dimension at several scales, as IntrinsicDimension(estimator="gride") has it '
            f"(--extra scales); there are {metrics_of(chosen)}."
        )
    draw = figures.scales_by_layer if by == "layer" else figures.scales_by_step
    return drawn(partial(draw, with_baseline(chosen)), ax)


def similarity(
    results: Results,
    layer: str | None = None,
    *,
    step: int | None = None,
    ax: Axes | None = None,
    run: str | None = None,
    model: str | None = None,
) -> Figure:
    """Debiased linear CKA as a square of colours: of layers with layers at a step, or of steps with steps at a layer.

    Args:
        results: a folder in which ``embedgeo drift`` has compared the saved rows of a sweep.
        layer: which layer, for steps with steps.
        step: which step, for layers with layers; default: the last one compared.
        ax: axes to draw into; default: a new figure.
        run: which run, where there are several: its name.
        model: which model, where there are several.

    Raises:
        TypeError, ValueError, FileNotFoundError: as `dynamics` does; nothing was compared, or not there.
    """
    if layer is not None and step is not None:
        raise ValueError(f"similarity is of one layer or of one step; got layer={layer!r} and step={step!r}.")
    chosen = chosen_run(results, run, model)
    if chosen.cka.empty:
        raise ValueError(
            "similarity needs rows that were compared: a folder of a sweep with --save-samples true, and embedgeo "
            "drift on it; there are none."
        )
    if layer is not None:
        require_known("layer", layer, figures.layers_over_steps(chosen))
        return drawn(partial(figures.cka_of_steps, chosen, layer), ax)
    steps = figures.steps_over_layers(chosen)
    if step is not None or not steps:
        require_known("step", step, steps)
    return drawn(partial(figures.cka_of_layers, chosen, max(steps) if step is None else step), ax)
