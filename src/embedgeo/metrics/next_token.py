"""How rows gather by the token that follows: neural collapse in language models."""

from collections.abc import Sequence
from copy import copy
from typing import Any, Self

import torch
from torch import Tensor

from embedgeo.functional.next_tokens import alignment_values, class_distance_values, collapse_values, labelled_by_next
from embedgeo.functional.rows import Rows
from embedgeo.functional.tokens import SequenceCount, TokenTable, token_table
from embedgeo.metrics.base import GeometryMetric, ValuesAndErrors


class NextTokenGeometry(GeometryMetric):
    """How rows gather by the token that follows, and whether their means point to what predicts it.

    The token table is keyed by the token at the next position of the same sequence, masked or not; the last row of a
    sequence that counts has none, and is left out. Rows that come as (n, d) have none without ``sequence_ids``.

    ``compute()`` returns ``nc1`` and ``nc1_unbiased``, the variance within over that between these types, of all rows;
    and of the frequent ones, ``next_token_types`` of them: the class-distance normalized variance ``cdnv``, with its
    bias corrected, of the share ``cdnv_pairs`` of pairs whose distance stands out of noise, and ``cdnv_plugin``,
    as published; ``unembedding_alignment`` and ``unembedding_alignment_std``, mean and sample standard deviation of the
    cosine of a type's mean, less that of all these rows, with its row of the output embedding. What too few rows leave
    undefined is NaN, and so are the alignments without an output embedding: `Geometry` gives the model's, by hand it is
    `set_unembedding`. See `embedgeo.functional.next_tokens`.

    Memory is O(T d) for T token types.

    Source: Wu & Papyan 2024, *Linguistic Collapse* (arXiv 2405.17767): NC1, NC3 and UNC3.

    Args:
        dim: d, the width of the embeddings.
        min_count: rows that a frequent type has at least; 2 or more.
        max_types: number of frequent types at most, those with the most rows: all pairs of them are compared.
        kwargs: of `torchmetrics.Metric`.

    Raises:
        ValueError: ``min_count`` or ``max_types`` is below 2.

    >>> metric = NextTokenGeometry(1, min_count=2)
    >>> x, ids = torch.tensor([[[1.0], [7.0], [3.0], [9.0], [0.0]]]), torch.tensor([[2, 5, 2, 5, 2]])
    >>> metric.update(x, token_ids=ids)
    >>> round(metric.compute()["nc1"].item(), 4)
    0.1111
    """

    plotted = ("nc1", "cdnv", "unembedding_alignment")

    _unembedding: Tensor | None = None

    _compared: Tensor | None = None
    """The frequent types; None: those that the rows show."""

    def __init__(self, dim: int, min_count: int = 10, max_types: int = 1000, **kwargs: Any) -> None:
        super().__init__(dim, min_count, max_types, **kwargs)
        for name, value in (("min_count", min_count), ("max_types", max_types)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 2:
                raise ValueError(f"{name} must be an integer of 2 or more; got {value!r}.")
        self.min_count, self.max_types = min_count, max_types
        self.declare(TokenTable.empty(dim), "type_")
        self.declare(SequenceCount(torch.zeros((), dtype=torch.float64)))

    def set_unembedding(self, weights: Tensor | None) -> None:
        """Take the weights of the output embedding, shape (V, d), a row for each token id; None: there are none.

        They are held as they are, not copied, and are no state: they are the same on every rank.
        """
        self._unembedding = None if weights is None else weights.detach()

    def update_states(self, rows: Rows) -> None:
        labelled = labelled_by_next(rows)
        if labelled is not None and labelled.token_ids is not None:
            ids = labelled.ids
            self.extend(token_table(labelled.embeddings, labelled.token_ids, ids.sequence_ids))
            self.extend(SequenceCount(torch.full((), float(labelled.num_sequences), device=labelled.embeddings.device)))

    def state_bytes(self, num_rows: int, num_types: int = 0, itemsize: int = 4) -> int:
        return super().state_bytes(num_rows) + num_types * (8 * self.dim + 48)

    def compute(self) -> dict[str, Tensor]:
        types = self.load(TokenTable).without_rounding()
        frequent = self._frequent(types)
        return {
            **collapse_values(types, self.load(SequenceCount).num_sequences),
            **class_distance_values(frequent),
            **alignment_values(frequent, self._unembedding),
            "next_token_types": types.n.new_tensor(len(frequent.n)),
        }

    def compute_with_errors(self, groups: Sequence[Self]) -> ValuesAndErrors:
        """As `GeometryMetric.compute_with_errors`; the frequent types are the same without each group."""
        if groups:
            first = copy(groups[0])
            first._compared = self._frequent(self.load(TokenTable)).token_ids
            groups = [first, *groups[1:]]
        return super().compute_with_errors(groups)

    def _frequent(self, types: TokenTable) -> TokenTable:
        if self._compared is not None:
            return types.select(torch.isin(types.token_ids, self._compared) & (types.n > 1))
        most = types.n.argsort(descending=True, stable=True)[: self.max_types]
        return types.select(
            torch.zeros_like(types.n, dtype=torch.bool).index_fill(0, most, 1) & (types.n >= self.min_count)
        )
