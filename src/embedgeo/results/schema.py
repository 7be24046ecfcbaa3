"""The flat form of results: a record is one number and where it was measured."""

from math import nan
from typing import TypedDict, cast

MODEL = "model"
"""Layer name of metrics of the whole model, such as its loss; their layer index is -1 and their width 0."""


class Record(TypedDict):
    """The value of a metric at a layer.

    Attributes:
        layer: name of the layer.
        layer_index: its position in forward order, from 0.
        width: d, the width of its hidden state.
        metric: key of the metric.
        value: NaN where it is undefined.
        stderr: its standard error; NaN where it was not asked for.
    """

    layer: str
    layer_index: int
    width: int
    metric: str
    value: float
    stderr: float


class StepRecord(Record):
    """A record of a training run: measured at an optimizer step."""

    step: int


class _Keys:
    """The dicts of its instances share the table of their keys, and are half as large as others."""


def dated(step: int, record: Record) -> StepRecord:
    """A record as it was measured at a step; in half of a dict's memory, as a long run has millions of them.

    >>> dated(8, model_record("loss", 2.5))
    {'step': 8, 'layer': 'model', 'layer_index': -1, 'width': 0, 'metric': 'loss', 'value': 2.5, 'stderr': nan}
    """
    shared = _Keys()
    for key, value in {"step": step, **record}.items():
        setattr(shared, key, value if value == value else nan)  # noqa: PLR0124 (one NaN for all)
    return cast("StepRecord", vars(shared))


def model_record(metric: str, value: float) -> Record:
    """A record of the whole model.

    >>> model_record("loss", 2.5)
    {'layer': 'model', 'layer_index': -1, 'width': 0, 'metric': 'loss', 'value': 2.5, 'stderr': nan}
    """
    return Record(layer=MODEL, layer_index=-1, width=0, metric=metric, value=value, stderr=nan)
