"""Checkpoints of training runs: where they are, which are the same, and how to load them."""

from embedgeo.checkpoints.files import Contents, StoredFile, duplicates, shared_parts
from embedgeo.checkpoints.sources import Checkpoint, is_local, list_checkpoints
from embedgeo.checkpoints.steps import Position, Steps, parse_position, select_steps

__all__ = [
    "Checkpoint",
    "Contents",
    "Position",
    "Steps",
    "StoredFile",
    "duplicates",
    "is_local",
    "list_checkpoints",
    "parse_position",
    "select_steps",
    "shared_parts",
]
