"""Q, M and V of the embeddings in O(d) memory."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from embedgeo.functional.distributed import Ranks
from embedgeo.functional.massive import RowGroup, first_positions, first_share
from embedgeo.functional.moments import Moments, moment_values, row_moments
from embedgeo.functional.rows import Rows
from embedgeo.functional.sampling import Sample
from embedgeo.functional.tokens import (
    Count,
    has_token_values,
    sampled_within_variance,
    table_working_bytes,
    unbiased_split,
)
from embedgeo.glossary import WITHOUT_TOP_DIM, Term, in_group, left_without
from embedgeo.metrics.base import GeometryMetric
from embedgeo.metrics.gaussian import Array, GaussianRows

SQUARED = "squared embedding units"
_SAMPLED_ROWS = 2048  # of which pairs are taken, on the host; all are where there are fewer

_TERMS = {
    **in_group(
        "at a glance",
        110,
        V_W_over_V_unbiased=Term(
            "V_W / V",
            "share of V, from pairs in different sequences",
            "Share of the variance that lies within the occurrences of a token, from pairs in "
            "different sequences: 0 where context does nothing; 1 where the token does not matter.",
            gaussian=1.0,
            rows=4096,
        ),
        M_over_Q=Term(
            "M / Q",
            "share of the mean squared norm",
            "How much of the embeddings' size is an offset common to all. Near 1, all point the "
            "same way.",
            rows=2048,
        ),
    ),
    "mean_cosine": Term(
        "mean cosine",
        "cosine of two distinct rows, mean over all pairs",
        "How much any two embeddings point the same way; it includes the common offset.",
        gaussian=0.0,
        group="at a glance",
        order=140,
        rows=2048,
    ),
    **in_group(
        "size and variance",
        210,
        Q=Term(
            "Q",
            f"mean of ‖x‖², {SQUARED}",
            "Size of the embeddings; Q = M + V.",
            ranges=True,
            is_scalar=True,
        ),
        M=Term(
            "M",
            f"‖mean of x‖², {SQUARED}",
            "Size of the offset common to all embeddings.",
            ranges=True,
            is_scalar=True,
        ),
        V=Term(
            "V",
            f"mean of ‖x − mean‖², {SQUARED}",
            "How much the embeddings vary.",
            ranges=True,
            is_scalar=True,
        ),
        M_over_V=Term(
            "M / V",
            "ratio",
            "The common offset relative to the variance.",
            ranges=True,
            is_scalar=True,
        ),
        V_W_unbiased=Term(
            "V_W, unbiased",
            f"estimate from pairs in different sequences, {SQUARED}",
            "Variance within the occurrences of a token: what context does.",
            ranges=True,
            is_scalar=True,
        ),
        V_B_unbiased=Term(
            "V_B, unbiased",
            f"estimate from pairs in different sequences, {SQUARED}",
            "Variance between tokens: what the token itself does.",
            ranges=True,
            gaussian=0.0,
        ),
    ),
    **in_group(
        "norms",
        410,
        norm_mean=Term(
            "mean norm", "mean of ‖x‖, embedding units", "Length of the embeddings.", ranges=True
        ),
        norm_cv=Term(
            "C.V. of the norm", "std / mean of ‖x‖", "How unequal the lengths are.", ranges=True
        ),
        norm_max=Term(
            "largest norm",
            "max of ‖x‖, embedding units",
            "Length of the longest embedding: massive activations show here first.",
            ranges=True,
        ),
    ),
    "top_dim_share": Term(
        "top coordinate's share",
        "largest share of V in one coordinate",
        "How much of the variance a single rogue coordinate holds.",
        group="shape",
        order=320,
    ),
    **in_group(
        "norms",
        420,
        first_positions_share=Term(
            "first positions' share",
            "share of V of the first row of each sequence",
            "How much of the variance first positions hold, as attention sinks do.",
        ),
    ),
    "n": Term(
        "rows",
        "rows counted",
        "Embeddings measured.",
        ranges=True,
        is_drawn=False,
        group="rows counted",
        order=620,
    ),
    "n_nonfinite": Term(
        "non-finite rows",
        "rows left out",
        "Rows with a NaN or an infinity: a fault in the run.",
        is_drawn=False,
        group="rows counted",
        order=640,
    ),
}


_TERMS |= {
    f"{key}{WITHOUT_TOP_DIM}": left_without(_TERMS[key], "the largest coordinate")
    for key in ("V", "M_over_Q")
}


class EmbeddingMoments(GeometryMetric):
    """Moments of the embeddings, in O(d) memory of the device whatever the rows and the vocabulary.

    ``compute()`` returns float64 scalars: ``n``, the number of rows; ``n_nonfinite``, that of the
    rows left out; ``Q`` (mean squared norm), ``M`` (squared norm of the mean) and ``V`` (variance;
    Q = M + V) in squared embedding units; ``M_over_V``, ``M_over_Q``, ``mean_cosine`` of two
    distinct rows, ``norm_mean``, ``norm_cv``, ``norm_max``, ``top_dim_share`` and
    ``first_positions_share``; ``V_without_top_dim`` and ``M_over_Q_without_top_dim``; and, where
    rows came with token ids, ``V_W_unbiased``, ``V_B_unbiased`` and ``V_W_over_V_unbiased``: the
    within-token variance is estimated from pairs of occurrences in different sequences among a
    uniform sample of the rows of all updates and ranks (NaN where only some rows have a type, or no
    type occurs in two sequences). What too few rows leave undefined is NaN. See
    `embedgeo.functional.moment_values` and `embedgeo.functional.within_variance` for the
    definitions.

    Source: Yamagiwa & Shimodaira 2025 (arXiv 2409.11253).

    Args:
        dim: d, the width of the embeddings.
        seed: of the sample; another one for each of metrics that ``merge_state`` joins.
        kwargs: of `torchmetrics.Metric`.

    >>> metric = EmbeddingMoments(2)
    >>> metric.update(torch.tensor([[0.0, 1.0], [0.0, 3.0]]))
    >>> values = metric.compute()
    >>> values["Q"].item(), values["M"].item(), values["V"].item()
    (5.0, 4.0, 1.0)
    """

    terms = _TERMS
    keys_of_types = ("V_W_over_V_unbiased",)
    keys_without_massive = (
        "V",
        "M_over_Q",
        "V_W_over_V_unbiased",
        "mean_cosine",
        "V_without_top_dim",
        "M_over_Q_without_top_dim",
    )

    def __init__(self, dim: int, seed: int = 0, **kwargs: Any) -> None:
        super().__init__(dim, seed, **kwargs)
        self.declare(Moments.empty(dim))
        self.declare(RowGroup.empty(dim), "first_")
        self.declare(Count.empty(), "typed_")
        self.declare(Sample.empty(dim, _SAMPLED_ROWS, seed=seed), "sampled_")

    def update_states(self, rows: Rows) -> None:
        self.extend(row_moments(rows.embeddings))
        self.extend(first_positions(rows))
        ids = rows.ids.token_ids
        if ids is not None:
            self.extend(Count.of(int((ids >= 0).sum()), rows))
            self.store(self.load(Sample).extend(rows, Ranks.of(self.process_group)))

    def working_bytes(self, num_types: int, device: torch.device) -> int:
        return table_working_bytes(self.dim, _SAMPLED_ROWS, device)

    @staticmethod
    def baseline(rows: GaussianRows) -> dict[str, Array]:
        from scipy import special, stats

        n = rows.n
        Q = rows.Q
        dim = rows.dim
        free = n - 1
        # E‖x‖ / √Q
        root = np.sqrt(2 / dim) * np.exp(special.gammaln((dim + 1) / 2) - special.gammaln(dim / 2))
        return {
            "M": Q / n,
            "V": Q * free / n,
            "M_over_V": 1 / free,
            "M_over_Q": 1 / n,
            "norm_mean": np.sqrt(Q) * root,
            "norm_cv": np.sqrt(1 / root**2 - 1),
            "norm_max": np.sqrt(Q / dim * stats.chi2.ppf(0.5 ** (1 / n), dim)),
            "top_dim_share": stats.chi2.ppf(0.5 ** (1 / dim), free) / (free * dim),
            "V_W_unbiased": np.where(free > 0, Q, np.nan),
        }

    def compute(self) -> dict[str, Tensor]:
        num_typed = self.load(Count).number
        moments = self.load(Moments)
        values = moment_values(moments)
        n = values["n"]
        values["first_positions_share"] = first_share(self.load(RowGroup), moments)
        values["n_nonfinite"] = self.num_nonfinite.to(n)
        if has_token_values(n, num_typed):
            within = sampled_within_variance(self.load(Sample).on(self.device)).to(n)
            within = within.where(num_typed == n, torch.nan)
            values |= unbiased_split(n, values["V"], within)
        return values
