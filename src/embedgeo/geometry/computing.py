"""The numbers of all layers of a measurement."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import accumulate, groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from embedgeo.functional.distributed import is_distributed
from embedgeo.metrics.base import GeometryMetric, ValuesAndErrors, require_values, values_of
from embedgeo.metrics.layer import LayerMetrics, compute_alone, in_sync, named
from embedgeo.metrics.massive import massive_values, without_massive
from embedgeo.results.records import Record

# an operation on so many takes about as long as a thread of a busy machine needs to join in
_FEW_NUMBERS = 2**18

Pairs = dict[str, tuple[float, float]]
"""Value and standard error by key."""


class MeasuredLayer(NamedTuple):
    """A layer that has rows on some rank, and the metrics that have seen them."""

    name: str
    layer_index: int  # in forward order
    metrics: LayerMetrics
    num_bytes: int = 0  # of its states, on the rank where these are the largest


def compute(
    layers: Sequence[MeasuredLayer], together: int, *, keep_samples: bool = False
) -> list[Record]:
    """Records of layers over the rows of all ranks, on all of these of the same keys; every rank
    must call this. The states stay as they are.

    Layers get the rows of all ranks in one exchange, as many at a time as have states of about
    ``together`` bytes on each rank. An error of a layer is raised once all have been computed.
    ``keep_samples`` keeps the sampled rows of all ranks at the layers beyond their exchange.
    """
    pairs = list[Pairs | Exception]()
    for some in _exchanged_together(layers, together):
        metrics = [each.metrics for each in some]
        with in_sync(metrics):
            pairs += layer_values(metrics)
            for each in metrics if keep_samples else ():
                each.keep_samples()
    records = list[Record]()
    for layer, of_layer in zip(layers, pairs, strict=True):
        if isinstance(of_layer, Exception):
            of_layer.add_note(f"at layer {layer.name!r}")
            raise of_layer
        width = layer.metrics.dim
        records += [
            Record(
                layer=layer.name,
                layer_index=layer.layer_index,
                width=width,
                metric=key,
                value=value,
                stderr=stderr,
            )
            for key, (value, stderr) in of_layer.items()
        ]
    return records


def layer_values(layers: Sequence[LayerMetrics]) -> list[Pairs | Exception]:
    """Values and standard errors of each layer, by the states that it has (see `in_sync`), or the
    exception of one that fails.

    Small layers are computed in one thread.
    """
    size = max((max(each.num_rows, each.dim) * each.dim for each in layers), default=0)
    with threads_for(size), ExitStack() as stack:
        for kind in {"cpu", *(each.device.type for each in layers)}:
            stack.enter_context(torch.autocast(kind, enabled=False))
        return [_values(layer) for layer in layers]


def _exchanged_together(
    layers: Sequence[MeasuredLayer], together: int
) -> Iterator[Sequence[MeasuredLayer]]:
    """Layers in turn, several at a time; on all ranks the same ones."""
    if not is_distributed():
        yield layers
        return
    ends = accumulate(each.num_bytes for each in layers)
    for _, some in groupby(zip(layers, ends, strict=True), lambda each: each[1] // together):
        yield [layer for layer, _ in some]


@contextmanager
def threads_for(size: int) -> Iterator[None]:
    """Context for operations on so many numbers: one thread where they are few, on a CPU.

    Threads of a team wait for each other at the end of every operation. Where other processes keep
    a processor busy, that takes longer than the operation. The model outside of the context has the
    threads that it had; a thread of the user's whose very first operation falls into it keeps one.
    """
    num_threads = torch.get_num_threads()
    if size > _FEW_NUMBERS or num_threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def _values(layer: LayerMetrics) -> Pairs | Exception:
    """Values of a layer and of its ordinary rows, with standard errors from the copies of its
    metrics, or the exception of one that fails: the one place where they are computed.
    """
    values = dict[str, Tensor]()
    errors = dict[str, Tensor]()
    owners = dict[str, str]()
    whole = [*layer.whole.with_groups()]
    try:
        has_errors = layer.num_groups > 0
        for metric, copies in whole:
            own, found_errors = _values_of_metric(metric, copies, has_errors=has_errors)
            name = type(metric).__name__
            for key in own:
                if key in owners:
                    raise ValueError(
                        f"metrics must have distinct keys; {owners[key]} and {name} both give "
                        f"{key!r}. Leave one out."
                    )
                owners[key] = name
            values |= own
            errors |= found_errors
        for metric, copies in layer.ordinary.with_groups():
            own, found_errors = _values_of_metric(metric, copies, has_errors=has_errors)
            kept = metric.keys_without_massive
            for into, made in ((values, own), (errors, found_errors)):
                into |= {without_massive(key): made[key] for key in kept if key in made}
        held = [] if layer.skip_massive else [metric for metric, _ in whole]
        values |= massive_values(layer.massive, held)
        return _pairs(values, errors)
    except Exception as error:
        return error


def _values_of_metric(metric: Any, copies: list[Any], *, has_errors: bool) -> ValuesAndErrors:
    with named(metric):
        if not isinstance(metric, GeometryMetric):
            return require_values(compute_alone(metric)), {}
        if has_errors:
            return metric.compute_with_errors(copies)
        return values_of(metric), {}


def _pairs(values: Mapping[str, Tensor], errors: Mapping[str, Tensor]) -> Pairs:
    """Values on the host, each with its standard error or NaN."""
    scalars = [*values.values(), *errors.values()]
    if not scalars:
        return {}
    device = scalars[0].device  # from which all are brought together
    numbers = torch.stack([each.to(device) for each in scalars]).cpu().double().tolist()
    stderrs = dict(zip(errors, numbers[len(values) :], strict=True))
    return {
        key: (number, stderrs.get(key, math.nan))
        for key, number in zip(values, numbers, strict=False)
    }
