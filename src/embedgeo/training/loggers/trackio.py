"""Trackio: pictures on its page of media, the explanation on that of reports."""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from embedgeo.training.loggers.base import Adapter, Picture, is_instance


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


def adapter(logger: object) -> Adapter | None:
    """Of a run; of the module ``trackio`` or the Hugging Face Trainer's callback, where there is a current run."""
    if is_instance(logger, "trackio", "Run"):
        return Trackio(logger)
    trackio: Any = sys.modules.get("trackio")
    counts_logs = is_instance(logger, "transformers.integrations.integration_utils", "TrackioCallback")
    if counts_logs or logger is trackio:
        run = trackio and trackio.context_vars.current_run.get()
        return Trackio(run, counts_logs=counts_logs) if run else None
    return None
