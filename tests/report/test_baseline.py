import numpy as np
import pandas as pd
import pytest
import torch

from embedgeo import Anisotropy, IntrinsicDimension, TokenMoments
from embedgeo.functional import anisotropy_null
from embedgeo.report.baseline import null_values, widths

N, DIM, SCALE = 3000, 24, 3.0


@pytest.fixture(scope="module")
def counts() -> np.ndarray:
    return np.bincount(zipf_ids(N), minlength=200)


def zipf_ids(n: int) -> np.ndarray:
    weights = 1 / np.arange(1, 201)
    return np.random.default_rng(0).choice(200, n, p=weights / weights.sum())


@pytest.fixture(scope="module")
def measured() -> pd.DataFrame:
    """All metrics of Gaussian rows that know nothing of their tokens, a row a draw."""
    ids = torch.from_numpy(zipf_ids(N))
    draws = []
    for seed in range(24):
        rows = SCALE * torch.randn(N, DIM, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        values = {}
        for metric in (TokenMoments(DIM), Anisotropy(DIM, spectrum=True), IntrinsicDimension(DIM, batch_size=2048)):
            metric.update(rows, token_ids=ids)
            values |= {key: value.item() for key, value in metric.compute().items()}
        draws.append(values)
    return pd.DataFrame(draws)


@pytest.fixture(scope="module")
def null(measured: pd.DataFrame, counts: np.ndarray) -> pd.Series:
    return null_values(measured, counts[counts > 0].astype(float)).mean()


@pytest.mark.parametrize(
    ("metric", "tolerance"),
    [
        *((key, 0.01) for key in ("V", "norm_mean", "norm_cv", "participation_ratio", "V_W", "V_W_over_V")),
        *((key, 0.01) for key in ("V_W_unbiased", "V_W_over_V_unbiased", "effective_rank", "isoscore")),
        *((key, 0.03) for key in ("anisotropy", "anisotropy_standardized", "V_B", "norm_max", "top5_share")),
        *((key, 0.05) for key in ("top_dim_share", "anisotropy_without_top5", "intrinsic_dimension")),
        *((key, 0.15) for key in ("M", "M_over_Q", "M_over_V", "V_on_M_slope", "V_on_M_r2")),
        *((key, 0.05) for key in ("Q_t_cv", "M_freq_slope")),
        ("V_freq_slope", 0.15),
    ],
)
def test_is_what_gaussian_rows_show(metric: str, tolerance: float, measured: pd.DataFrame, null: pd.Series) -> None:
    assert null[metric] == pytest.approx(measured[metric].mean(), rel=tolerance)


@pytest.mark.parametrize("metric", ["mean_cosine", "V_B_unbiased", "duplicate_fraction", "Q_freq_slope"])
def test_is_zero_where_there_is_nothing_to_see(metric: str, measured: pd.DataFrame, null: pd.Series) -> None:
    error = measured[metric].std() / np.sqrt(len(measured)) if measured[metric].std() else 0.0
    assert abs(null[metric] - measured[metric].mean()) <= 4 * error + 0.01


def test_is_the_same_beside_embeddings_of_other_sizes(measured: pd.DataFrame, counts: np.ndarray) -> None:
    seen = counts[counts > 0].astype(float)
    rows = measured.iloc[[0] * 5].assign(Q=[0.05, 3.0, 40.0, 700.0, 1400.0]).reset_index(drop=True)
    together = null_values(rows, seen)
    for i in rows.index:
        alone = null_values(rows.loc[[i]], seen)
        for metric in ("M_freq_slope", "V_freq_slope", "V_on_M_slope", "Q_t_cv"):
            assert together[metric][i] == pytest.approx(alone[metric][i], rel=0.005, abs=1e-4)


def test_is_unknown_without_what_it_needs() -> None:
    null = null_values(pd.DataFrame({"M": [1.0], "norm_cv": [0.1], "mine": [3.0]}))
    assert null.isna().all(axis=None)


@pytest.mark.parametrize("n", [2.0, 50.0, 65_536.0])
@pytest.mark.parametrize("dim", [1, 2, 128, 5120])
def test_the_width_is_found_from_the_recorded_null_also_in_float32(n: float, dim: int) -> None:
    recorded = anisotropy_null(torch.tensor(n, dtype=torch.float64), dim)
    found = widths(pd.DataFrame({"n": [n] * 2, "anisotropy_null": [recorded.item(), recorded.float().item()]}))
    for width in found:
        again = anisotropy_null(torch.tensor(n, dtype=torch.float64), int(width)).item()
        assert again == pytest.approx(recorded.item(), rel=1e-6)
    if n > 100:
        assert found.tolist() == [dim, dim]
