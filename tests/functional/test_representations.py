import math

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from scipy import linalg

from embedgeo.studies.representations import (
    biased_cka,
    cka_matrix,
    debiased_cka,
    drift_values,
    linearity,
    linearity_values,
    neighbor_overlap,
    procrustes_distance,
)
from tests.data import floats, gaussian, generator

MEASURES = [debiased_cka, biased_cka, procrustes_distance, neighbor_overlap]


def unit(x):
    x = np.asarray(x, dtype=np.float64)
    x = x - x.mean(0)
    return x / np.sqrt((x**2).sum())


def related(n, d1, d2, *, mean=0.0):
    x = gaussian(n, d1, seed=1)
    noise, mix = gaussian(n, d2, seed=2), gaussian(d1, d2, seed=3)
    return mean + x, mean + x @ mix + noise


@pytest.mark.parametrize("widths", [(6, 8), (70, 90)])
def test_debiased_cka_is_the_published_formula(widths):
    n = 40
    x, y = related(n, *widths)

    def estimate(k, m):
        k, m = k - np.diag(np.diag(k)), m - np.diag(np.diag(m))
        one = np.ones(n)
        cross = one @ k @ one * (one @ m @ one) / ((n - 1) * (n - 2)) - 2 / (n - 2) * (
            one @ k @ m @ one
        )
        return (np.trace(k @ m) + cross) / (n * (n - 3))

    k, m = (each.numpy() @ each.numpy().T for each in (x, y))
    expected = estimate(k, m) / math.sqrt(estimate(k, k) * estimate(m, m))
    assert float(debiased_cka(x, y)) == pytest.approx(expected, rel=1e-9)
    assert cka_matrix([x, y]).numpy() == pytest.approx(
        np.array([[1, expected], [expected, 1]]), rel=1e-9
    )


@pytest.mark.parametrize("widths", [(6, 8), (70, 90)])
def test_biased_cka_is_that_of_centred_grams(widths):
    x, y = related(40, *widths)
    center = np.eye(40) - 1 / 40
    k, m = (center @ each.numpy() @ each.numpy().T @ center for each in (x, y))
    expected = (k * m).sum() / math.sqrt((k * k).sum() * (m * m).sum())
    assert float(biased_cka(x, y)) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("widths", [(6, 6), (70, 90)])
def test_procrustes_is_the_distance_after_the_best_rotation(widths):
    x, y = related(40, *widths)
    wide = max(widths)
    a, b = (np.pad(unit(each), ((0, 0), (0, wide - each.shape[1]))) for each in (x, y))
    rotation = linalg.orthogonal_procrustes(b, a)[0]
    assert float(procrustes_distance(x, y)) == pytest.approx(
        ((a - b @ rotation) ** 2).sum(), rel=1e-9
    )


@pytest.mark.parametrize("k", [1, 5, 30])
def test_overlap_is_that_of_the_sets_of_neighbours(k):
    x, y = related(200, 4, 6, mean=1000.0)

    def nearest(rows, i):
        distances = ((rows - rows[i]) ** 2).sum(1)
        distances[i] = np.inf
        return set(np.argsort(distances)[:k].tolist())

    shares = [len(nearest(x.numpy(), i) & nearest(y.numpy(), i)) / k for i in range(200)]
    assert float(neighbor_overlap(x, y, k)) == pytest.approx(np.mean(shares), rel=1e-6)


@pytest.mark.parametrize("adjusted", [False, True])
@pytest.mark.parametrize("residual", [False, True])
def test_linearity_is_that_of_least_squares(adjusted, residual):
    x, y = related(60, 7, 7, mean=5.0)
    a, b = unit(x), unit(y if residual else y - x)
    left = ((a @ np.linalg.lstsq(a, b)[0] - b) ** 2).sum()
    expected = 1 - left * (59 / 52 if adjusted else 1)
    assert float(linearity(x, y, adjusted, residual)) == pytest.approx(expected, rel=1e-9)
    if adjusted:
        key = "linearity" if residual else "linearity_without_residual"
        assert float(linearity_values(x, y)[key]) == pytest.approx(expected, rel=1e-9)


@given(
    st.integers(4, 40), st.integers(1, 12), st.integers(1, 12), st.floats(-3, 3), st.integers(0, 99)
)
@pytest.mark.slow
def test_order_place_and_scale_of_the_rows_do_not_matter(n, d1, d2, scale, seed):
    x, y = gaussian(n, d1, seed=seed), gaussian(n, d2, seed=seed + 100)
    order = torch.randperm(n, generator=generator(seed))
    before, after = drift_values(x, y), drift_values(10**scale * y[order] + 1, x[order] - 2)
    for key, value in before.items():
        assert float(after[key]) == pytest.approx(float(value), rel=1e-6, abs=1e-9, nan_ok=True)


def test_rows_that_are_not_finite_in_one_of_them_are_left_out():
    x, y = related(50, 5, 5)
    broken = x.clone()
    broken[3, 2], y[7] = torch.inf, torch.nan
    kept = [i for i in range(50) if i not in (3, 7)]
    assert floats(drift_values(broken, y)) == pytest.approx(
        floats(drift_values(x[kept], y[kept])), rel=1e-9
    )
    assert floats(linearity_values(broken, y)) == pytest.approx(
        floats(linearity_values(x[kept], y[kept])), rel=1e-9
    )


def undefined(values):
    return [key for key, value in values.items() if math.isnan(value)]


def test_what_is_undefined_is_nan():
    x, y = related(40, 5, 5)
    assert undefined(drift_values(x[:0], y[:0]) | linearity_values(x[:0], y[:0])) == [
        "cka", "procrustes", "neighbor_overlap", "linearity", "linearity_without_residual",
    ]  # fmt: skip
    assert len(undefined(drift_values(x[:1], y[:1]) | linearity_values(x[:1], y[:1]))) == 5
    assert undefined(drift_values(x[:3], y[:3])) == ["cka", "neighbor_overlap"]
    assert undefined(drift_values(x[:31], y[:31])) == ["neighbor_overlap"]
    assert not undefined(drift_values(x[:32], y[:32]))
    assert len(undefined(linearity_values(x[:6], y[:6]))) == 2
    assert not undefined(linearity_values(x[:7], y[:7]))
    assert undefined(linearity_values(x, y[:, :3])) == ["linearity_without_residual"]
    constant = torch.full((40, 5), 0.1)
    assert len(undefined(drift_values(x, constant) | drift_values(constant, constant))) == 3
    assert undefined(linearity_values(x, constant)) == ["linearity"]
    assert [float(value) for value in linearity_values(constant, y).values()] == pytest.approx(
        [0, 0], abs=1e-12
    )
    assert bool(cka_matrix([x, constant])[1].isnan().all())
    assert all(bool(cka_matrix([x[:n], y[:n]]).isnan().all()) for n in range(4))
    assert not cka_matrix([]).numel()
    # equally far from each other: nothing to compare
    assert math.isnan(debiased_cka(torch.eye(4), y[:4]))


@pytest.mark.parametrize("measure", [*MEASURES, linearity, drift_values, linearity_values])
def test_other_rows_are_refused(measure):
    with pytest.raises(ValueError, match=r"same rows.*got \(4, 2\) and \(5, 2\)"):
        measure(torch.zeros(4, 2), torch.zeros(5, 2))
    with pytest.raises(ValueError, match="same rows"):
        measure(torch.zeros(4), torch.zeros(4, 2))
