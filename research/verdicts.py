"""Verdicts on claims of papers, from values at layers or steps and what their errors are made of.

Every claim of a shape is some differences that have to be above 0: see `Contrast`.
"""

from collections.abc import Callable, Mapping, Sequence
from math import ceil, inf, isfinite, isnan, nan, sqrt
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from research.claims import LEAST_CHANGE, LEAST_TAU, SETTLED, VISIBLE

HOLDS = "holds"
FAILS = "does not hold"
FEW = "too few types"
OPEN = "not comparable"
TOO_FEW_TOKENS = "; not enough tokens to tell"
_LEAST_LAYERS = 4  # of which Kendall's τ can be two of its standard errors
_LARGEST_SHARE = 0.25  # of a printed value that z standard errors may be


def number(value: float) -> str:
    """A number in a sentence or a table."""
    # without a sign of zero
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e9 else f"{value + 0.0:.4g}"


class Verdict(NamedTuple):
    """A verdict, the reason, and the numbers that it rests on; NaN where there are none."""

    verdict: str
    why: str
    measured: float = nan
    error: float = nan
    difference: float = nan
    error_of_difference: float = nan
    where: str = ""  # the layers or steps that were measured


class Series(NamedTuple):
    """Values at layers or steps; the standard error of their sum with weights is the norm of the
    sum of their deviations with these weights.
    """

    names: Sequence[str]
    values: NDArray[np.float64]  # (n,)
    deviations: NDArray[np.float64]  # (n, parts)
    degrees: float = inf  # of freedom of the errors

    def weighted(self, weights: Mapping[int, float]) -> tuple[float, float]:
        """The sum of the values with weights, and its standard error."""
        places, factors = [*weights], np.array([*weights.values()])
        of_sum = factors @ self.deviations[places]
        return float(factors @ self.values[places]), float(np.linalg.norm(of_sum))

    def only(self, places: Sequence[int]) -> "Series":
        """The values at some places."""
        names = [self.names[i] for i in places]
        return self._replace(
            names=names, values=self.values[places], deviations=self.deviations[places]
        )


class Contrast(NamedTuple):
    """What a claim says is above 0: a sum of values with weights, and a constant.

    A sum that is as the paper shows would be ``least``.
    """

    what: str
    weights: Mapping[int, float]
    least: float
    constant: float = 0.0


def widened(choices: int, degrees: float = inf) -> float:
    """Number of standard errors that the largest of so many differences exceeds by chance in one
    case of forty.

    By Student's t: errors from G groups have G - 1 degrees of freedom.
    """
    return float(stats.t.isf(0.025 / max(1, choices), degrees))


def exceeds(difference: float, error: float, least: float, z: float) -> str:
    """Verdict on a difference that should be above 0, and ``least`` if it is to count as one."""
    if not (isfinite(difference) and isfinite(error)):
        return OPEN
    if difference > z * error and difference >= least:
        return HOLDS
    return FAILS if difference + z * error < least else OPEN


def decide(of: Series, contrasts: Sequence[Contrast], choices: int) -> Verdict:
    """The verdict on the weakest of some contrasts, with the value that it weighs most."""
    z = widened(choices, of.degrees)
    found = []
    for contrast in contrasts:
        total, error = of.weighted(contrast.weights)
        difference = total + contrast.constant
        verdict = exceeds(difference, error, contrast.least, z)
        why = f"{contrast.what}, z = {z:.2f}{_why_open(verdict, error)}"
        main = next(iter(contrast.weights))
        value = of.weighted({main: 1.0})
        found.append(Verdict(verdict, why, *value, difference, error, of.names[main]))
    order = (FAILS, OPEN, HOLDS)
    weakest, _ = min(
        zip(found, contrasts, strict=True),
        key=lambda pair: (order.index(pair[0].verdict), pair[0].difference - pair[1].least),
    )
    return weakest


def _why_open(verdict: str, error: float) -> str:
    if verdict != OPEN:
        return ""
    return (
        "; no standard error: sweep with --jackknife 16, or more tokens"
        if isnan(error)
        else TOO_FEW_TOKENS
    )


def falling(rule: Callable[[Series], Verdict], of: Series) -> Verdict:
    """The verdict of a rule about growth on values that fall instead."""
    found = rule(of._replace(values=-of.values))
    why = found.why.replace("larger", "smaller").replace("largest", "smallest")
    return found._replace(why=why, measured=-found.measured, difference=-found.difference)


