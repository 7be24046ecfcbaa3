"""Mean cosines of rows: of one token type, of different types, of one sequence.

Source: Ethayarajh 2019, *How Contextual are Contextualized Word Representations?* (EMNLP): self-similarity,
intra-sentence similarity, and both adjusted for anisotropy. Of rows scaled to norm 1, 1 - cos(u, v) = ‖u - v‖² / 2, so
that means of cosines follow from squared deviations, and no two large numbers are subtracted.
"""

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from embedgeo.functional.distributed import all_reduce_sum
from embedgeo.functional.moments import merge_parts, ratio, row_chunks
from embedgeo.functional.precision import accumulator_dtype, row_norms
from embedgeo.functional.tokens import TokenTable, token_table


class SequenceSimilarity(NamedTuple):
    """What similarities within sequences, and of all rows, follow from; u is a row scaled to norm 1.

    States of rows that share no sequence merge exactly.

    Attributes:
        n: number of rows, scalar.
        mean: mean of u, shape (d,).
        m2: squared deviations from it, summed over rows and coordinates, scalar.
        pairs: Σ_s n_s (n_s - 1) over sequences s, n_s being their rows: ordered pairs of rows of one sequence, scalar.
        distances: Σ_s n_s m2_s, m2_s being the squared deviations of u from the mean in s: 1 - cos, summed over these
            pairs, scalar.
        sequences: number of sequences of two or more rows, scalar.
        with_mean: mean cosine of a row with the mean row of its sequence, summed over these, scalar.
    """

    n: Tensor
    mean: Tensor
    m2: Tensor
    pairs: Tensor
    distances: Tensor
    sequences: Tensor
    with_mean: Tensor

    @classmethod
    def empty(cls, dim: int) -> "SequenceSimilarity":
        """The state of no rows."""
        zero = torch.zeros((), dtype=torch.float64)
        return cls(zero, torch.zeros(dim, dtype=torch.float64), zero, zero, zero, zero, zero)

    def merge(self, other: "SequenceSimilarity") -> "SequenceSimilarity":
        """The state of the rows of both."""
        sums = (a + b for a, b in zip(self[3:], other[3:], strict=True))
        return SequenceSimilarity(*merge_parts((self[:3], other[:3])), *sums)

    def all_reduce(self, group: Any = None) -> "SequenceSimilarity":
        """The state of the rows of all ranks."""
        total = partial(all_reduce_sum, group=group)
        return SequenceSimilarity(*merge_parts((self[:3],), total), *total(torch.stack(self[3:])))


def row_directions(x: Tensor) -> tuple[Tensor, Tensor]:
    """The rows of ``x``, shape (n, d), scaled to norm 1.

    A row of norm 0 has no direction, nor has one whose norm exceeds the range of float64.

    Returns:
        The directions, shape (m, d), float64 (float32 where the device has no float64); their places, shape (m,).
    """
    norms = row_norms(x)
    places = ((norms > 0) & norms.isfinite()).nonzero().flatten()
    kept = x if len(places) == len(x) else x.index_select(0, places)
    return kept.to(accumulator_dtype(x.device)) / norms[places, None], places


def sequence_similarity(x: Tensor, directions: Tensor, sequence_ids: Tensor | None = None) -> SequenceSimilarity:
    """The `SequenceSimilarity` of rows.

    Args:
        x: the rows, none of norm 0, shape (n, d), any floating dtype.
        directions: the same scaled to norm 1, shape (n, d).
        sequence_ids: shape (n,), int64; None: each row is a sequence of its own.
    """
    ids = torch.arange(len(x), device=x.device) if sequence_ids is None else sequence_ids
    units = token_table(directions, ids)
    n, mean, m2 = units.pooled()
    several = units.n > 1
    with_mean = units.m2.new_zeros(())
    if bool(several.any()):
        totals, sequence = torch.zeros_like(units.mean), torch.searchsorted(units.token_ids, ids.contiguous())
        for chunk in row_chunks(x):
            totals.index_add_(0, sequence[chunk], x[chunk].to(totals.dtype))
        cosines = ratio((totals * units.mean).sum(1), row_norms(totals))
        with_mean = cosines[several].nan_to_num().sum()
    return SequenceSimilarity(
        n=n,
        mean=mean,
        m2=m2,
        pairs=(units.n * (units.n - 1)).sum(),
        distances=(units.n * units.m2).sum(),
        sequences=several.sum().to(m2.dtype),
        with_mean=with_mean,
    )


def sequence_similarity_values(state: SequenceSimilarity) -> tuple[dict[str, Tensor], Tensor]:
    """``within_sequence_similarity`` and ``intra_sentence_similarity``, and the mean cosine of all distinct pairs.

    The first is the mean cosine over all pairs of distinct rows of one sequence; the second, Ethayarajh's, the mean
    over sequences of two or more rows of the mean cosine of their rows with their mean row.

    >>> x = torch.tensor([[3.0, 0.0], [0.0, 3.0], [0.0, 5.0]])
    >>> state = sequence_similarity(x, row_directions(x)[0], torch.tensor([0, 0, 1]))
    >>> values, all_pairs = sequence_similarity_values(state)
    >>> [abs(round(float(value), 3)) for value in (*values.values(), all_pairs)]
    [0.0, 0.707, 0.333]
    """
    values = {
        "within_sequence_similarity": 1 - ratio(state.distances, state.pairs),
        "intra_sentence_similarity": ratio(state.with_mean, state.sequences),
    }
    return values, 1 - torch.where(state.n > 1, ratio(state.m2, state.n - 1), torch.nan)


def type_similarity_values(types: TokenTable) -> dict[str, Tensor]:
    """``self_similarity`` and ``different_token_similarity``, given the table of rows scaled to norm 1.

    The first, Ethayarajh's, is the mean over token types of two or more rows of the mean cosine of two distinct rows;
    the second the mean cosine over all pairs of rows of different types.

    >>> x = torch.eye(2)[[0, 0, 1]]
    >>> values = type_similarity_values(token_table(x, torch.tensor([7, 7, 9])))
    >>> [float(value) for value in values.values()]
    [1.0, 0.0]
    """
    n, several = types.n, types.n > 1
    of_type = torch.where(several, 1 - ratio(types.m2, n - 1), 0)
    total, _, between = types._replace(m2=torch.zeros_like(types.m2)).pooled()
    pairs = (n * (total - n)).sum()
    distances = ((total - n) * types.m2).sum() + total * between
    return {
        "self_similarity": ratio(of_type.sum(), several.sum().to(n.dtype)),
        "different_token_similarity": 1 - ratio(distances, pairs),
    }
