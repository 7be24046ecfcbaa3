"""Charts and pictures for loggers, beside scalars."""

import glob
import math
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

from lightning.pytorch.loggers import (
    Logger,
    TensorBoardLogger,
    WandbLogger,
)
from lightning.pytorch.utilities import rank_zero_info, rank_zero_only

from embedgeo.extras import require_extra
from embedgeo.formatting import reason
from embedgeo.glossary import in_order
from embedgeo.results.events import Scalars, custom_scalars_layout, is_logged, layout_summary
from embedgeo.results.records import Record

if TYPE_CHECKING:
    from embedgeo.drawing import Png

_HF_CALLBACKS = "transformers.integrations.integration_utils"


@dataclass
class Illustrations:
    """The charts and the pictures of one monitor in one run.

    Charts are laid out, where there are new ones, and pictures are written at the first
    measurement, whenever there are twice as many, and at the last.

    A logger that fails gets nothing more beside scalars, with one warning; where drawing fails no
    logger gets pictures.
    """

    prefix: str  # the monitor's
    tag_start: str = ""  # in front of the tags of scalars
    on_error: Literal["warn", "raise"] = "warn"
    pictures: bool = True  # are drawn
    scalars: Scalars = "headlines"  # that loggers get
    _adapters: list["TensorBoard | Wandb"] = field(default_factory=list, init=False)
    _charted: Sequence[str] = ()  # metrics
    _num_measurements = 0
    _num_drawn = 0  # records

    def write(
        self,
        loggers: Iterable[object],
        history: Sequence[Record],
        earlier: Callable[[], Sequence[Record]] = tuple,
        *,
        last: bool = False,
    ) -> None:
        """Write what is new: after each measurement, and once more after the ``last`` one.

        ``earlier`` gives the records of the run that this one goes on with.
        """
        if not history:
            return
        step = history[-1]["step"]
        if not self._num_measurements:
            self._begin(loggers)
        self._num_measurements += not last
        # after 1, 2, 4, 8 … measurements
        is_due = last or self._num_measurements.bit_count() == 1
        if self._adapters and is_due and self._num_drawn < len(history):
            self._num_drawn = len(history)
            self._lay_out(history)
            self._draw([*before, *history] if (before := earlier()) else history, step)

    def _begin(self, loggers: Iterable[object]) -> None:
        for logger in loggers:
            try:
                self._adapters += filter(None, [adapter_of(logger, self.prefix)])
            except Exception as error:
                self._warn(f"{type(logger).__name__} gets", error)

    def _lay_out(self, history: Sequence[Record]) -> None:
        """Lay out the charts."""
        logged = (record for record in history if is_logged(record, self.scalars))
        metrics = in_order(record["metric"] for record in logged)
        if metrics != self._charted:
            self._charted = metrics
            self._write_to_all("write_charts", self.prefix, metrics, self.tag_start)

    def _draw(self, history: Sequence[Record], step: int) -> None:
        """Write pictures."""
        if not self.pictures:
            return
        try:
            require_extra("report", "drawing them")
            from embedgeo.report import live

            drawn = [*live.draw_pictures(history, self.prefix)]
        except ImportError as error:
            self.pictures = False
            rank_zero_info(f"Loggers get no pictures of {self.prefix}: {error}")
        except Exception as error:
            self.pictures = False
            self._warn("loggers get", error)
        else:
            for tag, picture in drawn:
                self._write_to_all("write_image", tag, picture, step)

    def _write_to_all(self, method: str, *arguments: Any) -> None:
        for adapter in tuple(self._adapters):
            try:
                getattr(adapter, method)(*arguments)
            except Exception as error:
                self._adapters.remove(adapter)
                self._warn(f"{type(adapter).__name__.lower()} gets", error)

    def _warn(self, who_gets: str, error: Exception) -> None:
        if self.on_error == "raise":
            raise error
        rule = (
            f"{who_gets} no more charts and pictures of {self.prefix}; scalars and training go on"
        )
        warnings.warn(f"{rule}: {reason(error)}", stacklevel=2)


class TensorBoard:
    """The custom-scalars and image tabs of a ``SummaryWriter``. ``start`` is what its logger puts
    in front of the tags of scalars.
    """

    def __init__(self, writer: Any, start: str) -> None:
        self._writer = writer
        self._start = start

    def write_charts(self, prefix: str, metrics: Sequence[str], tag_start: str) -> None:
        layout = custom_scalars_layout(metrics, prefix, self._start + tag_start)
        self._writer.flush()
        self._add(layout_summary(layout, self._writer.log_dir))

    def write_image(self, tag: str, picture: "Png", step: int) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        # `SummaryWriter.add_image` would decode, resize and encode it again
        png, width, height = picture
        image = Summary.Image(height=height, width=width, colorspace=3, encoded_image_string=png)
        self._add(Summary(value=[Summary.Value(tag=tag, image=image)]), step)

    def _add(self, *summary: Any) -> None:
        # a writer that another fit has closed begins a new file
        self._writer._get_file_writer().add_summary(*summary)  # noqa: SLF001


