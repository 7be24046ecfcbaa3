"""Departures of a run's numbers from what their own past lets expect.

A number of a run is autocorrelated, follows a trend, fluctuates more in some runs than in others,
and may have outliers. So each of its values is forecast from those before it, by an autoregression
with a constant or a linear trend, and the last two forecast errors are compared with those of the
past: see `departures`.
"""

from itertools import product
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

WINDOW = 64
"""Values before it that a value is forecast from, at most."""

PAST = 100
"""Forecast errors that the last two are compared with, at most."""

_FEWEST = 8  # values that one is forecast from
# of freedom, of Student's t: the laws that errors may follow
_DEGREES = np.array([2.0, 3, 4, 6, 10, 20, np.inf])
_SMALLEST = 1e-9  # of the size of the values: a standard error that is not rounding
# normal errors are ten times as probable as those of another law
_PRIOR = np.where(np.isinf(_DEGREES), 10.0, 1.0)
_OTHER_LAW = 0.2  # probability that a group has a law of its own
_FEWEST_ERRORS = 4  # whose mean magnitude is a scale
_MEMORY = 16  # errors, of which the last ones tell how large the next will be, where that changes
_ITERATIONS = 8


class Forecasts(NamedTuple):
    """Forecasts of values, shape (T, K), from those before; leading axes are other runs.

    Attributes:
        errors: of each value, forecast from all values before it; shape (2, ..., T, K): without and
            with a trend.
        leverages: variance of a forecast error over that of the run's own fluctuation, which is 1
            or more.
        late_errors: of each value, forecast without the value just before it.
        sizes: of the values: largest magnitude of those that a forecast is made from, shape (...,
            T, K).
    """

    errors: Array
    leverages: Array
    late_errors: Array
    sizes: Array

    def until(self, stop: int) -> "Forecasts":
        """Those of the first ``stop`` values."""
        return Forecasts(*(each[..., :stop, :] for each in self))


class Departures(NamedTuple):
    """Distances of the last two values of K numbers from what their past lets expect, shape (...,
    K) each.

    Attributes:
        p: probability that the two are as far off by chance; 1 where nothing is known.
        standard_errors: by how many standard errors of its forecast the last but one is off, with
            its sign.
        excess: of the last value over its forecast from the values up to two before it.
    """

    p: Array
    standard_errors: Array
    excess: Array


def forecasts(values: Array) -> Forecasts:
    """Forecast each value from at most `WINDOW` values before it, by least squares.

    Args:
        values: shape (..., T, K), K numbers at T measurements; NaN before a number's first value,
            and nowhere else.

    Returns:
        Errors, NaN where there are fewer than 8 values before.
    """
    shape = (2, *values.shape)
    found = Forecasts(
        np.full(shape, np.nan),
        np.full(shape, np.nan),
        np.full(shape, np.nan),
        np.zeros(values.shape),
    )
    for t in range(_FEWEST, values.shape[-2]):
        before = values[..., max(0, t - WINDOW) : t, :]
        known = np.isfinite(before[..., :-1, :])
        n = known.sum(-2, keepdims=True)
        target = np.where(known, before[..., 1:, :], 0.0)
        center = target.sum(-2, keepdims=True) / n.clip(1)
        size = np.abs(target).max(-2, keepdims=True)
        with np.errstate(over="ignore"):
            scale = np.sqrt(
                (np.where(known, target - center, 0.0) ** 2).sum(-2, keepdims=True) / n.clip(1)
            )
        scale = np.where((scale > _SMALLEST * size) & np.isfinite(scale), scale, np.nan)
        found.sizes[..., t, :] = size[..., 0, :]
        times = np.arange(-known.shape[-2], 2) / WINDOW
        lag = np.where(known, (np.where(known, before[..., :-1, :], 0.0) - center) / scale, 0.0)
        target = np.where(known, (target - center) / scale, 0.0)
        last = (before[..., -1, :] - center[..., 0, :]) / scale[..., 0, :]
        enough = n[..., 0, :] >= _FEWEST - 1
        for order in (0, 1):
            columns = [
                np.where(known, times[:-2, None] ** power, 0.0) for power in range(order + 1)
            ]
            design = np.stack([*columns, lag], -1)
            gram = np.einsum("...nkp,...nkq->...kpq", design, design) + 1e-9 * np.eye(order + 2)
            inverse = np.linalg.inv(np.where(enough[..., None, None], gram, np.eye(order + 2)))
            weights = np.einsum("...kpq,...nkq,...nk->...kp", inverse, design, target)
            now = np.stack(
                [*(np.full_like(last, times[-2] ** power) for power in range(order + 1)), last], -1
            )
            forecast = (now * weights).sum(-1)
            off = (values[..., t, :] - center[..., 0, :]) - forecast * scale[..., 0, :]
            found.errors[order, ..., t, :] = np.where(enough, off, np.nan)
            found.leverages[order, ..., t, :] = 1 + np.einsum(
                "...kp,...kpq,...kq->...k", now, inverse, now
            )
            if t + 1 < values.shape[-2]:
                later = np.stack(
                    [
                        *(np.full_like(last, times[-1] ** power) for power in range(order + 1)),
                        forecast,
                    ],
                    -1,
                )
                off = (values[..., t + 1, :] - center[..., 0, :]) - (later * weights).sum(
                    -1
                ) * scale[..., 0, :]
                found.late_errors[order, ..., t + 1, :] = np.where(enough, off, np.nan)
    return found


