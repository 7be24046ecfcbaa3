"""The lines that open a run, and the number of rows that a monitor reckons with."""

from collections.abc import Iterable, Sequence, Sized
from math import inf
from pathlib import Path
from typing import Any

from torch import Tensor

from embedgeo.capture.structure import measured_model, model_width
from embedgeo.capture.units import RowUnit
from embedgeo.extras import require_extra
from embedgeo.formatting import listed, size
from embedgeo.geometry import Geometry
from embedgeo.glossary import headlines, term
from embedgeo.metrics.base import GeometryMetric
from embedgeo.metrics.defaults import TABLE_BYTES, width_notes

UNKNOWN_SHAPE = 128, 512
"""Sequences and tokens of a batch that does not tell them."""


def opening(geometry: Geometry, schedule: object, path: Path | None, *, given: bool) -> list[str]:
    """Sentences, when training starts, on what a monitor measures, and when.

    ``path`` is the history file's; token ids may be ``given`` in place of those that the model's
    table is called with.
    """
    width = model_width(geometry.model) or 2
    made = geometry.make_metrics(width)
    layers = listed([layer.name for layer in geometry.layers], 4)
    metrics = listed([type(metric).__name__ for metric in made])
    why_not = missing_for_history() or "folder= has it written"
    history = f"written to {path}" if path else f"kept in its history alone ({why_not})"
    lines = [f"{len(geometry.layers)} layers ({layers}), {metrics}, {schedule}; {history}."]
    lines += width_notes(geometry.make_metrics, width)
    own = [each for each in made if isinstance(each, GeometryMetric)]
    absent = [key for key in headlines() if any(key in each.keys_of_types for each in own)]
    has_no_types = geometry.settings["rows"] in ("mean", "max")
    if absent and not (given or geometry.inputs.tables or geometry.part or has_no_types):
        lines.append(
            f"{listed([term(key).name for key in absent])} and other values over token types will "
            f"be absent, because {type(measured_model(geometry.model)).__name__} has no embedding "
            f"table that is called with token ids. Give token_ids=, a function of the batch."
        )
    return lines


def missing_for_history() -> str:
    """Name what the history file needs that is not installed, with the command that installs it;
    empty if nothing.
    """
    try:
        require_extra("report", "history.parquet", "pandas", "pyarrow")
    except ImportError as missing:
        return str(missing)
    return ""


def without_tables(num_bytes: float) -> str:
    """A sentence on what a monitor does without token tables, which would take so many bytes."""
    needed = (
        ""
        if num_bytes == inf
        else f" Token tables and their union over the ranks may take {size(num_bytes)} on a rank, "
        f"more than {size(TABLE_BYTES)}."
    )
    return (
        f"EmbeddingMoments is in place of TokenMoments: V_W is estimated within updates, and "
        f"other values over token types are absent.{needed} metrics=embedgeo.default_metrics has "
        f"the tables."
    )


def expected_rows(
    window: int,
    probe: Iterable[Any] | None,
    batch: Any,
    unit: RowUnit,
    ranks: int,
    default: tuple[int, int] = UNKNOWN_SHAPE,
) -> int:
    """Number of rows of a measurement on one rank, at most.

    They are those of a window of so many training batches like this one, or of the batches of a
    probe, which the ranks share. ``default`` is the shape of batches that do not tell theirs.
    """
    num_batches = window
    if probe is not None:
        num_batches = -(-(len(probe) if isinstance(probe, Sized) else 1) // ranks)
        batch = probe[0] if isinstance(probe, Sequence) and probe else None
        default = getattr(probe, "batch_size", None) or default[0], default[1]
    batch_size, seq_len = _shape(batch) or default
    return num_batches * batch_size * (seq_len if unit in ("tokens", "words") else 1)


def _shape(batch: Any) -> tuple[int, int] | None:
    """Sequences and tokens of a batch: the shape of its first matrix of integers, if it has one."""
    is_mapping = hasattr(batch, "values") and not isinstance(batch, Tensor)
    for each in batch.values() if is_mapping else [batch]:
        if isinstance(each, Tensor) and each.ndim == 2 and not each.is_floating_point():
            return len(each), each.shape[1]
    return None
