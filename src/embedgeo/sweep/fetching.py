"""Downloads ahead of the measurements and evictions behind them, one at a time, in a thread beside."""

import time
from collections.abc import Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import TracebackType

from embedgeo.checkpoints import hub
from embedgeo.checkpoints.downloads import Downloads
from embedgeo.sweep.plan import Planned

_WAIT = 0.5
"""Seconds between attempts to evict what other sweeps still use, at the end."""


def folder_of(planned: Planned) -> Path:
    """Where the files of a checkpoint are, or will be."""
    return planned.checkpoint.path or hub.snapshot_folder(planned.checkpoint.model, planned.checkpoint.commit)


class Fetching:
    """Fetches checkpoints, and evicts them again.

    Args:
        journal: a folder for the notes on what has been downloaded; left empty, it is gone in the end.
        evict: take what is downloaded out of the cache again.
    """

    def __init__(self, journal: Path, evict: bool) -> None:
        self._evict = evict
        self._downloads = Downloads(journal)
        self._worker = ThreadPoolExecutor(1)
        self._fetches: dict[str, Future[Path]] = {}
        self._to_evict: list[str] = []
        self.problems: set[str] = set()
        """Why some could not be evicted."""

    def __enter__(self) -> "Fetching":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        is_stopped = error is not None and not isinstance(error, Exception)
        self._worker.shutdown(wait=not is_stopped, cancel_futures=is_stopped)  # the notes tell the next run
        for name in self._fetches:
            self._downloads.release(name)
        if self._to_evict and not is_stopped:
            print("waiting for another sweep that uses what is to be evicted from the cache")
        while self._to_evict and not is_stopped:
            time.sleep(_WAIT)
            self._evict_unused()

    def start(self, planned: Planned) -> "Future[Path]":
        """Begin to fetch a checkpoint, unless that has begun; the result is its folder or file."""
        if planned.name not in self._fetches:
            self._fetches[planned.name] = self._worker.submit(self._fetch, planned)
        return self._fetches[planned.name]

    def _fetch(self, planned: Planned) -> Path:
        checkpoint = planned.checkpoint
        if checkpoint.path is not None:
            return checkpoint.path
        assert planned.contents is not None
        self._downloads.lease(planned.name, checkpoint.model, checkpoint.commit)
        if self._evict:
            note = partial(self._downloads.note, planned.name, checkpoint.model, checkpoint.commit, planned.contents)
            hub.retried(note)  # another process may be removing the folder, which is empty
        return hub.fetch(checkpoint.model, checkpoint.commit, planned.contents)

    def release(self, planned: Planned) -> None:
        """Let other sweeps have the files: they are loaded."""
        self._downloads.release(planned.name)

    def finish(self, planned: Planned) -> None:
        """Evict a checkpoint that is done, or has failed."""
        self._fetches.pop(planned.name, None)
        self.release(planned)
        if planned.checkpoint.path is None:
            self._evict_later([planned.name])

    def evict_done(self, done: Collection[str]) -> None:
        """Evict what an earlier run, killed meanwhile, has left in the cache of checkpoints that are done."""
        self._evict_later([name for name in self._downloads.noted() if name in done])

    def _evict_later(self, names: Sequence[str]) -> None:
        if self._evict:
            self._to_evict += names
            self._worker.submit(self._evict_unused)

    def _evict_unused(self) -> None:
        """Evict what no other sweep uses: to wait for one here may be to wait for each other."""
        for name in list(self._to_evict):
            try:
                is_gone = hub.retried(partial(self._downloads.evict, name))  # beside other sweeps' changes
            except Exception as error:
                self.problems.add(str(error))
                is_gone = True
            if is_gone:
                self._to_evict.remove(name)