def departures(found: Forecasts, groups: NDArray[np.int64] | None = None) -> Departures:
    """Departures of the last two values of K numbers of a run, together.

    Under the null hypothesis a number's forecast errors are independent and have the law of
    Student's t, with one scale, or with one that follows the mean magnitude of the errors before,
    as a run settles. Which of the two it is, and the degrees of freedom, 2, 3, 4, 6, 10, 20 or ∞,
    the numbers of a group share, such as a metric at all layers. With probability 0.8 these are the
    laws of the other groups too, for which the past errors of these speak, and with 0.2 the group's
    own. The probability is the mean of those of the laws over their posterior. As numbers that move
    together tell less of their law than independent ones, the log-likelihood of a group is divided
    by d^¾; d is the variance of the sum of its errors' signs over that of independent signs.

    The one-sided tail probabilities of the last two errors are combined by Fisher's rule, p = 2 c
    (1 − log c) with their product c, in the direction of the first. It is 1 unless the last value
    is still off, by half as much as the one before, and the last error counts up to twice the one
    before: a single outlier is no departure. What the second error shares with the first, by the
    autocorrelation of past errors, is taken off. Of the two forecasts, with and without a trend,
    the one counts that was better in the past.

    Source: Fisher 1932 (combined probabilities).

    Args:
        found: forecasts of the numbers, which end with the values in question; leading axes are
            other runs.
        groups: the group of each number, shape (K,); default: all are one.
    """
    errors = found.errors / np.sqrt(found.leverages)
    first = max(0, errors.shape[-2] - PAST - 2)
    past = errors[..., first:-2, :]
    sizes = np.nan_to_num(np.abs(found.errors[..., first:-2, :])).sum(-2)
    best = sizes.argmin(0)[None]

    def chosen(each: Array) -> Array:
        return np.take_along_axis(each, best, 0)[0]

    past = np.take_along_axis(past, best[..., None, :], 0)[0]
    rounding = _SMALLEST * found.sizes[..., -2, :]
    known = np.isfinite(past)
    past = np.where(known, past, 0.0)
    n = known.sum(-2)
    one, two = chosen(errors[..., -2, :]), chosen(errors[..., -1, :])
    raw, late = chosen(found.errors[..., -2, :]), chosen(found.late_errors[..., -1, :])
    roots = np.sign(past) * np.sqrt(np.abs(past))  # in which no outlier decides
    with np.errstate(divide="ignore", invalid="ignore"):
        two = (
            two
            - ((roots[..., 1:, :] * roots[..., :-1, :]).sum(-2) / (roots**2).sum(-2)).clip(0) * one
        )
    sign = np.sign(one)
    two = sign * np.minimum(sign * two, 2 * np.abs(one))
    likelihoods = []
    chances = []
    deviations = []
    scales = _local_scales(past, known)
    for scale, degrees in product((np.ones_like(scales), scales), _DEGREES):
        before, now = scale[..., :-1, :], scale[..., -1, :]
        counts = known & np.isfinite(scales[..., :-1, :]) & (scales[..., :-1, :] > 0)
        standardized = np.divide(past, before, out=np.zeros_like(past), where=counts)
        variance = _variance(standardized, counts, counts.sum(-2), degrees)
        density = _log_density(standardized, variance[..., None, :], degrees)
        logs = np.log(np.where(counts, before, 1.0))
        likelihoods.append(np.where(counts, density - logs, 0.0).sum(-2))
        deviation = (np.sqrt(variance) * now).clip(rounding)
        both = np.prod(
            [_tail(sign * each / deviation, np.minimum(degrees, n)) for each in (one, two)], 0
        )
        chances.append(2 * both * (1 - np.log(np.where(both > 0, both, 1.0))))
        deviations.append(deviation)
    groups = np.zeros(past.shape[-1], dtype=int) if groups is None else groups
    posterior = _posterior(np.stack(likelihoods), np.sign(past), groups)
    p = (posterior * np.stack(chances)).sum(0)
    with np.errstate(divide="ignore", invalid="ignore"):
        deviation = (posterior * np.stack(deviations)).sum(0)
        standard_errors = raw / deviation / np.sqrt(chosen(found.leverages[..., -2, :]))
    is_off = np.isfinite(p) & (n >= _FEWEST + _FEWEST_ERRORS) & (sign * late > np.abs(raw) / 2)
    return Departures(np.where(is_off, p, 1.0).clip(max=1.0), standard_errors, late)


