"""Results: records, the files and folders that hold them, and all of them as one tidy table."""

import os
from math import nan
from pathlib import Path
from typing import TYPE_CHECKING

from embedgeo.extras import require_extra

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["load_results"]

_UNKNOWN = {"string": "", "int64": 0, "double": nan}
_ORDER = ["run", "step", "model", "revision", "layer_index", "layer", "metric"]


def load_results(folder: str | os.PathLike[str]) -> "pd.DataFrame":
    """Read what was measured, one value a row, whatever has written it.

    The folder is that of ``embedgeo sweep`` or of `embedgeo.Geometry.save`, or that of one or more
    monitored runs (``history.parquet``, which may also be given itself). Histories in folders
    inside it are read only where it has none itself, sweeps in them never.

    Returns:
        A table with the columns ``run`` (name of the training run or model; of a monitored run that
        of its own folder, with as many of those around it as tell it from others, and the prefix of
        its monitor unless it is ``geometry``), ``model``, ``revision``, ``step``, ``commit``,
        ``series``, ``weights_sha256``, ``duplicate_of``, ``layer``, ``layer_index``, ``width``,
        ``metric``, ``value`` and ``stderr``: always these, sorted by run, step, layer and metric.
        ``step``, ``layer_index`` and ``width`` are int64, ``value`` and ``stderr`` float64, the
        others strings. What is unknown is "", a width 0, a standard error NaN. Means over blocks
        have the layer ``mean`` (those of an encoder and its decoder ``encoder.mean`` and
        ``decoder.mean``), and metrics of the whole model, such as the loss, the layer ``model``;
        their layer index is -1. A model that is not a step of a training run has the step 0.

    Raises:
        FileNotFoundError: there is no such folder.
        ImportError: pandas or pyarrow is not installed.
        ValueError: it holds no results, or a file that cannot be read.
    """
    require_extra("report", "load_results", "pandas", "pyarrow")
    import pandas as pd

    from embedgeo.results.folder import SweepFolder, found_results
    from embedgeo.results.parquet import SCHEMA

    found = found_results(Path(folder).expanduser())
    if isinstance(found, SweepFolder):
        runs = [(run, found.with_means(frames)) for run, frames in found.runs().items()]
    else:
        runs = [(run.name, run.records) for run in found]
    tables = [records.assign(run=run) for run, records in runs]
    table = pd.concat(tables, ignore_index=True).reindex(columns=["run", *SCHEMA.names])
    for name, unknown in (
        ("run", ""),
        *((field.name, _UNKNOWN[str(field.type)]) for field in SCHEMA),
    ):
        known = table[name].astype(object).where(table[name].notna(), unknown)
        table[name] = known.astype(type(unknown))
    return table.sort_values(_ORDER, kind="stable", ignore_index=True)
