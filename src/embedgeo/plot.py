"""The report's figures of one run, from whatever holds its results."""

from embedgeo.extras import require_extra

require_extra("report", "embedgeo.plot")

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from embedgeo.drawing import FigureData, figure_style
from embedgeo.formatting import did_you_mean, listed
from embedgeo.geometry import Geometry
from embedgeo.glossary import in_order, term
from embedgeo.report import figures
from embedgeo.report.figures import By
from embedgeo.report.runs import Run, read_folder, runs_of_records, spectrum_shares, with_baseline
from embedgeo.report.tokens import mean_against_variance, require_examples
from embedgeo.report.variance import spectra_by_layer, spectra_by_step

Results = str | os.PathLike[str] | pd.DataFrame | Sequence[Mapping[str, Any]] | Geometry | Any
"""A folder, a table, a history, a `Geometry` or a monitor."""

_Draw = Callable[[Run, str, Axes | None], FigureData]
_RULE = "results must be a folder, a table, a history, a monitor or a Geometry"


def dynamics(
    results: Results,
    metric: str,
    *,
    ax: Axes | None = None,
    title: str | None = None,
    figsize: tuple[float, float] | None = None,
    compact: bool = False,
    run: str | None = None,
    model: str | None = None,
) -> Figure:
    """A metric against the step: a line for each layer, their mean over blocks, and that of
    Gaussian rows.

    The dashed line is what isotropic Gaussian embeddings of the same number, width and size show.
    As in the other figures it is there where it can be told from the numbers: a table without
    ``width``, such as that of `embedgeo.Geometry.to_frame`, gives it for few metrics.

    Args:
        results: what was measured: see `embedgeo.plot`.
        metric: the key of a metric.
        ax: axes to draw into; default: a new figure. Texts have the fonts and sizes of
            ``matplotlib.rcParams``.
        title: in place of the figure's own; ``""`` leaves it out, as where a caption says it.
        figsize: width and height of a new figure, in inches. Texts have 9.5 points and their
            family, unless ``rcParams`` have other than matplotlib's defaults.
        compact: make a new figure for one column of a paper: 3.25 × 2.5 inches unless ``figsize``
            says otherwise, with texts of 7 points. Several panels, as of `tokens`, are as many
            times 2.6 inches wide.
        run: which run, where there are several: its name.
        model: which model, where there are several.

    Returns:
        The figure.

    Raises:
        TypeError: ``results``, ``ax`` or ``title`` is something else.
        ValueError: nothing was measured, not this metric, or of several runs; ``figsize`` has no
            room for axes; ``figsize`` or ``compact`` with ``ax``.
        FileNotFoundError: there is no such folder.
    """
    with figure_style(ax, title, figsize, compact=compact):
        return _metric_figure(figures.dynamics, results, metric, ax, run, model)


def profile(
    results: Results,
    metric: str,
    *,
    ax: Axes | None = None,
    title: str | None = None,
    figsize: tuple[float, float] | None = None,
    compact: bool = False,
    run: str | None = None,
    model: str | None = None,
) -> Figure:
    """A metric against the layer: a line for each step, the last one in black; arguments as of
    `dynamics`.
    """
    with figure_style(ax, title, figsize, compact=compact):
        return _metric_figure(figures.profile, results, metric, ax, run, model)


def heatmap(
    results: Results,
    metric: str,
    *,
    ax: Axes | None = None,
    title: str | None = None,
    figsize: tuple[float, float] | None = None,
    compact: bool = False,
    run: str | None = None,
    model: str | None = None,
) -> Figure:
    """A metric as colour over steps and layers; arguments as of `dynamics`."""
    with figure_style(ax, title, figsize, compact=compact):
        return _metric_figure(figures.heatmap, results, metric, ax, run, model)


