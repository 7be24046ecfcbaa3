"""What the glossary says of one metric."""

import re
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from embedgeo.formatting import printable


class Term(NamedTuple):
    """How people read a metric.

    Attributes:
        name: short, for titles and axes.
        unit: unit and, where there are several, the estimator.
        meaning: one or two sentences.
        ranges: its values may span orders of magnitude.
        is_drawn: the report has figures of it; else it is only in the table, in the flags or a dashed line.
        group: one of `embedgeo.glossary.GROUPS`.
    """

    name: str
    unit: str
    meaning: str
    ranges: bool = False
    is_drawn: bool = True
    group: str = "more"

    def is_logarithmic(self, values: NDArray[np.float64]) -> bool:
        """Whether values go on a logarithmic scale: all of them positive, over more than a factor of 10."""
        finite = values[np.isfinite(values)]
        return bool(self.ranges and finite.size and 1e-200 < 10 * finite.min() < finite.max() < 1e200)


_COMPARED = {"previous": "the measurement before", "first": "the first measurement", "below": "the layer below"}

DRIFT: dict[str, Term] = {
    f"{key}_to_{other}": Term(
        f"{name} {'layer ' * (other == 'below')}{other}", unit, f"{meaning} Of the same rows here and at {what}."
    )
    for key, name, unit, meaning in (
        (
            "cka",
            "CKA to",
            "linear, debiased",
            "How alike the geometry is, whatever the rotation and scale: 1 for copies, 0 for unrelated rows.",
        ),
        (
            "procrustes",
            "Procrustes to",
            "squared distance of rows centred and scaled to norm 1",
            "What is left between the rows after the best rotation: 0 for rotated and scaled copies, 2 at most.",
        ),
        (
            "neighbor_overlap",
            "overlap with",
            "share of the 30 nearest neighbours, mean over rows",
            "How much of a row's neighbourhood stays: 1 where all of it does, 30 / (rows − 1) for unrelated rows.",
        ),
    )
    for other, what in _COMPARED.items()
} | {
    "linearity": Term(
        "linearity",
        "R² of an affine map from the layer below, adjusted",
        "How much of a layer, the residual stream included, is an affine function of the one below: 1 if all of it is, "
        "0 for unrelated rows.",
    ),
    "linearity_without_residual": Term(
        "linearity without the residual",
        "R² of an affine map from the layer below, adjusted",
        "How much of what a layer adds to the one below is an affine function of that: 1 if all of it is.",
    ),
}
"""By metric, in the order in which to look at them."""


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


GROUPS = ("at a glance", "size and variance", "norms", "shape", "token types", "rows counted", "more")
"""Groups of metrics, in the order of TensorBoard's custom-scalars page."""


def _grouped(group: str, **terms: Term) -> dict[str, Term]:
    return {metric: term._replace(group=group) for metric, term in terms.items()}


_SQUARED = "squared embedding units"
_OF_A_SKETCH = "How far the estimate may be from the exact value, where wide layers have a sketch of their scatter."

