"""Results of a `Geometry` in other forms: tables, a notebook's cell, samples, and the folder of a sweep."""

import os
import platform
import re
from collections.abc import Mapping, Sequence
from html import escape
from importlib.metadata import version
from importlib.util import find_spec
from math import nan
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import torch
from torch import Tensor

from embedgeo.capture.structure import measured_model
from embedgeo.extras import require_extra
from embedgeo.formatting import reason, with_error
from embedgeo.functional.distributed import all_reduce_max, current_rank, has_other_ranks, is_distributed
from embedgeo.geometry.computing import MeasuredLayer
from embedgeo.glossary import headlines, in_order, term
from embedgeo.metrics import MAX_STATE_BYTES
from embedgeo.metrics.base import GeometryMetric
from embedgeo.metrics.defaults import is_auto
from embedgeo.metrics.layer import LayerMetrics, MetricFactory
from embedgeo.results.samples import LayerSample

if TYPE_CHECKING:
    import pandas as pd

    from embedgeo.geometry import Geometry
    from embedgeo.results.folder import SweepFolder

_MAX_COLUMNS = 8  # of a notebook's table where none of the metrics is among those to look at first
_TYPE_COLUMNS = {
    "tokens": ("Q", "M", "V"),
    "projections": ("pc1", "pc2"),
    "distances": ("distance",),
    "occurrences": ("pc1", "pc2"),
}  # of the tables of token types beside token_id and n, by kind
_WRITER = "Geometry.save"
_PACKAGES = ("embedgeo", "torch", "torchmetrics", "transformers")
_LONGEST_NAME = 200  # of a checkpoint, whose files are named after it: file systems allow 255 bytes


def tables_of_types(method: str, layers: Sequence[MeasuredLayer], kind: str) -> "pd.DataFrame":
    """A row for each token type at each layer, of the metrics with that kind of table; for a method of `Geometry`."""
    require_extra("report", f"Geometry.{method}", "pandas")
    import pandas as pd

    tables = [pd.DataFrame(columns=["layer", "layer_index", "token_id", "n", *_TYPE_COLUMNS[kind]])]
    for layer in layers:
        for metric in layer.metrics.synced(lambda metric: kind in metric.token_tables()):
            tables.append(_at_layer(layer, metric.token_tables()[kind]()))
    return pd.concat(tables[1:] or tables, ignore_index=True)


def layer_tables(layers: Sequence[MeasuredLayer]) -> "dict[str, pd.DataFrame]":
    """The tables of `embedgeo.Geometry.layer_tables`, by kind, without those that are empty."""
    require_extra("report", "Geometry.layer_tables", "pandas")
    import pandas as pd

    found: dict[str, list[pd.DataFrame]] = {}
    for layer in layers:
        for metric in layer.metrics.synced(lambda metric: metric.layer_tables()):
            for kind, table in metric.layer_tables().items():
                found.setdefault(kind, []).append(_at_layer(layer, table()))
    return {kind: pd.concat(tables, ignore_index=True) for kind, tables in found.items()}


def _at_layer(layer: MeasuredLayer, table: Mapping[str, Tensor]) -> "pd.DataFrame":
    import pandas as pd

    columns = {name: column.cpu().numpy() for name, column in table.items()}
    return pd.DataFrame({"layer": layer.name, "layer_index": layer.layer_index, **columns})


def html_table(geometry: "Geometry") -> str:
    """A row for each layer and a column for each metric to look at first; never raises nor calls on other ranks."""
    start = f"Geometry of {len(geometry.layers)} layers"
    if has_other_ranks():
        return f"<p>{start}, on several ranks: <code>to_frame()</code>, called on every rank, has the numbers.</p>"
    try:
        records = geometry.records()
    except Exception as error:  # a notebook would print the whole traceback
        return f"<p>Geometry: it cannot be computed ({escape(reason(error))}).</p>"
    if not records:
        return f"<p>{start}: nothing was measured yet.</p>"
    metrics = in_order(record["metric"] for record in records)
    columns = [metric for metric in headlines() if metric in metrics] or metrics[:_MAX_COLUMNS]
    cells: dict[str, dict[str, str]] = {}
    for record in records:
        is_defined = record["value"] == record["value"]
        text = with_error(record["value"], record["stderr"]) if is_defined else "–"
        cells.setdefault(record["layer"], {})[record["metric"]] = text
    titles = "".join(f'<th title="{escape(term(key).meaning)}">{escape(term(key).name)}</th>' for key in columns)
    rows = "".join(
        f"<tr><th>{escape(layer)}</th>" + "".join(f"<td>{of_layer.get(key, '–')}</td>" for key in columns) + "</tr>\n"
        for layer, of_layer in cells.items()
    )
    num_more = len(metrics) - len(columns)
    more = f"{num_more} more metrics: <code>to_frame()</code>. " if num_more else ""
    why = geometry.why_silent()
    caption = f"{start}. {more}{escape(why[:1].upper() + why[1:])}".strip()
    return f"<table>\n<caption>{caption}</caption>\n<tr><th>layer</th>{titles}</tr>\n{rows}</table>"


