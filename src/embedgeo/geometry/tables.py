"""What was measured, as tables of pandas: see `embedgeo.Geometry`, whose methods these are."""

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from embedgeo.capture.layers import Layer
from embedgeo.extras import require_extra
from embedgeo.metrics import OutlierCoordinates, TokenMoments
from embedgeo.metrics.layer import LayerMetrics
from embedgeo.results.schema import Record

if TYPE_CHECKING:
    import pandas as pd


def of_records(records: Sequence[Record]) -> "pd.DataFrame":
    """See `embedgeo.Geometry.to_frame`."""
    require_extra("report", "Geometry.to_frame", "pandas")
    import pandas as pd

    return pd.DataFrame(records, columns=["layer", "layer_index", "metric", "value", "stderr"])


def of_token_types(
    method: str,
    reached: Iterable[tuple[int, Layer, LayerMetrics]],
    of: Callable[[TokenMoments], dict[str, Tensor]],
    columns: Sequence[str],
) -> "pd.DataFrame":
    """See `embedgeo.Geometry.token_tables` and ``token_planes``.

    Args:
        method: of `embedgeo.Geometry`, as it was called.
        reached: the layers that have rows, with their indices and metrics.
        of: a method that gives the columns of a layer.
        columns: its columns, for an empty table.
    """
    require_extra("report", f"Geometry.{method}", "pandas")
    import pandas as pd

    tables = [pd.DataFrame(columns=["layer", "layer_index", "token_id", "n", *columns])]
    for i, layer, metrics in reached:
        for metric in metrics.synced(TokenMoments):
            table = {name: column.cpu().numpy() for name, column in of(metric).items()}
            tables.append(pd.DataFrame({"layer": layer.name, "layer_index": i, **table}))
    return pd.concat(tables[1:] or tables, ignore_index=True)


def of_layers(reached: Iterable[tuple[int, Layer, LayerMetrics]]) -> "dict[str, pd.DataFrame]":
    """See `embedgeo.Geometry.layer_tables`; without those that are empty."""
    require_extra("report", "Geometry.layer_tables", "pandas")
    import pandas as pd

    found: dict[str, list[pd.DataFrame]] = {}
    for i, layer, metrics in reached:
        for metric in metrics.synced(OutlierCoordinates):
            columns = {name: column.cpu().numpy() for name, column in metric.largest_coordinates().items()}
            table = pd.DataFrame({"layer": layer.name, "layer_index": i, **columns})
            found.setdefault("coordinates", []).append(table)
    return {kind: pd.concat(tables, ignore_index=True) for kind, tables in found.items()}
