"""How far the rows of a layer have moved: since the last measurement, since the first, and from the layer below."""

import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from embedgeo.functional.alignment import drift_values, linearity_values
from embedgeo.geometry.computing import Reached
from embedgeo.layer_names import layers_below
from embedgeo.metrics.base import ValuesAndErrors
from embedgeo.metrics.layer import FixedRows, LayerMetrics, MetricFactory


class KeptRows(NamedTuple):
    """The rows of a layer that are compared, of one measurement.

    Attributes:
        rows: shape (m, d), in the dtype of the hidden states, on the CPU.
        row_numbers: shape (m,), int64, ascending: which they are among all rows, as one process would see them.
        token_ids: shape (m,), int64; 0 where there are none.
        num_rows: number of rows that they were drawn from, those with a NaN or Inf among them.
    """

    rows: Tensor
    row_numbers: Tensor
    token_ids: Tensor
    num_rows: int

    @classmethod
    def of(cls, metrics: LayerMetrics) -> "KeptRows":
        """Those of a layer, drawn from the rows of all ranks; every rank must call this."""
        (fixed,) = metrics.synced(FixedRows)
        sample = fixed.taken()
        numbers = metrics.row_numbers(sample.positions)
        order = numbers.argsort()
        rows = sample.rows[order].to(metrics.dtype or sample.rows.dtype)  # they came from it
        return cls(rows.cpu(), numbers[order].cpu(), sample.labels[order].cpu(), int(sample.seen))

    def is_comparable(self, other: "KeptRows") -> bool:
        """Whether these are the same rows, but for some that have a NaN or Inf in one of them."""
        own, others = self._in_both(other)
        return (
            self.num_rows == other.num_rows
            and 2 * int(own.sum()) >= min(len(own), len(others))
            and torch.equal(self.token_ids[own], other.token_ids[others])
        )

    def paired(self, other: "KeptRows", device: torch.device) -> tuple[Tensor, Tensor]:
        """The rows that both have, in one order."""
        own, others = self._in_both(other)
        return self.rows[own].to(device), other.rows[others].to(device)

    def _in_both(self, other: "KeptRows") -> tuple[Tensor, Tensor]:
        numbers = self.row_numbers, other.row_numbers
        return torch.isin(*numbers), torch.isin(*reversed(numbers))


class Drift:
    """Compares the rows of each measurement with those of the one before, of the first one, and of the layer below.

    Values are those of `embedgeo.functional.drift_values` of some rows of a layer, drawn once and for all:
    ``cka_to_previous``, ``procrustes_to_previous``, ``neighbor_overlap_to_previous``, the same with ``_to_first``, and
    with ``_to_below``, beside the ``linearity`` and ``linearity_without_residual`` of
    `embedgeo.functional.linearity_values`, which are NaN unless there are more rows than the layer is wide. The layer
    below is the one measured before it in forward order; those of an encoder and a decoder, means of layers, and layers
    of other rows have none of each other. What a layer is not compared with is absent, so at the first
    measurement the first six are.

    Rows are told by their numbers and token ids. Where these change, one warning says so, and the next measurement is
    compared with this one.

    Args:
        num_rows: how many rows of a layer are compared, at most.
    """

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self._first: dict[str, KeptRows] = {}
        self._previous: dict[str, KeptRows] = {}
        self._has_warned = False

    def with_fixed_rows(self, make: MetricFactory) -> MetricFactory:
        """What makes the same metrics, and the rows to compare."""
        return lambda dim: [*make(dim), FixedRows(dim, self.num_rows)]

    def compared(self, reached: Sequence[Reached]) -> list[Reached]:
        """The layers of a measurement, each with what compares it; every rank must call this, once a measurement."""
        now = {each.layer.name: KeptRows.of(each.metrics) for each in reached}
        changed = [name for name, rows in now.items() if not rows.is_comparable(self._previous.get(name, rows))]
        if changed:
            self.forget()
            self._warn(changed[0])
        given = []
        for each, below in zip(reached, layers_below(now), strict=True):
            name = each.layer.name
            others = {"previous": self._previous.get(name), "first": self._first.get(name), "below": now.get(below)}
            found = {to: rows for to, rows in others.items() if rows is not None and rows.is_comparable(now[name])}
            given.append(each._replace(further=(partial(_values, now[name], found, each.metrics.device),)))
        self._first, self._previous = now | self._first, self._previous | now
        return given

    @property
    def has_rows(self) -> bool:
        """Whether there are rows of earlier measurements."""
        return bool(self._first)

    def forget(self) -> None:
        """Drop the rows of earlier measurements."""
        self._first, self._previous = {}, {}

    def state(self) -> dict[str, Any]:
        """The rows of the first and of the last measurement, as tensors and numbers for a checkpoint."""
        of_both = {"first": self._first, "previous": self._previous}
        return {which: {name: rows._asdict() for name, rows in kept.items()} for which, kept in of_both.items()}

    def load(self, state: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> None:
        """Go on from what `state` has returned."""
        of_both = [{name: _on_cpu(rows) for name, rows in state[which].items()} for which in ("first", "previous")]
        self._first, self._previous = of_both

    def _warn(self, layer: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"drift compares the same rows at every measurement; at layer {layer!r} the probe has others than at "
                "the last one, and is compared from now on. Give a probe of fixed batches (shuffle=False), and go on "
                "from a checkpoint with the same probe on as many ranks.",
                stacklevel=2,
            )


def _values(rows: KeptRows, others: Mapping[str, KeptRows], device: torch.device) -> ValuesAndErrors:
    values: dict[str, Tensor] = {}
    for to, other in others.items():
        pair = other.paired(rows, device)
        values |= {f"{key}_to_{to}": value for key, value in drift_values(*pair).items()}
        if to == "below":
            values |= linearity_values(*pair)
    return values, {key: torch.full_like(value, torch.nan) for key, value in values.items()}


def _on_cpu(kept: Mapping[str, Any]) -> KeptRows:
    rows, row_numbers, token_ids = (kept[key].cpu() for key in ("rows", "row_numbers", "token_ids"))
    return KeptRows(rows, row_numbers, token_ids, kept["num_rows"])
