import numpy as np
import pandas as pd
import pytest
import torch

from embedgeo import Anisotropy, IntrinsicDimension, TokenMoments
from embedgeo.functional import gride_dimensions
from embedgeo.functional.dimension import SCALES
from embedgeo.metrics.gaussian import GaussianRows
from embedgeo.metrics.gaussian import baseline_values as values_of_rows
from tests.data import gaussian

N, DIM, SCALE = 3000, 24, 3.0


def baseline_values(
    values: pd.DataFrame, widths: pd.Series, counts: np.ndarray | None = None
) -> pd.DataFrame:
    measured = {str(key): column.to_numpy(dtype=float) for key, column in values.items()}
    rows = GaussianRows(frozenset(measured), measured, widths.to_numpy(dtype=float), counts)
    return (
        pd.DataFrame(values_of_rows(rows), values.index)
        .reindex(columns=values.columns)
        .astype(float)
    )


@pytest.fixture(scope="module")
def counts() -> np.ndarray:
    return np.bincount(zipf_ids(N), minlength=200)


def widths(values: pd.DataFrame) -> pd.Series:
    return pd.Series(float(DIM), values.index)


def zipf_ids(n: int) -> np.ndarray:
    weights = 1 / np.arange(1, 201)
    return np.random.default_rng(0).choice(200, n, p=weights / weights.sum())


@pytest.fixture(scope="module")
def measured() -> pd.DataFrame:
    """All metrics of Gaussian rows that know nothing of their tokens, a row a draw."""
    ids = torch.from_numpy(zipf_ids(N))
    draws = []
    for seed in range(24):
        rows = SCALE * torch.randn(
            N, DIM, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
        )
        values = {}
        for metric in (
            TokenMoments(DIM),
            Anisotropy(DIM, spectrum=True),
            IntrinsicDimension(DIM, batch_size=2048),
        ):
            metric.update(rows, token_ids=ids, sequence_ids=torch.arange(N) // 100)
            values |= {key: value.item() for key, value in metric.compute().items()}
        draws.append(values)
    return pd.DataFrame(draws)


@pytest.fixture(scope="module")
def baseline(measured: pd.DataFrame, counts: np.ndarray) -> pd.Series:
    return baseline_values(measured, widths(measured), counts[counts > 0].astype(float)).mean()


@pytest.mark.parametrize(
    ("metric", "tolerance"),
    [
        *(
            (key, 0.01)
            for key in ("V", "norm_mean", "norm_cv", "participation_ratio", "V_W", "V_W_over_V")
        ),
        *((key, 0.01) for key in ("V_over_Q", "V_W_over_Q", "token_types_regressed")),
        *(
            (key, 0.01)
            for key in ("V_W_unbiased", "V_W_over_V_unbiased", "effective_rank", "isoscore")
        ),
        *((key, 0.01) for key in ("rankme", "effective_rank_eigenvalues")),
        *(
            (key, 0.03)
            for key in (
                "anisotropy",
                "anisotropy_standardized",
                "V_B",
                "V_B_over_Q",
                "norm_max",
                "top5_share",
            )
        ),
        ("top1_share", 0.03),
        *((key, 0.05) for key in ("alpha_req", "alpha_req_r2")),
        *(
            (key, 0.05)
            for key in ("top_dim_share", "anisotropy_without_top5", "intrinsic_dimension")
        ),
        *((key, 0.15) for key in ("M", "M_over_Q", "M_over_V", "V_on_M_slope", "V_on_M_r2")),
        *((key, 0.05) for key in ("Q_t_cv", "M_freq_slope")),
        ("V_freq_slope", 0.15),
        *(
            (key, 0.1)
            for key in (
                "same_type_neighbors",
                "same_sequence_neighbors",
                "intrinsic_dimension_between",
            )
        ),
    ],
)
def test_is_what_gaussian_rows_show(
    metric: str, tolerance: float, measured: pd.DataFrame, baseline: pd.Series
) -> None:
    assert baseline[metric] == pytest.approx(measured[metric].mean(), rel=tolerance)


@pytest.mark.parametrize(
    "metric", ["mean_cosine", "V_B_unbiased", "duplicate_fraction", "Q_freq_slope"]
)
def test_is_zero_where_there_is_nothing_to_see(
    metric: str, measured: pd.DataFrame, baseline: pd.Series
) -> None:
    error = measured[metric].std() / np.sqrt(len(measured)) if measured[metric].std() else 0.0
    assert abs(baseline[metric] - measured[metric].mean()) <= 4 * error + 0.01


def test_is_the_same_beside_embeddings_of_other_sizes(
    measured: pd.DataFrame, counts: np.ndarray
) -> None:
    seen = counts[counts > 0].astype(float)
    rows = measured.iloc[[0] * 5].assign(Q=[0.05, 3.0, 40.0, 700.0, 1400.0]).reset_index(drop=True)
    together = baseline_values(rows, widths(rows), seen)
    for i in rows.index:
        alone = baseline_values(rows.loc[[i]], widths(rows.loc[[i]]), seen)
        for metric in ("M_freq_slope", "V_freq_slope", "V_on_M_slope", "Q_t_cv"):
            assert together[metric][i] == pytest.approx(alone[metric][i], rel=0.005, abs=1e-4)


def test_is_unknown_without_what_it_needs() -> None:
    values = pd.DataFrame({"M": [1.0], "norm_cv": [0.1], "mine": [3.0]})
    assert baseline_values(values, widths(values)).isna().all(axis=None)


def test_without_the_width_only_what_depends_on_it_is_unknown() -> None:
    row = {
        "n": 1000.0,
        "Q": 50.0,
        "M": 2.0,
        "anisotropy": 0.5,
        "anisotropy_null": 0.03,
        "norm_mean": 7.0,
    }
    values = pd.DataFrame(
        [{**row, "participation_ratio": 9.0, "intrinsic_dimension": 4.0, "effective_rank": 8.0}]
    )
    baseline = baseline_values(values, pd.Series([np.nan])).iloc[0]
    assert baseline[["M", "anisotropy"]].tolist() == [0.05, 0.03]
    unknown = ["norm_mean", "participation_ratio", "intrinsic_dimension", "effective_rank"]
    assert baseline[unknown].isna().all()
    assert baseline_values(values, widths(values))[unknown].notna().all(axis=None)


def test_is_that_of_the_width_at_each_row() -> None:
    values = pd.DataFrame({"n": [500.0, 500.0], "participation_ratio": [3.0, 3.0]})
    found = baseline_values(values, pd.Series([8.0, 64.0]))["participation_ratio"]
    assert found.tolist() == [(d * 499 + 2) / (499 + d + 1) for d in (8, 64)]


@pytest.mark.parametrize(("n", "dim"), [(256, 8), (1024, 300)])
def test_dimensions_at_scales_are_those_of_gaussian_rows(n, dim):
    keys = [f"intrinsic_dimension_at_{scale}" for scale in SCALES]
    values = pd.DataFrame([{"n": n, "n_points": n, "Q": 1.0, **dict.fromkeys(keys, 1.0)}])
    found = baseline_values(values, pd.Series([dim])).iloc[0][keys].to_numpy()
    drawn = torch.stack(
        [gride_dimensions(gaussian(n, dim, seed=seed)).dimensions for seed in range(4)]
    ).mean(0)
    np.testing.assert_allclose(found, drawn, rtol=0.08)
