import numpy as np

from embedgeo.metrics.gaussian import GaussianRows, baseline_values


def baseline(values: dict[str, list[float]], widths: list[float]) -> dict[str, list[float]]:
    measured = {key: np.array(column) for key, column in values.items()}
    found = baseline_values(GaussianRows(frozenset(measured), measured, np.array(widths), None))
    return {key: found.get(key, np.full(len(widths), np.nan)).tolist() for key in values}


def test_is_unknown_without_what_it_needs() -> None:
    assert np.isnan(
        [*baseline({"M": [1.0], "norm_cv": [0.1], "mine": [3.0]}, [24.0]).values()]
    ).all()


def test_without_the_width_only_what_depends_on_it_is_unknown() -> None:
    known = {"n": [1000.0], "Q": [50.0], "M": [2.0], "anisotropy": [0.5], "anisotropy_null": [0.03]}
    by_width = ("norm_mean", "participation_ratio", "intrinsic_dimension", "effective_rank")
    values = known | {key: [7.0] for key in by_width}
    found = baseline(values, [np.nan])
    assert (found["M"], found["anisotropy"]) == ([0.05], [0.03])
    assert np.isnan([found[key] for key in by_width]).all()
    assert np.isfinite([baseline(values, [24.0])[key] for key in by_width]).all()


def test_is_that_of_the_width_at_each_row() -> None:
    found = baseline({"n": [500.0] * 2, "participation_ratio": [3.0] * 2}, [8.0, 64.0])
    assert found["participation_ratio"] == [(d * 499 + 2) / (499 + d + 1) for d in (8, 64)]
