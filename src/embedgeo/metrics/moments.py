"""Q, M and V of the embeddings in O(d) memory."""

from typing import Any

import torch
from torch import Tensor

from embedgeo.functional.coordinates import coordinate_shares
from embedgeo.functional.moments import Moments, moment_values, ratio, row_moments
from embedgeo.functional.precision import to_state
from embedgeo.functional.rows import Rows
from embedgeo.functional.tokens import WithinMoments, token_table, unbiased_split, within_moments
from embedgeo.metrics.base import GeometryMetric


class EmbeddingMoments(GeometryMetric):
    """Moments of the embeddings, in O(d) memory whatever the number of rows and the vocabulary.

    ``compute()`` returns float64 scalars: ``n``, the number of rows; ``n_nonfinite``, that of the rows left out; ``Q``
    (mean squared norm), ``M`` (squared norm of the mean) and ``V`` (variance; Q = M + V) in squared embedding units;
    ``M_over_V``, ``M_over_Q``, ``mean_cosine`` of two distinct rows, ``norm_mean``, ``norm_cv``, ``norm_max`` and
    ``top_dim_share``; and, where rows came with token ids, ``V_W_unbiased``, ``V_B_unbiased`` and
    ``V_W_over_V_unbiased``: the within-token variance is estimated in each update from pairs of occurrences in
    different sequences, and averaged over the updates that have such pairs, weighted by their rows (NaN where only
    some rows had ids). What too few rows leave undefined is NaN. See `embedgeo.functional.moment_values` and
    `embedgeo.functional.within_variance` for the definitions.

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

    plotted = ("V_W_over_V_unbiased", "M_over_Q", "mean_cosine", "norm_cv", "top_dim_share")

    def __init__(self, dim: int, **kwargs: Any) -> None:
        super().__init__(dim, **kwargs)
        self.declare(Moments.empty(dim))
        self.declare(WithinMoments.empty())

    def update_states(self, rows: Rows) -> None:
        self.extend(row_moments(rows.embeddings))
        if rows.token_ids is not None:
            table = token_table(rows.embeddings, rows.token_ids, rows.sequence_ids)
            self.extend(within_moments(to_state(table), rows.num_sequences))

    def coordinates(self) -> dict[str, Tensor]:
        """What each coordinate holds, shape (d,), float64, in their order; NaN where undefined.

        ``mean`` and ``variance`` (population); ``share_of_M``, ``share_of_V`` and ``share_of_cosine``, the coordinate's
        part of the mean cosine of all pairs of rows (Timkey & van Schijndel 2021): see
        `embedgeo.functional.coordinate_shares`. They are of the rows that this process has seen or, within
        ``sync_context()``, those of all ranks.
        """
        return coordinates_of(self.load(Moments))

    def compute(self) -> dict[str, Tensor]:
        values = moment_values(self.load(Moments))
        values["n_nonfinite"] = self.num_nonfinite.to(values["n"].dtype)
        n, within = values["n"], self.load(WithinMoments)
        if wants_token_values(n, within.n_with_ids):
            variance = torch.where(within.n_with_ids == n, ratio(within.within, within.n_paired), torch.nan)
            values |= unbiased_split(n, values["V"], variance)
        return values


def coordinates_of(moments: Moments) -> dict[str, Tensor]:
    """See `EmbeddingMoments.coordinates`."""
    return coordinate_shares(moments.n, moments.mean, moments.m2, moments.direction_sum)


def wants_token_values(n: Tensor, n_with_ids: Tensor) -> bool:
    """Whether to return the values that need token ids: unless there were rows and none had one."""
    return bool((n_with_ids > 0) | (n == 0))
