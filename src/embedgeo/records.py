"""What is measured, as records and as TensorBoard sees it."""

import re
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypedDict

_FIRST_CHARTS = ("V_W_over_V_unbiased", "anisotropy", "M_over_Q", "intrinsic_dimension", "mean_cosine")


class Record(TypedDict):
    """One number: the value of a metric at a layer at a step."""

    step: int
    layer: str
    layer_index: int
    metric: str
    value: float


def tagged_scalars(values: Mapping[str, Mapping[str, float]], prefix: str = "geometry") -> dict[str, float]:
    """Scalars by tag, ``{prefix}.{metric}/{layer}``, and their mean over blocks, ``{prefix}.{metric}/mean``.

    Args:
        values: by layer and metric.
        prefix: of the tags.

    >>> tagged_scalars({"embed": {"V": 1.0}, "block.00": {"V": 2.0}, "block.01": {"V": 4.0}})
    {'geometry.V/embed': 1.0, 'geometry.V/block.00': 2.0, 'geometry.V/block.01': 4.0, 'geometry.V/mean': 3.0}
    """
    scalars = {f"{prefix}.{metric}/{layer}": v for layer, at in values.items() for metric, v in at.items()}
    of_blocks: dict[str, list[float]] = {}
    for layer, at in values.items():
        for metric, value in at.items() if layer.startswith("block.") else ():
            of_blocks.setdefault(metric, []).append(value)
    return {**scalars, **{f"{prefix}.{metric}/mean": sum(v) / len(v) for metric, v in of_blocks.items()}}


def custom_scalars_layout(metrics: Iterable[str], prefix: str = "geometry") -> dict[str, dict[str, list[Any]]]:
    """TensorBoard's custom-scalars page: a chart per metric, holding all layers; what to look at first comes first."""
    metrics = list(metrics)
    ordered = dict.fromkeys([*(first for first in _FIRST_CHARTS if first in metrics), *metrics])
    return {prefix: {metric: ["Multiline", [rf"^{re.escape(f'{prefix}.{metric}')}\/"]] for metric in ordered}}


def write_events(path: Path, step: int, values: Mapping[str, Mapping[str, float]]) -> None:
    """Write TensorBoard's event file of one step: each tag once, and the custom-scalars page.

    Args:
        path: the file.
        step: of all values.
        values: by layer and metric.
    """
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.summary.writer.record_writer import RecordWriter
    from torch.utils.tensorboard.summary import custom_scalars, scalar

    charts = custom_scalars_layout(dict.fromkeys(metric for at in values.values() for metric in at))
    summaries = [custom_scalars(charts), *(scalar(tag, value) for tag, value in tagged_scalars(values).items())]
    now = time.time()
    with path.open("wb") as file:
        writer = RecordWriter(file)
        writer.write(Event(wall_time=now, file_version="brain.Event:2").SerializeToString())
        for summary in summaries:
            writer.write(Event(wall_time=now, step=step, summary=summary).SerializeToString())
        writer.flush()
