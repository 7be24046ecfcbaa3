"""What the glossary says of the metrics that are measured only if they are asked for."""

from embedgeo.results.term import Term

SPECTRUM: dict[str, Term] = {}

SCALES: dict[str, Term] = {}

COORDINATES: dict[str, Term] = {}

_SIMILARITIES = {
    "self_similarity": Term(
        "self-similarity",
        "cosine of two occurrences of a token, mean over pairs, then over tokens",
        "How alike the occurrences of a token are: 1 where context does nothing; it includes the common offset.",
    ),
    "different_token_similarity": Term(
        "similarity of different tokens",
        "cosine of two rows of different tokens, mean over pairs",
        "How much embeddings of different tokens point the same way; it includes the common offset.",
    ),
    "within_sequence_similarity": Term(
        "similarity within sequences",
        "cosine of two distinct rows of one sequence, mean over pairs",
        "How alike the embeddings of one text are; it includes the common offset.",
    ),
    "intra_sentence_similarity": Term(
        "intra-sentence similarity",
        "cosine of a row with its sequence's mean row, mean over rows, then over sequences",
        "The published measure of how alike the embeddings of one text are; high in short ones.",
    ),
}

SIMILARITY = _SIMILARITIES | {
    f"{key}_adjusted": Term(
        f"{term.name}, adjusted",
        f"{term.unit}; less the mean cosine of all pairs",
        f"The {term.name} beyond that of any two embeddings, which all share one offset.",
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
    ),
    "nc1_unbiased": Term(
        "NC1",
        "variance within over that between next tokens, from pairs in different sequences",
        "Small where rows before the same token gather, as in neural collapse.",
        ranges=True,
    ),
    "cdnv": Term(
        "CDNV",
        "(σ² + σ'²) / (2 ‖μ − μ'‖²) of two next tokens, mean over pairs, bias corrected",
        "Class-distance normalized variance: how much rows before the same token spread, relative to how "
        "far apart two tokens' means are; of frequent tokens. Not to be read where few pairs are told apart.",
        ranges=True,
    ),
    "cdnv_plugin": Term(
        "CDNV, plug-in",
        "(σ² + σ'²) / (2 ‖μ − μ'‖²) of two next tokens, mean over pairs, plug-in estimate",
        "As published, of exactly the rows seen: too low where tokens occur a few times.",
        ranges=True,
    ),
    "cdnv_pairs": Term(
        "next tokens told apart",
        "share of the pairs of frequent next tokens",
        "Pairs whose squared distance is more than twice what noise alone would make it: those that the class-distance "
        "normalized variance is the mean of.",
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
    ),
    "next_token_types": Term(
        "frequent next tokens",
        "tokens that follow 10 rows or more, the 1,000 most frequent at most",
        "What the distances and the alignment rest on.",
        ranges=True,
        is_drawn=False,
    ),
}

DRIFT: dict[str, Term] = {}

NORMALIZATION: dict[str, Term] = {}

EXTRA_TERMS = SPECTRUM | SCALES | COORDINATES | SIMILARITY | NEXT_TOKEN | DRIFT | NORMALIZATION
"""By metric, in the order in which to look at them; their group is "more" unless they say another one."""
