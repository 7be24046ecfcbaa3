"""Mean cosines of rows: of one token type, of different types, of one sequence (Ethayarajh 2019).

Functions return means of 1 - cos, ‖u - v‖² / 2 for unit rows, so that differences of similarities
keep their digits.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from embedgeo.functional.distributed import Found
from embedgeo.functional.moments import merged, moment_reductions, ratio, row_chunks
from embedgeo.functional.precision import accumulator_dtype, scaled_row_norms, sent
from embedgeo.functional.rows import Rows
from embedgeo.functional.spectrum import Scatter
from embedgeo.functional.tokens import TokenTable, TypeRuns


class SequenceSimilarity(NamedTuple):
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
    sequences: Tensor  # number of sequences of two or more rows, scalar
    # mean of 1 - cos of a row and the mean row of its sequence, summed over these, scalar
    from_mean: Tensor

    @classmethod
    def empty(cls, dim: int) -> "SequenceSimilarity":
        """The state of no rows."""
        zero = torch.zeros((), dtype=torch.float64)
        return cls(zero, torch.zeros(dim, dtype=torch.float64), zero, zero, zero, zero, zero)

    def merge(self, other: "SequenceSimilarity") -> "SequenceSimilarity":
        """The state of the rows of both."""
        return merged((self, other))

    def reductions(self, phase: int, found: Found) -> dict[str, Tensor]:
        """The sums over sequences, and the squares about the mean of all ranks."""
        reduced = moment_reductions(phase, found, self.n, self.mean, self.m2)
        if phase == 1:
            sums = "pairs", "distances", "sequences", "from_mean"
            reduced |= {name: getattr(self, name) for name in sums}
        return reduced

    def of_ranks(self, found: Found) -> "SequenceSimilarity":
        """The state of the rows of all ranks."""
        return SequenceSimilarity(*(found[name] for name in self._fields))


def with_directions(rows: Rows) -> tuple[Rows, Rows]:
    """The rows that have a direction, and the same scaled to norm 1, in the accumulator's dtype."""
    x, ids = rows.embeddings, rows.ids
    norms = scaled_row_norms(x)
    has_direction = (norms > 0) & norms.isfinite()
    if not bool(has_direction.all()):
        places = has_direction.nonzero().flatten()
        x = x.index_select(0, places)
        norms = norms[places]
        ids = ids.select(places.cpu())
    return Rows(x, ids), Rows(x.to(accumulator_dtype(x.device)) / norms[:, None], ids)


def sequence_similarity(rows: Rows, directions: Rows) -> SequenceSimilarity:
    """The state of `with_directions`."""
    x, ids = rows.embeddings, rows.ids
    device = x.device

    def found() -> tuple[TypeRuns, Tensor]:
        of_rows = (
            torch.arange(len(x), device="cpu")
            if ids.sequence_ids is None
            else ids.sequence_ids.contiguous()
        )
        runs = TypeRuns(of_rows, None, x.shape[1], device)
        return runs, sent(torch.searchsorted(runs.token_ids, of_rows), device)

    runs, sequence = ids.once(("sequence runs", x.shape[1], device), found)
    units = runs.table(directions.embeddings)
    n, mean, m2 = units.pooled()
    several = units.n > 1
    from_mean = units.m2.new_zeros(())
    if ids.sequence_ids is not None:
        totals = torch.zeros_like(units.mean)
        for chunk in row_chunks(x):
            totals.index_add_(0, sequence[chunk], x[chunk].to(totals.dtype))
        offset = units.mean - totals / scaled_row_norms(totals)[:, None]
        of_each = ((ratio(units.m2, units.n) + offset.square().sum(1)) / 2).nan_to_num(nan=1.0)
        from_mean = torch.where(several, of_each, 0).sum()
    return SequenceSimilarity(
        n=n,
        mean=mean,
        m2=m2,
        pairs=(units.n * (units.n - 1)).sum(),
        distances=(units.n * units.m2).sum(),
        sequences=several.sum().to(m2.dtype),
        from_mean=from_mean,
    )


def sequence_distances(state: SequenceSimilarity) -> tuple[dict[str, Tensor], Tensor]:
    """1 - ``within_sequence_similarity`` and 1 - ``intra_sentence_similarity``, and 1 - the mean
    cosine of all pairs.

    Of pairs of rows of one sequence; and (Ethayarajh's) of rows with the mean row of their
    sequence, mean over sequences.
    """
    distances = {
        "within_sequence_similarity": ratio(state.distances, state.pairs),
        "intra_sentence_similarity": ratio(state.from_mean, state.sequences),
    }
    return distances, torch.where(state.n > 1, ratio(state.m2, state.n - 1), torch.nan)


def cosine_deviation(directions: Scatter) -> Tensor:
    """Standard deviation of the cosine over the pairs of distinct rows, given the scatter S of rows
    scaled to norm 1.

    With a = u - ū a cosine is ‖ū‖² + ū·a_i + ū·a_j + a_i·a_j. Sums over j of the last three are 0,
    and for j = i the three are 1 - ‖ū‖² = tr S / n whatever i, so that the variance is (2 n ūᵀSū +
    ‖S‖²_F - (tr S)² / (n - 1)) / (n (n - 1)): exact, and no difference of squared means. NaN for n
    < 2.

    Source of the number: Cai et al. 2021.
    """
    n, mean, scatter = directions
    squares = 2 * n * (mean @ scatter @ mean) + scatter.square().sum()
    variance = ratio(squares - ratio(scatter.trace().square(), n - 1), n * (n - 1))
    return torch.where(n > 1, variance.clamp(min=0), torch.nan).sqrt()


def type_distances(types: TokenTable) -> dict[str, Tensor]:
    """1 - ``self_similarity`` and 1 - ``different_token_similarity``, given the table of rows
    scaled to norm 1.

    Of pairs of rows of one token type, mean over types (Ethayarajh's); and of all pairs of rows of
    different types.
    """
    n, several = types.n, types.n > 1
    of_type = torch.where(several, ratio(types.m2, n - 1), 0)
    total, _, between = types.means_pooled()
    pairs = (n * (total - n)).sum()
    distances = ((total - n) * types.m2).sum() + total * between
    return {
        "self_similarity": ratio(of_type.sum(), several.sum().to(n.dtype)),
        "different_token_similarity": ratio(distances, pairs),
    }


def crossed_distances(state: SequenceSimilarity, types: TokenTable) -> dict[str, Tensor]:
    """1 - the mean cosine of pairs by type and sequence, given also the table of rows scaled to
    norm 1.

    Of all pairs of rows of one token type in different sequences, of different types in one
    sequence, and of different types in different sequences; NaN where some rows have no type.
    """
    n = types.n
    every = torch.stack((state.n * state.m2, state.n * (state.n - 1)))
    of_type = torch.stack(((n * types.m2).sum(), (n * (n - 1)).sum()))
    of_sequence = torch.stack((state.distances, state.pairs))
    of_both = torch.stack((types.sequence_m2.sum(), (types.sequence_n2 - n).sum()))
    distances = {
        "self_similarity_across_sequences": of_type - of_both,
        "different_token_similarity_within_sequence": of_sequence - of_both,
        "different_token_similarity_across_sequences": every - of_type - of_sequence + of_both,
    }
    has_types = n.sum() == state.n  # of sequences there are no sums of the rows with a type alone
    return {key: torch.where(has_types, ratio(*each), torch.nan) for key, each in distances.items()}
