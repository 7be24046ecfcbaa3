"""Adapters of tracking services: Aim, Comet, MLflow, Trackio."""

import re
import sys
from io import BytesIO
from typing import Any

from lightning.pytorch.loggers import CometLogger, MLFlowLogger

from embedgeo.training.loggers.base import HF_CALLBACKS, Adapter, Picture, is_instance, png_file


class Aim(Adapter):
    """Pictures and the explanation among the images and texts of a run."""

    def __init__(self, run: Any) -> None:
        self._run = run

    @classmethod
    def of(cls, logger: Any) -> "Aim | None":
        kinds = ("pytorch_lightning", "AimLogger"), ("hugging_face", "AimCallback")
        is_aim = any(is_instance(logger, f"aim.sdk.adapters.{module}", name) for module, name in kinds)
        return cls(logger.experiment) if is_aim else None

    def write_text(self, tag: str, markdown: str, step: int) -> None:
        self._run.track(sys.modules["aim"].Text(markdown), name=tag, step=step)

    def write_image(self, tag: str, picture: Picture, step: int) -> None:
        from PIL import Image

        image = sys.modules["aim"].Image(Image.open(BytesIO(picture[0])))
        self._run.track(image, name=tag, step=step)


class Comet(Adapter):
    """Pictures, and the explanation as a text without a name, in a ``CometExperiment``, online or offline."""

    def __init__(self, experiment: Any) -> None:
        self._experiment = experiment

    @classmethod
    def of(cls, logger: Any) -> "Comet | None":
        experiment: Any = None
        if isinstance(logger, CometLogger):
            experiment = logger.experiment
        elif is_instance(logger, "comet_ml", "CometExperiment"):
            experiment = logger
        elif is_instance(logger, HF_CALLBACKS, "CometCallback"):
            experiment = sys.modules["comet_ml"].get_running_experiment()
        return None if experiment is None else cls(experiment)

    def write_text(self, tag: str, markdown: str, step: int) -> None:
        self._experiment.log_text(markdown, step=step, metadata={"name": tag})

    def write_image(self, tag: str, picture: Picture, step: int) -> None:
        self._experiment.log_image(BytesIO(picture[0]), name=tag, step=step)


class MLflow(Adapter):
    """Pictures, and the explanation as a Markdown file, among the artifacts of a run."""

    def __init__(self, client: Any, run_id: str | None) -> None:
        self._client = client
        self._run_id = run_id

    @classmethod
    def of(cls, logger: Any) -> "MLflow | None":
        if isinstance(logger, MLFlowLogger):
            return cls(logger.experiment, logger.run_id)
        mlflow: Any = sys.modules.get("mlflow")
        if mlflow is None or not (logger is mlflow or is_instance(logger, HF_CALLBACKS, "MLflowCallback")):
            return None
        run = mlflow.active_run()
        return cls(mlflow.MlflowClient(), run.info.run_id) if run else None

    def write_text(self, tag: str, markdown: str, step: int) -> None:
        self._client.log_text(self._run_id, markdown, f"{_artifact_name(tag)}.md")

    def write_image(self, tag: str, picture: Picture, step: int) -> None:
        from PIL import Image

        image = Image.open(BytesIO(picture[0])).convert("RGB")  # of a palette, thumbnails would leave out pixels
        self._client.log_image(self._run_id, image, key=_artifact_name(tag), step=step)


def _artifact_name(tag: str) -> str:
    return re.sub(r"[^a-zA-Z0-9_\-./ ]", "", tag)  # MLflow refuses the others in the name of an image


class Trackio(Adapter):
    """Pictures, and the explanation as Markdown, in a run.

    With ``counts_logs`` its steps are the number of times that something was logged, as with the Hugging Face Trainer:
    what is written then has the step of the scalars before it, and the caption the step of training.
    """

    def __init__(self, run: Any, *, counts_logs: bool = False) -> None:
        self._run = run
        self._counts_logs = counts_logs

    @classmethod
    def of(cls, logger: Any) -> "Trackio | None":
        if is_instance(logger, "trackio", "Run"):
            return cls(logger)
        trackio: Any = sys.modules.get("trackio")
        counts_logs = is_instance(logger, HF_CALLBACKS, "TrackioCallback")
        if trackio is None or not (counts_logs or logger is trackio):
            return None
        run = trackio.context_vars.current_run.get()
        return cls(run, counts_logs=counts_logs) if run else None

    def write_text(self, tag: str, markdown: str, step: int) -> None:
        self._log(tag, sys.modules["trackio"].Markdown(markdown), step)

    def write_image(self, tag: str, picture: Picture, step: int) -> None:
        with png_file(picture) as path:
            self._log(tag, sys.modules["trackio"].Image(path, caption=f"step {step}"), step)

    def _log(self, tag: str, value: object, step: int) -> None:
        if self._counts_logs:
            step = getattr(self._run, "_next_step", step + 1) - 1  # without a step, Trackio would count this, too
        self._run.log({tag: value}, step=step)
