"""Trackio: pictures on its page of media, the explanation on that of reports."""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from embedgeo.training.loggers.base import Adapter, Picture


def adapter(logger: object) -> Adapter | None:
    """The adapter of a run, of the module ``trackio`` and of the Hugging Face Trainer's callback."""
    callback = getattr(sys.modules.get("transformers.integrations.integration_utils"), "TrackioCallback", ())
    trackio = sys.modules.get("trackio")
    is_ours = isinstance(logger, (getattr(trackio, "Run", ()), callback)) or (trackio and logger is trackio)
    return _Trackio(logger, counts_logs=isinstance(logger, callback)) if is_ours else None


class _Trackio(Adapter):
    """A run of Trackio: the one that was given, otherwise the current one.

    Args:
        logger: a run or something else.
        counts_logs: whether the run's steps are the number of times that something was logged, as with the Hugging Face
            Trainer. The step of training is then in the caption alone.
    """

    def __init__(self, logger: object, *, counts_logs: bool) -> None:
        self._logger = logger
        self._counts_logs = counts_logs

    def write_text(self, tag: str, markdown: str, step: int) -> None:
        self._log(tag, sys.modules["trackio"].Markdown(markdown), step)

    def write_image(self, tag: str, picture: Picture, step: int) -> None:
        with TemporaryDirectory() as folder:
            path = Path(folder) / "picture.png"  # of a file Trackio keeps the bytes; an image it would encode again
            path.write_bytes(picture[0])
            self._log(tag, sys.modules["trackio"].Image(path, caption=f"step {step}"), step)

    def _log(self, tag: str, value: object, step: int) -> None:
        trackio: Any = sys.modules["trackio"]
        run = self._logger if isinstance(self._logger, trackio.Run) else trackio.context_vars.current_run.get()
        if run is not None:
            run.log({tag: value}, step=getattr(run, "_next_step", step + 1) - 1 if self._counts_logs else step)
