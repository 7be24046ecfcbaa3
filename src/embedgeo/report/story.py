"""The story of a run in words: where each headline number turned, by how much, and at which
blocks.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from embedgeo.drawing import Array
from embedgeo.formatting import number, with_error
from embedgeo.glossary import headlines, term
from embedgeo.report.runs import Run

FALSE = 0.05
"""Share of runs, at most, of which anything is said where nothing has changed."""

FEWEST = 20
"""Measurements from whose own fluctuation errors are taken, where no standard errors are known."""

VISIBLE = 0.1
"""Share of its range by which a number has to change for it to be said, where errors of differences
are known.
"""

_MOST_CORRELATED = 0.95  # a value with the next, of what is still fluctuation
# standard errors of a difference, in which a value is still, or already, that of a turning point
_WITHIN = 2.0
_FEW = 0.1  # share of the values, whose errors may be unknown
_NEAR = 0.2  # of the smallest change that counts, in which it is, too
_MAD = 1.4826  # standard deviation over the median absolute one, of normal numbers
_CLIPPED = 3.0  # standard deviations
_TENTH = 1.645  # standard deviations that the absolute value of one normal number in ten exceeds
_FEWEST_BLOCKS = 4  # that have an order
_ORDERED = 0.9  # Kendall's τ of the depth and the time of what moves through the blocks


class Move(NamedTuple):
    """A rise or fall, by the places of measurements: its start, its end, and the turning point that
    it leads to.
    """

    start: int
    end: int
    turn: int


def story(run: Run) -> list[str]:
    """Sentences on what the headline numbers of a run did, means over blocks; none where nothing is
    significant.

    A number moves from one turning point to the next where any two of its values differ by more
    than z standard errors of the difference: see `moves`. z is such that of at most 5 % of runs in
    which nothing changes anything is said, over all pairs of measurements and all headlines, if
    errors are normal. Errors are the jackknife's: of a sweep those of the difference, paired by
    group of sequences, by Student's t; of a monitor those of the records, taken as those of
    unrelated samples, which is too large on a fixed probe. Pairs tell small changes, too: those of
    less than a tenth of the number's range are left out.

    Without them, of 20 measurements or more, values are running medians of five, so that one or two
    outliers (near an end one) are no change, and their errors the number's own `fluctuation`. In
    simulations of up to 200 measurements the 5 % hold for heavy tails, too: of Student's t with 3
    degrees of freedom where a value's correlation with the next is at most 0.5, with 5 degrees up
    to 0.9. The price is that only changes of many times that are found.
    """
    metrics = [metric for metric in headlines() if metric in run.values]
    if not run.has_steps or len(run.steps) < 3 or not metrics:
        return []
    return [sentence for metric in metrics for sentence in _sentences(run, metric, len(metrics))]


def stories(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """The `story` of each run, by its label; of those in which anything happened."""
    told = [(run.label, story(run)) for run in runs]
    return [(label, sentences) for label, sentences in told if sentences]


def moves(
    values: Array, error: Callable[[int, int], float], z: float, least: float = 0.0
) -> list[Move]:
    """Rises and falls of a curve, each from the turning point before to the next.

    A turning point is the highest value before the first that is lower by more than ``z`` standard
    errors of their difference, or the lowest one before a higher. A move begins at the last value
    within two standard errors of the turning point before it, and ends at the first one within two
    of the next (or within a fifth of ``least``).

    Args:
        values: shape (T,), finite.
        error: the standard error of the difference of two of them, by their places.
        z: how many standard errors count.
        least: the smallest change that counts.
    """

    def is_more(i: int, j: int) -> bool:
        return bool(values[i] - values[j] > max(least, z * error(i, j)))

    def is_apart(i: int, j: int) -> bool:
        return bool(abs(values[i] - values[j]) > max(_NEAR * least, _WITHIN * error(i, j)))

    lowest = 0
    highest = 0
    direction = 0
    turns = list[int]()
    for i in range(1, len(values)):
        if direction >= 0 and is_more(highest, i):
            turns.append(highest)
            direction, lowest = -1, i
        elif direction <= 0 and is_more(i, lowest):
            turns.append(lowest)
            direction, highest = 1, i
        if direction >= 0 and values[i] > values[highest]:
            highest = i
        if direction <= 0 and values[i] < values[lowest]:
            lowest = i
    if direction:
        turns.append(highest if direction > 0 else lowest)
    found = list[Move]()
    for start, turn in pairwise(turns):
        end = next(i for i in range(start + 1, turn + 1) if not is_apart(i, turn))
        found.append(
            Move(
                next(i for i in range(end - 1, start - 1, -1) if not is_apart(i, start)), end, turn
            )
        )
    return found


def running_medians(values: Array) -> Array:
    """Medians of five neighbours; of three beside an end. An end stays if it goes on as the next
    two do (Tukey 1977).

    Args:
        values: shape (T,), five or more.
    """
    smooth = values.copy()
    smooth[2:-2] = np.median(np.lib.stride_tricks.sliding_window_view(values, 5), axis=-1)
    for of_values, found in ((values, smooth), (values[::-1], smooth[::-1])):
        found[1] = np.median(of_values[:3])
        found[0] = np.median([of_values[0], found[1], 3 * found[1] - 2 * found[2]])
    return smooth


def fluctuation(values: Array) -> float:
    """Standard deviation of a number that follows a first-order autoregression; infinite for fewer
    than 20 values.

    It follows from its differences and its correlation with the next value, in both of which so
    much counts at most that a jump, which is no fluctuation, does not matter. For heavier tails
    than a normal number's it is larger: by the square of the ratio of what one difference in ten
    exceeds.
    """
    if len(values) < FEWEST:
        return np.inf
    centered = _clipped(values - np.median(values))
    square = centered @ centered
    if not square > 0:
        return 0.0
    correlation = np.clip(
        (centered[:-1] @ centered[1:]) / square * (1 + 4 / len(values)), 0, _MOST_CORRELATED
    )
    differences = np.diff(values)
    typical = _MAD * np.median(np.abs(differences))
    tail = (
        max(1.0, np.quantile(np.abs(differences), 0.9) / (_TENTH * typical)) if typical > 0 else 1.0
    )
    return float(np.sqrt(np.square(_clipped(differences)).mean() / 2 / (1 - correlation)) * tail**2)


def _clipped(deviations: Array) -> Array:
    most = _CLIPPED * _MAD * np.median(np.abs(deviations))
    return deviations.clip(-most, most)


def _sentences(run: Run, metric: str, num_metrics: int) -> list[str]:
    from scipy import stats

    table = run.table(metric)
    table_errors = run.table(metric, run.errors)
    means = run.means(table)
    sentences = []
    for side, blocks in run.blocks.items():
        mean = means[side].dropna()
        if len(mean) < 3:
            continue
        errors = run.mean_errors(table, table_errors)[side].reindex(mean.index)
        # left out
        if (
            len(mean) > 3
            and errors.isna().sum() <= max(1, _FEW * len(mean))
            and errors.notna().iloc[-1]
        ):
            errors = errors.dropna()
            mean = mean[errors.index]
        has_errors = bool(errors.notna().all())
        values = mean.to_numpy(dtype=float)
        if has_errors:
            scale = errors.to_numpy(dtype=float)
        elif len(mean) >= FEWEST:
            scale = np.full(len(mean), fluctuation(values))
            values = running_medians(values)
        else:
            continue
        num_pairs = len(mean) * (len(mean) - 1) / 2 * num_metrics * len(run.blocks)
        law = stats.norm if has_errors else stats.t(len(mean) - 3)
        deviations = run.deviations_of_blocks(metric, [*mean.index]).get(side)
        if deviations is not None:  # the errors of both values are paired
            law = stats.t(np.any(deviations, axis=(0, 2)).sum() - 1)
        z = float(law.isf(FALSE / num_pairs / 2))
        least = VISIBLE * float(np.ptp(values)) if deviations is not None else 0.0
        found = moves(values, _of_difference(scale, deviations), z, least)
        if not found:
            continue
        steps = list(mean.index)
        of_blocks = table.loc[steps, blocks].to_numpy(dtype=float)
        block_errors = table_errors.loc[steps, blocks].to_numpy(dtype=float)
        parts = list[str]()
        for move in found:
            verb = "rose" if values[move.end] > values[move.start] else "fell"
            start = (
                ""
                if parts
                else f"from {_value(values, errors, move.start)} at step {steps[move.start]:,} "
            )
            end = f"to {_value(values, errors, move.end)} by step {steps[move.end]:,}"
            where = _where(of_blocks, block_errors, deviations, move, z)
            farthest = "" if move is found[-1] else _farthest(values, errors, steps, move)
            parts.append(f"{verb} {start}{end}{where}{farthest}")
        name = term(metric).name if len(run.blocks) == 1 else f"{term(metric).name} ({side})"
        since = len(values) - 1 - found[-1].end
        what = "is more than a tenth of its range" if least else "is significant"
        rest = f"; since then no change {what}" if since > 0 else ""
        sentences.append(f"{name} {', '.join(parts)}{rest}.")
    return sentences


def _of_difference(errors: Array, deviations: Array | None) -> Callable[[int, int], float]:
    """The standard error of the difference of two values, by their places."""
    if deviations is None:
        return lambda i, j: float(np.hypot(errors[i], errors[j]))
    of_means = deviations.mean(-1)
    return lambda i, j: float(np.linalg.norm(of_means[i] - of_means[j]))


def _value(values: Array, errors: pd.Series, place: int) -> str:
    return (
        with_error(values[place], errors.iloc[place])
        if errors.notna().all()
        else number(values[place])
    )


def _farthest(values: Array, errors: pd.Series, steps: Sequence[int], move: Move) -> str:
    """The turning point, where it is not the end of the move to the printed digits."""
    turn = _value(values, errors, move.turn)
    if turn == _value(values, errors, move.end):
        return ""
    which = "highest" if values[move.turn] > values[move.end] else "lowest"
    return f", {which} {turn} at step {steps[move.turn]:,}"


def _where(values: Array, errors: Array, deviations: Array | None, move: Move, z: float) -> str:
    """The blocks that moved as their mean did, and the end of the model at which they began."""
    scale = np.hypot(errors[move.start], errors[move.end])
    if deviations is not None:
        scale = np.linalg.norm(deviations[move.start] - deviations[move.end], axis=0)
    elif np.isnan(scale).any() and len(values) >= FEWEST:
        scale = np.array([fluctuation(column) * np.sqrt(2) for column in values.T])
        values = np.stack([running_medians(column) for column in values.T], axis=1)
    up = np.sign(np.nanmean(values[move.end] - values[move.start]))
    change = up * (values[move.end] - values[move.start])
    has_moved = change > z * scale
    count, of_all = int(has_moved.sum()), len(has_moved)
    if of_all < 2 or not count:
        return ""
    which = f"all {of_all} blocks" if count == of_all else f"{count} of {of_all} blocks"
    return f" ({which}{_order(up * values[move.start : move.end + 1, has_moved])})"


def _order(values: Array) -> str:
    """Words on which blocks got half of their way first, given rising values by step and block."""
    num_blocks = values.shape[1]
    if num_blocks < _FEWEST_BLOCKS or len(values) < 3:
        return ""
    half = (values[0] + values[-1]) / 2
    above = values >= half
    after = above.argmax(0)  # the first place at or beyond half of the way, which is not 0
    columns = np.arange(num_blocks)
    low, high = values[after - 1, columns], values[after, columns]
    times: NDArray[np.float64] = after - 1 + (half - low) / (high - low)
    order = _tau(times)
    return (
        ", the last first"
        if order <= -_ORDERED
        else ", the first first"
        if order >= _ORDERED
        else ""
    )


def _tau(times: Sequence[float] | Array) -> float:
    from scipy import stats

    return float(stats.kendalltau(np.arange(len(times)), times).statistic)
