"""Interface of the adapters of loggers: charts, text and pictures beside scalars."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar, NamedTuple

from embedgeo.results.records import Record

HF_CALLBACKS = "transformers.integrations.integration_utils"
"""Module of the callbacks by which the Hugging Face Trainer logs."""

Picture = tuple[bytes, int, int]
"""A PNG, its width and height."""


class Charts(NamedTuple):
    """The charts of a monitor: one for each metric, with a line for each layer."""

    prefix: str  # the monitor's
    metrics: Sequence[str]  # their keys
    tag_start: str = ""  # in front of the tags of scalars: "train/" in the Hugging Face Trainer
    is_due: bool = True  # all pictures are drawn now: the time to write again what holds the whole history


class Adapter:
    """A logger as the place of charts, text and pictures; a method that is not overridden does nothing.

    It belongs to one monitor in one run, and is called on the rank that writes. An error of a method ends the adapter's
    work, not the monitor's.
    """

    takes_pictures: ClassVar[bool] = True  # none are drawn where no adapter takes any

    @classmethod
    def of(cls, logger: Any) -> "Adapter | None":
        """The adapter of a logger; None for another object. The logger's package is not imported for this."""
        return logger if isinstance(logger, Adapter) else None

    def write_charts(self, charts: Charts, history: Sequence[Record]) -> None:
        """Draw or update charts, after each measurement and once more at the end, of all records of this run."""

    def write_text(self, tag: str, markdown: str, step: int) -> None:
        """Write the explanation of the metrics, once, at the first measurement."""

    def write_image(self, tag: str, picture: Picture, step: int) -> None:
        """Write a picture when it is drawn."""


def is_instance(logger: object, module: str, name: str) -> bool:
    """Test a logger for a class of a module that is not imported for this."""
    kind = getattr(sys.modules.get(module), name, None)
    return isinstance(kind, type) and isinstance(logger, kind)


@contextmanager
def png_file(picture: Picture) -> Iterator[Path]:
    """Context of a file with the picture as it is: loggers encode an image in memory again."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "picture.png"
        path.write_bytes(picture[0])
        yield path
