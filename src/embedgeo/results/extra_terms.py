"""What the glossary says of the metrics that are measured only if they are asked for."""

from embedgeo.results.drift_terms import DRIFT
from embedgeo.results.term import Term

SPECTRUM: dict[str, Term] = {
    "effective_rank": Term("effective rank", "exp of the entropy of the σ", "How many directions matter.", ranges=True),
    "rankme": Term(
        "RankMe",
        "exp of the entropy of the σ of the rows as they are",
        "The effective rank with the common offset, which counts as one direction, and a long one takes from the rest.",
        ranges=True,
    ),
    "effective_rank_eigenvalues": Term(
        "effective rank of eigenvalues",
        "exp of the entropy of the λ",
        "How many directions the variance needs; some papers call it RankMe. Small λ count less than in the other two.",
        ranges=True,
    ),
    "isoscore": Term("IsoScore", "score, 0 to 1", "How evenly the variance is spread over all directions."),
    "top1_share": Term(
        "top-1 share",
        "share of the variance",
        "Variance along the largest direction: the anisotropy, by another name.",
        is_drawn=False,
    ),
    "top5_share": Term("top-5 share", "share of the variance", "Variance along the five largest directions."),
    "anisotropy_without_top5": Term(
        "anisotropy without the top 5",
        "λ₆ / Σλ beyond the fifth",
        "Anisotropy that is left without the five largest directions.",
    ),
    "alpha_req": Term(
        "α-ReQ",
        "exponent α of λᵢ ∝ i^−α, fitted over i = 11 … 99, or as told",
        "How fast the spectrum decays: near 0 the directions matter alike, from 1 on a few of them hold most.",
    ),
    "alpha_req_r2": Term("R² of α-ReQ", "R², weighted like the fit", "How well a power law describes the spectrum."),
}
"""Those of the whole spectrum; they are of the group "shape"."""

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

_OF_ROWS = {
    "": ("", ""),
    "_first": (", first positions", " Here of the first row of each sequence: attention sinks show here."),
    "_rest": (", the rest", " Here of the rows that are not the first of their sequence."),
}
_OUTLIERS = {
    "kurtosis": Term(
        "kurtosis of coordinates",
        "excess kurtosis over rows, mean over coordinates",
        "How heavy the tails of the coordinates are: 0 for a Gaussian, large where few rows hold most of the variance.",
        ranges=True,
    ),
    "max_abs": Term("largest entry", "max |x|, embedding units", "The largest magnitude of an entry.", ranges=True),
    "massive_fraction": Term(
        "massive rows",
        "share of rows with |x| > 100 and > 1000 × median |x|",
        "Rows with a massive activation: an entry over 100 that is over 1000 times the median one of its row.",
    ),
    "massive_fraction_100x": Term(
        "massive rows, 100 ×",
        "share of rows with an |x| > 100 × median |x|",
        "Rows with an entry over 100 times the median one of the row, however large.",
    ),
    "massive_fraction_1000x": Term(
        "massive rows, 1000 ×",
        "share of rows with an |x| > 1000 × median |x|",
        "Rows with an entry over 1000 times the median one of the row, however large.",
    ),
}
_DRAWN = ("kurtosis", "max_abs")
"""Those with figures of their own; first positions against the rest have one of all of them together."""

COORDINATES = {
    key + suffix: Term(term.name + name, term.unit, term.meaning + meaning, term.ranges, key + suffix in _DRAWN)
    for key, term in _OUTLIERS.items()
    for suffix, (name, meaning) in _OF_ROWS.items()
}

_SIMILARITIES = {
    "self_similarity": Term(
        "self-similarity",
        "cosine of two occurrences of a token, mean over pairs, then over tokens",
        "How alike the occurrences of a token are: 1 where context does nothing; it includes the common offset.",
    ),
    "different_token_similarity": Term(
        "different-token cosine",
        "cosine of two rows of different tokens, mean over pairs",
        "How much embeddings of different tokens point the same way; it includes the common offset.",
        is_drawn=False,
    ),
    "within_sequence_similarity": Term(
        "within-sequence cosine",
        "cosine of two distinct rows of one sequence, mean over pairs",
        "How alike the embeddings of one text are; it includes the common offset.",
    ),
    "intra_sentence_similarity": Term(
        "intra-sentence cosine",
        "cosine with the sequence's mean row, mean over rows, then sequences",
        "The published measure of how alike the embeddings of one text are; high in short ones.",
    ),
}