TERMS = {
    **_grouped(
        "at a glance",
        V_W_over_V_unbiased=Term(
            "V_W / V",
            "share of V, from pairs in different sequences",
            "Share of the variance that lies within the occurrences of a token, from pairs in different sequences: 0 "
            "where context does nothing, growing as embeddings become contextual; 1 where the token does not matter.",
        ),
        M_over_Q=Term(
            "M / Q",
            "share of the mean squared norm",
            "How much of the embeddings' size is an offset common to all. Near 1, all point the same way.",
        ),
        anisotropy=Term("anisotropy", "σ₁² / Σσ² of the centred rows", "Share of the variance along one direction."),
        intrinsic_dimension=Term(
            "intrinsic dimension",
            "dimensions, TwoNN",
            "Dimension of the surface that the embeddings lie on, at the scale of neighbouring rows; it grows with the "
            "number of rows, so compare estimates from equally many.",
            ranges=True,
        ),
        mean_cosine=Term(
            "mean cosine",
            "cosine of two distinct rows, mean over all pairs",
            "How much any two embeddings point the same way; it includes the common offset.",
        ),
    ),
    **_grouped(
        "size and variance",
        Q=Term("Q", f"mean of ‖x‖², {_SQUARED}", "Size of the embeddings; Q = M + V.", ranges=True),
        M=Term("M", f"‖mean of x‖², {_SQUARED}", "Size of the offset common to all embeddings.", ranges=True),
        V=Term("V", f"mean of ‖x − mean‖², {_SQUARED}", "How much the embeddings vary.", ranges=True),
        M_over_V=Term("M / V", "ratio", "The common offset relative to the variance.", ranges=True),
        V_W_unbiased=Term(
            "V_W, unbiased",
            f"estimate from pairs in different sequences, {_SQUARED}",
            "Variance within the occurrences of a token: what context does.",
            ranges=True,
        ),
        V_B_unbiased=Term(
            "V_B, unbiased",
            f"estimate from pairs in different sequences, {_SQUARED}",
            "Variance between tokens: what the token itself does.",
            ranges=True,
        ),
        V_W=Term(
            "V_W, plug-in",
            f"plug-in estimate, {_SQUARED}",
            "The published variance within tokens, of exactly the rows seen: too low where tokens occur a few times.",
            ranges=True,
        ),
        V_B=Term(
            "V_B, plug-in",
            f"plug-in estimate, {_SQUARED}",
            "The published variance between tokens, of exactly the rows seen: too high where tokens occur a few times.",
            ranges=True,
        ),
        V_W_over_V=Term(
            "V_W / V, plug-in",
            "share of the variance, plug-in estimate",
            "The published share, of exactly the rows seen: comparable only to values from equally large samples.",
        ),
        V_over_Q=Term("V / Q", "share of the mean squared norm", "1 − M / Q.", is_drawn=False),
        V_W_over_Q=Term(
            "V_W / Q, plug-in",
            "share of the mean squared norm, plug-in estimate",
            "How much of the embeddings' size is what context does, of exactly the rows seen.",
        ),
        V_B_over_Q=Term(
            "V_B / Q, plug-in",
            "share of the mean squared norm, plug-in estimate",
            "How much of the embeddings' size is what the token itself does, of exactly the rows seen.",
        ),
    ),
    **_grouped(
        "shape",
        anisotropy_standardized=Term(
            "anisotropy, standardized",
            "σ₁² / Σσ² of the z-scored rows",
            "Anisotropy with every coordinate scaled to variance 1: is there more to it than a few large coordinates?",
        ),
        participation_ratio=Term(
            "participation ratio",
            "directions, (Σλ)² / Σλ²",
            "How many directions the variance is spread over.",
            ranges=True,
        ),
        **SPECTRUM,
        anisotropy_error=Term("error of the anisotropy", "half-width", _OF_A_SKETCH, is_drawn=False),
        participation_ratio_error=Term("error of the participation ratio", "half-width", _OF_A_SKETCH, is_drawn=False),
        anisotropy_null=Term(
            "anisotropy of a Gaussian",
            "expected σ₁² / Σσ²",
            "What isotropic Gaussian rows of the same number and width show.",
            is_drawn=False,
        ),
        top_dim_share=Term(
            "top coordinate's share",
            "largest share of V in one coordinate",
            "How much of the variance a single rogue coordinate holds.",
        ),
        anisotropy_batch_mean=Term(
            "anisotropy of batches", "mean over batches of rows", "Anisotropy as papers report it: batch by batch."
        ),
        anisotropy_batch_std=Term(
            "spread of the anisotropy", "std over batches of rows", "How much the anisotropy of batches varies."
        ),
    ),
    **_grouped(
        "norms",
        norm_mean=Term("mean norm", "mean of ‖x‖, embedding units", "Length of the embeddings.", ranges=True),
        norm_cv=Term("C.V. of the norm", "std / mean of ‖x‖", "How unequal the lengths are.", ranges=True),
        norm_max=Term(
            "largest norm",
            "max of ‖x‖, embedding units",
            "Length of the longest embedding: massive activations show here first.",
            ranges=True,
        ),
    ),
    **_grouped(
        "token types",
        Q_t_cv=Term(
            "C.V. of Q over tokens",
            "std / mean of Q_t over token types",
            "How unequal the token types' Q are.",
            ranges=True,
        ),
        V_on_M_slope=Term(
            "slope of V on M",
            "least squares over token types",
            "Near −1: what a token's mean gains, its variance loses, at constant Q.",
        ),
        V_on_M_r2=Term(
            "R² of V on M", "R², least squares over token types", "How well a token's mean norm predicts its variance."
        ),
        Q_freq_slope=Term(
            "slope of Q on frequency", "log10(1 + Q) on log10 n, over token types", "Does size depend on frequency?"
        ),
        M_freq_slope=Term(
            "slope of M on frequency",
            "log10(1 + M) on log10 n, over token types",
            "Negative: frequent tokens have means near the origin.",
        ),
        V_freq_slope=Term(
            "slope of V on frequency",
            "log10(1 + V) on log10 n, over token types",
            "Positive: frequent tokens vary more with context.",
        ),
        **{
            f"{key}_freq_r2": Term(
                f"R² of {key} on frequency",
                f"R² of log10(1 + {key}) on log10 n, over token types",
                f"How well a token's frequency predicts its {key}.",
            )
            for key in "QMV"
        },
    ),
    **_grouped(
        "rows counted",
        intrinsic_dimension_std=Term(
            "spread of the dimension", "std over batches, TwoNN", "How much the estimate varies.", ranges=True
        ),
        duplicate_fraction=Term(
            "duplicate rows",
            "share of the sampled rows",
            "Rows equal to another one but for rounding, merged before the intrinsic dimension is estimated; many are "
            "to be expected at `embed` of a model with rotary positions.",
        ),
        n_points=Term(
            "distinct rows",
            "rows used by TwoNN",
            "What the intrinsic dimension rests on.",
            ranges=True,
            is_drawn=False,
        ),
        n=Term("rows", "rows counted", "Embeddings measured.", ranges=True, is_drawn=False),
        token_types=Term(
            "token types", "distinct tokens seen", "Vocabulary ids among the rows.", ranges=True, is_drawn=False
        ),
        token_types_regressed=Term(
            "token types in the regressions",
            "tokens seen 10 to 100,000 times, or as told",
            "What the spread of Q over tokens and the slopes and R² rest on.",
            ranges=True,
            is_drawn=False,
        ),
        n_nonfinite=Term(
            "non-finite rows", "rows left out", "Rows with a NaN or an infinity: a fault in the run.", is_drawn=False
        ),
    ),
    **EXTRA_TERMS,
    "loss": Term("loss", "mean loss on the text, nats per token", "How well the model predicts the measured text."),
    "tokens_seen": Term("tokens seen", "tokens, as the name says", "How much the model was trained on.", ranges=True),
}
"""By metric, in the order in which to look at them."""

