"""The metrics of one layer and, for their standard errors, copies of them for groups of its sequences."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torchmetrics import Metric

from embedgeo.functional.distributed import all_reduce_sum, current_rank, is_distributed
from embedgeo.metrics.base import GeometryMetric, ValuesAndErrors

MetricFactory = Callable[[int], list[Metric]]
"""Makes the metrics of one layer, given the layer's width."""


class LayerMetrics:
    """Metrics of one layer.

    Args:
        make: makes the metrics.
        dim: d, the width of the layer.
        device: where they begin.
        process_group: the ranks that have different rows.
        num_groups: G, into how many groups whole sequences are dealt for standard errors; 0 for none. Sequence i of the S
            in batch b is in group (b S + i) mod G; ranks count as if one process saw their batches in turn.
    """

    def __init__(
        self,
        make: MetricFactory,
        dim: int,
        *,
        device: torch.device,
        process_group: dist.ProcessGroup | None = None,
        num_groups: int = 0,
    ) -> None:
        self.dim = dim
        self._group = process_group
        self._num_batches = 0
        self._sizes = torch.zeros(num_groups, dtype=torch.int64, device=device)
        sets = [[metric.to(device) for metric in make(dim)] for _ in range(num_groups + 1)]
        self._metrics, copies = sets[0], sets[1:]
        self._copies: list[list[Any]] = [
            [each[i] for each in copies] if isinstance(metric, GeometryMetric) and metric.merges_groups else []
            for i, metric in enumerate(self._metrics)
        ]
        for metric in self._all():
            metric._to_sync = False  # `synced` does it
            metric.process_group = process_group

    def _all(self) -> Iterator[Metric]:
        for metric, copies in zip(self._metrics, self._copies, strict=True):
            yield from (metric, *copies)

    def update(
        self, embeddings: Tensor, token_ids: Tensor | None, mask: Tensor | None, sequence_ids: Tensor | None
    ) -> None:
        """Update the metrics with a batch, and the copies with the rows of their groups."""
