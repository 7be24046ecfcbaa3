"""A worker as an actor of Ray. Nothing heavy is imported before `RayWorker` has its environment,
which imports read.
"""

import os
import socket
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from embedgeo.formatting import reason

if TYPE_CHECKING:
    from embedgeo.sweep.measure import Measured, Study
    from embedgeo.sweep.plan import Planned
    from embedgeo.sweep.settings import SweepSettings
    from embedgeo.sweep.texts import ProbeText


class Started(NamedTuple):
    """A worker that is ready, or why it cannot work."""

    node: str
    versions: Mapping[str, str]
    error: str = ""


class Answer(NamedTuple):
    """A checkpoint's measurement, or the reason why there is none; and the warnings given
    meanwhile.
    """

    result: "Measured | str"
    warnings: Sequence[str] = ()


class RayWorker:
    """Measures one checkpoint after the other on a node, with the driver's variables and a folder
    that it removes.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        os.environ.update(environment)

    def start(
        self,
        settings: "SweepSettings",
        texts: "Mapping[str, ProbeText]",
        study: "Study | None",
    ) -> Started:
        """Import what is needed and choose the device."""
        from embedgeo.sweep.measure import Downloads, Worker
        from embedgeo.sweep.processes import make_fabric, versions

        folder = Path(tempfile.gettempdir(), f"embedgeo-workers-{getattr(os, 'getuid', int)()}")
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            self._downloads = Downloads(folder, evict=settings.evict)
            self._worker = Worker(
                make_fabric(settings.trainer or {}), settings, texts, self._downloads, study
            )
        except Exception as error:
            return Started(socket.gethostname(), versions(), reason(error))
        return Started(socket.gethostname(), versions())

    def measure(self, planned: "Planned", upcoming: "Planned | None") -> Answer:
        """Measure a checkpoint, and fetch another one meanwhile."""
        from embedgeo.sweep.processes import muted_libraries

        path = planned.checkpoint.path
        if path is not None and not path.exists():
            where = (
                f"every node of the cluster, under the same path; {socket.gethostname()} has no "
                f"{path}"
            )
            return Answer(f"FileNotFoundError: a local checkpoint must be on {where}.")
        with muted_libraries(), warnings.catch_warnings(record=True) as caught:
            result: Measured | str
            try:
                result = self._worker.measure(planned, lambda: upcoming)
            except Exception as error:
                result = reason(error)
        return Answer(
            result,
            [
                str(warning.message)
                for warning in caught
                if issubclass(warning.category, UserWarning)
            ],
        )

    def close(self) -> None:
        """Remove what has been downloaded, also while a checkpoint is being measured, and end the
        process.
        """
        self._downloads.discard()
        os._exit(0)
