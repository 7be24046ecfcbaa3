"""Losses that are out of line with their neighbours."""

import math
from collections.abc import Sequence
from statistics import median

_LEAST_JUMP = 0.5
"""Nats by which a loss has to lie outside the range of its neighbours to be an outlier."""


def loss_outliers(losses: Sequence[tuple[str, float]]) -> list[str]:
    """Checkpoints whose loss lies much farther outside the range of its two neighbours than other losses do.

    Args:
        losses: name and loss of the checkpoints of one series, by step.

    Returns:
        Their names. A loss that is not finite is an outlier. The first checkpoint, which has one neighbour, is not.

    >>> loss_outliers([("step1", 9.0), ("step2", 5.0), ("step3", 12.7), ("step4", 3.0)])
    ['step3']
    """
    finite = [(name, loss) for name, loss in losses if math.isfinite(loss)]
    outliers = {name for name, loss in losses if not math.isfinite(loss)}
    while len(finite) > 1:  # the farthest first: beside an outlier its neighbours look like outliers, too
        jumps = _jumps([loss for _, loss in finite])
        farthest = max(range(len(finite)), key=jumps.__getitem__)
        elsewhere = [0.0, *jumps[: max(0, farthest - 1)], *jumps[farthest + 2 :]]
        if jumps[farthest] <= max(_LEAST_JUMP, 5 * median(elsewhere)):
            break
        outliers.add(finite.pop(farthest)[0])
    return [name for name, _ in losses if name in outliers]


def _jumps(losses: Sequence[float]) -> list[float]:
    """How far each loss lies outside the range of its two neighbours; the first may be anything, the last may fall."""
    jumps = [0.0]
    for before, loss, after in zip(losses, losses[1:], [*losses[2:], None], strict=False):
        highest = before if after is None else max(before, after)
        lowest = loss if after is None else min(before, after)
        jumps.append(max(0.0, loss - highest, lowest - loss))
    return jumps
