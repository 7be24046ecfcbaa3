"""What a sweep prints: one line for each checkpoint, and a summary at the end."""

from collections.abc import Mapping, Sequence

import pandas as pd

from embedgeo.results.glossary import HEADLINES
from embedgeo.results.outliers import loss_outliers
from embedgeo.results.schema import MODEL
from embedgeo.sweep.plan import Planned

_HEADLINES = HEADLINES[:4]  # as many as fit in a line


def headline(records: pd.DataFrame) -> str:
    """The loss, and means over blocks (over all layers if none is a block), in one line."""
    loss = records[(records["layer"] == MODEL) & (records["metric"] == "loss")]["value"]
    parts = [f"loss {loss.iloc[0]:.4g}"] if len(loss) else []
    blocks = records[records["layer"].str.startswith("block.")]
    if not len(blocks):
        blocks = records[records["layer"] != MODEL]
    means = blocks.groupby("metric")["value"].mean()
    return "  ".join([*parts, *(f"{key} {means[key]:.4g}" for key in _HEADLINES if key in means)])


def summarize(records: Mapping[str, pd.DataFrame], plan: Sequence[Planned], failures: Mapping[str, str]) -> str:
    """How many checkpoints are done, and which are duplicates, have moved, have an outlying loss or failed.

    Args:
        records: of the checkpoints that are done, by name.
        plan: all checkpoints of the sweep.
        failures: reasons, by name.
    """
    lines = [f"{len(records)} of {len(plan)} checkpoints done"]
    listed = {planned.name: planned.checkpoint for planned in plan}
    losses: dict[str, list[tuple[int, str, float]]] = {}
    for name, frame in records.items():
        original = frame["duplicate_of"].iloc[0]
        if isinstance(original, str):
            lines.append(f"  duplicate: {name} has the weights of {original}")
        before, now = frame["commit"].iloc[0], listed[name].commit
        if before != now:
            lines.append(f"  moved: {name} was measured at commit {before[:12]}; its revision is {now[:12]} now")
        for value in frame[(frame["layer"] == MODEL) & (frame["metric"] == "loss")]["value"]:
            losses.setdefault(listed[name].position.series, []).append((int(frame["step"].iloc[0]), name, float(value)))
    for found in losses.values():
        by_step = [(name, value) for _, name, value in sorted(found)]
        for name in loss_outliers(by_step):
            lines.append(f"  outlier: {name} has a loss of {dict(by_step)[name]:.4g}, out of line with its neighbours")
    lines += [f"  failed: {name}: {reason}" for name, reason in failures.items()]
    if failures:
        lines.append(f"{len(failures)} checkpoints failed; once the reasons are mended, the next run tries only those")
    return "\n".join(lines)
