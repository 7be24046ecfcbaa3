"""What was measured, as tables of pandas: see `embedgeo.Geometry`, whose methods these are."""

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

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


_COLUMNS: dict[str, tuple[type, Callable[[Any], dict[str, Tensor]], Sequence[str]]] = {
    "token_tables": (TokenMoments, TokenMoments.table, ("token_id", "n", "Q", "M", "V")),
    "token_planes": (TokenMoments, TokenMoments.plane, ("token_id", "n", "pc1", "pc2")),
    "coordinates": (OutlierCoordinates, OutlierCoordinates.largest_coordinates, ("coordinate",)),
}
"""By the method of `embedgeo.Geometry`: the metrics that hold what it tells, what gives the columns, and some of them."""


def of_layers(method: str, reached: Iterable[tuple[int, Layer, LayerMetrics]]) -> "pd.DataFrame":
    """See `embedgeo.Geometry.token_tables`, ``token_planes`` and ``coordinates``.

    Args:
        method: of `embedgeo.Geometry`, as it was called.
        reached: the layers that have rows, with their indices and metrics.
    """
    require_extra("report", f"Geometry.{method}", "pandas")
    import pandas as pd

    kind, of, columns = _COLUMNS[method]
    tables = [pd.DataFrame(columns=["layer", "layer_index", *columns])]
    for i, layer, metrics in reached:
        for metric in metrics.synced(kind):
            table = {name: column.cpu().numpy() for name, column in of(metric).items()}
            tables.append(pd.DataFrame({"layer": layer.name, "layer_index": i, **table}))
    return pd.concat(tables[1:] or tables, ignore_index=True)
