"""Aim: pictures and the explanation among the images and texts of a run."""

import re
import sys
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from lightning.pytorch.loggers import CometLogger, MLFlowLogger

from embedgeo.training.loggers.base import Adapter, Picture, is_instance


class Aim(Adapter):
    """Writes to the run of one of Aim's own loggers."""

    def __init__(self, run: Any) -> None:
        self._run = run

    def write_text(self, tag: str, markdown: str, step: int) -> None:
        """Write it as a text."""
        self._run.track(sys.modules["aim"].Text(markdown), name=tag, step=step)

    def write_image(self, tag: str, picture: Picture, step: int) -> None:
        """Write it as an image, which Aim encodes again."""
        from PIL import Image

        image = sys.modules["aim"].Image(Image.open(BytesIO(picture[0])))
        self._run.track(image, name=tag, step=step)


def aim_adapter(logger: Any) -> Adapter | None:
    """Of Aim's logger for Lightning and its callback for the Hugging Face Trainer."""
    ours = ("pytorch_lightning", "AimLogger"), ("hugging_face", "AimCallback")
    if any(is_instance(logger, f"aim.sdk.adapters.{module}", name) for module, name in ours):
        return Aim(logger.experiment)
    return None


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


def comet_adapter(logger: object) -> Adapter | None:
    """Of Lightning's logger, an experiment, or the Hugging Face Trainer's callback where one is running."""
    if isinstance(logger, CometLogger):
        return Comet(logger.experiment)
    if is_instance(logger, "comet_ml", "CometExperiment"):
        return Comet(logger)
    if is_instance(logger, "transformers.integrations.integration_utils", "CometCallback"):
        experiment = sys.modules["comet_ml"].get_running_experiment()
        return Comet(experiment) if experiment else None
    return None


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


def mlflow_adapter(logger: object) -> Adapter | None:
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


class Trackio(Adapter):
    """Writes to a run.

    Args:
        run: the run.
        counts_logs: whether its steps are the number of times that something was logged, as with the Hugging Face
            Trainer: what is written then has the step of the scalars before it, and the caption the step of training.
    """

    def __init__(self, run: Any, *, counts_logs: bool = False) -> None:
        self._run = run
        self._counts_logs = counts_logs

    def write_text(self, tag: str, markdown: str, step: int) -> None:
        """Write it as Markdown."""
        self._log(tag, sys.modules["trackio"].Markdown(markdown), step)

    def write_image(self, tag: str, picture: Picture, step: int) -> None:
        """Write the PNG as it is, from a file: Trackio would encode a picture in memory again."""
        with TemporaryDirectory() as folder:
            path = Path(folder) / "picture.png"
            path.write_bytes(picture[0])
            self._log(tag, sys.modules["trackio"].Image(path, caption=f"step {step}"), step)

    def _log(self, tag: str, value: object, step: int) -> None:
        if self._counts_logs:
            step = getattr(self._run, "_next_step", step + 1) - 1  # without a step, Trackio would count this, too
        self._run.log({tag: value}, step=step)


def trackio_adapter(logger: object) -> Adapter | None:
    """Of a run; of the module ``trackio`` or the Hugging Face Trainer's callback, where there is a current run."""
    if is_instance(logger, "trackio", "Run"):
        return Trackio(logger)
    trackio: Any = sys.modules.get("trackio")
    counts_logs = is_instance(logger, "transformers.integrations.integration_utils", "TrackioCallback")
    if counts_logs or logger is trackio:
        run = trackio and trackio.context_vars.current_run.get()
        return Trackio(run, counts_logs=counts_logs) if run else None
    return None
