"""The memory that the metrics of all layers take during a measurement."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torchmetrics import Metric

from embedgeo.functional.distributed import BUFFER_BYTES
from embedgeo.metrics.base import GeometryMetric, state_bytes


@dataclass
class Memory:
    """The most bytes that a measurement takes on a rank, those of the model apart."""

    metrics: Counter[str] = field(default_factory=Counter)  # of states, by the class of the metric
    on_device: int = 0  # of states
    on_host: int = 0  # of sampled rows
    working: int = 0  # beside them: of one layer, and states before a pass, or those exchanged
    together: int = 1  # of states of layers that ranks exchange together, but for the last of these

    @property
    def peak(self) -> int:
        """On the device."""
        return self.on_device + self.working


class SeenRows(NamedTuple):
    """The rows of a layer that a rank sees in a measurement, at most."""

    num_rows: int
    num_passes: int = 1  # forward passes that they come from
    num_types: int = 0  # token types of the rows of all ranks


def planned_memory(
    layers: Iterable[tuple[list[Metric], int]],
    seen: SeenRows,
    device: torch.device,
    budget: int,
    num_ranks: int = 1,
    jackknife: int = 0,
) -> Memory:
    """The most memory that metrics take.

    From a layer's first massive row on it has a second copy of its metrics. What layers held before
    a forward pass is there until it ends. Standard errors take copies for each group, and states
    without each. While ranks exchange states, a rank holds those of all rows beside its own, for as
    many layers at a time as the budget leaves room for.

    Args:
        layers: metrics, and the number of layers that have such.
        seen: the rows.
        device: of the rows.
        budget: bytes of the device that may be taken.
        num_ranks: number of ranks that have different rows.
        jackknife: number of groups for standard errors.
    """
    num_rows, num_passes, num_types = seen
    of_pass = -(-num_rows // num_passes)
    memory = Memory()
    # bytes on the device of the rows of all ranks: of all layers, and of one
    united = 0
    most = 0
    united_on_host = 0

    def of(metric: GeometryMetric, rows: int) -> tuple[int, int]:
        return state_bytes(metric, rows, min(num_types, rows))

    for metrics, num_layers in layers:
        of_layer = 0
        for metric in metrics:
            name = type(metric).__name__
            memory.metrics[name] += 0
            if not isinstance(metric, GeometryMetric):
                continue
            groups = jackknife if metric.has_copies else 0
            copies = num_layers * (2 if metric.keys_without_massive else 1)
            of_group = -(-num_rows // max(groups, 1))
            for rows, times in ((num_rows, copies), (of_group, copies * groups)):
                on_device, on_host = of(metric, rows)
                memory.metrics[name] += times * (on_device + on_host)
                memory.on_device += times * on_device
                memory.on_host += times * on_host
                on_device, on_host = of(metric, rows * num_ranks)
                of_layer += times * on_device // num_layers
                united_on_host += times * on_host
            # states without each group; the rows that count, and the ordinary ones
            num_merged = groups + 2 if groups else 0
            working = num_merged * sum(of(metric, num_rows)) + 8 * of_pass * metric.dim
            working += metric.working_bytes(min(num_types, of_pass), device)
            memory.working = max(memory.working, working)
        united += of_layer * num_layers
        most = max(most, of_layer)
    # states before a pass are gone when ranks exchange
    before, on_host = (memory.on_device, memory.on_host) if num_passes > 1 else (0, 0)
    exchanging = 0
    if num_ranks > 1:
        exchanging = max(memory.working, min(united + united_on_host, BUFFER_BYTES))
        memory.together = max(1, budget - memory.on_device - max(before, exchanging) - most)
        held = min(united, memory.together + most)
        exchanging += held
        on_host = max(on_host, united_on_host * held // max(united, 1))
    memory.working = max(memory.working + before, exchanging)
    memory.on_host += on_host
    return memory
