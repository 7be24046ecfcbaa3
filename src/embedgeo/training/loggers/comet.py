"""Comet: pictures on its Graphics tab, the explanation on its Text tab."""

import sys
from io import BytesIO
from typing import Any

from lightning.pytorch.loggers import CometLogger

from embedgeo.training.loggers.base import Adapter, Picture, is_instance


class Comet(Adapter):
    """Writes to a ``CometExperiment``, online or offline."""

    def __init__(self, experiment: Any) -> None:
        self._experiment = experiment

    def write_text(self, tag: str, markdown: str, step: int) -> None:
        """Write it as a text, which has no name of its own."""
        self._experiment.log_text(markdown, step=step, metadata={"name": tag})

    def write_image(self, tag: str, picture: Picture, step: int) -> None:
        """Write the PNG as it is."""
        self._experiment.log_image(BytesIO(picture[0]), name=tag, step=step)


def adapter(logger: object) -> Adapter | None:
    """Of Lightning's logger, an experiment, or the Hugging Face Trainer's callback where one is running."""
    if isinstance(logger, CometLogger):
        return Comet(logger.experiment)
    if is_instance(logger, "comet_ml", "CometExperiment"):
        return Comet(logger)
    if is_instance(logger, "transformers.integrations.integration_utils", "CometCallback"):
        experiment = sys.modules["comet_ml"].get_running_experiment()
        return Comet(experiment) if experiment else None
    return None
