"""What a sweep prints: one line for each checkpoint, and a summary at the end."""

import time
from collections.abc import Mapping, Sequence
from datetime import timedelta

import pandas as pd

from embedgeo.results.glossary import HEADLINES
from embedgeo.results.layer_names import blocks_by_side
from embedgeo.results.outliers import loss_outliers
from embedgeo.results.schema import MODEL
from embedgeo.results.wording import listed
from embedgeo.sweep.plan import Planned
from embedgeo.sweep.probe_text import ProbeText
from embedgeo.sweep.settings import SweepSettings

_HEADLINES = HEADLINES[:4]  # as many as fit in a line
_VALUES = ("loss", *_HEADLINES)
_OVER = "means over {}"


class Lines:
    """The lines of a sweep, in columns: what has become of each checkpoint, and an estimate of the time left.

    Args:
        pending: the checkpoints that are to be measured.
    """

    def __init__(self, pending: Sequence[Planned]) -> None:
        self._total = len(pending)
        self._width = min(max([len(_OVER.format("blocks")), *(len(planned.name) for planned in pending)]), 40)
        self._started = time.monotonic()
        self._num_ended = 0
        self._columns: list[str] = []

    def measured(self, planned: Planned, number: int, records: pd.DataFrame, seconds: float) -> str:
        """The loss, and means over blocks (over all layers if none is a block), as far as they are measured.

        Above the first line stand the columns, and again where there are more of them.
        """
        at_layers = records[records["layer"] != MODEL]
        names = [name for side in blocks_by_side(at_layers["layer"].unique()).values() for name in side]
        blocks = at_layers[at_layers["layer"].isin(names)]
        means = (blocks if len(blocks) else at_layers).groupby("metric")["value"].mean()
        loss = records[(records["layer"] == MODEL) & (records["metric"] == "loss")]["value"]
        values = {**means, **({"loss": loss.iloc[0]} if len(loss) else {})}
        columns = [key for key in _VALUES if key in values or key in self._columns] + ["time", "left"]
        cells = [f"{values[key]:.4g}" if key in values else "" for key in columns[:-2]]
        self._num_ended += 1
        left = (time.monotonic() - self._started) / self._num_ended * (self._total - number)
        cells += [f"{seconds:.1f} s", str(timedelta(seconds=round(left)))]
        is_headed, self._columns = columns == self._columns, columns
        heading = "" if is_headed else self._line("", _OVER.format("blocks" if len(blocks) else "layers"), columns)
        return "\n".join(filter(None, (heading, self._line(f"{number}/{self._total}", planned.name, cells))))

    def failed(self, planned: Planned, number: int, why: str) -> str:
        """Why there are no results."""
        self._num_ended += 1
        return f"{self._line(f'{number}/{self._total}', planned.name, [])}  failed: {why}"

    def _line(self, number: str, name: str, cells: Sequence[str]) -> str:
        aligned = [f"{cell:>{max(8, len(key))}}" for cell, key in zip(cells, self._columns, strict=False)]
        return "  ".join([f"{number:>{2 * len(str(self._total)) + 1}}", f"{name:<{self._width}}", *aligned])


def shortfall(settings: SweepSettings, text: ProbeText) -> str:
    """Whether fewer tokens are used than were asked for, and whether texts were cut, in sentences; empty if neither."""
    used, left = len(text.token_ids), settings.num_tokens - len(text.token_ids)
    many = f"{len(text.lengths):,} sequences of {settings.seq_len:,}"
    rest = "what does not fill a sequence is left out"
    if settings.unit != "sequence":
        many, rest = f"{len(text.lengths):,} texts", "only whole texts are taken"
    why = "the text has no more" if left >= settings.seq_len else rest
    lines = [f"{settings.num_tokens:,} tokens asked for, {used:,} used ({many}): {why}"] if left else []
    if text.num_cut:
        lines.append(f"{text.num_cut:,} of {len(text.lengths):,} texts are cut to seq_len={settings.seq_len} tokens")
    return "; ".join(lines)


def summarize(
    records: Mapping[str, pd.DataFrame], plan: Sequence[Planned], mine: Sequence[Planned], failures: Mapping[str, str]
) -> str:
    """How many checkpoints are done, and which are duplicates, have moved, were replaced, are other models, or failed.

    Args:
        records: of the checkpoints that are done, by name, as `SweepFolder.read_runs` has them.
        plan: all checkpoints of the sweep.
        mine: those that this run was to have done.
        failures: reasons, by name.
    """
    done = [planned for planned in plan if planned.is_done(records.get(planned.name))]
    left = [planned.name for planned in mine if planned not in done]
    part = f" ({len(mine) - len(left)} of {len(mine)} in this shard)" if len(mine) < len(plan) else ""
    lines = [f"{len(done)} of {len(plan)} checkpoints done{part}"]
    losses: dict[str, list[tuple[str, float]]] = {}
    models: dict[str, dict[str, list[str]]] = {}
    for planned in done:
        name, frame = planned.name, records[planned.name]
        if planned.duplicate_of:
            lines.append(f"  duplicate: {name} has the weights of {planned.duplicate_of}")
        before, now = frame["commit"].iloc[0], planned.checkpoint.commit
        if before != now:
            lines.append(f"  moved: {name} was measured at commit {before[:12]}; its revision is {now[:12]} now")
        if planned.is_stale:
            lines.append(f"  replaced: {name} was measured before with other weights; measured again")
        series = str(frame["series"].iloc[0])
        models.setdefault(planned.checkpoint.position.series, {}).setdefault(series, []).append(name)
        for value in frame[(frame["layer"] == MODEL) & (frame["metric"] == "loss")]["value"]:
            losses.setdefault(series, []).append((name, float(value)))
    for apart in models.values():
        if len(apart) > 1:
            which = "; ".join(f"{series} ({listed(names)})" for series, names in apart.items())
            lines.append(f"  different models, kept apart as runs of their own: {which}")
    for by_step in losses.values():
        for name in loss_outliers(by_step):
            lines.append(f"  outlier: {name} has a loss of {dict(by_step)[name]:.4g}, out of line with its neighbours")
    lines += [f"  failed: {name}: {reason}" for name, reason in failures.items()]
    lines += [f"  not done: {name}: its results are gone again" for name in left if name not in failures]
    if left:
        lines.append(f"{len(left)} checkpoints failed; once the reasons are mended, the next run tries only those")
    return "\n".join(lines)
