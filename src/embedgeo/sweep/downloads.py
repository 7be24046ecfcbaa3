"""Downloads of a sweep: the next checkpoint is fetched in a thread while one is measured."""

import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Self

from embedgeo.checkpoints import hub
from embedgeo.results.files import remove_leftovers, temporary_path
from embedgeo.sweep.plan import Planned


class Downloads:
    """Fetches checkpoints one at a time, and removes their files once they have been measured.

    With ``evict``, files are downloaded into a folder of this process alone, inside ``out``, and the user's
    cache is only read: nothing is written to it or removed from it. If the process is killed, the next one that
    downloads into ``out`` removes what is left. Without ``evict``, files are downloaded into the user's cache and stay.

    Args:
        out: a folder: on the driver's machine, that of the sweep.
        evict: remove what has been downloaded.
    """

    def __init__(self, out: Path, *, evict: bool) -> None:
        remove_leftovers(out)  # of killed processes of this machine, also where another one opens the sweep folder
        self._folder = temporary_path(out / "downloads")
        self._evict = evict
        self._worker = ThreadPoolExecutor(1)
        self._fetches: dict[str, Future[Path]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        is_stopped = kind is not None and not issubclass(kind, Exception)  # then a download may not be waited for
        self._worker.shutdown(wait=not is_stopped, cancel_futures=True)
        self.discard()

    def discard(self) -> None:
        """Remove all that has been downloaded."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def start(self, planned: Planned) -> Future[Path]:
        """Begin to fetch a checkpoint, unless that has begun already; the result is its folder or file."""
        if planned.name not in self._fetches:
            self._fetches[planned.name] = self._worker.submit(self._fetch, planned)
        return self._fetches[planned.name]

    def _fetch(self, planned: Planned) -> Path:
        checkpoint = planned.checkpoint
        if checkpoint.path is not None:
            return checkpoint.path
        assert planned.contents is not None
        cache = self._folder / planned.name if self._evict else None
        return hub.fetch(checkpoint.model, checkpoint.commit, planned.contents, cache)

    def offload_folder(self, planned: Planned) -> Path:
        """A folder for the weights of a checkpoint that a device map keeps on disk."""
        return self._folder / planned.name / "offloaded"

    def remove(self, planned: Planned) -> None:
        """Remove what was downloaded of a checkpoint, and what a device map keeps on disk."""
        self._fetches.pop(planned.name, None)
        shutil.rmtree(self._folder / planned.name, ignore_errors=True)
