"""What is measured, as records and as TensorBoard sees it."""

import re
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from embedgeo.results.glossary import in_order, term
from embedgeo.results.layer_names import blocks_by_side
from embedgeo.results.schema import Record

AT_A_GLANCE = ("V_W_over_V_unbiased", "M_over_Q", "anisotropy", "intrinsic_dimension", "mean_cosine")
"""The metrics to look at first."""

_GROUPS = {
    "at a glance": AT_A_GLANCE,
    "size and variance": ("Q", "M", "V", "M_over_V", "V_W_unbiased", "V_B_unbiased", "V_W", "V_B", "V_W_over_V"),
    "norms": ("norm_mean", "norm_cv", "norm_max"),
    "shape": (
        *("anisotropy_standardized", "anisotropy_null", "participation_ratio", "top_dim_share", "effective_rank"),
        *("isoscore", "top5_share", "anisotropy_without_top5", "anisotropy_batch_mean", "anisotropy_batch_std"),
    ),
    "token types": ("Q_t_cv", "V_on_M_slope", "V_on_M_r2", "Q_freq_slope", "M_freq_slope", "V_freq_slope"),
    "rows counted": ("n", "n_nonfinite", "token_types", "n_points", "duplicate_fraction", "intrinsic_dimension_std"),
}
_MORE = "more"


def tagged_scalars(records: Iterable[Record], prefix: str = "geometry") -> dict[str, float]:
    """Scalars by tag, ``{prefix}.{metric}/{layer}``, and their mean over blocks, ``{prefix}.{metric}/mean``.

    Encoder and decoder have a mean each, ``{prefix}.{metric}/encoder.mean`` and ``…/decoder.mean``.

    >>> V = {"layer_index": 0, "width": 8, "metric": "V"}
    >>> tagged_scalars([{"layer": "block.00", "value": 2.0, **V}, {"layer": "block.01", "value": 4.0, **V}])
    {'geometry.V/block.00': 2.0, 'geometry.V/block.01': 4.0, 'geometry.V/mean': 3.0}
    """
    records = list(records)
    sides = {block: side for side, blocks in blocks_by_side(r["layer"] for r in records).items() for block in blocks}
    scalars: dict[str, float] = {}
    of_blocks: dict[str, list[float]] = {}
    for record in records:
        layer, value, tag = record["layer"], record["value"], f"{prefix}.{record['metric']}"
        scalars[f"{tag}/{layer}"] = value
        if layer in sides:
            of_blocks.setdefault(f"{tag}/{sides[layer]}mean", []).append(value)
    return scalars | {tag: sum(values) / len(values) for tag, values in of_blocks.items()}


def custom_scalars_layout(metrics: Iterable[str], prefix: str = "geometry") -> dict[str, dict[str, list[Any]]]:
    """TensorBoard's custom-scalars page: groups of charts, one chart a metric, holding all layers.

    >>> layout = custom_scalars_layout(["V", "anisotropy", "M_over_Q"])
    >>> {group: list(charts) for group, charts in layout.items()}
    {'geometry: at a glance': ['M / Q (M_over_Q)', 'anisotropy'], 'geometry: size and variance': ['V']}
    """
    of = {metric: group for group, members in _GROUPS.items() for metric in members}
    layout: dict[str, dict[str, list[Any]]] = {f"{prefix}: {group}": {} for group in (*_GROUPS, _MORE)}
    for metric in in_order(list(metrics)):
        name = term(metric).name
        title = name if name.replace(" ", "_") == metric else f"{name} ({metric})"
        chart = ["Multiline", [rf"^{re.escape(f'{prefix}.{metric}')}\/"]]
        layout[f"{prefix}: {of.get(metric, _MORE)}"][title] = chart
    return {group: charts for group, charts in layout.items() if charts}


def write_events(path: Path, step: int, records: Sequence[Record]) -> None:
    """Write TensorBoard's event file of one step: each tag once, and the custom-scalars page.

    Args:
        path: the file.
        step: that of all records.
        records: what was measured.
    """
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.summary.writer.record_writer import RecordWriter
    from torch.utils.tensorboard.summary import custom_scalars, scalar

    charts = custom_scalars_layout(dict.fromkeys(record["metric"] for record in records))
    summaries = [custom_scalars(charts), *(scalar(tag, value) for tag, value in tagged_scalars(records).items())]
    now = time.time()
    with path.open("wb") as file:
        writer = RecordWriter(file)
        writer.write(Event(wall_time=now, file_version="brain.Event:2").SerializeToString())
        for summary in summaries:
            writer.write(Event(wall_time=now, step=step, summary=summary).SerializeToString())
        writer.flush()
