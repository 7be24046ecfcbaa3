"""Departures against plain loops, in simulated runs, and what they must not depend on."""

import numpy as np
import pytest
from scipy import stats

from benchmarks.alarms import AT_ONCE, LAWS, Law, false_alarms, found_jumps, simulated
from embedgeo.results.departures import WINDOW, departures, forecasts


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


@pytest.mark.parametrize(("scale", "shift"), [(1e6, 100.0), (-1e-6, -100.0)])
def test_units_do_not_matter(scale, shift):
    values = run(50, seed=5)
    values[-2:, 3] += 4
    expected = departures(forecasts(values)).p
    found = departures(forecasts(scale * (values + shift))).p
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize("settles", [1.0, 100.0])
def test_a_jump_is_found_with_its_size(settles):
    values = run(122, correlation=0.5) * np.geomspace(settles, 1, 122)[:, None]
    values[120:, 4] -= 20
    found = departures(forecasts(values))
    assert found.p.argmin() == 4
    assert found.p[4] < 1e-6
    assert found.standard_errors[4] < -6
    assert -25 < found.excess[4] < -10


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
@pytest.mark.parametrize("law", LAWS[::6], ids=str)
def test_few_sound_runs_have_an_alarm(law):
    runs = 2 * AT_ONCE
    raised = sum(false_alarms(law, seed) for seed in range(2))
    # at most 5 % of them, as far as so many runs tell
    assert stats.binom.sf(raised - 1, runs, 0.05) > 0.01


@pytest.mark.slow
@pytest.mark.parametrize("law", LAWS[:1], ids=str)
def test_a_jump_of_all_blocks_is_found_within_two_measurements(law):
    runs = 4 * AT_ONCE
    found = sum(found_jumps(law, seed, slice(0, 8)) for seed in range(4))
    assert stats.binom.cdf(found, runs, 0.95) > 0.01