class Wandb:
    """Writes into the row that a run has open, which the next scalars end; the axis is the key of
    steps.
    """

    def __init__(self, run: Any, axis: str) -> None:
        self._log = partial(_log_in_open_row, run, axis)
        self._run = run
        self._axis = axis

    def write_charts(self, prefix: str, metrics: Sequence[str], tag_start: str) -> None:
        self._run.define_metric(f"{tag_start}{prefix}.*", step_metric=self._axis)

    def write_image(self, tag: str, picture: "Png", step: int) -> None:
        with TemporaryDirectory() as folder:  # of another thing than a file it makes a new one
            path = Path(folder) / "picture.png"
            path.write_bytes(picture[0])
            self._log(step, {tag: sys.modules["wandb"].Image(str(path))})


def wandb_scalar_writer(
    log: Any, prefix: str
) -> Callable[[int, Mapping[str, float]], object] | None:
    """A function that writes scalars, at a step, to a run or to ``wandb`` itself; None for another
    log.

    The counter of steps of a run only goes forward, and what is logged at one that is over is lost.
    So the step is a value, ``{prefix}/step``, and the axis, and a measurement goes into the row
    that the loop has open. It replaces one that is in it already, with one warning.
    """
    if not _is_wandb(log) and _wandb_run(log) is None:
        return None
    last_row: int | None = None
    in_row: Mapping[str, float] = {}
    has_warned = False

    def write(step: int, scalars: Mapping[str, float]) -> None:
        nonlocal last_row, in_row, has_warned
        run = _wandb_run(log)
        if run is None or run.disabled:
            return
        if last_row is None:
            run.define_metric(_wandb_axis(prefix), hidden=True)
            run.define_metric(f"{prefix}.*", step_metric=_wandb_axis(prefix))
        if run.step == last_row:
            scalars = {**dict.fromkeys(in_row, math.nan), **scalars}
            if not has_warned:
                has_warned = True
                warnings.warn(
                    f"W&B has one measurement in each row of run.log; that of step {step} replaces "
                    "the one before in W&B, as others will. monitor.history and its file have all. "
                    "Call run.log, at least run.log({}), after each measured step.",
                    stacklevel=2,
                )
        last_row = run.step
        in_row = scalars
        _log_in_open_row(run, _wandb_axis(prefix), step, scalars)

    return write


def _is_wandb(log: object) -> bool:
    return log is not None and log is sys.modules.get("wandb")


def _wandb_run(log: Any) -> Any:
    """The run that a log is, or that ``wandb`` has now, if any."""
    if _is_wandb(log):
        return log.run
    return log if _is_instance(log, "wandb.sdk.wandb_run", "Run") else None


def _wandb_axis(prefix: str) -> str:
    return prefix.replace(".", "_") + "/step"  # a dot would be read as a path


def _log_in_open_row(run: Any, axis: str, step: int, values: Mapping[str, Any]) -> None:
    run.log({**values, axis: step}, commit=False)


def adapter_of(logger: Any, prefix: str) -> TensorBoard | Wandb | None:
    """The adapter of a logger that takes more than scalars, None of others; Lightning's own have
    one on rank zero alone. No logger's package is imported for this.
    """
    if isinstance(logger, Logger) and getattr(rank_zero_only, "rank", None):
        return None
    writer = _summary_writer(logger)
    start = getattr(logger, "_prefix", "") and f"{logger._prefix}-"  # noqa: SLF001
    return _wandb_adapter(logger, prefix) if writer is None else TensorBoard(writer, start)


def _summary_writer(logger: Any) -> Any:
    if isinstance(logger, TensorBoardLogger):
        return logger.experiment
    if _is_instance(logger, _HF_CALLBACKS, "TensorBoardCallback"):
        return logger.tb_writer
    return (
        logger if _is_instance(logger, "torch.utils.tensorboard.writer", "SummaryWriter") else None
    )


def _wandb_adapter(logger: Any, prefix: str) -> Wandb | None:
    run = _wandb_run(logger)
    axis = _wandb_axis(prefix)
    if isinstance(logger, WandbLogger):
        run = logger.experiment
        axis = "trainer/global_step"
    elif _is_instance(logger, _HF_CALLBACKS, "WandbCallback"):
        run = sys.modules["wandb"].run
        axis = "train/global_step"
    return run and Wandb(run, axis)


def _is_instance(logger: object, module: str, name: str) -> bool:
    """Test a logger for a class of a module that is not imported for this."""
    kind = getattr(sys.modules.get(module), name, None)
    return isinstance(kind, type) and isinstance(logger, kind)


def logger_folder(loggers: Iterable[Any]) -> Path | None:
    """The folder on this machine in which the first logger or ``SummaryWriter`` writes, if it has
    one: its run's own.

    Of Weights & Biases it is the directory in which the run began, also where another process goes
    on with it.
    """
    first = next(iter(loggers), None)
    folders = [getattr(first, "log_dir", None), getattr(first, "save_dir", None)]
    with suppress(Exception):  # of a server that does not answer, or another rank's logger
        run = _wandb_run(first.experiment if isinstance(first, WandbLogger) else first)
        if run is not None and not run.disabled:
            own = Path(run.dir)
            every = [own.parent, *own.parent.parent.glob(f"*run-*-{glob.escape(run.id)}")]
            began = min(every, key=lambda path: path.name.removeprefix("offline-"))
            return began / own.name
    local = (
        Path(each)
        for each in folders
        if isinstance(each, str | Path) and not urlsplit(str(each)).scheme
    )
    return next(local, None)
