"""Departures against plain loops, in simulated runs, and what they must not depend on."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from benchmarks.alarms import AT_ONCE, LAWS, Law, false_alarms, found_jumps, simulated
from embedgeo.results.departures import PAST, WINDOW, departures, forecasts


def run(length=90, seed=0, **law):
    """A run of 32 numbers."""
    return simulated(Law(**law), 1, length, seed)[0]


def naive_forecast(values, order, ahead):
    """By least squares on the last values, so many steps ahead; and its variance over that of the
    noise.
    """
    values = values[-WINDOW:]
    times = np.arange(len(values))
    design = np.column_stack(
        [*(times[1:] ** power for power in range(order + 1)), values[:-1]]
    ).astype(float)
    weights = np.linalg.lstsq(design, values[1:], rcond=None)[0]
    last = values[-1]
    for step in range(1, ahead + 1):
        row = np.array(
            [*((times[-1] + step) ** power for power in range(order + 1)), last], dtype=float
        )
        leverage = 1 + row @ np.linalg.solve(design.T @ design, row)
        last = row @ weights
    return last, leverage


@pytest.mark.parametrize("order", [0, 1])
def test_forecasts_are_those_of_least_squares(order):
    values = run(correlation=0.7, trend="linear")[:, :3]
    found = forecasts(values)
    for t in (8, 20, 64, 65, 89):
        for k in range(3):
            expected, leverage = naive_forecast(values[:t, k], order, 1)
            np.testing.assert_allclose(
                found.errors[order, t, k], values[t, k] - expected, rtol=1e-6, atol=1e-6
            )
            np.testing.assert_allclose(found.leverages[order, t, k], leverage, rtol=1e-6)
            if t > 8:
                late, _ = naive_forecast(values[: t - 1, k], order, 2)
                np.testing.assert_allclose(
                    found.late_errors[order, t, k], values[t, k] - late, rtol=1e-6, atol=1e-6
                )


def naive_scales(errors):
    """Mean magnitude of the errors before each and before the next one, which forgets one in
    sixteen.
    """
    scales = []
    for t in range(4, len(errors) + 1):
        weights = (15 / 16) ** np.arange(t)[::-1]
        scales.append(weights @ np.abs(errors[:t]) / weights.sum())
    return np.array(scales)


def naive_p(values, groups=None):
    """The probability, number by number, law by law."""
    groups = [0] * values.shape[1] if groups is None else groups
    found = forecasts(values)
    errors = found.errors / np.sqrt(found.leverages)
    grid = [
        (local, degrees) for local in (False, True) for degrees in (2.0, 3, 4, 6, 10, 20, np.inf)
    ]
    prior = np.array([10.0 if np.isinf(degrees) else 1.0 for _, degrees in grid])
    prior /= prior.sum()
    likelihoods = {group: np.zeros(len(grid)) for group in groups}
    signs, of_numbers = {group: [] for group in groups}, []
    for k, group in enumerate(groups):
        past = slice(max(0, len(values) - PAST - 2), len(values) - 2)
        best = int(np.nansum(np.abs(found.errors[:, past, k]), 1).argmin())
        own = errors[best, past, k]
        own = own[np.isfinite(own)]
        signs[group].append(np.sign(own))
        one, two = errors[best, -2, k], errors[best, -1, k]
        roots = np.sign(own) * np.sqrt(np.abs(own))
        two -= max(0.0, (roots[1:] @ roots[:-1]) / (roots @ roots)) * one
        two = np.sign(one) * min(np.sign(one) * two, 2 * abs(one))
        of_number = []
        for i, (local, degrees) in enumerate(grid):
            scales = naive_scales(own) if local else np.ones(len(own) - 3)
            standardized = own[4:] / scales[:-1]
            law = stats.norm if np.isinf(degrees) else stats.t(degrees)
            variance = np.mean(standardized**2)
            for _ in range(0 if np.isinf(degrees) else 8):
                variance = np.mean(
                    (degrees + 1) / (degrees + standardized**2 / variance) * standardized**2
                )
            scale = np.sqrt(variance)
            likelihoods[group][i] += (
                law.logpdf(standardized / scale) - np.log(scale * scales[:-1])
            ).sum()
            off = np.sign(one) * np.array([one, two]) / scale / scales[-1]
            product = np.prod(stats.t.sf(off, min(degrees, len(own))))
            of_number.append(2 * product * (1 - np.log(product)))
        stays = np.sign(one) * found.late_errors[best, -1, k] > abs(found.errors[best, -2, k]) / 2
        of_numbers.append((of_number, stays))
    for group, found_signs in signs.items():
        together = np.sum(found_signs, 0)
        likelihoods[group] /= max(1.0, np.mean(together**2) / len(found_signs)) ** 0.75

    def normalized(logs):
        weights = np.exp(logs - logs.max())
        return weights / weights.sum()

    posteriors = {}
    for group, of_own in likelihoods.items():
        others = sum(
            (of_other for other, of_other in likelihoods.items() if other != group),
            np.zeros(len(grid)),
        )
        mixed = 0.8 * normalized(np.log(prior) + others) + 0.2 * prior
        posteriors[group] = normalized(np.log(mixed) + of_own)
    return np.array(
        [
            min(1, posteriors[group] @ of_number) if stays else 1.0
            for group, (of_number, stays) in zip(groups, of_numbers, strict=True)
        ]
    )


@pytest.mark.parametrize(
    "law", [LAWS[1], LAWS[7], Law(0.9, trend="saturating", falls=True)], ids=str
)
def test_probability_is_that_of_a_loop(law):
    values = simulated(law, 1, 80, seed=3)[0]
    values[-2:, ::2] += 2
    found = departures(forecasts(values))
    np.testing.assert_allclose(found.p, naive_p(values), rtol=1e-6)
    assert (found.p[::2] < 0.5).any()


@pytest.mark.parametrize("law", [Law(0.5, first=3), Law(0.0, together=0.9)], ids=str)
def test_groups_have_laws_of_their_own_which_are_those_of_the_others_as_a_rule(law):
    values = simulated(law, 1, 80, seed=3)[0]
    values[-2:, ::2] += 4
    groups = np.repeat(np.arange(4), 8)
    found = departures(forecasts(values), groups).p
    np.testing.assert_allclose(found, naive_p(values, groups), rtol=1e-6)
    assert (found != departures(forecasts(values)).p).any()


def test_leading_axes_are_other_runs():
    values = simulated(Law(0.5), 3, 60, seed=1)
    together = departures(forecasts(values))
    for number, of_run in enumerate(values):
        for of_all, alone in zip(together, departures(forecasts(of_run)), strict=True):
            np.testing.assert_allclose(of_all[number], alone, rtol=1e-9)


def test_values_before_the_first_do_not_matter():
    values = run(60)
    later = values.copy()
    later[:10] = np.nan
    for with_nan, without in zip(
        departures(forecasts(later)), departures(forecasts(values[10:])), strict=True
    ):
        np.testing.assert_allclose(with_nan, without, rtol=1e-9)


@given(st.floats(1e-6, 1e6), st.floats(-100, 100), st.booleans())
@pytest.mark.slow
def test_units_do_not_matter(scale, shift, is_mirrored):
    values = run(50, seed=5)
    values[-2:, 3] += 4
    expected = departures(forecasts(values)).p
    sign = -1 if is_mirrored else 1
    np.testing.assert_allclose(
        departures(forecasts(sign * scale * (values + shift))).p, expected, rtol=1e-5
    )


def test_a_jump_is_found_with_its_size():
    values = run(82, correlation=0.5)
    values[80:, 4] -= 8
    found = departures(forecasts(values))
    assert found.p.argmin() == 4
    assert found.p[4] < 1e-6
    assert -14 < found.standard_errors[4] < -6
    assert -11 < found.excess[4] < -5


def test_a_jump_is_found_in_a_run_that_has_settled():
    values = run(120, correlation=0.5) * np.geomspace(100, 1, 120)[:, None]
    values[118:, 4] += 20
    found = departures(forecasts(values))
    assert found.p.argmin() == 4
    assert found.p[4] < 1e-6


@pytest.mark.parametrize("at", [80, 81])
def test_a_spike_is_none(at):
    values = run(82)
    values[at, 4] += 30
    assert departures(forecasts(values)).p[4] > 1e-3


@pytest.mark.parametrize("size", [0.0, 1.0, 1e-300, 1e300])
def test_what_was_constant_has_no_departures(size):
    values = run(60)
    values[:, 0] = size
    values[:, 1] = size * (1 + 1e-16 * np.arange(60) % 2)
    found = departures(forecasts(values))
    assert found.p[:2].tolist() == [1, 1]
    assert np.isfinite(found.p).all()


def test_too_few_values_have_no_departures():
    assert (departures(forecasts(run(9))).p == 1).all()


@pytest.mark.slow
@pytest.mark.parametrize("law", LAWS, ids=str)
def test_few_sound_runs_have_an_alarm(law):
    runs = 2 * AT_ONCE
    raised = sum(false_alarms(law, seed) for seed in range(2))
    # at most 5 % of them, as far as so many runs tell
    assert stats.binom.sf(raised - 1, runs, 0.05) > 0.01


@pytest.mark.slow
@pytest.mark.parametrize("law", LAWS[:3], ids=str)
def test_a_jump_of_all_blocks_is_found_within_two_measurements(law):
    runs = 4 * AT_ONCE
    found = sum(found_jumps(law, seed, slice(0, 8)) for seed in range(4))
    assert stats.binom.cdf(found, runs, 0.95) > 0.01
