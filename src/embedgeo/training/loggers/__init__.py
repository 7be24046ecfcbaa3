"""Charts, an explanation and pictures for loggers, beside scalars."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import methodcaller
from typing import TYPE_CHECKING, Literal

from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_info, rank_zero_only

from embedgeo.extras import require_extra
from embedgeo.formatting import reason
from embedgeo.glossary import in_order, term
from embedgeo.results.records import Record
from embedgeo.training.loggers.adapters import Adapter, Aim, Charts, Comet, Csv, MLflow, Picture, TensorBoard, Trackio
from embedgeo.training.loggers.wandb import Wandb

if TYPE_CHECKING:
    from embedgeo.report.live import LivePictures

_ADAPTERS: tuple[type[Adapter], ...] = (Adapter, TensorBoard, Wandb, Csv, MLflow, Comet, Trackio, Aim)


def adapters(loggers: Iterable[object]) -> list[Adapter]:
    """The adapters of the loggers that take more than scalars; Lightning's own do on rank zero alone."""
    here = (logger for logger in loggers if not (isinstance(logger, Logger) and getattr(rank_zero_only, "rank", None)))
    found = (kind.of(logger) for logger in here for kind in _ADAPTERS)
    return [adapter for adapter in found if adapter is not None]


class Media:
    """The charts, the text and the pictures of one monitor in one run.

    A text that explains each metric is written at the first measurement. Pictures are drawn at the first, second,
    fourth, eighth … measurement and at the last, and some of them more often: see `embedgeo.report.live.LivePictures`.
    A logger that fails gets nothing more beside scalars, with one warning; where drawing fails no logger gets pictures.
    ``num_earlier`` records in the monitor's history are of other runs; ``tag_start`` is as in `Charts`.
    """

    def __init__(
        self, prefix: str, num_earlier: int = 0, tag_start: str = "", on_error: Literal["warn", "raise"] = "warn"
    ) -> None:
        self._prefix = prefix
        self._num_earlier = num_earlier
        self._tag_start = tag_start
        self._on_error = on_error
        self._metrics: list[str] = []
        self._num_measurements = 0
        self._adapters: list[Adapter] | None = None
        self._pictures: LivePictures | None = None
        self._can_draw = True

    def write(self, loggers: Iterable[object], history: Sequence[Record], *, last: bool = False) -> None:
        """Write what is new: after each measurement, and once more after the ``last`` one."""
        history = history[self._num_earlier :]
        if history and self._adapters is None:
            self._adapters = list(self._found(loggers))
        if not history or not self._adapters:
            return
        step = history[-1]["step"]
        self._num_measurements += not last
        is_due = last or self._num_measurements.bit_count() == 1
        is_first = not self._metrics
        if is_first:
            self._metrics = in_order(record["metric"] for record in history)
        charts = Charts(self._prefix, self._metrics, self._tag_start, is_due)
        self._give(methodcaller("write_charts", charts, history))
        if is_first:
            text = "\n".join(_explanation(self._metrics))
            self._give(methodcaller("write_text", f"{self._prefix}/what the numbers mean", text, step))
        if self._can_draw and any(adapter.takes_pictures for adapter in self._adapters):
            for tag, picture in self._drawn(history, is_due):
                self._give(methodcaller("write_image", tag, picture, step))

    def _found(self, loggers: Iterable[object]) -> Iterator[Adapter]:
        for logger in loggers:
            try:
                yield from adapters([logger])
            except Exception as error:
                self._warn(f"{type(logger).__name__} gets", error)

    def _drawn(self, history: Sequence[Record], is_due: bool) -> Iterator[tuple[str, Picture]]:
        try:
            if self._pictures is None:
                require_extra("report", "drawing them")
                from embedgeo.report.live import LivePictures

                self._pictures = LivePictures(self._prefix)
            yield from self._pictures.draw(history, is_due=is_due)
        except ImportError as error:
            self._can_draw = False
            rank_zero_info(f"Loggers get no pictures of {self._prefix}: {error}")
        except Exception as error:
            self._can_draw = False
            self._warn("loggers get", error, "pictures")

    def _give(self, write: Callable[[Adapter], None]) -> None:
        assert self._adapters is not None
        for adapter in tuple(self._adapters):
            try:
                write(adapter)
            except Exception as error:
                self._adapters.remove(adapter)
                self._warn(f"{type(adapter).__name__.lower()} gets", error)

    def _warn(self, who_gets: str, error: Exception, what: str = "charts, text and pictures") -> None:
        if self._on_error == "raise":
            raise error
        rule = f"{who_gets} no more {what} of {self._prefix}; scalars and training go on"
        warnings.warn(f"{rule}: {reason(error)}", stacklevel=2)


def _explanation(metrics: Iterable[str]) -> Iterator[str]:
    yield "| number | is | unit or estimator | how to read it |"
    yield "|---|---|---|---|"
    for metric in metrics:
        named = term(metric)
        row = (metric, named.name, named.unit, named.meaning)
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |"
    yield ""
    yield (
        "Layers: `embed` is what enters the first block, `block.00` … are the blocks' outputs, `mean` is the mean over "
        "blocks. The step is the number of optimizer steps that the weights have taken. Undefined values (too few "
        "rows, rows that do not vary) are missing in the charts and grey in the heatmaps."
    )
