import numpy as np

from embedgeo.metrics.gaussian import GaussianRows, baseline_values


def test_the_baseline_is_unknown_only_where_what_it_needs_is():
    values = {"n": 500.0, "Q": 50.0, "M": 2.0, "norm_mean": 7.0, "participation_ratio": 3.0}
    measured = {key: np.full(3, value) for key, value in values.items()}
    widths = np.array([8.0, 64.0, np.nan])
    found = baseline_values(GaussianRows(frozenset(measured), measured, widths))
    assert found["M"].tolist() == [0.1] * 3
    expected = [d * 499 / (499 + d + 1) + 2 / (499 + d + 1) for d in (8, 64)]
    np.testing.assert_allclose(found["participation_ratio"], [*expected, np.nan])
    assert np.isnan(found["norm_mean"]).tolist() == [False, False, True]
