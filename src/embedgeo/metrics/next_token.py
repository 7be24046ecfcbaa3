"""Gathering of rows by the token that follows: neural collapse in language models."""

from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from embedgeo.functional.next_tokens import (
    alignment_values,
    class_distance_values,
    collapse_values,
    labelled_by_next,
)
from embedgeo.functional.rows import Rows
from embedgeo.functional.tokens import SequenceCount, TokenTable, type_table
from embedgeo.glossary import Term, in_group
from embedgeo.metrics.base import GeometryMetric
from embedgeo.metrics.gaussian import Array, GaussianRows

_TERMS = in_group(
    "more",
    740,
    nc1=Term(
        "NC1, plug-in",
        "variance within over that between next tokens, plug-in estimate",
        "Published as neural collapse: small where rows before the same token gather. Of exactly "
        "the rows seen: too low where tokens occur a few times.",
        ranges=True,
        is_drawn=False,
    ),
    nc1_unbiased=Term(
        "NC1",
        "variance within / between next tokens, from pairs in different sequences",
        "Small where rows before the same token gather, as in neural collapse.",
        ranges=True,
    ),
    cdnv=Term(
        "CDNV",
        "(σ² + σ'²) / (2 ‖μ − μ'‖²), mean over pairs of next tokens, bias corrected",
        "Class-distance normalized variance: how much rows before the same token spread, relative "
        "to how far apart two "
        "tokens' means are; of frequent tokens. Do not read it where few pairs are told apart.",
        ranges=True,
    ),
    cdnv_plugin=Term(
        "CDNV, plug-in",
        "(σ² + σ'²) / (2 ‖μ − μ'‖²), mean over pairs of next tokens, plug-in",
        "As published, of exactly the rows seen: too low where tokens occur a few times.",
        ranges=True,
        is_drawn=False,
    ),
    cdnv_pairs=Term(
        "next tokens told apart",
        "share of the pairs of frequent next tokens",
        "Pairs of tokens whose means are farther apart than noise makes them: CDNV is the mean "
        "over these pairs.",
        is_drawn=False,
    ),
    unembedding_alignment=Term(
        "alignment with the unembedding",
        "cosine, mean over frequent next tokens",
        "How much the mean of the rows before a token, less that of all, points to its row of the "
        "output embedding.",
        gaussian=0.0,
    ),
    unembedding_alignment_std=Term(
        "spread of the alignment",
        "std of the cosine over frequent next tokens",
        "How unequally tokens are aligned with their rows of the output embedding: small in "
        "uniform duality.",
        is_drawn=False,
    ),
    next_token_types=Term(
        "frequent next tokens",
        "tokens that follow 10 rows or more, the 1,000 most frequent at most",
        "What the distances and the alignment rest on.",
        ranges=True,
        is_drawn=False,
    ),
)


class NextTokenGeometry(GeometryMetric):
    """Gathering of rows by the token that follows, and alignment of their means with what predicts
    it.

    The token table is keyed by the token at the next position of the same sequence, masked or not;
    the last row of a sequence that counts has none, and is left out. Rows that come as (n, d) have
    none without ``sequence_ids``.

    ``compute()`` returns ``nc1`` and ``nc1_unbiased``, the variance within over that between these
    types, of all rows; and of the frequent ones, ``next_token_types`` of them: the class-distance
    normalized variance ``cdnv``, with its bias corrected, of the share ``cdnv_pairs`` of pairs
    whose distance stands out of noise, and ``cdnv_plugin``, as published; ``unembedding_alignment``
    and ``unembedding_alignment_std``, mean and sample standard deviation of the cosine of a type's
    mean, less that of all these rows, with its row of the output embedding. What too few rows leave
    undefined is NaN, and so are the alignments without ``unembedding``, and at layers of another
    width. See `embedgeo.functional.next_tokens`.

    Memory is O(T d) for T token types.

    Source: Wu & Papyan 2024, *Linguistic Collapse* (arXiv 2405.17767): NC1, NC3 and UNC3.

    Args:
        dim: d, the width of the embeddings.
        min_count: rows that a frequent type has at least; 2 or more.
        max_types: number of frequent types at most, those with the most rows: all pairs of them are
            compared.
        unembedding: weights of the output embedding, shape (V, d), a row for each token id, as
            ``model.get_output_embeddings().weight``. They are held as they are, not copied, and are
            no state.
        kwargs: of `torchmetrics.Metric`.

    Raises:
        TypeError: ``unembedding`` is sharded.
        ValueError: ``min_count`` or ``max_types`` is below 2.

    >>> metric = NextTokenGeometry(1, min_count=2)
    >>> x, ids = (
    ...     torch.tensor([[[1.0], [7.0], [3.0], [9.0], [0.0]]]),
    ...     torch.tensor([[2, 5, 2, 5, 2]]),
    ... )
    >>> metric.update(x, token_ids=ids)
    >>> round(metric.compute()["nc1"].item(), 4)
    0.1111
    """

    terms = _TERMS

    _compared: Tensor | None = None  # ids of the frequent types; None: those that the rows show

    def __init__(
        self,
        dim: int,
        min_count: int = 10,
        max_types: int = 1000,
        unembedding: Tensor | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(dim, min_count, max_types, **kwargs)
        if isinstance(unembedding, DTensor):
            raise TypeError(
                "unembedding must be whole weights; got a DTensor. Pass its full_tensor()."
            )
        for name, value in (("min_count", min_count), ("max_types", max_types)):
            if type(value) is not int or value < 2:
                raise ValueError(f"{name} must be an integer of 2 or more; got {value!r}.")
        self.min_count = min_count
        self.max_types = max_types
        self._unembedding = None if unembedding is None else unembedding.detach()
        self.declare(TokenTable.empty(dim), "type_")
        self.declare(SequenceCount.empty())

    def update_states(self, rows: Rows) -> None:
        labelled = labelled_by_next(rows)
        if labelled is not None:
            self.extend(type_table(labelled))
            self.extend(SequenceCount.of(labelled))

    @staticmethod
    def baseline(rows: GaussianRows) -> dict[str, Array]:
        return {"unembedding_alignment_std": np.sqrt(1 / rows.dim)}

    def compute(self) -> dict[str, Tensor]:
        types = self._types()
        frequent = types.select(self._frequent(types))
        return {
            **collapse_values(types, self.load(SequenceCount).num_sequences),
            **class_distance_values(frequent),
            **alignment_values(frequent, self._unembedding),
            "next_token_types": types.n.new_tensor(len(frequent.n)),
        }

    def hold(self, whole: Self) -> None:
        """Compare the types that are frequent among all rows."""
        types = whole._types()
        self._compared = types.token_ids[whole._frequent(types)]

    def _types(self) -> TokenTable:
        return self.load(TokenTable).typed().without_rounding()

    def _frequent(self, types: TokenTable) -> Tensor:
        """Marks of the frequent types."""
        if self._compared is not None:
            return torch.isin(types.token_ids, self._compared) & (types.n > 1)
        most = types.n.argsort(descending=True, stable=True)[: self.max_types]
        is_among_most = torch.zeros_like(types.n, dtype=torch.bool).index_fill(0, most, 1)
        return is_among_most & (types.n >= self.min_count)
