"""Aim: pictures and the explanation among the images and texts of a run."""

import sys
from io import BytesIO
from typing import Any

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


def adapter(logger: Any) -> Adapter | None:
    """Of Aim's logger for Lightning and its callback for the Hugging Face Trainer."""
    ours = ("pytorch_lightning", "AimLogger"), ("hugging_face", "AimCallback")
    if any(is_instance(logger, f"aim.sdk.adapters.{module}", name) for module, name in ours):
        return Aim(logger.experiment)
    return None
