"""What a monitor is going to measure: how many rows, of which tokens, by which metrics."""

from collections.abc import Iterable, Mapping, Sequence
from inspect import signature
from math import prod
from operator import length_hint
from pathlib import Path
from typing import Any, NamedTuple

from torch import Size, Tensor

from embedgeo.capture.forward_inputs import READ_MASKS
from embedgeo.capture.structure import measured_model, model_width, submodels
from embedgeo.capture.units import RowUnit
from embedgeo.extras import require_extra
from embedgeo.formatting import listed, size
from embedgeo.geometry import Geometry
from embedgeo.glossary import headlines, term
from embedgeo.metrics.base import GeometryMetric
from embedgeo.metrics.memory import Memory

UNKNOWN_SHAPE = 128, 512
"""Sequences and tokens of a batch that does not tell them."""


class ExpectedRows(NamedTuple):
    """Rows of a measurement, at most."""

    num_batches: int  # on all ranks
    on_rank: int  # where batches do not tell their shape, of batches of the default one
    num_rows: int  # of all ranks; 0 where batches do not tell their shape


def plan_sentences(
    geometry: Geometry,
    schedule: object,
    path: Path | None,
    expected: ExpectedRows,
    *,
    gives_ids: bool,
    gives_mask: bool,
) -> list[str]:
    """Sentences, when training starts, on what a monitor measures, when, and of which rows.

    ``path`` is the history file's; token ids and mask may be given in place of those that the model
    is called with.
    """
    width = model_width(geometry.model) or 0
    made = geometry.make_metrics(width) if width else []
    own = [each for each in made if isinstance(each, GeometryMetric)]
    has_types = geometry.settings["rows"] != "mean"
    has_ids = bool(gives_ids or geometry.inputs.tables)
    why_not = missing_for_history() or "folder= has it written"
    history = f"written to {path}" if path else f"kept in its history alone ({why_not})"
    of_ids, of_mask = sources_of_rows(
        geometry, has_ids=has_ids and has_types, ids=gives_ids, mask=gives_mask
    )
    sources = f"{of_ids}, {of_mask}."
    # without token ids, other integers of a batch do not tell its rows
    if (num_rows := expected.num_rows) and has_ids:
        sources = (
            f"up to {num_rows:,} rows a measurement (batches like the first, each run once: "
            f"{expected.num_batches:,}), {sources}"
        )
    sentences = [
        f"{len(geometry.layers)} layers ({listed([layer.name for layer in geometry.layers], 4)}), "
        f"{listed([type(metric).__name__ for metric in made]) or 'metrics by width'}, {schedule}; "
        f"{history}.",
        sources,
        *(metric.compromise for metric in own if metric.compromise),
    ]
    of_types = [key for key in headlines() if any(key in each.keys_of_types for each in own)]
    if of_types and has_types and not has_ids:
        model = measured_model(geometry.model)
        why = "has no embedding table that is called with token ids"
        if len(submodels(model)) > 1:
            why = "has no table inside of its encoder and decoder to tell whose token ids are whose"
        sentences.append(
            f"{listed([term(key).name for key in of_types])} and other values over token types "
            f"will be absent, because {type(model).__name__} {why}. Give token_ids=, a function "
            f"of the batch."
        )
    return sentences


def sources_of_rows(geometry: Geometry, *, has_ids: bool, ids: bool, mask: bool) -> tuple[str, str]:
    """Where token ids and mask come from, which may be given, and what is beside the text."""
    inputs = geometry.inputs
    of_ids = "no token ids"
    paths = {each: name for name, each in measured_model(geometry.model).named_modules()}
    towers = [name for each, name in paths.items() if each in inputs.other_towers]
    outer = [name for name in towers if name.rpartition(".")[0] not in towers]
    if has_ids:
        tables = listed([paths[table] for table in inputs.tables], 2) or "the batch"
        of_ids = f"token ids of {'token_ids=' if ids else tables}"
    calls = (signature(module.forward).parameters for module in inputs.enclosing_modules)
    of_mask = "mask of mask=" if mask else "no mask"
    if not mask and any(READ_MASKS & call.keys() for call in calls):
        of_mask = "the model's mask where it is given one"
    if outer:
        of_ids += f" ({listed(outer, 2)} beside the text: not measured)"
    return of_ids, of_mask


def missing_for_history() -> str:
    """Name what the history file needs that is not installed, with the command that installs it;
    empty if nothing.
    """
    try:
        require_extra("report", "history.parquet", "pandas", "pyarrow")
    except ImportError as missing:
        return str(missing)
    return ""


def memory_sentences(memory: Memory, budget: int, bounded: Mapping[str, bool]) -> list[str]:
    """Sentences on the memory that a monitor takes, and on what it does without, arguments of
    `embedgeo.default_metrics`, to stay within its budget.
    """
    host = f", and {size(memory.on_host)} of the host for sampled rows" if memory.on_host else ""
    sentences = [
        f"It takes at most {size(memory.peak)} of the device beside the model{host}; max_bytes= is "
        f"{size(budget)}."
    ]
    if "scatter" in bounded:
        sentences.append(
            "The scatters of all layers would take more: Anisotropy is that of a sample."
        )
    if "type_tables" in bounded:
        sentences.append(
            "Token tables would take more: EmbeddingMoments is in place of TokenMoments, V_W is "
            "estimated from a sample of the rows, and other values over token types are absent."
        )
    if memory.peak > budget:
        sentences.append(
            "That is more: choose fewer layers=, other metrics= or no jackknife=, or raise it."
        )
    return sentences


def expected_rows(
    window: int,
    probe: Iterable[Any] | None,
    batch: Any,
    unit: RowUnit,
    ranks: int,
    default: tuple[int, int] = UNKNOWN_SHAPE,
) -> ExpectedRows:
    """Number of rows of a measurement, at most.

    They are those of a window of so many training batches like this one, or of the batches of a
    probe, which the ranks share. ``default`` is the shape of batches that do not tell theirs.
    """
    num_batches = window * ranks
    if probe is not None:
        num_batches = length_hint(probe, 1)
        batch = probe[0] if isinstance(probe, Sequence) and probe else None
        default = getattr(probe, "batch_size", None) or default[0], default[1]
    shape = _shape(batch)
    batch_size, seq_len = shape or default
    in_batch = batch_size * (seq_len if unit in ("tokens", "words") else 1)
    on_rank = -(-num_batches // ranks) * in_batch
    num_rows = num_batches * in_batch if shape else 0
    return ExpectedRows(num_batches, on_rank, num_rows)


def _shape(batch: Any) -> Size | None:
    """Sequences and tokens of a batch: the shape of its largest matrix of integers, if any."""
    parts = batch if isinstance(batch, list | tuple) else [batch]
    shapes = [
        each.shape
        for each in (batch.values() if isinstance(batch, Mapping) else parts)
        if isinstance(each, Tensor) and each.ndim == 2 and not each.is_floating_point()
    ]
    return max(shapes, key=prod, default=None)