def _posterior(log_likelihoods: Array, signs: Array, groups: NDArray[np.int64]) -> Array:
    """Posterior of laws, shape (laws, ..., K), of the group of each number, given all numbers."""
    in_group = (groups[:, None] == groups).astype(float)
    sums = signs @ in_group
    design_effect = (signs * sums).sum(-2) @ in_group / ((signs**2).sum(-2) @ in_group).clip(1)
    log_likelihoods = log_likelihoods / design_effect.clip(1) ** 0.75
    prior = np.tile(_PRIOR / _PRIOR.sum() / 2, 2).reshape(-1, *(1,) * (log_likelihoods.ndim - 1))
    of_others = _normalized(np.log(prior) + log_likelihoods @ (1 - in_group))
    mixed = (1 - _OTHER_LAW) * of_others + _OTHER_LAW * prior
    return _normalized(np.log(mixed) + log_likelihoods @ in_group)


def _normalized(logs: Array) -> Array:
    weights = np.exp(logs - logs.max(0))
    return weights / weights.sum(0)


def _local_scales(errors: Array, known: NDArray[np.bool_]) -> Array:
    """Mean magnitude of the errors before each, and before the one to come, which forgets; NaN
    where there are few.
    """
    total = np.zeros_like(errors[..., 0, :])
    weight = np.zeros_like(total)
    count = np.zeros_like(total)
    scales = np.full((*errors.shape[:-2], errors.shape[-2] + 1, errors.shape[-1]), np.nan)
    for t in range(scales.shape[-2]):
        np.divide(total, weight, out=scales[..., t, :], where=count >= _FEWEST_ERRORS)
        if t < errors.shape[-2]:
            total = (1 - 1 / _MEMORY) * total + np.abs(errors[..., t, :])
            weight = (1 - 1 / _MEMORY) * weight + known[..., t, :]
            count += known[..., t, :]
    return scales


def _variance(
    errors: Array, known: NDArray[np.bool_], n: NDArray[np.int64], degrees: float
) -> Array:
    """Squared scale of errors that follow Student's t, by maximum likelihood."""
    squares = errors**2
    variance = squares.sum(-2) / n.clip(1)
    if np.isinf(degrees):
        return variance
    with np.errstate(divide="ignore", invalid="ignore"):
        for _ in range(_ITERATIONS):
            weights = (degrees + 1) / (degrees + squares / variance[..., None, :])
            variance = np.where(known, weights * squares, 0.0).sum(-2) / n.clip(1)
    return variance


def _log_density(x: Array, variance: Array, degrees: float) -> Array:
    from scipy.special import gammaln

    with np.errstate(divide="ignore", invalid="ignore"):
        squares = x**2 / variance
        logs = -np.log(variance) / 2
        if np.isinf(degrees):
            logs = logs - (squares + np.log(2 * np.pi)) / 2
        else:
            constant = (
                gammaln((degrees + 1) / 2) - gammaln(degrees / 2) - np.log(degrees * np.pi) / 2
            )
            logs = logs + constant - (degrees + 1) / 2 * np.log1p(squares / degrees)
    return np.where(variance > 0, logs, 0.0)


def _tail(x: Array, degrees: Array) -> Array:
    from scipy.special import stdtr

    return stdtr(degrees.clip(1), -x)