SIMILARITY = _SIMILARITIES | {
    f"{key}_adjusted": Term(
        f"{term.name}, adjusted",
        f"{term.name}, less the mean cosine of all pairs",
        f"The {term.name} beyond that of any two embeddings, which all share one offset.",
        is_drawn=term.is_drawn,
    )
    for key, term in _SIMILARITIES.items()
}

NEXT_TOKEN = {
    "nc1": Term(
        "NC1, plug-in",
        "variance within over that between next tokens, plug-in estimate",
        "Published as neural collapse: small where rows before the same token gather. Of exactly the rows seen: too "
        "low where tokens occur a few times.",
        ranges=True,
        is_drawn=False,
    ),
    "nc1_unbiased": Term(
        "NC1",
        "variance within / between next tokens, from pairs in different sequences",
        "Small where rows before the same token gather, as in neural collapse.",
        ranges=True,
    ),
    "cdnv": Term(
        "CDNV",
        "(σ² + σ'²) / (2 ‖μ − μ'‖²), mean over pairs of next tokens, bias corrected",
        "Class-distance normalized variance: how much rows before the same token spread, relative to how "
        "far apart two tokens' means are; of frequent tokens. Not to be read where few pairs are told apart.",
        ranges=True,
    ),
    "cdnv_plugin": Term(
        "CDNV, plug-in",
        "(σ² + σ'²) / (2 ‖μ − μ'‖²), mean over pairs of next tokens, plug-in",
        "As published, of exactly the rows seen: too low where tokens occur a few times.",
        ranges=True,
        is_drawn=False,
    ),
    "cdnv_pairs": Term(
        "next tokens told apart",
        "share of the pairs of frequent next tokens",
        "Pairs whose squared distance is more than twice what noise alone would make it: those that the class-distance "
        "normalized variance is the mean of.",
        is_drawn=False,
    ),
    "unembedding_alignment": Term(
        "alignment with the unembedding",
        "cosine, mean over frequent next tokens",
        "How much the mean of the rows before a token, less that of all, points to its row of the output embedding.",
    ),
    "unembedding_alignment_std": Term(
        "spread of the alignment",
        "std of the cosine over frequent next tokens",
        "How unequally tokens are aligned with their rows of the output embedding: small in uniform duality.",
        is_drawn=False,
    ),
    "next_token_types": Term(
        "frequent next tokens",
        "tokens that follow 10 rows or more, the 1,000 most frequent at most",
        "What the distances and the alignment rest on.",
        ranges=True,
        is_drawn=False,
    ),
}

NORMALIZATION: dict[str, Term] = {
    "norm_Q_expected": Term(
        "Q expected of the norm",
        "‖γ‖² + ‖β‖², squared embedding units",
        "Q at the output of a LayerNorm (of an RMSNorm ‖γ‖²) whose rows are spread alike over the coordinates.",
        ranges=True,
        is_drawn=False,
    )
}

VOCABULARY: dict[str, Term] = {
    "duplicate_rows": Term(
        "rows with a copy",
        "rows of an embedding matrix",
        "Rows equal to another one but for rounding: tokens that the model cannot tell apart.",
        ranges=True,
    ),
    "rows_without_token": Term(
        "rows without a token",
        "rows of an embedding matrix",
        "Rows of ids that the tokenizer does not have: padding of the vocabulary.",
        ranges=True,
    ),
    "untrained_rows": Term(
        "rows that look untrained",
        "rows of an embedding matrix",
        "Rows as near to the mean of those that no token uses as these are: no training has moved them apart.",
        ranges=True,
    ),
    "tied_embeddings": Term(
        "tied embeddings", "1: tied, 0: not", "Whether input and output embedding are one matrix.", is_drawn=False
    ),
}

EXTRA_TERMS = SCALES | COORDINATES | SIMILARITY | NEXT_TOKEN | DRIFT | NORMALIZATION | VOCABULARY
"""By metric, in the order in which to look at them; their group is "more" unless they say another one."""