def composition(
    results: Results,
    by: By = "layer",
    *,
    ax: Axes | None = None,
    title: str | None = None,
    figsize: tuple[float, float] | None = None,
    compact: bool = False,
    run: str | None = None,
    model: str | None = None,
) -> Figure:
    """Composition of the mean squared norm Q: the shares of M, V_W and V_B; other arguments as of
    `dynamics`.

    ``by`` is ``"layer"``, at the last step; or ``"step"``, averaged over blocks.

    Raises:
        TypeError, ValueError, FileNotFoundError: as `dynamics` does; M and V were not measured.
    """
    if by not in get_args(By):
        raise ValueError(f'by must be "layer" or "step"; got {by!r}.')
    chosen = _chosen_run(results, run, model, ax)
    if not figures.has_composition(chosen):
        raise ValueError(
            f"composition needs M and V, as EmbeddingMoments has them; there are "
            f"{_metrics(chosen)}."
        )
    with figure_style(ax, title, figsize, compact=compact):
        return figures.composition(chosen, by, ax).figure


def tokens(
    results: Results,
    layer: str | None = None,
    *,
    layers: int = 4,
    examples: Sequence[str] = (),
    ax: Axes | None = None,
    title: str | None = None,
    figsize: tuple[float, float] | None = None,
    compact: bool = False,
    run: str | None = None,
    model: str | None = None,
) -> Figure:
    """V against M, a point a token type, with the regression line, at the last step; other
    arguments as of `dynamics`.

    ``results`` are a `Geometry` with `embedgeo.TokenMoments`, a folder with tables of token types
    (``--token-tables true``, ``token_tables=True``), or such a table: of
    `embedgeo.Geometry.token_tables`, or ``pd.DataFrame(metric.table())``. Without ``layer`` there
    are at most as many as ``layers`` says, evenly spaced over the depth (5 of 13 are 0, 3, 6, 9 and
    12); with ``ax``, the last block. Token types with the texts in ``examples``, as ``("once",
    "winked")``, are named; of a table without texts they are its token ids, as text.

    Raises:
        TypeError, ValueError, FileNotFoundError: as `dynamics` does; there is no table of token
            types, or not of this layer, or without one of the ``examples``; ``layers`` is less than
            1.
    """
    if layers < 1:
        raise ValueError(f"layers must be at least 1 to draw at; got {layers}.")
    chosen = replace(_chosen_run(results, run, model, ax, tables="tokens"), num_drawn=layers)
    if not chosen.tokens:
        raise ValueError(
            "tokens needs a table of token types: a Geometry with TokenMoments and token ids, its "
            "token_tables(), or a "
            "folder with tokens/ (--token-tables true, token_tables=True); there is none."
        )
    present = chosen.layers_in(chosen.token_types[1])
    if layer is not None:
        _require_known("layer", layer, present)
    elif ax is not None:
        layer = ([name for name in present if name in chosen.all_blocks] or present)[-1]
    if examples:
        require_examples([chosen], examples)
    with figure_style(ax, title, figsize, compact=compact):
        return mean_against_variance(chosen, [layer] if layer else (), ax, examples).figure


def spectrum(
    results: Results,
    layer: str | None = None,
    *,
    ax: Axes | None = None,
    title: str | None = None,
    figsize: tuple[float, float] | None = None,
    compact: bool = False,
    run: str | None = None,
    model: str | None = None,
) -> Figure:
    """The eigenvalues of the covariance in descending order, beside those of Gaussian rows and
    their edge.

    ``results`` are a `Geometry` with ``Anisotropy(spectrum=True)``, or a folder with spectra
    (``--spectrum true``). There is a line for each step at ``layer``; without it, for each layer at
    the last step. Other arguments are as of `dynamics`.

    Raises:
        TypeError, ValueError, FileNotFoundError: as `dynamics` does; there are no spectra, or not
            of this layer.
    """
    chosen = _chosen_run(results, run, model, ax, tables="spectra")
    if not chosen.spectra:
        raise ValueError(
            "spectrum needs all eigenvalues: a Geometry with Anisotropy(spectrum=True), or a "
            "folder with spectra/ "
            "(--spectrum true); there are none."
        )
    if layer is not None:
        _require_known("layer", layer, chosen.layers_in(chosen.spectra[max(chosen.spectra)]))
    with figure_style(ax, title, figsize, compact=compact):
        return (
            spectra_by_layer(chosen, ax) if layer is None else spectra_by_step(chosen, [layer], ax)
        ).figure


