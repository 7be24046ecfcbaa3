"""docs/definitions.md defines every key there is, and says what each of them is for random rows."""

import math
from collections import defaultdict

import numpy as np
import pytest
import torch
from scipy import special, stats

from docs.facts import with_facts
from embedgeo.functional import (
    anisotropy_null,
    drift_values,
    gride_dimensions,
    linearity_values,
    twonn_dimension,
)
from embedgeo.functional.ablation import replacements
from embedgeo.functional.dimension import SCALES
from embedgeo.glossary import OWN
from embedgeo.metrics import (
    AfterProcessing,
    Anisotropy,
    EmbeddingMoments,
    IntrinsicDimension,
    NextTokenGeometry,
    OutlierCoordinates,
    TokenMoments,
    TokenSimilarity,
)
from embedgeo.metrics.gaussian import GaussianRows, baseline_values
from tests.data import OTHER_METRICS, floats, gaussian, generator, token_rows, updated
from tests.docs.page import GAUSSIAN, GRIDE, KEYS, TEXT, TWONN, keys_under

DIM, Q, BATCH, DRAWS, LENGTH = 64, 3.0, 128, 24, 10
COUNTS = torch.tensor([1, 2, 3] * 5 + [10, 10, 12, 15, 20, 25, 30, 40, 60, 80] * 2)
IDS = torch.repeat_interleave(torch.arange(len(COUNTS)), COUNTS)
MEDIANS = {"norm_max", "top_dim_share", "max_abs"}
OTHERS = ("previous", "first", "below")
SIMULATED = {
    "M_freq_r2",
    "V_freq_r2",
    "alpha_req",
    "alpha_req_r2",
    "intrinsic_dimension_next_scale",
}
"""The page gives no formula for these."""
OF_RANDOM_NEIGHBORS = {"same_type_neighbors", "same_sequence_neighbors"}
"""The page names the keys that have these."""
OF_TABLES = {
    "intrinsic_dimension",
    "intrinsic_dimension_between",
    *(f"intrinsic_dimension_at_{scale}" for scale in SCALES),
}
"""The page has tables of these."""
OF_OTHERS = {
    *(key for kind in OTHER_METRICS for key in kind.terms),
    *(
        key
        for kind in OTHER_METRICS
        for key in updated(kind(2), gaussian(9, 2), torch.arange(9)).compute()
    ),
}
"""Random rows show the baselines of these."""


