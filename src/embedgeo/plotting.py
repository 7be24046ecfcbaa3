"""The report's figures of one run, from whatever holds its results."""

from embedgeo.extras import require_extra

require_extra("report", "embedgeo.plot")

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NoReturn

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from embedgeo.drawing import FigureData, figure_style
from embedgeo.formatting import did_you_mean, listed
from embedgeo.geometry import Geometry
from embedgeo.glossary import in_order, term
from embedgeo.report import figures
from embedgeo.report.runs import Run, read_folder, runs_of_records, spectrum_shares, with_baseline
from embedgeo.report.tokens import mean_against_variance, require_examples
from embedgeo.report.variance import spectra_by_layer, spectra_by_step

Results = str | os.PathLike[str] | pd.DataFrame | Sequence[Mapping[str, Any]] | Geometry | Any
"""A folder, a table, a history, a `Geometry` or a monitor."""

Kind = Literal[
    "dynamics", "profile", "heatmap", "composition", "tokens", "spectrum", "scales", "similarity"
]

_RULE = "results must be a folder, a table, a history, a monitor or a Geometry"
_OF_METRIC = {
    "dynamics": figures.dynamics,
    "profile": figures.profile,
    "heatmap": figures.heatmap,
}
_OPTIONS = {  # that other kinds do not have
    **dict.fromkeys(_OF_METRIC, ("metric",)),
    "composition": ("by",),
    "tokens": ("layer", "layers", "examples"),
    "spectrum": ("layer",),
    "scales": ("by",),
    "similarity": ("layer", "step"),
}
_NEEDS = {
    "composition": (figures.has_composition, "M and V, as EmbeddingMoments has them"),
    "tokens": (
        lambda run: run.tokens,
        "a table of token types: a Geometry with TokenMoments and token ids, its token_tables(), "
        "or a folder with tokens/ (--token-tables true, token_tables=True)",
    ),
    "spectrum": (
        lambda run: run.spectra,
        "all eigenvalues: a Geometry with Anisotropy(spectrum=True), or a folder with spectra/ "
        "(--spectrum true)",
    ),
    "scales": (
        figures.measured_scales,
        "the intrinsic dimension at several scales, as "
        'IntrinsicDimension(estimator="gride") has it (--extra scales)',
    ),
    "similarity": (
        lambda run: not run.cka.empty,
        "rows that were compared: a folder of a sweep with --save-samples true, and embedgeo "
        "drift on it",
    ),
}


