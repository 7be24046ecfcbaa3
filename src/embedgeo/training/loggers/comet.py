"""Comet: pictures on the Graphics tab, the explanation on the Text tab."""

import sys
from io import BytesIO
from typing import Any

from lightning.pytorch.loggers import CometLogger

from embedgeo.training.loggers.base import Adapter, Picture, is_instance


def adapter(logger: object) -> Adapter | None:
    """The adapter of Lightning's logger, of an experiment and of the Hugging Face Trainer's callback."""
    if isinstance(logger, CometLogger) or is_instance(logger, "comet_ml", "CometExperiment"):
        return _Comet(logger)
    is_running = is_instance(logger, "transformers.integrations.integration_utils", "CometCallback")
    return _Comet(None) if is_running else None


class _Comet(Adapter):
    """A Comet experiment: the one that was given, or Lightning's logger's, otherwise the running one."""

    def __init__(self, logger: object) -> None:
        self._logger = logger

    def write_text(self, tag: str, markdown: str, step: int) -> None:
        if self._experiment is not None:
            self._experiment.log_text(markdown, step=step, metadata={"name": tag})

    def write_image(self, tag: str, picture: Picture, step: int) -> None:
        if self._experiment is not None:
            self._experiment.log_image(BytesIO(picture[0]), name=tag, step=step)

    @property
    def _experiment(self) -> Any:
        """The experiment; None if the Hugging Face Trainer has not started one."""
        if isinstance(self._logger, CometLogger):
            return self._logger.experiment
        return self._logger or sys.modules["comet_ml"].get_running_experiment()