def scales(
    results: Results,
    by: By = "layer",
    *,
    ax: Axes | None = None,
    title: str | None = None,
    figsize: tuple[float, float] | None = None,
    compact: bool = False,
    run: str | None = None,
    model: str | None = None,
) -> Figure:
    """The intrinsic dimension against the scale at which it is measured; other arguments as of
    `dynamics`.

    ``results`` are measured with ``IntrinsicDimension(estimator="gride")``. There is a line for
    each ``by``: for each ``"layer"``, at the last step; or for each ``"step"``, averaged over
    blocks.

    Raises:
        TypeError, ValueError, FileNotFoundError: as `dynamics` does; the dimension was not measured
            at scales.
    """
    _require_known("by", by, get_args(By))
    chosen = _chosen_run(results, run, model, ax)
    if not figures.measured_scales(chosen):
        raise ValueError(
            "scales needs the intrinsic dimension at several scales, as "
            'IntrinsicDimension(estimator="gride") has it '
            f"(--extra scales); there are {_metrics(chosen)}."
        )
    draw = figures.scales_by_layer if by == "layer" else figures.scales_by_step
    with figure_style(ax, title, figsize, compact=compact):
        return draw(with_baseline(chosen), ax).figure


def similarity(
    results: Results,
    layer: str | None = None,
    *,
    step: int | None = None,
    ax: Axes | None = None,
    title: str | None = None,
    figsize: tuple[float, float] | None = None,
    compact: bool = False,
    run: str | None = None,
    model: str | None = None,
) -> Figure:
    """Debiased linear CKA as a square of colours: of layers with layers at a step, or of steps with
    steps at a layer.

    ``results`` are a folder in which ``embedgeo drift`` has compared the saved rows of a sweep.
    With ``layer``, steps are compared with steps; without it, layers with layers, at ``step`` or
    the last one compared. Other arguments are as of `dynamics`.

    Raises:
        TypeError, ValueError, FileNotFoundError: as `dynamics` does; nothing was compared, or not
            there.
    """
    if layer is not None and step is not None:
        raise ValueError(
            f"similarity is of one layer or of one step; got layer={layer!r} and step={step!r}."
        )
    chosen = _chosen_run(results, run, model, ax)
    if chosen.cka.empty:
        raise ValueError(
            "similarity needs rows that were compared: a folder of a sweep with --save-samples "
            "true, and embedgeo "
            "drift on it; there are none."
        )
    steps = figures.steps_over_layers(chosen)
    if layer is not None:
        _require_known("layer", layer, figures.layers_over_steps(chosen))
    elif step is not None or not steps:
        _require_known("step", step, steps)
    with figure_style(ax, title, figsize, compact=compact):
        if layer is not None:
            return figures.cka_of_steps(chosen, layer, ax).figure
        return figures.cka_of_layers(chosen, max(steps) if step is None else step, ax).figure


def _metric_figure(
    draw: _Draw, results: Results, metric: str, ax: Axes | None, run: str | None, model: str | None
) -> Figure:
    tables: Literal["tokens", ""] = "tokens" if term(metric).group == "token types" else ""
    chosen = _chosen_run(results, run, model, ax, tables)
    if metric not in chosen.values:
        raise ValueError(
            f"metric must be one that was measured at layers: {_metrics(chosen)}; got {metric!r}."
            f"{did_you_mean(metric, chosen.metrics)}"
        )
    return draw(with_baseline(chosen, metric), metric, ax).figure