class Plot:
    """The report's figures of one run: `embedgeo.plot`, which is called."""

    def __call__(
        self,
        results: Results,
        kind: Kind,
        metric: str = "",
        *,
        by: Literal["layer", "step"] = "layer",
        layer: str | None = None,
        step: int | None = None,
        layers: int = 4,
        examples: Sequence[str] = (),
        ax: Axes | None = None,
        title: str | None = None,
        figsize: tuple[float, float] | None = None,
        compact: bool = False,
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
          regression line. ``results`` are a `Geometry` with `embedgeo.TokenMoments`, a folder with
          tables of token types, or such a table.
        - ``"spectrum"``: the eigenvalues of the covariance in descending order, beside those of
          Gaussian rows: a line for each layer at the last step, or for each step at ``layer``.
        - ``"scales"``: the intrinsic dimension against the scale at which it is measured: a line
          for each layer at the last step, or ``by="step"``, averaged over blocks.
        - ``"similarity"``: debiased linear CKA as colours: of layers with layers at ``step`` (by
          default the last one compared), or of steps with steps at ``layer``. ``results`` are a
          folder in which ``embedgeo drift`` has compared the saved rows of a sweep.

        Args:
            results: what was measured: a folder, a table, a history, a monitor or a `Geometry`.
            kind: the kind of figure.
            metric: the key of the metric that is drawn, of the first three kinds.
            by: of composition and scales, what stands side by side.
            layer: of tokens, spectrum and similarity, the only layer to draw. Token types without
                it are drawn at several layers; in given axes at the last block.
            step: of similarity, the step.
            layers: of tokens, at how many layers at most, evenly spaced over the depth (5 of 13
                are 0, 3, 6, 9 and 12).
            examples: of tokens, texts of token types to name, as ``("once", "winked")``; of a
                table without texts their ids.
            ax: axes to draw into; default: a new figure. Texts have the fonts and sizes of
                ``matplotlib.rcParams``.
            title: in place of the figure's own; ``""`` leaves it out.
            figsize: width and height of a new figure, in inches. Texts have 9.5 points and their
                family, unless ``rcParams`` have other than matplotlib's defaults.
            compact: make a new figure for one column of a paper: 3.25 × 2.5 inches unless
                ``figsize`` says otherwise, with texts of 7 points.
            run: which run, where there are several: its name, or that of its model.

        Returns:
            The figure.

        Raises:
            TypeError: ``results``, ``ax`` or ``title`` is something else.
            ValueError: there is no such kind, or it has no such option; what it shows was not
                measured, or of several runs; ``figsize`` has no room for axes; ``figsize`` or
                ``compact`` with ``ax``.
            FileNotFoundError: there is no such folder.
        """
        _require_known("kind", kind, [*_OPTIONS])
        given = {
            "metric": metric != "",
            "by": by != "layer",
            "layer": layer is not None,
            "step": step is not None,
            "layers": layers != 4,
            "examples": len(examples) > 0,
        }
        for option, is_given in given.items():
            if is_given and option not in _OPTIONS[kind]:
                raise ValueError(f"{kind} has no {option}; it is of other kinds of figures.")
        if ax is not None and not isinstance(ax, Axes):
            raise TypeError(f"ax must be one of matplotlib's Axes; got {type(ax).__name__}.")
        _require_known("by", by, ["layer", "step"])
        if layer is not None and step is not None:
            raise ValueError(
                f"{kind} is of one layer or of one step; got layer={layer!r} and step={step!r}."
            )
        if layers < 1:
            raise ValueError(f"layers must be at least 1 to draw at; got {layers}.")
        has_types = kind == "tokens" or (kind in _OF_METRIC and term(metric).group == "token types")
        tables = "tokens" if has_types else "spectra" if kind == "spectrum" else ""
        chosen = replace(_chosen_run(_runs(results, tables), run), num_drawn=layers)
        metrics = listed(in_order(chosen.metrics), 50)
        if kind in _OF_METRIC and metric not in chosen.values:
            raise ValueError(
                f"metric must be one that was measured at layers: {metrics}; got {metric!r}."
                f"{did_you_mean(metric, chosen.metrics)}"
            )
        is_there, needed = _NEEDS.get(kind, (bool, ""))
        if not is_there(chosen):
            raise ValueError(f"{kind} needs {needed}; there are {metrics}.")
        with figure_style(ax, title, figsize, compact=compact):
            if kind in _OF_METRIC:
                return _OF_METRIC[kind](with_baseline(chosen, metric), metric, ax).figure
            if kind == "composition":
                return figures.composition(chosen, by, ax).figure
            if kind == "scales":
                draw = figures.scales_by_layer if by == "layer" else figures.scales_by_step
                return draw(with_baseline(chosen), ax).figure
            return _at_layers(chosen, kind, layer, step, examples, ax).figure

    def __getattr__(self, name: str) -> NoReturn:
        """Say that figures are made by a call, not by functions of their own."""
        raise AttributeError(
            f"embedgeo.plot has no {name!r}: write embedgeo.plot(results, kind, …), where kind is "
            f"one of {listed([*_OPTIONS])}."
        )


plot = Plot()
"""Draws a figure of the report, by its kind: call it, as `embedgeo.plot`."""


def _at_layers(
    run: Run, kind: str, layer: str | None, step: int | None, names: Sequence[str], ax: Axes | None
) -> FigureData:
    """Token types, spectra or similarities, at one layer if it is given."""
    if kind == "similarity":
        steps = figures.steps_over_layers(run)
        if layer is not None:
            _require_known("layer", layer, figures.layers_over_steps(run))
            return figures.cka_of_steps(run, layer, ax)
        if step is not None or not steps:
            _require_known("step", step, steps)
        return figures.cka_of_layers(run, max(steps) if step is None else step, ax)
    present = run.layers_in(
        run.token_types[1] if kind == "tokens" else run.spectra[max(run.spectra)]
    )
    if layer is not None:
        _require_known("layer", layer, present)
    if kind == "spectrum":
        return spectra_by_layer(run, ax) if layer is None else spectra_by_step(run, [layer], ax)
    if layer is None and ax is not None:
        layer = ([name for name in present if name in run.all_blocks] or present)[-1]
    if names:
        require_examples([run], names)
    return mean_against_variance(run, [layer] if layer else (), ax, names)


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
    models = [str(model) for model in run.checkpoints["model"].unique() if model]
    return [run.label, *models, *(Path(model).name for model in models)]


def _runs(results: Results, tables: str) -> list[Run]:
    """The runs in results, with those tables that a `Geometry` has to make, if they are named."""
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
