"""Where a monitor's scalars go in a loop without a trainer, and what is written beside them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from embedgeo.results.schema import StepRecord
from embedgeo.training.loggers import wandb
from embedgeo.training.loggers.page import Page


class Log:
    """What `embedgeo.StepMonitor` is given as its ``log``.

    Args:
        log: a function of the step and the scalars by tag; a ``SummaryWriter``; an object with a method
            ``log_metrics(scalars, step=step)``, such as a Lightning logger, a Comet experiment or the module
            ``mlflow``; one with a method ``log(scalars, step=step)``, such as a run of Trackio; a run of Weights &
            Biases; or None.
        prefix: the monitor's.
        on_error: the monitor's.

    Attributes:
        write_scalars: called with a step and the scalars measured at it.
        folder: where the log writes on this machine; None if that is unknown.

    Raises:
        TypeError: ``log`` is something else.
    """

    def __init__(self, log: Any, prefix: str, on_error: Literal["warn", "raise"]) -> None:
        self.write_scalars = wandb.scalar_writer(log, prefix) or _scalar_writer(log)
        getattr(log, "experiment", None)  # has Lightning's make its folder now, which must be empty then
        self.folder = logger_folder([] if log is None else [log])
        self._log = log
        self._page = Page(prefix, on_error=on_error)

    def write_page(self, history: Sequence[StepRecord], *, last: bool = False) -> None:
        """Write charts, images and text, if the log takes them: see `embedgeo.training.loggers.page.Page.write`."""
        self._page.write([self._log], history, last=last)


def logger_folder(loggers: Iterable[Any]) -> Path | None:
    """The folder on this machine in which the first logger or ``SummaryWriter`` writes, if it has one."""
    for logger in loggers:
        for folder in (getattr(logger, "log_dir", None), getattr(logger, "save_dir", None)):
            if isinstance(folder, str | Path) and "://" not in str(folder):
                return Path(folder)
        return None
    return None


def _scalar_writer(log: Any) -> Callable[[int, Mapping[str, float]], object]:
    if log is None:
        return lambda step, scalars: None
    if callable(getattr(log, "log_metrics", None)):
        return lambda step, scalars: log.log_metrics(dict(scalars), step=step)
    if callable(getattr(log, "add_scalar", None)):
        return lambda step, scalars: [log.add_scalar(tag, value, step) for tag, value in scalars.items()]
    if callable(getattr(log, "log", None)):
        return lambda step, scalars: log.log(scalars, step=step)
    if callable(log):
        return log
    raise TypeError(
        "log must be a function (step, {tag: value}), a SummaryWriter, a Lightning logger or an object with a method "
        "log(values, step=step) or log_metrics(values, step=step), as a wandb run or the module mlflow; "
        f"got {type(log).__name__}."
    )
