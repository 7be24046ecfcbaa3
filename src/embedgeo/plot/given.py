"""From what a figure is given to the one run that it shows, and to the figure."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from embedgeo.geometry import Geometry
from embedgeo.report.drawing import FigureData, style
from embedgeo.report.reading import read_folder, runs_of_records
from embedgeo.report.runs import Run
from embedgeo.report.spectra import shares_of
from embedgeo.results.glossary import in_order
from embedgeo.results.wording import listed

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
    shares = None if table is None else shares_of(table, run.depth)
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
