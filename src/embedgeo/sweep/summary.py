"""What a sweep says: a line a checkpoint, and what to look at in the end."""

import math
from collections.abc import Mapping, Sequence
from statistics import median

import pandas as pd

from embedgeo.sweep.measure import MODEL

_HEADLINES = ("V_W_over_V_unbiased", "M_over_Q", "anisotropy", "intrinsic_dimension")
_LEAST_JUMP = 0.5
"""Nats by which a loss has to leave the range of its neighbours to be pointed out."""


def headline(records: pd.DataFrame) -> str:
    """The loss, and means over blocks (over all layers where none is called a block), in one line."""
    loss = records[(records["layer"] == MODEL) & (records["metric"] == "loss")]["value"]
    parts = [f"loss {loss.iloc[0]:.4g}"] if len(loss) else []
    blocks = records[records["layer"].str.startswith("block.")]
    if not len(blocks):
        blocks = records[records["layer"] != MODEL]
    means = blocks.groupby("metric")["value"].mean()
    return "  ".join([*parts, *(f"{key} {means[key]:.4g}" for key in _HEADLINES if key in means)])


def loss_outliers(losses: Sequence[tuple[str, float]]) -> list[str]:
    """Checkpoints whose loss lies outside the range of their neighbours' by far more than others' do.

    Args:
        losses: name and loss of the checkpoints of one series, by step.

    Returns:
        Their names. A loss that is not finite is one; the first checkpoint has no neighbour before it, and is not.

    >>> loss_outliers([("step1", 9.0), ("step2", 5.0), ("step3", 12.7), ("step4", 3.0)])
    ['step3']
    """
    finite = [(name, loss) for name, loss in losses if math.isfinite(loss)]
    far = {name for name, loss in losses if not math.isfinite(loss)}
    while len(finite) > 1:  # the farthest first: beside an outlier its neighbours look like some
        jumps = _jumps([loss for _, loss in finite])
        farthest = max(range(len(finite)), key=jumps.__getitem__)
        elsewhere = [0.0, *jumps[: max(0, farthest - 1)], *jumps[farthest + 2 :]]
        if jumps[farthest] <= max(_LEAST_JUMP, 5 * median(elsewhere)):
            break
        far.add(finite.pop(farthest)[0])
    return [name for name, _ in losses if name in far]


def _jumps(losses: Sequence[float]) -> list[float]:
    """How far each lies out of the range of the two beside it; the last may fall as it likes, the first is free."""
    jumps = [0.0]
    for before, loss, after in zip(losses, losses[1:], [*losses[2:], None], strict=False):
        highest = before if after is None else max(before, after)
        lowest = loss if after is None else min(before, after)
        jumps.append(max(0.0, loss - highest, lowest - loss))
    return jumps


def summarize(
    records: Mapping[str, pd.DataFrame], series: Mapping[str, str], failures: Mapping[str, str], num_planned: int
) -> str:
    """What is done, and what in it is suspicious.

    Args:
        records: of the checkpoints that are done, by name.
        series: which series each belongs to.
        failures: reasons by name.
        num_planned: checkpoints of the whole sweep.
    """
    lines = [f"{len(records)} of {num_planned} checkpoints done"]
    losses: dict[str, list[tuple[int, str, float]]] = {}
    for name, frame in records.items():
        original = frame["duplicate_of"].iloc[0]
        if isinstance(original, str):
            lines.append(f"  duplicate: {name} has the weights of {original}")
        for value in frame[(frame["layer"] == MODEL) & (frame["metric"] == "loss")]["value"]:
            losses.setdefault(series.get(name, ""), []).append((int(frame["step"].iloc[0]), name, float(value)))
    for found in losses.values():
        by_step = [(name, value) for _, name, value in sorted(found)]
        for name in loss_outliers(by_step):
            lines.append(f"  outlier: {name} has a loss of {dict(by_step)[name]:.4g}, out of line with its neighbours")
    lines += [f"  failed: {name}: {reason}" for name, reason in failures.items()]
    if failures:
        lines.append(f"{len(failures)} checkpoints failed; run the same command again to try only those")
    return "\n".join(lines)
