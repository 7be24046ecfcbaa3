"""What a measurement costs: the bytes that metrics hold, and an estimate of the seconds that they take."""

import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torchmetrics import Metric

from embedgeo.functional.alignment import drift_values, linearity_values
from embedgeo.metrics.base import GeometryMetric
from embedgeo.metrics.layer import LayerMetrics

_TIMED_ROWS, _TIMED_WIDTH = 4096, 1024
"""Rows and width up to which metrics are timed; what more takes is extrapolated."""


class Rows(NamedTuple):
    """The rows of a measurement at a layer.

    Attributes:
        num_sequences: number of sequences.
        seq_len: rows of each.
        num_types: token types among them, at most; 0: there are no token ids.
        num_groups: of sequences, for standard errors; 0: there are none.
        itemsize: bytes of a number that is kept of a row.
    """

    num_sequences: int
    seq_len: int
    num_types: int
    num_groups: int
    itemsize: int

    @property
    def total(self) -> int:
        """How many there are."""
        return self.num_sequences * self.seq_len

    def drawn(self, width: int, device: torch.device) -> tuple[Tensor, Tensor | None, Tensor]:
        """Some of them at random, shape (sequences, positions, width), with token ids and sequence ids."""
        positions = min(self.seq_len, _TIMED_ROWS)
        shape = max(1, min(self.num_sequences, _TIMED_ROWS // positions)), positions
        generator = torch.Generator().manual_seed(0)
        rows = torch.randn(*shape, width, generator=generator)
        ids = torch.randint(self.num_types, shape, generator=generator).to(device) if self.num_types else None
        return rows.to(device), ids, torch.arange(shape[0])[:, None].expand(shape).to(device)


def held_bytes(metric: Metric, width: int, rows: Rows) -> int:
    """What a metric of a layer holds at the end of a measurement, with its copies for standard errors.

    What one of another package holds is found by updating it: in proportion to rows where it grows with them.
    """
    if not isinstance(metric, GeometryMetric):
        before, (hidden, ids, sequences) = _held(metric), rows.drawn(width, torch.device("cpu"))
        metric.update(hidden, **metric._filter_kwargs(token_ids=ids, sequence_ids=sequences))
        return before + round((_held(metric) - before) * rows.total / hidden.shape[:-1].numel())
    whole = metric.state_bytes(rows.total, rows.num_types, rows.itemsize)
    if not rows.num_groups or not metric.has_copies:
        return whole
    of_group = -(-rows.num_sequences // rows.num_groups) * rows.seq_len
    return whole + rows.num_groups * metric.state_bytes(of_group, min(rows.num_types, of_group), rows.itemsize)


def estimated_seconds(make: Callable[[int], Metric], width: int, rows: Rows, device: torch.device) -> float:
    """An estimate of what updating a metric of a layer, and computing its values, takes on this machine.

    It is timed on up to 4096 random rows, and of up to 1024 columns: more rows take longer in proportion, more columns
    in proportion to what the metric holds: d, or d² for a scatter.
    """
    metric, at, share = make(width), width, 1.0
    if isinstance(metric, GeometryMetric) and width > _TIMED_WIDTH:
        at, narrow = _TIMED_WIDTH, metric.of_width(_TIMED_WIDTH)
        share = metric.state_bytes(rows.total, 1) / narrow.state_bytes(rows.total, 1)
    hidden, ids, sequences = rows.drawn(at, device)
    for few in (slice(1), slice(None)):  # the first time threads and memory are set up
        metrics = LayerMetrics(
            lambda dim: [metric.of_width(dim) if isinstance(metric, GeometryMetric) else make(dim)],
            at,
            device=device,
            jackknife=rows.num_groups,
        )
        started = _now(device)
        metrics.update(hidden[few], None if ids is None else ids[few], None, sequences[few])
        updated = _now(device)
        for compute in metrics.computed():
            compute()
        computed = _now(device)
        metrics.reset()
    return share * ((updated - started) * rows.total / hidden.shape[:-1].numel() + computed - updated)


def drift_seconds(width: int, num_rows: int, device: torch.device) -> float:
    """An estimate of what comparing the rows of a layer takes: with three others, and with the layer below."""
    at = min(width, _TIMED_WIDTH)
    below, rows = torch.randn(2, num_rows, at, generator=torch.Generator().manual_seed(0)).to(device)
    started = _now(device)
    drift_values(below, rows)
    compared = _now(device)
    linearity_values(below, rows)
    return width / at * (3 * (compared - started) + _now(device) - compared)


def _held(metric: Metric) -> int:
    states = metric.metric_state.values()
    return sum(each.nbytes for state in states for each in (state if isinstance(state, list) else [state]))


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