def all_values(x, ids):
    metrics = [
        Anisotropy(x.shape[1], spectrum=True, batch_size=BATCH),
        AfterProcessing(x.shape[1]),
        *(kind(x.shape[1]) for kind in OTHER_METRICS),
    ]
    metrics = [updated(metric, x, ids) for metric in metrics]
    for metric in (
        TokenMoments(x.shape[1]),
        OutlierCoordinates(x.shape[1]),
        IntrinsicDimension(x.shape[1], batch_size=BATCH, num_batches=4),
        IntrinsicDimension(x.shape[1], estimator="gride"),
        TokenSimilarity(x.shape[1]),
        NextTokenGeometry(x.shape[1]),
    ):
        metric.update(x, ids, sequence_ids=torch.arange(len(x)) // LENGTH)
        metrics.append(metric)
    metrics[-1].set_unembedding(gaussian(1 + int(ids.max()), x.shape[1], seed=1))
    found = {key: value for metric in metrics for key, value in floats(metric.compute()).items()}
    return found | drift(*x[: len(x) // 2 * 2].chunk(2))


def drift(x, y):
    values = floats(drift_values(x, y))
    compared = {f"{key}_to_{other}": value for other in OTHERS for key, value in values.items()}
    return compared | floats(linearity_values(x, y))


def test_the_keys_are_those_of_the_metrics_and_of_the_glossary():
    x, ids = token_rows(300, 6)
    computed = all_values(x, ids).keys()
    assert len(KEYS) == len(set(KEYS))
    of_matrices = keys_under("Embedding matrices")
    assert of_matrices == {
        "duplicate_rows",
        "rows_without_token",
        "untrained_rows",
        "tied_embeddings",
    }
    assert set(KEYS) == computed | OF_OTHERS | of_matrices | {
        *(
            "loss_change_identity",
            *(
                f"loss_change_{name}{key}"
                for name in replacements()
                for key in ("", "_after_first")
            ),
        ),
        *(
            "norm_Q_expected",
            "loss",
            "logit_lens_loss",
            "unseen_type_share",
            "training_loss",
            "tokens_seen",
        ),
    }
    assert OWN.terms.keys() <= set(KEYS)
    assert all(map(OWN.find, KEYS))


@pytest.mark.slow
def test_the_facts_of_the_page_are_those_of_the_metrics():
    """``python docs/facts.py`` writes them."""
    assert with_facts(TEXT).splitlines() == TEXT.splitlines()


def test_every_section_names_the_metrics_that_have_its_keys():
    x, ids = token_rows(300, 6)
    of_rows = keys_under("Size|Directions")
    of_types = keys_under("Within|Over token types")
    unbiased = {"V_W_unbiased", "V_B_unbiased", "V_W_over_V_unbiased"}
    assert updated(EmbeddingMoments(6), x, ids).compute().keys() == of_rows | unbiased
    assert updated(TokenMoments(6), x, ids).compute().keys() == of_rows | of_types
    in_a_range = updated(TokenMoments(6, count_range=(1, 300)), x, ids).compute()
    assert in_a_range.keys() == keys_under("Size") | of_types
    of_scatter = updated(Anisotropy(6, spectrum=True, batch_size=BATCH), x).compute().keys()
    assert of_scatter == keys_under("Spectrum")
    assert of_scatter > updated(Anisotropy(6, sample_size=8), x).compute().keys()
    for estimator, heading in (("twonn", "Intrinsic"), ("gride", "Dimension over")):
        metric = IntrinsicDimension(6, estimator=estimator)
        metric.update(x, ids, sequence_ids=torch.arange(len(x)) // LENGTH)
        assert metric.compute().keys() == keys_under(heading)
    assert updated(AfterProcessing(6), x).compute().keys() == keys_under("After processing")
    assert updated(OutlierCoordinates(6), x).compute().keys() == keys_under("Outlier coordinates")
    assert updated(TokenSimilarity(6), x, ids).compute().keys() == keys_under("Similarity")
    assert updated(NextTokenGeometry(6), x, ids).compute().keys() == keys_under("Next")
    assert drift(x, x).keys() == keys_under("The same rows")


@pytest.fixture(scope="module")
def draws():
    """Every key for Gaussian rows, as drawn many times."""
    values, random = defaultdict(list), generator(5)
    for _ in range(DRAWS):
        x = math.sqrt(Q / DIM) * torch.randn(len(IDS), DIM, generator=random, dtype=torch.float64)
        for key, value in all_values(x, IDS[torch.randperm(len(IDS), generator=random)]).items():
            values[key].append(value)
    return {key: torch.tensor(drawn, dtype=torch.float64) for key, drawn in values.items()}


def exact_values(n, d, T):
    """What the page says of Gaussian rows, where it says it without an "about"."""
    return {
        "Q": Q,
        "M": Q / n,
        "V": Q * (n - 1) / n,
        "M_over_V": d / ((n - 1) * d - 2),
        "M_over_Q": 1 / n,
        "V_over_Q": (n - 1) / n,
        "mean_cosine": 0,
        "norm_mean": math.sqrt(Q) * norm_ratio(d),
        "V_W": Q * (n - T) / n,
        "V_B": Q * (T - 1) / n,
        "V_W_over_V": (n - T) / (n - 1),
        "V_W_over_Q": (n - T) / n,
        "V_B_over_Q": (T - 1) / n,
        "V_W_unbiased": Q,
        "V_B_unbiased": 0,
        "V_W_over_V_unbiased": 1,
        "V_W_local": Q,
        "V_W_text": 0,
        "V_W_text_over_V_W": 0,
        "Q_freq_slope": 0,
        "participation_ratio": (d * (n - 1) + 2) / (n + d),
        "isoscore": (n - 2) / (n + d),
        "anisotropy_null": null(n),
        "anisotropy_whitened": 1 / min(n - 1, d),
        "duplicate_fraction": 0,
        **{f"cka_to_{other}": 0 for other in OTHERS},
        "linearity": 0,
        "n_points": n // BATCH * BATCH,
        "kurtosis": -6 / (n + 1),
        **{key: 0 for key in keys_under("Outlier") if key.startswith("massive")},
        "unembedding_alignment": 0,
        "cdnv_pairs": 0,
        **{key: 0 for key in keys_under("Similarity") if not key.startswith(("intra", "cosine"))},
    }


def rough_values(n, d, T, dimension, at_scales):
    """The others: value, and relative tolerance; expectations of ratios are taken as ratios of
    expectations.
    """
    counts = COUNTS[COUNTS >= 10].double()
    a, b, c = (
        (1 / counts).var(correction=0),
        (1 / counts**2).mean(),
        ((counts - 1) / counts**2).mean(),
    )

    def slope(values):
        return stats.linregress(counts.log10(), (1 + values).log10()).slope

    num_labelled = n - -(-n // LENGTH)
    return {
        "nc1": ((num_labelled - T) / (T - 1) * d * (T - 1) / (d * (T - 1) - 2), 0.01),
        "unembedding_alignment_std": (1 / math.sqrt(d), 0.05),
        "norm_cv": (math.sqrt(1 / norm_ratio(d) ** 2 - 1), 0.01),
        "norm_max": (math.sqrt(Q / d * stats.chi2.ppf(0.5 ** (1 / n), d)), 0.01),
        "top_dim_share": (stats.chi2.ppf(0.5 ** (1 / d), n - 1) / ((n - 1) * d), 0.01),
        "max_abs": (math.sqrt(Q / d) * stats.norm.ppf((1 + 2 ** (-1 / (n * d))) / 2), 0.01),
        "cosine_std": (1 / math.sqrt(d), 0.01),
        "Q_t_cv": (math.sqrt(2 * (1 / counts).mean() / d), 0.05),
        "V_on_M_slope": (-a / (a + 2 * b / d), 0.05),
        "V_on_M_r2": (a**2 / ((a + 2 * b / d) * (a + 2 * c / d)), 0.1),
        "M_freq_slope": (slope(Q / counts), 0.02),
        "V_freq_slope": (slope(Q * (counts - 1) / counts), 0.1),
        "Q_freq_r2": (1 / (len(counts) - 1), 0.3),
        "anisotropy": (null(n), 0.01),
        "anisotropy_standardized": (null(n), 0.02),
        "effective_rank": (d * (1 - d / (8 * n)), 0.01),
        "rankme": (d * (1 - d / (8 * n)), 0.01),
        "effective_rank_eigenvalues": (d * (1 - d / (2 * n)), 0.01),
        "top1_share": (null(n), 0.01),
        "top5_share": (5 * null(n) * 0.95, 0.05),
        "anisotropy_without_top5": (null(n), 0.05),
        "anisotropy_batch_mean": (null(BATCH), 0.01),
        "anisotropy_batch_std": (0.04 * null(BATCH), 0.5),
        "anisotropy_z_scored": (null(n), 0.02),
        "anisotropy_top3_removed": (null(n), 0.05),
        **{f"neighbor_overlap_to_{other}": (30 / (n // 2 - 1), 0.03) for other in OTHERS},
        "linearity_without_residual": (0.5, 0.03),
        "intrinsic_dimension_std": (1.2 / math.sqrt(BATCH) * dimension, 0.25),
        **{
            f"intrinsic_dimension_at_{scale}_error": (at_scales[scale] / math.sqrt(scale * n), 0.1)
            for scale in SCALES
        },
        **{
            f"intra_sentence_similarity{how}": (1 / math.sqrt(LENGTH), 0.02)
            for how in ("", "_adjusted")
        },
        **{
            f"mean_cosine_{how}": (-1 / n, 0.05)
            for how in ("centered", "z_scored", "whitened", "top3_removed")
        },
    }


def norm_ratio(d):
    """r of the page."""
    return math.sqrt(2 / d) * math.exp(special.gammaln((d + 1) / 2) - special.gammaln(d / 2))


def null(n):
    return float(anisotropy_null(torch.tensor(n, dtype=torch.float64), DIM))


def test_random_rows_show_what_the_page_says(draws):
    exact = exact_values(len(IDS), DIM, len(COUNTS))
    at_scales = {scale: float(draws[f"intrinsic_dimension_at_{scale}"].mean()) for scale in SCALES}
    rough = rough_values(
        len(IDS), DIM, len(COUNTS), float(draws["intrinsic_dimension"].mean()), at_scales
    )
    with_a_value = GAUSSIAN.keys() - OF_OTHERS
    assert exact.keys() | rough.keys() | SIMULATED | OF_RANDOM_NEIGHBORS | OF_TABLES == with_a_value
    assert not exact.keys() & rough.keys()
    for key, (value, tolerance) in {
        **{key: (value, 0.0) for key, value in exact.items()},
        **rough,
    }.items():
        middle = draws[key].median() if key in MEDIANS else draws[key].mean()
        error = 4 * float(draws[key].std()) / math.sqrt(DRAWS) + tolerance * abs(value)
        assert float(middle) == pytest.approx(float(value), abs=max(float(error), 1e-12)), key
    for key in OF_RANDOM_NEIGHBORS:
        assert GAUSSIAN[key] == f"`{key}_null`"
        assert float(draws[key].mean()) == pytest.approx(
            float(draws[f"{key}_null"].mean()), rel=0.1
        )


def test_random_rows_show_the_baselines_of_other_metrics(draws):
    measured = {key: values.mean(0, keepdim=True).numpy() for key, values in draws.items()}
    with_a_value = frozenset(OF_OTHERS & GAUSSIAN.keys())
    expected = baseline_values(GaussianRows(with_a_value, measured, np.array([float(DIM)])))
    assert expected.keys() == with_a_value
    for key, (value,) in expected.items():
        error = 4 * float(draws[key].std()) / math.sqrt(DRAWS) + 0.05 * abs(value)
        assert measured[key] == pytest.approx(value, abs=error), key


@pytest.mark.parametrize(("n", "dim"), TWONN)
def test_twonn_of_random_rows_is_that_of_the_table(n, dim):
    repeats = max(1, 2048 // n)
    drawn = [
        twonn_dimension(gaussian(n, dim, seed=seed, dtype=torch.float32)).dimension
        for seed in range(repeats)
    ]
    error = 4 * 1.2 / math.sqrt(n * repeats)
    assert sum(drawn) / repeats == pytest.approx(TWONN[n, dim], rel=error + 0.02)


@pytest.mark.parametrize("dim", sorted({dim for _, dim in GRIDE}))
def test_gride_of_random_rows_is_that_of_the_table(dim):
    scales = sorted({scale for scale, _ in GRIDE})
    clouds = [gaussian(1024, dim, seed=seed, dtype=torch.float32) for seed in range(3)]
    drawn = torch.stack([gride_dimensions(x, scales).dimensions for x in clouds]).mean(0)
    for scale, value in zip(scales, drawn.tolist(), strict=True):
        error = 4 * 1.3 / math.sqrt(1024 * 3 * scale)
        assert value == pytest.approx(GRIDE[scale, dim], rel=error + 0.02)


def test_twonn_spreads_as_the_page_says():
    for dim, discarded, spread in ((5, 0.1, 1.2), (32, 0.1, 1.2), (5, 0.8, 2.4)):
        clouds = [gaussian(256, dim, seed=seed) for seed in range(100)]
        drawn = torch.tensor(
            [twonn_dimension(x, discard_fraction=discarded).dimension for x in clouds]
        )
        assert float(drawn.std() / drawn.mean()) * math.sqrt(256) == pytest.approx(spread, rel=0.2)
