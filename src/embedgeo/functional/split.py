"""The variance within and between token types.

Source: Yamagiwa & Shimodaira 2025 (arXiv 2409.11253): V = V_W + V_B. Their plug-in V_W is biased low where token types
occur only a few times; the unbiased estimates are those of one-way analysis of variance.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from embedgeo.functional.distributed import all_reduce_sum
from embedgeo.functional.moments import ratio
from embedgeo.functional.tokens import TokenTable


class WithinMoments(NamedTuple):
    """Deviations from the means of the token types of each batch, summed over batches.

    Attributes:
        n_with_ids: number of rows with token ids, scalar.
        within_m2: their squared deviations from the mean of their token type, summed, scalar.
        within_freedom: degrees of freedom of that sum, rows minus token types, scalar.
    """

    n_with_ids: Tensor
    within_m2: Tensor
    within_freedom: Tensor

    @classmethod
    def empty(cls) -> "WithinMoments":
        """Those of no batches."""
        return cls(*torch.zeros(3, dtype=torch.float64))

    def merge(self, other: "WithinMoments") -> "WithinMoments":
        """Those of the batches of both."""
        return WithinMoments(*(a + b for a, b in zip(self, other, strict=True)))

    def all_reduce(self, group: Any = None) -> "WithinMoments":
        """Those of the batches of all ranks."""
        return WithinMoments(*(all_reduce_sum(state, group) for state in self))


def within_moments(types: TokenTable) -> WithinMoments:
    """The `WithinMoments` of one batch, given its token table."""
    n = types.n.sum()
    return WithinMoments(n, types.without_rounding().m2.sum(), n - len(types.n))


def variance_split(types: TokenTable) -> dict[str, Tensor]:
    """Split the variance of all rows into within and between token types.

    Returns:
        ``V_W``, ``V_B`` and ``V_W_over_V`` of exactly the rows seen (the paper's equations 9-11).
    """
    n, _, between_m2 = types._replace(m2=torch.zeros_like(types.m2)).pooled()
    within, between = ratio(types.m2.sum(), n), ratio(between_m2, n)
    return {"V_W": within, "V_B": between, "V_W_over_V": ratio(within, within + between)}


def unbiased_split(n: Tensor, variance: Tensor, m2_within: Tensor, freedom: Tensor) -> dict[str, Tensor]:
    """Estimate the split of the variance without the bias due to few occurrences (one-way analysis of variance).

    Args:
        n: number of rows, scalar.
        variance: V of the rows, scalar.
        m2_within: squared deviations from the means of the token types, summed, scalar.
        freedom: their degrees of freedom, rows minus token types, scalar; for 0 the result is NaN.

    Returns:
        ``V_W_unbiased``, ``V_B_unbiased`` and ``V_W_over_V_unbiased``.

    >>> split = unbiased_split(*torch.tensor([4.0, 2.0, 2.0, 2.0]))
    >>> {key: value.item() for key, value in split.items()}
    {'V_W_unbiased': 1.0, 'V_B_unbiased': 1.25, 'V_W_over_V_unbiased': 0.4444444477558136}
    """
    within = ratio(m2_within, freedom)
    between = variance - within * ratio(n - 1, n)
    return {
        "V_W_unbiased": within,
        "V_B_unbiased": between,
        "V_W_over_V_unbiased": ratio(within, within + between),
    }