def peak(of: Series, *, in_the_middle: bool = False) -> Verdict:
    """Verdict on values that rise to a peak between their ends, or in the middle half, and fall
    again.
    """
    values, names = of.values, of.names
    last = len(values) - 1
    if last < 2:
        return Verdict(OPEN, f"a peak between two ends needs three values; there are {last + 1}")
    first, end_of_middle = (ceil(last / 4), last * 3 // 4) if in_the_middle else (1, last - 1)
    top = first + int(np.argmax(values[first : end_of_middle + 1]))
    highest = 1 + int(np.argmax(values[1:last]))
    what = f"the largest value {'of the middle half' if in_the_middle else 'between the ends'}, at "
    contrasts = [
        Contrast(
            f"{what}{names[top]}, less the value at {names[end]}",
            {top: 1.0, end: -1.0},
            VISIBLE * abs(values[end]),
        )
        for end in (0, last)
    ]
    if values[highest] > values[top]:
        outside = f"{what}{names[top]}, less a larger one outside of it, at {names[highest]}"
        contrasts.append(Contrast(outside, {top: 1.0, highest: -1.0}, 0.0))
    return decide(of, contrasts, last - 1)


def phase(of: Series, which: int) -> Verdict:
    """Verdict on one of three phases of values over steps: they fall, grow and fall again."""
    values = of.values
    count = len(values)
    if count < 4:
        return Verdict(OPEN, f"three phases need four steps; there are {count}")
    pairs = [(i, j) for i in range(count - 1) for j in range(i + 1, count)]
    low, high = max(pairs, key=lambda pair: values[pair[1]] - values[pair[0]])
    start, end, sign = {1: (0, low, -1), 2: (low, high, 1), 3: (high, count - 1, -1)}[which]
    choices = len(pairs) if which == 2 else count - 1  # both ends are chosen, or one
    spans = [(start, end)]
    # the one of those that the growth leaves no room for that its errors leave most room for
    if start == end:
        spans = [(low, i) if which == 1 else (i, high) for i in range(low, high + 1) if i != start]
    z = widened(choices, of.degrees)

    def most(span: tuple[int, int]) -> float:
        change, error = of.weighted({span[1]: sign, span[0]: -sign})
        return inf if isnan(error) else change + z * error

    start, end = max(spans, key=most)
    least = VISIBLE * max(abs(values[start]), abs(values[end]))
    what = f"from {of.names[start]} to {of.names[end]}"
    return decide(of, [Contrast(what, {end: sign, start: -sign}, least)], choices)


def settles(of: Series, steps: Sequence[int]) -> Verdict:
    """Verdict on values that grow over training, and change little over the second half of it."""
    last = len(steps) - 1
    half = next((i for i in range(1, last) if 2 * steps[i] >= steps[last]), None)
    if half is None:
        return Verdict(OPEN, "it needs a step before the last in the second half of the training")
    top = int(np.argmax(of.values))
    first, end = of.names[0], of.names[last]
    share = f"a quarter of the growth from {first} to {end}, less that "
    contrasts = [
        Contrast(
            f"the value at {end} less that at {first}",
            {last: 1.0, 0: -1.0},
            VISIBLE * abs(of.values[0]),
        ),
        Contrast(
            f"{share}from {of.names[half]} on", {last: SETTLED - 1, half: 1.0, 0: -SETTLED}, 0.0
        ),
    ]
    if top not in (0, last):
        fall = f"a quarter of the growth from {first} to {end}, less the fall from {of.names[top]}"
        contrasts.append(Contrast(fall, {last: SETTLED + 1, top: -1.0, 0: -SETTLED}, 0.0))
    return decide(of, contrasts, last)


def trend(of: Series) -> Verdict:
    """Verdict on values that grow through the layers, by Kendall's τ and by how far they are
    apart.
    """
    values = of.values
    count = len(values)
    if count < _LEAST_LAYERS:
        return Verdict(OPEN, f"a trend needs {_LEAST_LAYERS} layers; there are {count}")
    signs = [np.sign(values[j] - values[i]) for i in range(count) for j in range(i + 1, count)]
    tau = float(np.mean(signs))
    error = sqrt(2 * (2 * count + 5) / (9 * count * (count - 1)))
    why = f"Kendall's τ over {count} layers; none would be 0"
    verdict = exceeds(tau, error, LEAST_TAU, 2)
    low, high = int(np.argmin(values)), int(np.argmax(values))
    least = LEAST_CHANGE * float(np.max(np.abs(values)))
    range_contrast = Contrast("", {high: 1.0, low: -1.0}, least)
    of_range = decide(of, [range_contrast], len(signs))
    if verdict == OPEN:
        why += "; too few layers to tell"
    elif isnan(of_range.error_of_difference):
        if verdict == FAILS and exceeds(-tau, error, LEAST_TAU, 2) != HOLDS:
            verdict = OPEN  # few tokens may have hidden one
            why += _why_open(OPEN, nan)
    elif of_range.verdict == FAILS:
        verdict = FAILS
        why += f"; the values differ by less than {LEAST_CHANGE:.0%}"
    elif of_range.verdict == OPEN:
        verdict = OPEN
        why += TOO_FEW_TOKENS
    return Verdict(verdict, why, tau, error, tau, error)


def near(value: float, error: float, printed: float, within: float, degrees: float) -> Verdict:
    """Verdict on a value that the paper prints."""
    z = widened(1, degrees)
    numbers = (value, error, value - printed, error)
    if not (isfinite(value) and isfinite(error)):
        return Verdict(
            OPEN, "no standard error: sweep with --jackknife 16 or --token-tables true", *numbers
        )
    if z * error > _LARGEST_SHARE * abs(printed):
        why = f"not enough tokens: z errors are over {_LARGEST_SHARE:.0%} of the value"
        return Verdict(OPEN, why, *numbers)
    verdict = HOLDS if abs(value - printed) <= z * error + within else FAILS
    return Verdict(verdict, f"within z errors and {number(within)}, z = {z:.2f}", *numbers)
