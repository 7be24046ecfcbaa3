import numpy as np
import pandas as pd

from embedgeo.metrics.gaussian import GaussianRows, baseline_values as values_of_rows

DIM = 24


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


def widths(values: pd.DataFrame) -> pd.Series:
    return pd.Series(float(DIM), values.index)


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
