"""Comet: pictures on the Graphics tab, the explanation on the Text tab."""

import sys
from io import BytesIO
from typing import Any

from lightning.pytorch.loggers import CometLogger

from embedgeo.training.loggers.base import Adapter, Picture


def adapter(logger: object) -> Adapter | None:
    """The adapter of Lightning's logger, of an experiment and of the Hugging Face Trainer's callback."""
    callback = getattr(sys.modules.get("transformers.integrations.integration_utils"), "CometCallback", ())
    experiment = getattr(sys.modules.get("comet_ml"), "CometExperiment", ())
    return _Comet(logger) if isinstance(logger, (CometLogger, experiment, callback)) else None


class _Comet(Adapter):
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
        comet_ml: Any = sys.modules["comet_ml"]
        if isinstance(self._logger, CometLogger):
            return self._logger.experiment
        if isinstance(self._logger, comet_ml.CometExperiment):
            return self._logger
        return comet_ml.get_running_experiment()