def save(
    geometry: "Geometry",
    folder: str | os.PathLike[str],
    *,
    model: str,
    step: int | None,
    save_samples: bool,
    token_tables: bool,
) -> None:
    """Write what `embedgeo.Geometry.save` says; ranks tell each other whether rank 0 has failed."""
    packages = ["pandas", "pyarrow", *(["safetensors"] if save_samples else [])]
    require_extra("report", "Geometry.save", *packages)
    name = _named(model, step)
    records = geometry.records()
    if not records:
        raise ValueError(f"there must be something to save; {geometry.why_silent() or 'there are no layers.'}")
    samples = geometry.samples() if save_samples else None
    tables = geometry.layer_tables()
    if token_tables:
        sizes = nan if geometry.settings["rows"] == "words" else 1.0  # of words nobody has counted them
        tables["tokens"] = geometry.token_tables().assign(num_tokens=sizes)
        if not len(tables["tokens"]):
            raise ValueError(
                "token_tables needs TokenMoments among the metrics, and token ids; there is none. Leave it out."
            )
    inner = measured_model(geometry.model)
    facts = {
        "model_class": type(inner).__name__,
        "num_parameters": str(sum(parameter.numel() for parameter in inner.parameters())),
        **({"architecture": kind} if (kind := geometry.norms.architecture(geometry.layers)) else {}),
        **({"has_step": "false"} if step is None else {}),
    }
    columns = {
        "model": model,
        "revision": "main" if step is None else f"step{step}",
        "step": step or 0,
        "commit": "",
        "series": model,
        "weights_sha256": "",
        "duplicate_of": None,
    }
    settings = {"by": _WRITER, **geometry.settings, "save_samples": save_samples, "token_tables": token_tables}
    failure: Exception | None = None
    if current_rank() == 0:
        try:
            from embedgeo.results.parquet import to_frame

            out = _open(Path(folder), settings)
            _require_own(out, name, columns)
            out.write(name, to_frame(records, **columns), tables, facts, samples)
            out.rebuild()
            out.write_architecture()
        except Exception as error:
            failure = error
    if failure is not None and not is_distributed():
        raise failure
    if is_distributed() and bool(all_reduce_max(torch.tensor(int(failure is not None), device=geometry.device))):
        raise failure or RuntimeError(f"rank 0 could not write {folder}: it says why.")


def layer_sample(metrics: LayerMetrics) -> LayerSample | None:
    """Sampled rows, mean and eigenvalues of a layer, if it has any; every rank must call this."""
    held: dict[str, Any] = {}
    for metric in metrics.synced(lambda metric: metric.has_samples):
        sample = metric.samples()
        if "rows" in sample:
            sample["rows"] = sample["rows"].to(metrics.dtype or sample["rows"].dtype)  # they came from it
            sample["row_numbers"] = metrics.row_numbers(sample.pop("positions"))
        held |= {"n": int(metric.num_rows), **{name: tensor.cpu() for name, tensor in sample.items()}}
    return LayerSample(**held) if held else None


def recorded_metrics(make: MetricFactory) -> Any:
    """A choice of metrics as it is recorded: by those made, and if they depend on the width, by what on."""
    metrics = list[str]()
    for metric in make(2):
        digest = bytes(metric.settings.tolist()).hex() if isinstance(metric, GeometryMetric) else ""
        metrics.append(f"{type(metric).__name__} {digest}".strip())
    arguments = getattr(make, "keywords", {})
    if is_auto(make):
        return {**arguments, "metrics": metrics}
    limit = arguments.get("max_state_bytes", MAX_STATE_BYTES)
    return metrics if limit == MAX_STATE_BYTES else {"max_state_bytes": limit, "metrics": metrics}


def recorded_layers(layers: Any) -> Any:
    """A choice of layers as it is recorded: functions by their names."""
    if isinstance(layers, list | tuple):
        return [recorded_layers(each) for each in layers]
    return layers if isinstance(layers, str) else getattr(layers, "__qualname__", repr(layers))


def _named(model: Any, step: Any) -> str:
    if not isinstance(model, str) or not model:
        raise ValueError(f"model must be a name, such as the repository's; got {model!r}.")
    if step is not None and (isinstance(step, bool) or not isinstance(step, int) or step < 0):
        raise ValueError(f"step must be a number of optimizer steps, 0 or more, or None for none; got {step!r}.")
    name = (model if step is None else f"{model}--step{step}").replace("/", "--")
    name = re.sub(r"^\.", "%2E", quote(name, safe=" =+,@~"))
    if len(name) > _LONGEST_NAME:
        raise ValueError(
            f"model must be a name that fits into those of files, {_LONGEST_NAME} characters with the step and with "
            f"others than English ones as %XX; got {len(name)}: {model[:20]}…"
        )
    return name


def _require_own(out: "SweepFolder", name: str, columns: Mapping[str, Any]) -> None:
    """Check that what the folder has under a name is of the same model and step: ``a/b`` and ``a--b`` share one."""
    if name not in out.done():
        return
    before = out.read(name).iloc[0]
    if (before["model"], before["revision"]) != (columns["model"], columns["revision"]):
        raise ValueError(
            f"a folder holds one checkpoint of a name; {name} in {out.path} is {before['revision']} of "
            f"{before['model']}. Give another model, or another folder."
        )


def _open(folder: Path, settings: Mapping[str, Any]) -> "SweepFolder":
    from embedgeo.results.folder import SweepFolder

    out = SweepFolder(folder)
    before = out.manifest().get("asked")
    if before is not None and before.get("by") != _WRITER:
        raise ValueError(
            f"folder must be new or one that {_WRITER} made; {folder} is that of a sweep. Give another folder."
        )
    installed = [name for name in _PACKAGES if find_spec(name)]
    versions = {"python": platform.python_version(), **{name: version(name) for name in installed}}
    out.open(settings, {"versions": versions})
    return out
