"""What was measured by hand, in the folder of a sweep: for the report, and for new numbers without a forward pass."""

import os
import platform
import re
from collections.abc import Mapping
from importlib.metadata import version
from importlib.util import find_spec
from math import nan
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import torch

from embedgeo.capture.structure import measured_model
from embedgeo.extras import require_extra
from embedgeo.functional.distributed import all_reduce_max, current_rank, is_distributed
from embedgeo.metrics import MAX_STATE_BYTES, Anisotropy, IntrinsicDimension
from embedgeo.metrics.base import GeometryMetric
from embedgeo.metrics.defaults import is_auto
from embedgeo.metrics.layer import LayerMetrics, MetricFactory
from embedgeo.results.samples import LayerSample

if TYPE_CHECKING:
    from embedgeo.geometry.geometry import Results
    from embedgeo.results.folder import SweepFolder

_WRITER = "Geometry.save"
_PACKAGES = ("embedgeo", "torch", "torchmetrics", "transformers")
_LONGEST_NAME = 200
"""Of a checkpoint, in bytes: its files are named after it, and file systems allow 255, with what is around it."""


def save(
    geometry: "Results",
    folder: str | os.PathLike[str],
    *,
    model: str,
    step: int | None,
    save_samples: bool,
    token_tables: bool,
    device: torch.device,
) -> None:
    """See `Geometry.save`; ranks tell each other on ``device`` whether rank 0 has failed."""
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
    about = {
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
    asked = {"by": _WRITER, **geometry.settings, "save_samples": save_samples, "token_tables": token_tables}
    failure: Exception | None = None
    if current_rank() == 0:
        try:
            from embedgeo.results.parquet import to_frame

            out = _open(Path(folder), asked)
            _require_own(out, name, columns)
            out.write(name, to_frame(records, **columns), tables, about, samples)
            out.rebuild()
            out.write_architecture()
        except Exception as error:
            failure = error
    if failure is not None and not is_distributed():
        raise failure
    if is_distributed() and bool(all_reduce_max(torch.tensor(int(failure is not None), device=device))):
        raise failure or RuntimeError(f"rank 0 could not write {folder}: it says why.")


def layer_sample(metrics: LayerMetrics) -> LayerSample | None:
    """What is kept of the rows at a layer, those of all ranks; every rank must call this.

    None where none of its metrics has any of that.
    """
    held: dict[str, Any] = {}
    for metric in metrics.synced(IntrinsicDimension):
        sample = metric.sample()
        rows = sample.rows.to(metrics.dtype or sample.rows.dtype)  # they came from it
        numbers = metrics.row_numbers(sample.positions)
        held |= {"n": int(metric.num_rows), "rows": rows.cpu(), "row_numbers": numbers.cpu()}
    for metric in metrics.synced(Anisotropy):
        held |= {"n": int(metric.num_rows), "mean": metric.mean.where(metric.num_rows > 0, torch.nan).cpu()}
        held |= {"eigenvalues": metric.eigenvalues().cpu()} if metric.sketch is None else {}
    return LayerSample(**held) if held else None


def described(metric: Any) -> str:
    """A metric's class and, of those of this package, the digest of its arguments."""
    digest = bytes(metric.settings.tolist()).hex() if isinstance(metric, GeometryMetric) else ""
    return f"{type(metric).__name__} {digest}".strip()


def described_metrics(make: MetricFactory) -> Any:
    """What makes the metrics, as it is recorded: by the metrics, and if they depend on the width, by what on."""
    metrics = [described(metric) for metric in make(2)]
    given = getattr(make, "keywords", {})
    if is_auto(make):
        return {**given, "metrics": metrics}
    limit = given.get("max_state_bytes", MAX_STATE_BYTES)
    return metrics if limit == MAX_STATE_BYTES else {"max_state_bytes": limit, "metrics": metrics}


def described_layers(layers: Any) -> Any:
    """A choice of layers as it is recorded: functions by their names."""
    if isinstance(layers, list | tuple):
        return [described_layers(each) for each in layers]
    return layers if isinstance(layers, str) else getattr(layers, "__qualname__", repr(layers))


def _named(model: Any, step: Any) -> str:
    """The name of a checkpoint and of its files, as a sweep makes it: ``author--model`` of a repository."""
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


def _open(folder: Path, asked: Mapping[str, Any]) -> "SweepFolder":
    from embedgeo.results.folder import SweepFolder

    out = SweepFolder(folder)
    before = out.manifest().get("asked")
    if before is not None and before.get("by") != _WRITER:
        raise ValueError(
            f"folder must be new or one that {_WRITER} made; {folder} is that of a sweep. Give another folder."
        )
    installed = [name for name in _PACKAGES if find_spec(name)]
    versions = {"python": platform.python_version(), **{name: version(name) for name in installed}}
    out.open(asked, {"versions": versions})
    return out
