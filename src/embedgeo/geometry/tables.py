"""What was measured, as tables of pandas: see `embedgeo.Geometry`, whose methods these are."""

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from embedgeo.capture.layers import Layer
from embedgeo.extras import require_extra
from embedgeo.metrics import TokenMoments
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
    of: Callable[[Any], dict[str, Tensor]],
    columns: Sequence[str],
    kind: type = TokenMoments,
) -> "pd.DataFrame":
    """See `embedgeo.Geometry.token_tables` and ``token_planes``.

    Args:
        method: of `embedgeo.Geometry`, as it was called.
        reached: the layers that have rows, with their indices and metrics.
        of: a method that gives the columns of a layer.
        columns: its columns, for an empty table.
        kind: of metric that it is a method of.
    """
    require_extra("report", f"Geometry.{method}", "pandas")
    import pandas as pd

    tables = [pd.DataFrame(columns=["layer", "layer_index", "token_id", "n", *columns])]
    for i, layer, metrics in reached:
        for metric in metrics.synced(kind):
            table = {name: column.cpu().numpy() for name, column in of(metric).items()}
            tables.append(pd.DataFrame({"layer": layer.name, "layer_index": i, **table}))
    return pd.concat(tables[1:] or tables, ignore_index=True)
