"""What the glossary says of the metrics that are measured only if they are asked for."""

from embedgeo.results.term import Term

SPECTRUM: dict[str, Term] = {}

_RANKS = (1, 2, 4, 8, 16, 32, 64)

SCALES: dict[str, Term] = {
    **{
        f"intrinsic_dimension_at_{scale}": Term(
            f"intrinsic dimension at scale {scale}",
            f"dimensions, GRIDE, neighbours {scale} and {2 * scale}",
            f"Dimension of the surface that the embeddings lie on, as far as the neighbour of rank {2 * scale}: noise "
            "counts the less the larger the scale. Where it is the same at all scales it does not depend on the number "
            "of rows.",
            ranges=True,
            is_drawn=False,
        )
        for scale in _RANKS
    },
    **{
        f"intrinsic_dimension_at_{scale}_error": Term(
            f"error of the intrinsic dimension at scale {scale}",
            "standard error, maximum likelihood",
            "How much the estimate would vary if rows were independent; those of one text are not.",
            ranges=True,
            is_drawn=False,
        )
        for scale in _RANKS
    },
}

COORDINATES: dict[str, Term] = {}

SIMILARITY: dict[str, Term] = {}

NEXT_TOKEN: dict[str, Term] = {}

DRIFT: dict[str, Term] = {}

NORMALIZATION: dict[str, Term] = {}

EXTRA_TERMS = SPECTRUM | SCALES | COORDINATES | SIMILARITY | NEXT_TOKEN | DRIFT | NORMALIZATION
"""By metric, in the order in which to look at them; their group is "more" unless they say another one."""
