"""What the glossary says of the metrics that are measured only if they are asked for."""

from embedgeo.results.term import Term

SPECTRUM: dict[str, Term] = {}

SCALES: dict[str, Term] = {}

COORDINATES: dict[str, Term] = {}

SIMILARITY: dict[str, Term] = {}

NEXT_TOKEN: dict[str, Term] = {}

DRIFT: dict[str, Term] = {}

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

EXTRA_TERMS = SPECTRUM | SCALES | COORDINATES | SIMILARITY | NEXT_TOKEN | DRIFT | NORMALIZATION | VOCABULARY
"""By metric, in the order in which to look at them; their group is "more" unless they say another one."""
