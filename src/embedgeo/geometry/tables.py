"""What was measured, as tables of pandas: see `embedgeo.Geometry`, whose methods these are."""

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from embedgeo.extras import require_extra
from embedgeo.geometry.computing import Reached
from embedgeo.metrics import Anisotropy, OutlierCoordinates, TokenMoments
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
    reached: Iterable[Reached],
    of: Callable[[Any], dict[str, Tensor]],
    columns: Sequence[str],
    kind: type = TokenMoments,
) -> "pd.DataFrame":
    """See `embedgeo.Geometry.token_tables` and ``token_planes``.

    Args:
        method: of `embedgeo.Geometry`, as it was called.
        reached: the layers that have rows.
        of: a method that gives the columns of a layer.
        columns: its columns, for an empty table.
        kind: of metric that it is a method of.
    """
    require_extra("report", f"Geometry.{method}", "pandas")
    import pandas as pd

    tables = [pd.DataFrame(columns=["layer", "layer_index", "token_id", "n", *columns])]
    for each in reached:
        for metric in each.metrics.synced(kind):
            table = {name: column.cpu().numpy() for name, column in of(metric).items()}
            tables.append(pd.DataFrame({"layer": each.layer.name, "layer_index": each.layer_index, **table}))
    return pd.concat(tables[1:] or tables, ignore_index=True)


def of_layers(reached: Iterable[Reached]) -> "dict[str, pd.DataFrame]":
    """See `embedgeo.Geometry.layer_tables`; without those that are empty."""
    require_extra("report", "Geometry.layer_tables", "pandas")
    import pandas as pd

    found: dict[str, list[pd.DataFrame]] = {}
    for each in reached:
        at = {"layer": each.layer.name, "layer_index": each.layer_index}
        for spectral in each.metrics.synced(Anisotropy, having="spectrum"):
            index = range(1, spectral.dim + 1)
            columns = {"index": index, "eigenvalue": spectral.eigenvalues().cpu().numpy(), "n": int(spectral.num_rows)}
            found.setdefault("spectra", []).append(pd.DataFrame({**at, **columns}))
        for metric in each.metrics.synced(OutlierCoordinates):
            columns = {name: column.cpu().numpy() for name, column in metric.largest_coordinates().items()}
            found.setdefault("coordinates", []).append(pd.DataFrame({**at, **columns}))
    return {kind: pd.concat(tables, ignore_index=True) for kind, tables in found.items()}
