"""Q, M and V of the embeddings in O(d) memory."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from embedgeo.functional.distributed import Ranks
from embedgeo.functional.moments import Moments, merge, moment_values, row_moments, variance_moments
from embedgeo.functional.precision import to_state
from embedgeo.functional.rows import Rows
from embedgeo.functional.tokens import token_table, unbiased_split
from embedgeo.metrics.base import GeometryMetric


class Within(NamedTuple):
    """Deviations from the means of the token types of each update, pooled over updates; all additive.

    Attributes:
        n_with_ids: rows that came with token ids, scalar.
        within_m2: their squared deviations from the mean of their token type, summed, scalar.
        within_freedom: degrees of freedom of that sum, rows minus token types, scalar.
    """

    n_with_ids: Tensor
    within_m2: Tensor
    within_freedom: Tensor


class EmbeddingMoments(GeometryMetric):
    """Moments of the embeddings, in O(d) memory whatever the number of rows and the vocabulary.

    ``compute()`` gives float64 scalars: ``n`` rows, ``n_nonfinite`` rows left out, ``Q`` (mean squared norm),
    ``M`` (squared norm of the mean) and ``V`` (variance; Q = M + V) in squared embedding units, ``M_over_V``,
    ``M_over_Q``, ``mean_cosine`` of two distinct rows, ``norm_mean``, ``norm_cv``, ``norm_max``,
    ``top_dim_share``; and, where every row came with a token id, ``V_W_unbiased``, ``V_B_unbiased`` and
    ``V_W_over_V_unbiased``, with the within-token variance pooled within updates. What too few rows leave
    undefined is NaN. See `embedgeo.functional.moments.moment_values` for the definitions.

    Source: Yamagiwa & Shimodaira 2025 (arXiv 2409.11253).

    Args:
        dim: d, the width of the embeddings.
        kwargs: of `torchmetrics.Metric`.

    >>> metric = EmbeddingMoments(2)
    >>> metric.update(torch.tensor([[0.0, 1.0], [0.0, 3.0]]))
    >>> values = metric.compute()
    >>> values["Q"].item(), values["M"].item(), values["V"].item()
    (5.0, 4.0, 1.0)
    """

    def __init__(self, dim: int, **kwargs: Any) -> None:
        super().__init__(dim, **kwargs)
        zero = torch.zeros((), dtype=torch.float64)
        self.declare(Moments.zeros(dim))
        self.declare(Within(zero, zero, zero))

    def observe(self, rows: Rows) -> None:
        self.store(merge(self.load(Moments), to_state(row_moments(rows.embeddings))))
        if rows.token_ids is not None:
            types = variance_moments(to_state(token_table(rows.embeddings, rows.token_ids).moments))
            n = types.n.sum()
            self._add(Within(n, types.m2.sum(), n - len(types.n)))

    def merge(self, before: Mapping[str, Tensor]) -> None:
        self.store(merge(self.load(Moments, states=before), self.load(Moments)))
        self._add(self.load(Within, states=before))

    def all_reduce(self, ranks: Ranks) -> None:
        self.store(self.load(Moments).pool(ranks.total, ranks.largest))
        self.store(Within._make(map(ranks.total, self.load(Within))))

    def compute(self) -> dict[str, Tensor]:
        """The values named above."""
        values = moment_values(self.load(Moments))
        values["n_nonfinite"] = self.num_nonfinite.to(values["n"].dtype)
        n, within = values["n"], self.load(Within)
        if wants_token_values(n, within.n_with_ids):
            freedom = torch.where(within.n_with_ids == n, within.within_freedom, 0)
            values.update(unbiased_split(n, values["V"], within.within_m2, freedom))
        return values

    def _add(self, within: Within) -> None:
        self.store(Within._make(a + b for a, b in zip(self.load(Within), within, strict=True)))


def wants_token_values(n: Tensor, n_with_ids: Tensor) -> bool:
    """Whether to show the values that need token ids: not where there were rows and none had one."""
    return bool((n_with_ids > 0) | (n == 0))
