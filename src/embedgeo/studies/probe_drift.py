"""Drift of the rows of a layer: since the last measurement, since the first, and from the layer
below.
"""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from embedgeo.functional.distributed import is_distributed, reduce_states
from embedgeo.functional.precision import on_one_device
from embedgeo.functional.rows import Rows
from embedgeo.functional.sampling import Sample
from embedgeo.geometry.computing import MeasuredLayer
from embedgeo.glossary import DRIFT
from embedgeo.layer_names import layers_below
from embedgeo.metrics.base import GeometryMetric
from embedgeo.metrics.layer import LayerMetrics, MetricFactory
from embedgeo.results.records import Record
from embedgeo.studies.representations import NEIGHBORS, drift_values, linearity_values


class KeptRows(NamedTuple):
    """The rows of a layer that are compared, of one measurement, on the CPU."""

    rows: Tensor  # (m, d), in the dtype of the hidden states
    # (m,), int64, ascending: their numbers among all rows, as one process would see them
    row_numbers: Tensor
    token_ids: Tensor  # (m,), int64; 0 where there are none
    num_rows: int  # that they were drawn from, those with a NaN or Inf among them

    @classmethod
    def of(cls, metrics: LayerMetrics, sample: Sample) -> "KeptRows":
        """Those of a layer, given the sample of the rows of all ranks."""
        ascending = sample.positions.argsort()
        rows = sample.rows[ascending].to(metrics.dtype or sample.rows.dtype)  # they came from it
        labels = sample.labels[ascending.to(sample.labels.device)]
        positions = sample.positions[ascending]
        return cls(rows.cpu(), positions.cpu(), labels.cpu(), int(sample.seen))

    @classmethod
    def load(cls, state: Mapping[str, Any]) -> "KeptRows":
        """Those of a checkpoint."""
        return cls(
            state["rows"].cpu(),
            state["row_numbers"].cpu(),
            state["token_ids"].cpu(),
            state["num_rows"],
        )

    def is_comparable(self, other: "KeptRows") -> bool:
        """Tell whether these are the same rows, but for some that have a NaN or Inf in one of
        them.
        """
        own, others = self._shared_rows(other)
        return (
            self.num_rows == other.num_rows
            and 2 * int(own.sum()) >= min(len(own), len(others))
            and torch.equal(self.token_ids[own], other.token_ids[others])
        )

    def paired(self, other: "KeptRows") -> tuple[Tensor, Tensor]:
        """The rows that both have, in one order."""
        own, others = self._shared_rows(other)
        return self.rows[own], other.rows[others]

    def _shared_rows(self, other: "KeptRows") -> tuple[Tensor, Tensor]:
        return torch.isin(self.row_numbers, other.row_numbers), torch.isin(
            other.row_numbers, self.row_numbers
        )


class ComparedRows(GeometryMetric):
    """A uniform sample of the rows with their token ids, compared with other rows.

    Ranks share their rows once, in `Drift.compare`, and not when metrics are synchronised.
    ``comparisons`` are other rows and these, by what the others are of, such as ``previous``.
    """

    terms = DRIFT
    has_copies = False

    def __init__(self, dim: int, size: int, **kwargs: Any) -> None:
        super().__init__(dim, size, **kwargs)
        self.declare(Sample.empty(dim, size))
        self.comparisons: Mapping[str, tuple[KeptRows, KeptRows]] = {}

    def update_states(self, rows: Rows) -> None:
        """Draw from the rows of a batch."""
        self.draw(rows, rows.token_ids)

    def compute(self) -> dict[str, Tensor]:
        """Values of the comparisons; none before there are any."""
        pairs = {name: others.paired(rows) for name, (others, rows) in self.comparisons.items()}
        values = {
            f"{key}_to_{name}": value
            for name, pair in pairs.items()
            for key, value in drift_values(*(rows.to(self.device) for rows in pair)).items()
        }
        return values | linearity_values(*pairs["below"]) if "below" in pairs else values

    def states_to_reduce(self) -> list[Any]:
        """None: they stay those of this rank."""
        return []


