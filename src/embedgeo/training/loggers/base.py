"""What a logger is given beside scalars: the interface of its adapter."""

import sys
from collections.abc import Sequence
from typing import NamedTuple

from embedgeo.results.records import Record

Picture = tuple[bytes, int, int]
"""A PNG, its width and height."""


class Charts(NamedTuple):
    """The charts of a monitor: one for each metric, with a line for each layer.

    Attributes:
        prefix: the monitor's.
        metrics: their keys.
        tag_start: what the trainer puts in front of the tags of scalars: ``"train/"`` in the Hugging Face Trainer.
        is_due: whether this measurement is one at which all pictures are drawn, as the first, second, fourth, eighth …
            and the end are: the time to write again what holds the whole history.
    """

    prefix: str
    metrics: Sequence[str]
    tag_start: str = ""
    is_due: bool = True


class Adapter:
    """How one logger is given what it shows beside scalars; a method that is not overridden does nothing.

    It belongs to one monitor in one run, and is called on the rank that writes. Pictures are drawn if some adapter
    overrides `write_image`. An error of a method ends the adapter's work, not the monitor's.
    """

    def write_charts(self, charts: Charts, history: Sequence[Record]) -> None:
        """Called after each measurement, before text and images, and once more at the end.

        Args:
            charts: what to draw.
            history: all records of this run, of this monitor; at the end there may be none that are new.
        """

    def write_text(self, tag: str, markdown: str, step: int) -> None:
        """Called once, at the first measurement: the explanation of the metrics."""

    def write_image(self, tag: str, picture: Picture, step: int) -> None:
        """Called with each picture when it is drawn: a PNG, its width and height."""


def is_instance(logger: object, module: str, name: str) -> bool:
    """Whether the logger is an instance of a class, of a module that is not imported for this.

    >>> is_instance(1.5, "builtins", "float"), is_instance(1.5, "not.imported", "Run")
    (True, False)
    """
    kind = getattr(sys.modules.get(module), name, None)
    return isinstance(kind, type) and isinstance(logger, kind)
