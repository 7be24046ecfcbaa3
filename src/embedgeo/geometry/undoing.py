"""Putting layers back to the rows that they had before a forward pass that failed."""

from collections.abc import Callable, Iterable, Iterator
from copy import copy
from typing import Any

from torch import Tensor, nn
from torchmetrics import Metric

from embedgeo.metrics.base import GeometryMetric
from embedgeo.metrics.layer import LayerMetrics

_OF_MODULES = vars(nn.Module()).keys()  # which updates do not change


def undoing(layers: Iterable[LayerMetrics]) -> Callable[[], None]:
    """A function that puts layers back to the rows that they have now.

    It holds references to the states of this package's metrics, which are replaced and not changed
    in place; those of other metrics are copied.
    """
    held = [(each, _held(each)) for layer in layers for each in _parts(layer)]

    def put_back() -> None:
        for each, attributes in held:
            vars(each).clear()
            vars(each).update(attributes)

    return put_back


def _parts(value: Any) -> Iterator[Any]:
    """The objects inside of a layer's metrics that change with its rows."""
    if isinstance(value, Metric):
        yield from value.modules()
    elif type(value).__module__.startswith("embedgeo.metrics."):
        yield value
        yield from _parts([*vars(value).values()])
    elif isinstance(value, list | tuple | dict):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _parts(each)


def _held(part: Any) -> dict[str, Any]:
    copied = (list, dict, set) if isinstance(part, GeometryMetric) else (list, dict, set, Tensor)
    return {
        name: value
        if name in _OF_MODULES or not isinstance(value, copied)
        else value.clone()
        if isinstance(value, Tensor)
        else copy(value)
        for name, value in vars(part).items()
    }
