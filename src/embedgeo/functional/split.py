"""The variance within and between token types.

Source: Yamagiwa & Shimodaira 2025 (arXiv 2409.11253): V = V_W + V_B. Their plug-in V_W is badly low where token types
occur only a few times, and where occurrences in one sequence are alike.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from embedgeo.functional.distributed import all_reduce_sum
from embedgeo.functional.moments import ratio
from embedgeo.functional.tokens import TokenTable

_FEW_SEQUENCES = 3
"""Token types seen in two sequences up to this many stand for those seen in one only."""


class SequenceCount(NamedTuple):
    """Number of sequences that rows came from, scalar."""

    num_sequences: Tensor

    def merge(self, other: "SequenceCount") -> "SequenceCount":
        """That of the rows of both, which share no sequence."""
        return SequenceCount(self.num_sequences + other.num_sequences)

    def all_reduce(self, group: Any = None) -> "SequenceCount":
        """That of the rows of all ranks."""
        return SequenceCount(all_reduce_sum(self.num_sequences, group))


class WithinMoments(NamedTuple):
    """The `within_variance` of each batch, weighted by rows.

    Attributes:
        n_with_ids: number of rows with token ids, scalar.
        n_paired: number of rows of the batches that have a within-token variance, scalar.
        within: the sum over these rows of their batch's within-token variance, scalar.
    """

    n_with_ids: Tensor
    n_paired: Tensor
    within: Tensor

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


def within_moments(types: TokenTable, num_sequences: int) -> WithinMoments:
    """The `WithinMoments` of one batch, given its token table and the number of its sequences."""
    n = types.n.sum()
    variance = within_variance(types.without_rounding(), n.new_full((), num_sequences))
    n_paired = torch.where(variance.isnan(), 0, n)
    return WithinMoments(n, n_paired, n_paired * variance.nan_to_num())


def within_variance(types: TokenTable, num_sequences: Tensor) -> Tensor:
    """The within-token variance V_W, estimated from pairs of occurrences in different sequences.

    That of a token type is half the mean squared distance of such pairs, so that neither few occurrences nor those
    that are alike because they are of one sequence make it too low: (n m2 - Σ_s n_s m2_s) / (n² - Σ_s n_s²), with m2
    the squared deviations from the mean, of all n rows and of the n_s rows in sequence s. It is unbiased for each token
    type, however their variances differ. Token types seen in one sequence only get the pooled value (sum of numerators
    over sum of denominators) of those seen in two or three, or, where there are none, of all that have pairs.

    Args:
        types: the token table.
        num_sequences: number of sequences that its rows came from, scalar. In a single one rows count as independent.

    Returns:
        Mean over rows, in squared embedding units, scalar; NaN where no token type occurs twice (in different
        sequences, where there are several).

    >>> from embedgeo.functional import token_table
    >>> table = token_table(torch.tensor([[1.0], [3.0], [7.0]]), torch.tensor([5, 5, 2]), torch.tensor([0, 1, 1]))
    >>> within_variance(table, torch.tensor(2)).item()
    2.0
    """
    is_single, n = num_sequences <= 1, types.n
    sequences = torch.where(is_single, n, types.sequences)
    pairs = n.square() - torch.where(is_single, n, types.sequence_n2)
    squares = (n * types.m2 - torch.where(is_single, 0, types.sequence_m2)).clamp(min=0)
    few = (sequences > 1) & (sequences <= _FEW_SEQUENCES)
    pooled = ratio((few * squares).sum(), (few * pairs).sum())
    pooled = torch.where(few.any(), pooled, ratio(squares.sum(), pairs.sum()))
    variance = torch.where(sequences > 1, ratio(squares, pairs), pooled)
    return ratio((n * variance).sum(), n.sum())


def variance_split(types: TokenTable) -> dict[str, Tensor]:
    """Split the variance of all rows into within and between token types.

    Returns:
        ``V_W``, ``V_B`` and ``V_W_over_V`` of exactly the rows seen (the paper's figures 6 and 20).
    """
    n, _, between_m2 = types._replace(m2=torch.zeros_like(types.m2)).pooled()
    within, between = ratio(types.m2.sum(), n), ratio(between_m2, n)
    return {"V_W": within, "V_B": between, "V_W_over_V": ratio(within, within + between)}


def unbiased_split(n: Tensor, variance: Tensor, within: Tensor) -> dict[str, Tensor]:
    """Split the variance by an estimate of the one within token types.

    Args:
        n: number of rows, scalar.
        variance: V of the rows, scalar.
        within: see `within_variance`, scalar.

    Returns:
        ``V_W_unbiased``; ``V_B_unbiased``, which is V - V_W_unbiased (n - 1) / n; and ``V_W_over_V_unbiased``, the
        first over the sum of both.

    >>> split = unbiased_split(*torch.tensor([4.0, 2.0, 1.0]))
    >>> {key: value.item() for key, value in split.items()}
    {'V_W_unbiased': 1.0, 'V_B_unbiased': 1.25, 'V_W_over_V_unbiased': 0.4444444477558136}
    """
    between = variance - within * ratio(n - 1, n)
    return {
        "V_W_unbiased": within,
        "V_B_unbiased": between,
        "V_W_over_V_unbiased": ratio(within, within + between),
    }
