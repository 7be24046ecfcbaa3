"""The residual ledger: what each write of a block has of Q, M, V and V_W of the block's output."""

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from embedgeo.functional.ledger import (
    ROUNDING,
    StreamMoments,
    divided,
    stream_moments,
    within_products,
)
from embedgeo.functional.moments import ratio
from embedgeo.functional.rows import Rows
from embedgeo.functional.tokens import SequenceCount, TokenTable, type_table
from embedgeo.glossary import Term
from embedgeo.metrics.base import GeometryMetric
from embedgeo.metrics.layer import MetricFactory
from embedgeo.metrics.tokens import TokenMoments

_PART = re.compile(r"(Q|M|V|V_W|V_W_unbiased)_(from|share|by)_(\w+)")
_OF_WRITE = {
    "norm_ratio": (
        "size beside the stream",
        "√(Q of the write / Q of the stream)",
        "How large a write is.",
    ),
    "M_over_Q": ("M/Q", "share", "How much of a write is the same in every row: its offset."),
    "cosine_to_stream": (
        "cosine to the stream",
        "mean over rows",
        "Whether a write repeats or erases the stream.",
    ),
    "top_coordinate": (
        "largest coordinate",
        "place, from 0",
        "The coordinate with the largest part of the write's Q.",
    ),
    "top_coordinate_share": (
        "largest coordinate",
        "share of the write's Q",
        "How much of a write is one coordinate.",
    ),
}
# M/Q is that of a layer of its own
_DRAWN = "norm_ratio", "cosine_to_stream", "top_coordinate_share"
_WRITE = re.compile(rf"(\w+?)_({'|'.join(_OF_WRITE)})")


class ResidualLedger(GeometryMetric):
    """Exact division of Q, M, V and V_W of a sum of streams: of a block's output h' = h + a + m
    into h, a and m.

    Rows are the K streams side by side, shape (..., K d), as the layers of ``layers="residual"``
    have them. ``compute()`` returns float64 scalars: ``n``; Q, M, V and, with ``by_token_type`` and
    token ids, V_W (plug-in) and V_W_unbiased of the sum; of each of these, X, the parts
    ``X_from_{stream}``, a stream's own, and ``X_from_{stream}_{other}``, twice the product of two,
    negative where they cancel, and ``X_share_…``, divided by X. What involves the rounding of the
    model's dtype is ``X_from_rounding``. Parts add up to X; those of a stream that is zero in all
    rows are left out. ``X_by_{stream}`` is a stream's share with half of each of its products. Of
    each write: ``{write}_norm_ratio``, the root of its Q over the stream's; ``{write}_M_over_Q``;
    ``{write}_cosine_to_stream``, the mean over rows; ``{write}_top_coordinate``, the one with the
    largest part of its Q, and ``{write}_top_coordinate_share``, that part over Q. Without rows
    there is ``n`` alone.

    Memory is O(d): 2 K numbers a coordinate; with ``by_token_type`` K numbers a coordinate and
    token type, and 2 K² of each type.

    Args:
        dim: K d, the width of all streams together.
        streams: the K names, the stream that enters the block first.
        by_token_type: hold the mean of each token type, for V_W.
        kwargs: of `torchmetrics.Metric`.

    Raises:
        ValueError: ``dim`` is not a multiple of K, or names are not distinct.

    >>> metric = ResidualLedger(4, ("stream", "mlp"))
    >>> metric.update(torch.tensor([[1.0, 0.0, 1.0, 1.0], [1.0, 0.0, 3.0, 1.0]]))
    >>> values = metric.compute()
    >>> [values[key].item() for key in ("M", "M_from_stream", "M_from_mlp", "M_from_stream_mlp")]
    [10.0, 1.0, 5.0, 4.0]
    """

    def __init__(
        self, dim: int, streams: Sequence[str], by_token_type: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(dim, tuple(streams), by_token_type, **kwargs)
        if dim % len(streams) or len({*streams}) < len(streams):
            raise ValueError(
                f"dim must be a multiple of the number of streams, whose names are distinct; got "
                f"{dim} for {streams}."
            )
        self.streams = tuple(streams)
        self.declare(StreamMoments.empty(len(streams), dim // len(streams)))
        if by_token_type:
            self.declare(TokenTable.empty(dim, len(streams)), "table_")
            self.declare(SequenceCount(torch.zeros((), dtype=torch.float64)))

    @property
    def width(self) -> int:
        return self.dim // len(self.streams)

    @staticmethod
    def family_term(key: str) -> Term | None:
        if part := _PART.fullmatch(key):
            whole, kind, name = part.groups()
            name = name.replace("_", " ")
            if kind == "by":
                meaning = (
                    f"Who writes {whole}: the share of {name}, with half of each product that it "
                    f"has with another."
                )
                return Term(
                    f"{whole} written by {name}",
                    f"share of {whole}",
                    meaning,
                    is_drawn=False,
                    order=785,
                )
            unit = "squared embedding units" if kind == "from" else f"share of {whole}"
            meaning = (
                f"The part of {whole} of a block's output that comes from {name} (two names: from "
                "their product)."
            )
            return Term(f"{whole} from {name}", unit, meaning, is_drawn=False, order=790)
        if write := _WRITE.fullmatch(key):
            name, unit, meaning = _OF_WRITE[write[2]]
            return Term(
                f"{write[1]}: {name}", unit, meaning, is_drawn=write[2] in _DRAWN, order=795
            )
        return None

    def update_states(self, rows: Rows) -> None:
        self.extend(stream_moments(rows.embeddings.unflatten(1, (len(self.streams), -1))))
        table = type_table(rows, len(self.streams)) if self.holds(TokenTable) else None
        if table is not None:
            self.extend(table)
            self.extend(SequenceCount.of(rows))

    def compute(self) -> dict[str, Tensor]:
        moments = self.load(StreamMoments)
        values = {"n": moments.n}
        if not float(moments.n):
            return values
        size = moments.mean @ moments.mean.T
        variance = moments.scatter / moments.n
        forms = {"Q": size + variance, "M": size, "V": variance}
        if self.holds(TokenTable) and len(self.load(TokenTable).n):
            types, num_sequences = self.load(TokenTable), self.load(SequenceCount).num_sequences
            forms["V_W"], forms["V_W_unbiased"] = within_products(types.typed(), num_sequences)
        of_coordinates = moments.mean.square() + moments.m2 / moments.n
        own = of_coordinates.sum(1)
        sizes = own.tolist()
        places = [k for k, name in enumerate(self.streams) if sizes[k] or name == ROUNDING]
        streams = [self.streams[k] for k in places]
        for name, products in forms.items():
            values |= divided(name, products[places][:, places], streams)
        for k, stream in zip(places, streams, strict=True):
            if k == 0 or stream == ROUNDING:
                continue
            largest = of_coordinates[k].max(0)
            values |= {
                f"{stream}_norm_ratio": ratio(own[k], own[0]).sqrt(),
                f"{stream}_M_over_Q": ratio(size[k, k], own[k]),
                f"{stream}_cosine_to_stream": moments.cosine[k] / moments.n,
                f"{stream}_top_coordinate": largest.indices.double(),
                f"{stream}_top_coordinate_share": ratio(largest.values, own[k]),
            }
        return values


def ledger_of(make: MetricFactory, streams: Sequence[str]) -> MetricFactory:
    """The factory of a ledger, by token type where the metrics of other layers hold token
    tables.
    """

    def make_ledger(dim: int) -> list[Metric]:
        has_tables = any(isinstance(metric, TokenMoments) for metric in make(2))
        return [ResidualLedger(dim, streams, has_tables)]

    return make_ledger
