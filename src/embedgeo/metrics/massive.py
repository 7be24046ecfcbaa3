"""Massive rows: how many there are, what they hold, and the numbers of a layer without them."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from embedgeo.functional.massive import RowGroup, first_rows, row_group
from embedgeo.functional.moments import Moments, ratio
from embedgeo.functional.rows import Rows
from embedgeo.glossary import (
    WITHOUT_BOTH,
    WITHOUT_MASSIVE,
    WITHOUT_TOP_DIM,
    Term,
    in_group,
    left_without,
    term,
)
from embedgeo.metrics.base import GeometryMetric, values_of

_LEFT_OUT = {  # by the end of a key
    WITHOUT_BOTH: "massive rows and the largest coordinate",
    WITHOUT_MASSIVE: "massive rows",
}


class MassiveRows(GeometryMetric):
    """The massive rows of a layer, whose norm is beyond 4 times the median of their forward pass.

    A layer has one from its first massive row on; it is given these rows alone. ``compute()``
    returns ``n_massive``, their number, and ``n_massive_first``, that of those which are the first
    one of a sequence of two or more.

    Args:
        dim: d, the width of the embeddings.
        kwargs: of `torchmetrics.Metric`.
    """

    has_copies = False
    terms = in_group(
        "rows counted",
        615,
        n_massive=Term(
            "massive rows",
            "rows beyond 4 times the median norm of their forward pass",
            "Rows far longer than most, as attention sinks are. Numbers without them have keys of "
            "their own.",
            ranges=True,
            gaussian=0.0,
        ),
        n_massive_first=Term(
            "massive first positions",
            "massive rows that are the first one of their sequence",
            "How many of the massive rows are first positions.",
            ranges=True,
            is_drawn=False,
            gaussian=0.0,
        ),
    ) | in_group(
        "norms",
        420,
        massive_share_of_V=Term(
            "massive rows' share",
            "share of V of the massive rows",
            "How much of the variance massive rows hold.",
            gaussian=0.0,
        ),
    )

    def __init__(self, dim: int, **kwargs: Any) -> None:
        super().__init__(dim, **kwargs)
        self.declare(RowGroup.empty(dim))

    @staticmethod
    def family_term(key: str) -> Term | None:
        """The term of a number without massive rows."""
        for end, what in _LEFT_OUT.items():
            if key.endswith(end):
                return left_without(term(key.removesuffix(end)), what)
        return None

    def take(self, rows: Rows, marks: Tensor) -> None:
        """Take the rows of a pass that are marked as massive, shape (n,)."""
        num_first = int(marks.cpu()[first_rows(rows.ids)].sum())
        massive = rows.select(marks)
        self.update(massive)
        self.extend(row_group(massive.embeddings, num_first))

    def update_states(self, rows: Rows) -> None:
        """Nothing: `take` knows of which pass the rows are."""

    def compute(self) -> dict[str, Tensor]:
        group = self.load(RowGroup)
        return {"n_massive": group.n, "n_massive_first": group.num_first}


def massive_values(massive: MassiveRows | None, metrics: Iterable[object]) -> dict[str, Tensor]:
    """``n_massive``, ``n_massive_first`` and ``massive_share_of_V`` of a layer: 0 where no row is
    massive. The share needs a metric that holds the moments of all rows.
    """
    values = {"n_massive": torch.zeros((), dtype=torch.float64)}
    values["n_massive_first"] = values["n_massive"]
    if massive is not None:
        values = values_of(massive)
    for metric in metrics:
        if isinstance(metric, GeometryMetric) and Moments in metric.declared:
            moments = metric.load(Moments)
            total = moments.m2.sum()
            share = ratio(torch.zeros_like(total), total)
            if massive is not None:
                share = massive.load(RowGroup).share_of_variance(moments.mean, moments.m2)
            values["massive_share_of_V"] = share
            break
    return values


def without_massive(key: str) -> str:
    """The key of a number of the ordinary rows alone."""
    if key.endswith(WITHOUT_TOP_DIM):
        return key.removesuffix(WITHOUT_TOP_DIM) + WITHOUT_BOTH
    return key + WITHOUT_MASSIVE
