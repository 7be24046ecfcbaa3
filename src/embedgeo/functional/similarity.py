"""Mean cosines of rows: of one token type, of different types, of one sequence (Ethayarajh 2019).

Functions return means of 1 - cos, ‖u - v‖² / 2 for unit rows, so that differences of similarities
keep their digits.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from embedgeo.functional.moments import PooledState, ratio
from embedgeo.functional.precision import accumulator_dtype, row_norms
from embedgeo.functional.rows import Rows
from embedgeo.functional.tokens import TokenTable, TypeRuns


@dataclass(eq=False)
class SequenceSimilarity(PooledState):
    """Sums over sequences that share none, of rows u scaled to norm 1: for mean cosines within and
    of all.
    """

    n: Tensor  # number of rows, scalar
    mean: Tensor  # mean of u, shape (d,)
    m2: Tensor  # squared deviations from it, summed over rows and coordinates, scalar
    # Σ_s n_s (n_s - 1) over sequences s of n_s rows: ordered pairs of rows of one sequence, scalar
    pairs: Tensor
    # Σ_s n_s m2_s, of deviations from the mean in s: 1 - cos, summed over these pairs, scalar
    distances: Tensor

    powers = (("mean", "m2"),)
    of_coordinates = ("mean",)


def directions_of(rows: Rows) -> Rows:
    """The rows that are not zero, scaled to norm 1, in the accumulator's dtype."""
    x, ids = rows.embeddings, rows.ids
    norms = row_norms(x)
    has_direction = norms > 0
    if not bool(has_direction.all()):
        places = has_direction.nonzero().flatten()
        x = x.index_select(0, places)
        norms = norms[places]
        ids = ids.select(places.cpu())
    return Rows(x.to(accumulator_dtype(x.device)) / norms[:, None], ids)


def sequence_similarity(directions: Rows) -> SequenceSimilarity:
    """The state of `directions_of` rows."""
    x, ids = directions.embeddings, directions.ids

    def runs() -> TypeRuns:
        of_rows = ids.sequence_ids
        if of_rows is None:
            of_rows = torch.arange(len(x), device="cpu")
        return TypeRuns(of_rows, None, x.shape[1], x.device)

    units = ids.once(("sequence runs", x.shape[1], x.device), runs).table(x)
    n, mean, m2 = units.pooled()
    return SequenceSimilarity(
        n=n,
        mean=mean,
        m2=m2,
        pairs=(units.n * (units.n - 1)).sum(),
        distances=(units.n * units.m2).sum(),
    )


def type_distances(state: SequenceSimilarity, types: TokenTable) -> dict[str, Tensor]:
    """1 - the mean cosine of pairs in different sequences, given also the table of rows scaled to
    norm 1.

    Of all pairs of rows of one token type, and of all pairs of rows of different types; NaN where
    some rows have no type.
    """
    n = types.n
    every = torch.stack((state.n * state.m2, state.n * (state.n - 1)))
    of_type = torch.stack(((n * types.m2).sum(), (n * (n - 1)).sum()))
    of_sequence = torch.stack((state.distances, state.pairs))
    of_both = torch.stack((types.sequence_m2.sum(), (types.sequence_n2 - n).sum()))
    distances = {
        "self_similarity_across_sequences": of_type - of_both,
        "different_token_similarity_across_sequences": every - of_type - of_sequence + of_both,
    }
    has_types = n.sum() == state.n  # of sequences there are no sums of the rows with a type alone
    return {key: torch.where(has_types, ratio(*each), torch.nan) for key, each in distances.items()}
