"""Aim: pictures and the explanation among the images and texts of a run."""

import sys
from io import BytesIO
from typing import Any

from embedgeo.training.loggers.base import Adapter, Picture, is_instance


def adapter(logger: object) -> Adapter | None:
    """The adapter of Aim's own logger for Lightning and of its callback for the Hugging Face Trainer."""
    ours = ("pytorch_lightning", "AimLogger"), ("hugging_face", "AimCallback")
    is_ours = any(is_instance(logger, f"aim.sdk.adapters.{module}", name) for module, name in ours)
    return _Aim(logger) if is_ours else None


class _Aim(Adapter):
    def __init__(self, logger: Any) -> None:
        self._logger = logger

    def write_text(self, tag: str, markdown: str, step: int) -> None:
        self._logger.experiment.track(sys.modules["aim"].Text(markdown), name=tag, step=step)

    def write_image(self, tag: str, picture: Picture, step: int) -> None:
        from PIL import Image

        image = sys.modules["aim"].Image(Image.open(BytesIO(picture[0])))
        self._logger.experiment.track(image, name=tag, step=step)
