"""Series of checkpoints: training runs and final models, told apart."""

from collections.abc import Mapping

import pandas as pd

from embedgeo.results.layer_names import blocks_by_side
from embedgeo.results.schema import MODEL


def series_of(found: Mapping[str, pd.DataFrame], classes: Mapping[str, str]) -> dict[str, str]:
    """The series of each checkpoint; where a series has several models, with what tells them apart.

    Args:
        found: the records of checkpoints, by name.
        classes: of their models; empty where unknown.
    """
    groups: dict[str, list[str]] = {}
    for name, records in found.items():
        groups.setdefault(str(records["series"].iloc[0]), []).append(name)
    series = {}
    for one, names in groups.items():
        is_named = len({classes[name] for name in names} - {""}) > 1
        models = {name: f"{classes[name]} {_shape(found[name])}" if is_named else _shape(found[name]) for name in names}
        apart = len(set(models.values())) > 1
        series.update({name: " ".join((one, models[name])).strip() if apart else one for name in names})
    return series


def _shape(records: pd.DataFrame) -> str:
    """Width and depth of the model, as its records have them."""
    widths = (
        records[["layer", "width"]].drop_duplicates("layer").set_index("layer")["width"].drop(MODEL, errors="ignore")
    )
    blocks = [block for side in blocks_by_side(widths.index).values() for block in side] or list(widths.index)
    return f"{widths[blocks].max()} wide, {len(blocks)} deep"
