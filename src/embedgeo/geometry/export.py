"""Results of a `Geometry` in other forms: tables, a notebook's cell, the folder of a sweep,
samples.
"""

import platform
import warnings
from collections.abc import Mapping, Sequence
from html import escape
from importlib.metadata import version
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from embedgeo.extras import require_extra
from embedgeo.formatting import with_error
from embedgeo.geometry.computing import MeasuredLayer
from embedgeo.glossary import headlines, in_order, term
from embedgeo.metrics.base import GeometryMetric
from embedgeo.metrics.layer import LayerMetrics, MetricFactory
from embedgeo.results.files import file_name
from embedgeo.results.records import Record
from embedgeo.results.samples import LayerSample

if TYPE_CHECKING:
    import pandas as pd

    from embedgeo.results.folder import SweepFolder

_MAX_COLUMNS = 8  # of a notebook's table where none of the metrics is among those to look at first
_TYPE_COLUMNS = {
    "tokens": ("Q", "M", "V"),
    "projections": ("pc1", "pc2"),
    "distances": ("distance",),
    "means": ("mean",),
    "occurrences": ("pc1", "pc2"),
}  # of the tables of token types beside token_id and n, by kind
_WRITER = "Geometry.save"
_PACKAGES = ("embedgeo", "torch", "torchmetrics", "transformers")
_LONGEST_NAME = 200  # of a checkpoint, whose files are named after it: file systems allow 255 bytes


def tables_of_types(layers: Sequence[MeasuredLayer], kind: str) -> "pd.DataFrame":
    """A row for each token type at each layer, of the metrics with that kind of table."""
    require_extra("report", "Geometry.token_tables", "pandas")
    import pandas as pd

    tables = [
        pd.DataFrame(
            columns=["layer", "layer_index", "token_id", "n", *_TYPE_COLUMNS.get(kind, ())]
        )
    ]
    for layer in layers:
        for metric in layer.metrics.synced(lambda metric: kind in metric.token_tables()):
            tables.append(_layer_table(layer, metric.token_tables()[kind]()))
    return pd.concat(tables[1:] or tables, ignore_index=True)


def layer_tables(layers: Sequence[MeasuredLayer]) -> "dict[str, pd.DataFrame]":
    """The tables of `embedgeo.Geometry.layer_tables`, by kind, without those that are empty."""
    require_extra("report", "Geometry.layer_tables", "pandas")
    import pandas as pd

    found: dict[str, list[pd.DataFrame]] = {}
    for layer in layers:
        for metric in layer.metrics.synced(lambda metric: metric.layer_tables()):
            for kind, table in metric.layer_tables().items():
                found.setdefault(kind, []).append(_layer_table(layer, table()))
        for metric in layer.metrics.wanted(attrgetter("deviations")):
            for key, of_groups in metric.deviations.items():
                table = {"group": torch.arange(len(of_groups)), "deviation": of_groups.double()}
                found.setdefault("jackknife", []).append(
                    _layer_table(layer, table).assign(metric=key)
                )
    return {kind: pd.concat(tables, ignore_index=True) for kind, tables in found.items()}


def _layer_table(layer: MeasuredLayer, table: Mapping[str, Tensor]) -> "pd.DataFrame":
    import pandas as pd

    arrays = {name: column.cpu().numpy() for name, column in table.items()}
    columns = {name: list(array) if array.ndim > 1 else array for name, array in arrays.items()}
    return pd.DataFrame({"layer": layer.name, "layer_index": layer.layer_index, **columns})


def html_table(title: str, records: Sequence[Record], note: str) -> str:
    """A row for each layer and a column for each metric to look at first."""
    metrics = in_order(record["metric"] for record in records)
    columns = [metric for metric in headlines() if metric in metrics] or metrics[:_MAX_COLUMNS]
    cells: dict[str, dict[str, str]] = {}
    for record in records:
        is_defined = record["value"] == record["value"]
        text = with_error(record["value"], record["stderr"]) if is_defined else "–"
        cells.setdefault(record["layer"], {})[record["metric"]] = text
    titles = "".join(
        f'<th title="{escape(term(key).meaning)}">{escape(term(key).name)}</th>' for key in columns
    )
    rows = "".join(
        f"<tr><th>{escape(layer)}</th>"
        + "".join(f"<td>{of_layer.get(key, '–')}</td>" for key in columns)
        + "</tr>\n"
        for layer, of_layer in cells.items()
    )
    caption = (
        f"{title}; <code>to_frame()</code> has all numbers. {escape(note[:1].upper() + note[1:])}"
    )
    return f"<table>\n<caption>{caption}</caption>\n<tr><th>layer</th>{titles}</tr>\n{rows}</table>"


