"""Results of a `Geometry` in other forms: tables, a notebook's cell, the folder of a sweep,
samples.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from embedgeo.extras import require_extra
from embedgeo.geometry.computing import MeasuredLayer
from embedgeo.metrics.base import GeometryMetric
from embedgeo.metrics.layer import LayerMetrics
from embedgeo.metrics.massive import without_massive
from embedgeo.metrics.tokens import TokenMoments
from embedgeo.results.samples import LayerSample

if TYPE_CHECKING:
    import pandas as pd


def tables_of_types(layers: Sequence[MeasuredLayer]) -> "pd.DataFrame":
    """A row for each token type at each layer, where there are `TokenMoments`."""
    require_extra("report", "Geometry.token_tables", "pandas")
    import pandas as pd

    tables = [pd.DataFrame(columns=["layer", "layer_index", "token_id", "n"])]
    for layer in layers:
        for metric in layer.metrics.synced(lambda metric: isinstance(metric, TokenMoments)):
            tables.append(_layer_table(layer, metric.table()))
    return pd.concat(tables[1:] or tables, ignore_index=True)


def layer_tables(layers: Sequence[MeasuredLayer]) -> "dict[str, pd.DataFrame]":
    """The tables of `embedgeo.Geometry.layer_tables`, by kind, without those that are empty."""
    require_extra("report", "Geometry.layer_tables", "pandas")
    import pandas as pd

    parts: dict[str, list[pd.DataFrame]] = {}
    for layer in layers:
        for metric in layer.metrics.synced(lambda metric: metric.layer_tables()):
            for kind, table in metric.layer_tables().items():
                parts.setdefault(kind, []).append(_layer_table(layer, table()))
        for key, of_groups in deviations(layer).items():
            table = {"group": torch.arange(len(of_groups)), "deviation": of_groups.double()}
            parts.setdefault("jackknife", []).append(_layer_table(layer, table).assign(metric=key))
    return {kind: pd.concat(tables, ignore_index=True) for kind, tables in parts.items()}


def deviations(layer: MeasuredLayer) -> dict[str, Tensor]:
    """Deviations of the groups of the jackknife, by key, if there are any."""
    metrics = layer.metrics
    of_all = [each for each in metrics.whole.metrics if isinstance(each, GeometryMetric)]
    return {key: each for metric in of_all for key, each in metric.deviations.items()} | {
        without_massive(key): metric.deviations[key]
        for metric in metrics.ordinary.metrics
        for key in metric.keys_without_massive
        if key in metric.deviations
    }


def _layer_table(layer: MeasuredLayer, table: Mapping[str, Tensor]) -> "pd.DataFrame":
    import pandas as pd

    arrays = {name: column.cpu().numpy() for name, column in table.items()}
    columns = {name: list(array) if array.ndim > 1 else array for name, array in arrays.items()}
    return pd.DataFrame({"layer": layer.name, "layer_index": layer.layer_index, **columns})


def layer_sample(metrics: LayerMetrics, *, kept: bool = False) -> LayerSample | None:
    """Sampled rows, mean and eigenvalues of a layer, if it has any; every rank must call this.

    Of what is ``kept`` there are the rows alone, and no other rank is waited for.
    """
    held: dict[str, Any] = {}
    synced = metrics.synced(lambda metric: metric.has_samples)
    for metric in metrics.kept_samples() if kept else synced:
        sample = metric.samples()
        if "rows" in sample:
            # they came from it
            sample["rows"] = sample["rows"].to(metrics.dtype or sample["rows"].dtype)
            sample["row_numbers"] = sample.pop("positions")
        held["n"] = int(metric.num_rows - metric.num_nonfinite)
        held |= {name: tensor.cpu() for name, tensor in sample.items()}
    return LayerSample(**held) if held else None


def recorded_metrics(layer: LayerMetrics) -> dict[str, str]:
    """The metrics of a layer as they are recorded: digests of their arguments, by class."""
    digests = dict[str, str]()
    for metric in layer.whole.metrics:
        name = type(metric).__name__
        is_own = isinstance(metric, GeometryMetric)
        digest = bytes(metric.settings.tolist()).hex() if is_own else type(metric).__module__
        digests[name] = f"{digests.get(name, '')} {digest}".strip()
    return digests


def recorded_layers(layers: Any) -> str:
    """A choice of layers as it is recorded: functions by their names."""
    if isinstance(layers, list | tuple | Mapping):
        return ", ".join(map(recorded_layers, layers))
    return layers if isinstance(layers, str) else getattr(layers, "__qualname__", repr(layers))
