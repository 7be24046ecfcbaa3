"""Results in TensorBoard's event files: tags, charts, writing and reading."""

import os
import re
import time
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeAlias

from embedgeo.glossary import GROUPS, OWN, in_order, term
from embedgeo.results.records import MEANS, Record, block_means, is_mean

EVENTS = "events.out.tfevents."  # the start of an event file's name

_LAYOUT = "custom_scalars__config__"  # tag


Scalars: TypeAlias = Literal["headlines", "all"] | Sequence[str]
"""Which scalars loggers get: see `is_logged`."""


def require_scalars(scalars: Scalars) -> Scalars:
    """The argument ``scalars``; ValueError if it is none."""
    patterns = [] if scalars in ("headlines", "all") else scalars
    if isinstance(patterns, str) or not all(isinstance(each, str) for each in patterns):
        raise ValueError(
            f'scalars must be "headlines", "all", or a list of keys and patterns; got {scalars!r}.'
        )
    return scalars


def is_logged(record: Record, scalars: Scalars) -> bool:
    """Tell whether the value of a record is among the scalars that loggers get.

    Those of ``"headlines"`` are the headlines, terms with ``is_scalar``, keys from outside the
    package, and ``n_nonfinite`` where it is not 0.
    """
    key = record["metric"]
    if scalars == "all":
        return True
    if scalars == "headlines":
        if key == "n_nonfinite":
            return record["value"] != 0
        own = OWN.find(key)
        return own is None or own.is_scalar or own.group == GROUPS[0]
    return any(fnmatchcase(key, pattern) for pattern in scalars)


def tagged_scalars(
    records: Iterable[Record],
    prefix: str = "geometry",
    scalars: Scalars = "all",
) -> dict[str, float]:
    """Scalars by tag, ``{prefix}.{metric}/{layer}``, those of means over blocks among them.

    ``scalars`` says which: see `is_logged`.
    """
    records = [record for record in records if is_logged(record, scalars)]
    names = dict.fromkeys(record["layer"] for record in records if not is_mean(record))
    layers = _distinct_tags(tuple(names), MEANS)
    charts = _charts(prefix, (record["metric"] for record in records))
    return {
        f"{charts[record['metric']]}/"
        f"{record['layer'] if is_mean(record) else layers[record['layer']]}": record["value"]
        for record in records
    }


def _tag_part(name: str) -> str:
    """A name as it stands in tags: an underscore for whatever is not a letter, a digit or one of
    ``_ . -``.

    TensorBoard's custom scalars show nothing in a chart that has a tag with an opening parenthesis
    (2.21).
    """
    return re.sub(r"[^\w.-]+", "_", re.sub(r"[^\w.-]+$", "", name)) or "_"


def _charts(prefix: str, metrics: Iterable[str]) -> dict[str, str]:
    """Starts of the tags of metrics, up to the slash before the layer; a key that is fit for a tag
    stays as it is.
    """
    start = "/".join(map(_tag_part, prefix.split("/")))
    names = sorted(set(metrics), key=lambda metric: (_tag_part(metric) != metric, metric))
    return {metric: f"{start}.{tag}" for metric, tag in _distinct_tags(tuple(names)).items()}


@cache
def _distinct_tags(names: tuple[str, ...], taken: tuple[str, ...] = ()) -> dict[str, str]:
    """Names as they stand in tags, distinct from each other and from those that are taken."""
    tags: dict[str, str] = {}
    for name in names:
        tag = _tag_part(name)
        while tag in (*taken, *tags.values()):
            tag += "_"
        tags[name] = tag
    return tags


def custom_scalars_layout(
    metrics: Iterable[str], prefix: str = "geometry", tag_start: str = ""
) -> dict[str, dict[str, list[Any]]]:
    """Layout of TensorBoard's custom scalars: groups of charts, one chart per metric with a line
    for each layer. Tags have ``tag_start`` in front.
    """
    layout: dict[str, dict[str, list[Any]]] = {f"{prefix}: {group}": {} for group in GROUPS}
    charts = _charts(prefix, metrics)
    for metric in in_order(charts):
        chart = ["Multiline", [rf"^{re.escape(tag_start + charts[metric])}\/"]]
        layout[f"{prefix}: {term(metric).group}"][chart_title(metric)] = chart
    return {group: charts for group, charts in layout.items() if charts}


def chart_title(metric: str) -> str:
    """The name of a metric and, where they differ, its key."""
    name = term(metric).name
    return name if name.replace(" ", "_") == metric else f"{name} ({metric})"


def write_events(path: Path, step: int, records: Sequence[Record]) -> None:
    """Write TensorBoard's event file of one step: each tag once, means over blocks among them, and
    the layout of custom scalars.
    """
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.summary.writer.record_writer import RecordWriter
    from torch.utils.tensorboard.summary import custom_scalars, scalar

    layout = custom_scalars_layout(record["metric"] for record in records)
    values = tagged_scalars([*records, *block_means(records)])
    summaries = [custom_scalars(layout), *(scalar(tag, value) for tag, value in values.items())]
    now = time.time()
    with path.open("wb") as file:
        writer = RecordWriter(file)
        writer.write(Event(wall_time=now, file_version="brain.Event:2").SerializeToString())
        for summary in summaries:
            writer.write(Event(wall_time=now, step=step, summary=summary).SerializeToString())
        writer.flush()


def custom_layout(events: Any) -> Any:
    """The layout of custom scalars in event files; an empty one where they have none."""
    from tensorboard.plugins.custom_scalar.layout_pb2 import Layout

    if _LAYOUT not in events.Tags()["tensors"]:
        return Layout()
    return Layout.FromString(events.Tensors(_LAYOUT)[-1].tensor_proto.string_val[0])


def layout_summary(layout: dict[str, dict[str, list[Any]]], folder: str) -> Any:
    """A layout of custom scalars for the newest event file in a folder, with the charts that the
    file has already: TensorBoard keeps only the last layout.
    """
    from torch.utils.tensorboard.summary import custom_scalars

    newest = max(Path(folder).glob(f"{EVENTS}*"), key=os.path.getmtime, default=Path(folder))
    summary = custom_scalars(layout)
    merged = custom_layout(event_contents(newest))
    others = [each for each in merged.category if each.title not in layout]
    del merged.category[:]
    merged.MergeFromString(summary.value[0].tensor.string_val[0])
    merged.category.extend(others)
    summary.value[0].tensor.string_val[0] = merged.SerializeToString()
    return summary


def event_contents(path: Path) -> Any:
    """What is in an event file, or in those of a folder."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(path), size_guidance={"scalars": 0})
    events.Reload()
    return events
