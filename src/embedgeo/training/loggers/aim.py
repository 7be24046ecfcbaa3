"""Aim: pictures and the explanation among the images and texts of a run."""

import sys
from io import BytesIO
from typing import Any

from embedgeo.training.loggers.base import Adapter, Picture


def adapter(logger: object) -> Adapter | None:
    """The adapter of Aim's own logger for Lightning and of its callback for the Hugging Face Trainer."""
    lightning = getattr(sys.modules.get("aim.sdk.adapters.pytorch_lightning"), "AimLogger", ())
    hugging_face = getattr(sys.modules.get("aim.sdk.adapters.hugging_face"), "AimCallback", ())
    return _Aim(logger) if isinstance(logger, (lightning, hugging_face)) else None


class _Aim(Adapter):
    def __init__(self, logger: Any) -> None:
        self._logger = logger

    def write_text(self, tag: str, markdown: str, step: int) -> None:
        self._logger.experiment.track(sys.modules["aim"].Text(markdown), name=tag, step=step)

    def write_image(self, tag: str, picture: Picture, step: int) -> None:
        from PIL import Image

        image = sys.modules["aim"].Image(Image.open(BytesIO(picture[0])))
        self._logger.experiment.track(image, name=tag, step=step)
