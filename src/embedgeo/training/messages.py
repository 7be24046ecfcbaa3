"""What a monitor tells its user: what it will measure, what it has measured, what it could not."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from embedgeo.capture.structure import model_width
from embedgeo.geometry import Geometry
from embedgeo.geometry.widths import choices
from embedgeo.metrics.auto import metric_name
from embedgeo.results.schema import Record
from embedgeo.results.wording import listed, shell_command, size
from embedgeo.training.adapter import history_lacks
from embedgeo.training.schedule import Schedule

if TYPE_CHECKING:
    from embedgeo.results.history import HistoryFile


def opening(
    monitor: object,
    geometry: Geometry,
    schedule: Schedule,
    file: "HistoryFile | None",
    *,
    num_kept: int,
    anew_at: int = 0,
) -> str:
    """Layers, metrics, steps and file in a line, for the start of training; in others what the width has decided.

    Metrics are those at the width of the model; ``num_kept`` rows are compared, of which there are none from before the
    step ``anew_at`` if it is not 0.
    """
    name, layers = type(monitor).__name__, [layer.name for layer in geometry.layers]
    width = model_width(geometry.model) or 2
    kinds = [metric_name(metric) for metric in geometry.make_metrics(width)]
    why_not = history_lacks() or "folder= has it written"
    where = f"written to {file.path}" if file else f"kept in its history alone ({why_not})"
    line = f"{name}: {len(layers)} layers ({listed(layers, 4)}), {listed(kinds)}, {schedule}; {where}."
    more = [*choices(geometry.make_metrics, width)]
    if num_kept:
        num_bytes = 2 * len(layers) * num_kept * width * 4
        held = f"drift keeps {num_kept} rows of each layer twice, up to {size(num_bytes)} in all, also in checkpoints"
        few = f"; the linearity is undefined, it needs more than {width + 1}: drift={2 * width}, say"
        more.append(f"{held}{few if num_kept < width + 2 else ''}.")
        if anew_at:
            more.append(
                f"drift has no rows from before step {anew_at:,}: the first measurement from now on is its first."
            )
    return "\n".join([line, *(f"{name}: {each}" for each in more)])


def closing(monitor: object, file: "HistoryFile") -> str:
    """Where the history is, and the command that draws it, which can be pasted."""
    command = shell_command("embedgeo", "report", file.path.parent)
    return f"{type(monitor).__name__}: its history is in {file.path}; to look at it: {command}"


def off(monitor: object, cause: str) -> str:
    """That a failure has turned the monitor off."""
    return f"{type(monitor).__name__} is off for the rest of this run, training goes on: {cause}"


def not_written(monitor: object, cause: str) -> str:
    """That the history file cannot be written, though the monitor goes on."""
    return f"{type(monitor).__name__}: its history file cannot be written, measuring and logging go on: {cause}"


def failed(monitor: object, error: Exception) -> str:
    """That this failure has turned the monitor off."""
    return off(monitor, " ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])]))


def not_measured(monitor: object, step: int, cause: str) -> str:
    """Why the last weights could not be measured on training batches, and what to do."""
    return (
        f"{type(monitor).__name__}: the weights of the last step, {step}, are not measured, because the model could "
        f"not be run on a training batch outside of its training step ({cause}). Give probe_forward=, a function of "
        "the module and a batch, or measure_last=False."
    )


def gap(
    monitor: object,
    step: int,
    records: Sequence[Record],
    why_silent: str,
    exclusions: Mapping[str, object],
) -> str | None:
    """What a measurement lacks, and why: layers that no forward pass has reached, or all rows."""
    name = type(monitor).__name__
    if why_silent:
        return f"{name}: {why_silent}"
    if any(record["value"] and not math.isnan(record["value"]) for record in records):
        return None
    causes = [*(f"{name}={value!r}" for name, value in exclusions.items() if value), "the mask"]
    verb = "leave" if len(causes) > 1 else "leaves"
    return f"{name}: no token is left to measure at step {step}; {' and '.join(causes)} {verb} out all of them."
