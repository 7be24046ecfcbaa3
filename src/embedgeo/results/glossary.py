"""The glossary: what each metric is called, its unit and estimator, its group, and how to read it."""

import re
from collections.abc import Iterable

from embedgeo.results.extra_terms import EXTRA_TERMS, SPECTRUM
from embedgeo.results.term import Term
from embedgeo.results.wording import printable

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