HEADLINES = tuple(metric for metric, term in TERMS.items() if term.group == GROUPS[0])
"""The metrics to look at first, in order."""

_PROCESSED = re.compile(r"(anisotropy|mean_cosine)_(centered|z_scored|whitened|top(\d+)_removed)")


def term(metric: str) -> Term:
    """The term of a metric; a metric that is not in the glossary keeps its key as its name.

    >>> term("M_over_Q").name, term("my_metric").name, term("anisotropy_top3_removed").name
    ('M / Q', 'my_metric', 'anisotropy, top 3 removed')
    """
    if processed := _PROCESSED.fullmatch(metric):
        base = TERMS[processed[1]]
        how = f"top {processed[3]} removed" if processed[3] else processed[2].replace("_", "-")
        return Term(f"{base.name}, {how}", base.unit, f"{base.meaning} Here of the rows after processing: {how}.")
    return TERMS.get(metric, Term(printable(metric), "value", "A metric of your own."))


def is_processed(metric: str) -> bool:
    """Whether a metric describes the rows after processing.

    >>> is_processed("mean_cosine_whitened"), is_processed("anisotropy_standardized")
    (True, False)
    """
    return _PROCESSED.fullmatch(metric) is not None


def in_order(metrics: Iterable[str]) -> list[str]:
    """Distinct metrics in the order in which to look at them; unknown ones last, by name."""
    rank = {metric: i for i, metric in enumerate(TERMS)}
    return sorted(set(metrics), key=lambda metric: (rank.get(metric, len(rank)), metric))
