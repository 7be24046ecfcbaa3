"""MLflow: pictures with a slider over their steps, the explanation as an artifact."""

import re
import sys
from io import BytesIO
from typing import Any

from lightning.pytorch.loggers import MLFlowLogger

from embedgeo.training.loggers.base import Adapter, Picture, is_instance


class MLflow(Adapter):
    """Writes to a run by an ``MlflowClient``."""

    def __init__(self, client: Any, run_id: str | None) -> None:
        self._client = client
        self._run_id = run_id

    def write_text(self, tag: str, markdown: str, step: int) -> None:
        """Write a Markdown file among the artifacts."""
        self._client.log_text(self._run_id, markdown, f"{_key(tag)}.md")

    def write_image(self, tag: str, picture: Picture, step: int) -> None:
        """Write it in colours that are not of a palette, of which MLflow's thumbnails would leave out pixels."""
        from PIL import Image

        image = Image.open(BytesIO(picture[0])).convert("RGB")
        self._client.log_image(self._run_id, image, key=_key(tag), step=step)


def adapter(logger: object) -> Adapter | None:
    """Of Lightning's logger; of the module ``mlflow`` or the Hugging Face Trainer's callback, where a run is active."""
    if isinstance(logger, MLFlowLogger):
        return MLflow(logger.experiment, logger.run_id)
    mlflow: Any = sys.modules.get("mlflow")
    if is_instance(logger, "transformers.integrations.integration_utils", "MLflowCallback") or logger is mlflow:
        run = mlflow and mlflow.active_run()
        return MLflow(mlflow.MlflowClient(), run.info.run_id) if run else None
    return None


def _key(tag: str) -> str:
    """The tag without the characters that MLflow refuses in the name of an image.

    >>> _key("geometry.shares/M, V_W, V_B")
    'geometry.shares/M V_W V_B'
    """
    return re.sub(r"[^a-zA-Z0-9_\-./ ]", "", tag)
