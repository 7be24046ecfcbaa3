"""MLflow: pictures with a slider over their steps, the explanation as an artifact."""

import re
import sys
from io import BytesIO
from typing import Any

from lightning.pytorch.loggers import MLFlowLogger

from embedgeo.training.loggers.base import Adapter, Picture, is_instance


def adapter(logger: object) -> Adapter | None:
    """The adapter of Lightning's logger, of the module ``mlflow`` and of the Hugging Face Trainer's callback."""
    if isinstance(logger, MLFlowLogger):
        return _MLflow(logger)
    is_active_run = is_instance(logger, "transformers.integrations.integration_utils", "MLflowCallback")
    return _MLflow(None) if is_active_run or logger is sys.modules.get("mlflow", ...) else None


class _MLflow(Adapter):
    """A run of MLflow: that of Lightning's logger, otherwise the active one."""

    def __init__(self, logger: MLFlowLogger | None) -> None:
        self._logger = logger

    def write_text(self, tag: str, markdown: str, step: int) -> None:
        for client, run_id in self._runs():
            client.log_text(run_id, markdown, f"{_key(tag)}.md")

    def write_image(self, tag: str, picture: Picture, step: int) -> None:
        from PIL import Image

        for client, run_id in self._runs():
            image = Image.open(BytesIO(picture[0])).convert("RGB")  # MLflow's thumbnails of a palette skip pixels
            client.log_image(run_id, image, key=_key(tag), step=step)

    def _runs(self) -> list[tuple[Any, str]]:
        """The run and a client for it; none if no run is active, since MLflow would start one."""
        if self._logger is not None:
            assert self._logger.run_id is not None
            return [(self._logger.experiment, self._logger.run_id)]
        mlflow: Any = sys.modules["mlflow"]
        run = mlflow.active_run()
        return [] if run is None else [(mlflow.MlflowClient(), run.info.run_id)]


def _key(tag: str) -> str:
    """The tag without the characters that MLflow refuses in the name of an image.

    >>> _key("geometry.shares/M, V_W, V_B")
    'geometry.shares/M V_W V_B'
    """
    return re.sub(r"[^a-zA-Z0-9_\-./ ]", "", tag)