class Drift:
    """Compares the rows of each measurement with those of the one before, of the first one, and of
    the layer below.

    Values are those of `embedgeo.studies.representations.drift_values` of some rows of a layer,
    drawn once and for all: ``cka_to_previous``, ``procrustes_to_previous``,
    ``neighbor_overlap_to_previous``, the same with ``_to_first``, and with ``_to_below``, beside
    the ``linearity`` and ``linearity_without_residual`` of
    `embedgeo.studies.representations.linearity_values`, which are NaN unless there are more rows
    than the layer is wide. The layer below is the one measured before it in forward order; those of
    an encoder and a decoder, means of layers, and layers of other rows have none of each other.
    What a layer is not compared with is absent, so at the first measurement the first six are.

    Rows are told by their numbers and token ids. Where these change, one warning says so, and the
    next measurement is compared with this one.

    It is a listener of a monitor with a probe, whose checkpoints then hold the rows of the first
    and of the last measurement, so that a resumed run goes on from them.

    Args:
        num_rows: how many rows of a layer are compared, at most.

    Raises:
        ValueError: the number of rows is less than 32, which the neighbours need.

    Example::

        monitor = GeometryMonitor(every_n_steps=100, probe=loader, listeners=[Drift()])
    """

    def __init__(self, num_rows: int = 1024) -> None:
        if num_rows < NEIGHBORS + 2:
            raise ValueError(f"num_rows must be {NEIGHBORS + 2} or more; got {num_rows!r}.")
        self.num_rows = num_rows
        self.reset()

    def reset(self) -> None:
        """Drop the rows of earlier measurements: another run begins."""
        self._first: dict[str, KeptRows] = {}
        self._previous: dict[str, KeptRows] = {}
        self._has_warned = False

    def __call__(self, step: int, records: Sequence[Record]) -> None:
        """Hear what was measured, the drift among it; this does nothing."""

    def with_compared_rows(self, make: MetricFactory) -> MetricFactory:
        """Make the metrics that ``make`` makes, and the sample of rows to compare."""
        return lambda dim: [*make(dim), ComparedRows(dim, self.num_rows)]

    def compare(self, layers: Sequence[MeasuredLayer]) -> None:
        """Give the metrics of all layers the rows to compare with; every rank must call this, once
        a measurement.
        """
        compared = [
            each.metrics.wanted(lambda metric: isinstance(metric, ComparedRows))[0]
            for each in layers
        ]
        group = compared[0].process_group if compared else None
        drawn = [on_one_device(each.load(Sample), each.device) for each in compared]
        if is_distributed():
            drawn = reduce_states(drawn, group)
        now = {
            each.name: KeptRows.of(each.metrics, sample)
            for each, sample in zip(layers, drawn, strict=True)
        }
        changed = [
            name
            for name, rows in now.items()
            if not rows.is_comparable(self._previous.get(name, rows))
        ]
        if changed:
            self._first = {}
            self._previous = {}
            if not self._has_warned:
                self._has_warned = True
                warnings.warn(
                    f"drift compares the same rows at every measurement; at layer {changed[0]!r} "
                    "the probe has others than at the last one, and is compared from now on. Give "
                    "a probe of fixed batches (shuffle=False), and go on from a checkpoint with "
                    "the same probe on as many ranks.",
                    stacklevel=1,
                )
        for layer, below, metric in zip(layers, layers_below(now), compared, strict=True):
            rows = now[layer.name]
            others = {
                "previous": self._previous.get(layer.name),
                "first": self._first.get(layer.name),
                "below": now.get(below),
            }
            metric.comparisons = {
                name: (other, rows)
                for name, other in others.items()
                if other is not None and other.is_comparable(rows)
            }
        self._first = now | self._first
        self._previous = self._previous | now

    def state_dict(self) -> dict[str, Any]:
        """The rows of the first and of the last measurement, as tensors and numbers for a
        checkpoint.
        """
        kept = {"first": self._first, "previous": self._previous}
        return {
            key: {name: rows._asdict() for name, rows in of_layers.items()}
            for key, of_layers in kept.items()
        }

    def load_state_dict(self, state: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> None:
        """Go on from what `state_dict` has returned."""
        self._first = {name: KeptRows.load(rows) for name, rows in state["first"].items()}
        self._previous = {name: KeptRows.load(rows) for name, rows in state["previous"].items()}
