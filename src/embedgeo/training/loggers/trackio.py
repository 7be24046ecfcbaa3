"""Trackio: pictures on its page of media, the explanation on that of reports."""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from embedgeo.training.loggers.base import Adapter, Picture, is_instance


def adapter(logger: object) -> Adapter | None:
    """The adapter of a run, of the module ``trackio`` and of the Hugging Face Trainer's callback."""
    if is_instance(logger, "trackio", "Run"):
        return _Trackio(logger)
    counts_logs = is_instance(logger, "transformers.integrations.integration_utils", "TrackioCallback")
    return _Trackio(None, counts_logs) if counts_logs or logger is sys.modules.get("trackio", ...) else None


class _Trackio(Adapter):
    """A run of Trackio: the one that was given, otherwise the current one.

    Args:
        run: the run, if it was given.
        counts_logs: whether the run's steps are the number of times that something was logged, as with the Hugging Face
            Trainer. The step of training is then in the caption alone.
    """

    def __init__(self, run: Any, counts_logs: bool = False) -> None:
        self._run = run
        self._counts_logs = counts_logs

    def write_text(self, tag: str, markdown: str, step: int) -> None:
        self._log(tag, sys.modules["trackio"].Markdown(markdown), step)

    def write_image(self, tag: str, picture: Picture, step: int) -> None:
        with TemporaryDirectory() as folder:
            path = Path(folder) / "picture.png"  # of a file Trackio keeps the bytes; an image it would encode again
            path.write_bytes(picture[0])
            self._log(tag, sys.modules["trackio"].Image(path, caption=f"step {step}"), step)

    def _log(self, tag: str, value: object, step: int) -> None:
        run = self._run or sys.modules["trackio"].context_vars.current_run.get()
        if run is not None:
            run.log({tag: value}, step=getattr(run, "_next_step", step + 1) - 1 if self._counts_logs else step)
