"""Mean cosines of rows of one token type, of different types, and of one sequence."""

from typing import Any

from torch import Tensor

from embedgeo.functional.moments import ratio
from embedgeo.functional.rows import Rows
from embedgeo.functional.similarity import (
    SequenceSimilarity,
    directions_of,
    sequence_similarity,
    type_distances,
)
from embedgeo.functional.tokens import TokenTable, has_token_values, type_table
from embedgeo.glossary import Term, in_group
from embedgeo.metrics.base import GeometryMetric

_TERMS = in_group(
    "more",
    730,
    self_similarity_across_sequences=Term(
        "self-similarity across texts",
        "cosine of two occurrences of a token in different sequences, mean over pairs",
        "How alike the occurrences of a token are, whatever the text; it includes the common "
        "offset.",
        gaussian=0.0,
    ),
    different_token_similarity_across_sequences=Term(
        "different-token cosine across texts",
        "cosine of two rows of different tokens in different sequences, mean over pairs",
        "How alike embeddings are that share neither token nor text: the common offset.",
        is_drawn=False,
        gaussian=0.0,
    ),
    within_sequence_similarity=Term(
        "within-sequence cosine",
        "cosine of two distinct rows of one sequence, mean over pairs",
        "How alike the embeddings of one text are; it includes the common offset.",
        gaussian=0.0,
    ),
)


class TokenSimilarity(GeometryMetric):
    """Likeness in direction of rows of one token type, of different types, and of one sequence.

    ``compute()`` returns mean cosines over pairs of distinct rows:
    ``self_similarity_across_sequences`` of rows of one token type in different sequences;
    ``different_token_similarity_across_sequences`` of rows of different types in different
    sequences; and ``within_sequence_similarity`` of rows of one sequence. The values of types are
    absent where rows came without token ids.

    Rows of norm 0 are left out. Memory is O(T d) for T token types.

    Source: Ethayarajh 2019, *How Contextual are Contextualized Word Representations?*, section 3.
    He takes pairs of one token type in one sequence, too.

    Args:
        dim: d, the width of the embeddings.
        kwargs: of `torchmetrics.Metric`.

    >>> import torch
    >>> metric = TokenSimilarity(2)
    >>> metric.update(
    ...     torch.tensor([[1.0, 0.0], [2.0, 0.0], [0.0, 2.0]]), token_ids=torch.tensor([5, 5, 2])
    ... )
    >>> metric.compute()["self_similarity_across_sequences"].item()
    1.0
    """

    terms = _TERMS

    def __init__(self, dim: int, **kwargs: Any) -> None:
        super().__init__(dim, **kwargs)
        self.declare(TokenTable.empty(dim), "type_")
        self.declare(SequenceSimilarity.empty(dim))

    def update_states(self, rows: Rows) -> None:
        directions = directions_of(rows)
        self.extend(sequence_similarity(directions))
        table = type_table(directions)
        if table is not None:
            self.extend(table)

    def compute(self) -> dict[str, Tensor]:
        state = self.load(SequenceSimilarity)
        table = self.load(TokenTable)
        distances = {"within_sequence_similarity": ratio(state.distances, state.pairs)}
        if has_token_values(state.n, table.n.sum()):
            distances |= type_distances(state, table.typed())
        return {key: 1 - each for key, each in distances.items()}