def _metrics(run: Run) -> str:
    return listed(in_order(run.metrics), 50)


def _require_known(option: str, value: object, known: Sequence[object]) -> None:
    if value not in known:
        raise ValueError(
            f"{option} must be one of {listed(known, 50) or 'none that are there'}; got {value!r}."
        )


def _chosen_run(
    results: Results,
    run: str | None,
    model: str | None,
    ax: Axes | None,
    tables: Literal["tokens", "spectra", ""] = "",
) -> Run:
    """The one run that is meant, with those tables that a `Geometry` has to make, if they are
    named.
    """
    if ax is not None and not isinstance(ax, Axes):
        raise TypeError(f"ax must be one of matplotlib's Axes; got {type(ax).__name__}.")
    runs = [each for each in _runs(results, tables) if each.layers]
    if not runs:
        raise ValueError("results must hold values at layers; nothing was measured yet.")
    for option, name, names_of in (
        ("run", run, lambda each: [each.label]),
        ("model", model, _models),
    ):
        if name is not None:
            known = listed(
                list(dict.fromkeys(names_of(each)[0] or "one without a name" for each in runs))
            )
            runs = [each for each in runs if name in names_of(each)]
            if not runs:
                raise ValueError(
                    f"{option} must be one of those in results: {known}; got {name!r}."
                )
    if len(runs) > 1:
        labels = [each.label for each in runs]
        option, names = (
            ("run", labels)
            if len(set(labels)) > 1
            else ("model", [_models(each)[0] for each in runs])
        )
        raise ValueError(
            f"a figure is of one run, and results has {len(runs)}: choose one by {option}=, of "
            f"{listed(names)}."
        )
    return runs[0]


def _models(run: Run) -> list[str]:
    models = [str(model) for model in run.checkpoints["model"].unique()]
    return [*models, *(Path(model).name for model in models)]


def _runs(results: Results, tables: Literal["tokens", "spectra", ""]) -> list[Run]:
    if isinstance(results, str | os.PathLike):
        folder = Path(results)
        if not folder.is_dir():
            raise FileNotFoundError(f"{_RULE}; there is no folder {folder}.")
        return read_folder(folder)
    if isinstance(results, Geometry):
        runs = _runs_of_history(
            results.records(), results.token_tables() if tables == "tokens" else None
        )
        spectra = results.layer_tables().get("spectra") if tables == "spectra" else None
        if spectra is None:
            return runs
        shares = [(run, spectrum_shares(spectra, run.depth)) for run in runs]
        return [
            replace(run, spectra={run.steps[-1]: share}) if len(share) else run
            for run, share in shares
        ]
    if isinstance(results, pd.DataFrame):
        return _runs_of_token_types(results) if "token_id" in results else runs_of_records(results)
    records = getattr(results, "history", results)
    if not isinstance(records, Sequence) or not all(
        isinstance(record, Mapping) for record in records
    ):
        raise TypeError(f"{_RULE}; got {type(results).__name__}.")
    return _runs_of_history(records)


def _runs_of_history(
    records: Sequence[Mapping[str, Any]], token_types: pd.DataFrame | None = None
) -> list[Run]:
    return runs_of_records(pd.DataFrame(list(records)), token_types) if len(records) else []


def _runs_of_token_types(table: pd.DataFrame) -> list[Run]:
    missing = [column for column in ("n", "Q", "M", "V") if column not in table]
    if missing:
        raise ValueError(
            f"a table of token types must have n, Q, M and V; {', '.join(missing)} missing."
        )
    table = table if "layer" in table else table.assign(layer="all rows")
    counts = table.groupby("layer", sort=False)["n"].sum()
    records = pd.DataFrame({"layer": counts.index, "metric": "n", "value": counts.to_numpy()})
    return runs_of_records(records, table)
