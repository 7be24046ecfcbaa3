"""What loggers are given beside scalars: charts, text and pictures.

There is one module a logger. Its function ``adapter`` returns the `Adapter` of an object that is its logger's, and None
for any other one, which it recognizes without importing the logger's package.
"""

from collections.abc import Iterable

from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only

from embedgeo.training.loggers import aim, comet, csv, mlflow, tensorboard, trackio, wandb
from embedgeo.training.loggers.base import Adapter, Charts, Picture

__all__ = ["Adapter", "Charts", "Picture", "adapters"]

_LOGGERS = (tensorboard, wandb, csv, mlflow, comet, trackio, aim)


def adapters(loggers: Iterable[object]) -> list[Adapter]:
    """The adapters of the loggers that take more than scalars; Lightning's own do on rank zero alone.

    Args:
        loggers: Lightning's, callbacks of a Hugging Face Trainer, or what `embedgeo.StepMonitor` is given as ``log``.
    """
    here = (logger for logger in loggers if not (isinstance(logger, Logger) and getattr(rank_zero_only, "rank", None)))
    found = (module.adapter(logger) for logger in here for module in _LOGGERS)
    return [adapter for adapter in found if adapter is not None]