def checkpoint_name(model: Any, step: Any) -> str:
    """Name of a checkpoint that stands in the names of its files."""
    if not isinstance(model, str) or not model:
        raise ValueError(f"model must be a name, such as the repository's; got {model!r}.")
    if step is not None and (isinstance(step, bool) or not isinstance(step, int) or step < 0):
        raise ValueError(
            f"step must be a number of optimizer steps, 0 or more, or None for none; got {step!r}."
        )
    name = (model if step is None else f"{model}--step{step}").replace("/", "--")
    name = file_name(name)
    if len(name) > _LONGEST_NAME:
        raise ValueError(
            f"model must be a name that fits into those of files, {_LONGEST_NAME} characters with "
            f"the step and with others than English ones as %XX; got {len(name)}: {model[:20]}…"
        )
    return name


def open_folder(folder: Path, settings: Mapping[str, Any]) -> "SweepFolder":
    """Make the folder of a sweep, or open one that was made with these settings, by `Geometry.save`
    too.
    """
    from embedgeo.results.folder import SweepFolder

    out = SweepFolder(folder)
    before = out.manifest().get("asked")
    if before is not None and before.get("by") != _WRITER:
        raise ValueError(
            f"folder must be new or one that {_WRITER} made; {folder} is that of a sweep. Give "
            f"another folder."
        )
    installed = [name for name in _PACKAGES if find_spec(name)]
    versions = {"python": platform.python_version(), **{name: version(name) for name in installed}}
    out.open({"by": _WRITER, **settings}, {"versions": versions})
    return out


def write_checkpoint(
    out: "SweepFolder",
    name: str,
    model: str,
    step: int | None,
    records: Sequence[Record],
    tables: "Mapping[str, pd.DataFrame]",
    facts: Mapping[str, str],
    samples: Mapping[str, LayerSample] | None,
) -> None:
    """Write the results of a model into a folder of its own or beside other models' and steps'."""
    from embedgeo.results.parquet import to_frame

    revision = "main" if step is None else f"step{step}"
    if name in out.done():
        before = out.read(name).iloc[0]
        # ``a/b`` and ``a--b`` share a name
        if (before["model"], before["revision"]) != (model, revision):
            raise ValueError(
                f"a folder holds one checkpoint of a name; {name} in {out.path} is "
                f"{before['revision']} of {before['model']}. Give another model, or another folder."
            )
        warnings.warn(
            f"save replaces {name}, which {out.path} has already. To keep both, give another "
            f"model, step or folder.",
            stacklevel=3,
        )
    origin = {
        "model": model,
        "revision": revision,
        "step": step or 0,
        "commit": "",
        "series": model,
    }
    frame = to_frame(records, **origin, weights_sha256="", duplicate_of=None)
    out.write(name, frame, tables, facts, samples)
    out.rebuild()


def layer_sample(metrics: LayerMetrics) -> LayerSample | None:
    """Sampled rows, mean and eigenvalues of a layer, if it has any; every rank must call this."""
    held: dict[str, Any] = {}
    for metric in metrics.synced(lambda metric: metric.has_samples):
        sample = metric.samples()
        if "rows" in sample:
            # they came from it
            sample["rows"] = sample["rows"].to(metrics.dtype or sample["rows"].dtype)
            sample["row_numbers"] = sample.pop("positions")
        held |= {
            "n": int(metric.num_finite),
            **{name: tensor.cpu() for name, tensor in sample.items()},
        }
    return LayerSample(**held) if held else None


def recorded_metrics(make: MetricFactory) -> list[str]:
    """A choice of metrics as it is recorded: by those made."""
    metrics = list[str]()
    for metric in make(2):
        digest = bytes(metric.settings.tolist()).hex() if isinstance(metric, GeometryMetric) else ""
        metrics.append(f"{type(metric).__name__} {digest}".strip())
    return metrics


def recorded_layers(layers: Any) -> Any:
    """A choice of layers as it is recorded: functions by their names."""
    if isinstance(layers, list | tuple):
        return [recorded_layers(each) for each in layers]
    return layers if isinstance(layers, str) else getattr(layers, "__qualname__", repr(layers))
