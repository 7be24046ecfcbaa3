"""Mean cosines of rows of one token type, of different types, and of one sequence."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from embedgeo.functional.rows import Rows
from embedgeo.functional.similarity import (
    SequenceSimilarity,
    cosine_deviation,
    crossed_distances,
    sequence_distances,
    sequence_similarity,
    type_distances,
    with_directions,
)
from embedgeo.functional.spectrum import Scatter, row_scatter
from embedgeo.functional.tokens import TokenTable, has_token_values, type_table
from embedgeo.glossary import Term, in_group
from embedgeo.metrics.base import GeometryMetric
from embedgeo.metrics.gaussian import Array, GaussianRows

_SIMILARITIES = {
    "self_similarity": Term(
        "self-similarity",
        "cosine of two occurrences of a token, mean over pairs, then over tokens",
        "How alike the occurrences of a token are: 1 where context does nothing; it includes the "
        "common offset.",
        gaussian=0.0,
    ),
    "different_token_similarity": Term(
        "different-token cosine",
        "cosine of two rows of different tokens, mean over pairs",
        "How much embeddings of different tokens point the same way; it includes the "
        "common offset.",
        is_drawn=False,
        gaussian=0.0,
    ),
    "within_sequence_similarity": Term(
        "within-sequence cosine",
        "cosine of two distinct rows of one sequence, mean over pairs",
        "How alike the embeddings of one text are; it includes the common offset.",
        gaussian=0.0,
    ),
    "intra_sentence_similarity": Term(
        "intra-sentence cosine",
        "cosine with the sequence's mean row, mean over rows, then sequences",
        "The published measure of how alike the embeddings of one text are; high in short ones.",
    ),
    "self_similarity_across_sequences": Term(
        "self-similarity across texts",
        "cosine of two occurrences of a token in different sequences, mean over pairs",
        "How alike the occurrences of a token are, whatever the text; it includes the common "
        "offset.",
        is_drawn=False,
        gaussian=0.0,
    ),
    "different_token_similarity_within_sequence": Term(
        "different-token cosine in a text",
        "cosine of two rows of different tokens in one sequence, mean over pairs",
        "How alike the embeddings of one text are, whatever the token; it includes the common "
        "offset.",
        is_drawn=False,
        gaussian=0.0,
    ),
    "different_token_similarity_across_sequences": Term(
        "different-token cosine across texts",
        "cosine of two rows of different tokens in different sequences, mean over pairs",
        "How alike embeddings are that share neither token nor text: the common offset.",
        is_drawn=False,
        gaussian=0.0,
    ),
}
_SPREAD = Term(
    "spread of the cosine",
    "standard deviation of the cosine of two distinct rows, over all pairs",
    "How much the angle of two embeddings varies: 1 / √d where directions are even, less with a "
    "common offset, more where embeddings form clusters or share main directions.",
    ranges=True,
)


_ADJUSTED = {
    f"{key}_adjusted": term._replace(
        name=f"{term.name}, adjusted",
        unit=f"{term.name}, less the mean cosine of all pairs",
        meaning=f"The {term.name} beyond that of any two embeddings, which all share one offset.",
    )
    for key, term in _SIMILARITIES.items()
}


class TokenSimilarity(GeometryMetric):
    """Likeness in direction of rows of one token type, of different types, and of one sequence.

    ``compute()`` returns ``self_similarity``: the mean over token types of two or more rows of the
    mean cosine of two distinct ones (Ethayarajh 2019; 1 where context does nothing);
    ``different_token_similarity``: the mean cosine over the pairs of rows of different types;
    ``within_sequence_similarity``: that over the pairs of distinct rows of one sequence; and
    ``intra_sentence_similarity``: Ethayarajh's measure of the same, the mean over sequences of two
    or more rows of the mean cosine of their rows with their mean row, high in short sequences, as a
    row is part of the mean. ``self_similarity_across_sequences``,
    ``different_token_similarity_within_sequence`` and
    ``different_token_similarity_across_sequences`` are mean cosines over all pairs of one token
    type in different sequences, of different types in one sequence, and of different types in
    different sequences. Each has an ``…_adjusted``, Ethayarajh's correction for anisotropy: less
    the mean cosine of all pairs of distinct rows. ``cosine_std`` is the standard deviation of the
    cosine over these pairs (Cai et al. 2021, of whose histograms it is the width). The values of
    types are absent where rows came without token ids.

    Rows of norm 0 are left out. Memory is O(T d + d²) for T token types.

    Sources: Ethayarajh 2019, *How Contextual are Contextualized Word Representations?*, section 3;
    Cai et al. 2021, *Isotropy in the Contextual Embedding Space*.

    Args:
        dim: d, the width of the embeddings.
        kwargs: of `torchmetrics.Metric`.

    >>> metric = TokenSimilarity(2)
    >>> metric.update(
    ...     torch.tensor([[1.0, 0.0], [2.0, 0.0], [0.0, 2.0]]), token_ids=torch.tensor([5, 5, 2])
    ... )
    >>> values = metric.compute()
    >>> values["self_similarity"].item(), values["different_token_similarity"].item()
    (1.0, 0.0)
    """

    terms = in_group("more", 730, **_SIMILARITIES, **_ADJUSTED, cosine_std=_SPREAD)

    def __init__(self, dim: int, **kwargs: Any) -> None:
        super().__init__(dim, **kwargs)
        self.declare(TokenTable.empty(dim), "type_")
        self.declare(SequenceSimilarity.empty(dim))
        self.declare(Scatter.empty(dim), "direction_")

    def update_states(self, rows: Rows) -> None:
        rows, directions = with_directions(rows)
        self.extend(sequence_similarity(rows, directions))
        self.extend(row_scatter(directions.embeddings))
        table = type_table(directions)
        if table is not None:
            self.extend(table)

    @staticmethod
    def baseline(rows: GaussianRows) -> dict[str, Array]:
        """The spread of rows m + ε, where m is the offset of those measured, and ε isotropic
        Gaussian noise.

        Two of them have independent cosines t with m, and parts across it of even directions. ‖m +
        ε‖² is χ² of d + 2 J degrees of freedom for a Poisson number J, given which t² is a Beta
        number.
        """
        from scipy import special

        n, dim = rows.n, rows.dim
        # ‖m‖² / 2 of noise of variance 1
        offset = np.maximum(rows.value("M_over_V") - 1 / (n - 1), 0) * dim / 2
        mean = np.exp(special.gammaln((dim + 1) / 2) - special.gammaln(dim / 2 + 1)) * np.sqrt(
            offset
        )
        mean = mean * special.hyp1f1(0.5, dim / 2 + 1, -offset)
        across = (dim - 1) / dim * special.hyp1f1(1, dim / 2 + 1, -offset)  # the mean of 1 - t²
        squares = (1 - across) ** 2 + np.where(dim > 1, across**2 / (dim - 1), 0)
        return {"cosine_std": np.sqrt(np.maximum(squares - mean**4, 0))}

    def compute(self) -> dict[str, Tensor]:
        state, table = self.load(SequenceSimilarity), self.load(TokenTable)
        types = table.typed()
        distances, of_all_pairs = sequence_distances(state)
        n_with_ids = table.n.sum()
        if has_token_values(state.n, n_with_ids):
            complete = n_with_ids == state.n  # not if only some of the rows had token ids
            of_types = type_distances(types) | crossed_distances(state, types)
            distances = {
                key: torch.where(complete, each, torch.nan) for key, each in of_types.items()
            } | distances
        spread = cosine_deviation(self.load(Scatter).expanded())
        values = {"cosine_std": spread} | {key: 1 - each for key, each in distances.items()}
        return values | {f"{key}_adjusted": of_all_pairs - each for key, each in distances.items()}
