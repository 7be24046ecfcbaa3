"""Checks of metrics that are computed together."""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torchmetrics import Metric

from embedgeo.functional.distributed import all_reduce_max
from embedgeo.metrics.anisotropy import Anisotropy
from embedgeo.metrics.dimension import IntrinsicDimension


def require_distinct_keys(make_metrics: Callable[[int], list[Metric]]) -> None:
    """Raise TypeError if what is made for a width is no list of metrics, ValueError if two of them give one key."""
    owners: dict[str, str] = {}
    made: object = make_metrics(2)
    if not isinstance(made, list | tuple):
        raise TypeError(f"metrics must make a list of torchmetrics metrics; got {type(made).__name__}.")
    for metric in made:
        if not isinstance(metric, Metric):
            raise TypeError(f"metrics must make torchmetrics metrics; got {type(metric).__name__}.")
        metric.update(torch.zeros(0, 2), torch.zeros(0, dtype=torch.int64))
        metric._to_sync = False
        name = type(metric).__name__
        for key in metric.compute():
            if key in owners:
                raise ValueError(
                    f"metrics must have distinct keys; {owners[key]} and {name} both give {key!r}. Leave one out."
                )
            owners[key] = name


def require_samples(make_metrics: Callable[[int], list[Metric]]) -> None:
    """Raise ValueError unless some of the metrics made hold what ``save_samples`` saves."""
    if not any(isinstance(metric, IntrinsicDimension | Anisotropy) for metric in make_metrics(2)):
        raise ValueError("save_samples needs IntrinsicDimension or Anisotropy among the metrics; neither is.")


def require_same_values(names: Sequence[str], values: Tensor, process_group: dist.ProcessGroup | None = None) -> None:
    """Raise ValueError, naming the first, if values differ between the ranks of the group, which must all call this."""
    if not names:
        return
    largest = all_reduce_max(torch.stack((values, -values)).nan_to_num(), process_group)
    differs = largest.sum(0) > 1e-3 * largest.abs().amax(0)
    if bool(differs.any()):
        raise ValueError(
            "ranks that run one model in parallel must see the same rows at a layer; "
            f"{names[int(differs.nonzero()[0])]} differs between them: each rank has a part of it. Leave the layer out."
        )
