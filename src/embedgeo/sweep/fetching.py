"""Downloads ahead of the measurements and evictions behind them, one at a time, in a thread beside."""

from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import TracebackType

from embedgeo.checkpoints import hub
from embedgeo.checkpoints.downloads import Downloads
from embedgeo.sweep.plan import Planned


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
        self._evictions: list[Future[None]] = []

    def __enter__(self) -> "Fetching":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._worker.shutdown(cancel_futures=error is not None)  # the notes tell the next run what to evict

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
        self._downloads.lease(planned.name, checkpoint.commit)
        if self._evict:
            self._downloads.note(planned.name, checkpoint.model, checkpoint.commit, planned.contents)
        return hub.fetch(checkpoint.model, checkpoint.commit, planned.contents)

    def release(self, planned: Planned) -> None:
        """Let other sweeps have the files: they are loaded."""
        self._downloads.release(planned.name)

    def finish(self, planned: Planned) -> None:
        """Evict a checkpoint that is done, or has failed."""
        self._fetches.pop(planned.name, None)
        self.release(planned)
        if planned.checkpoint.path is None:
            self._evict_later(planned.name)

    def evict_done(self, done: Collection[str]) -> None:
        """Evict what an earlier run, killed meanwhile, has left in the cache of checkpoints that are done."""
        for name in self._downloads.noted():
            if name in done:
                self._evict_later(name)

    def problems(self) -> set[str]:
        """Why some could not be evicted."""
        return {str(eviction.exception()) for eviction in self._evictions if eviction.exception()}

    def _evict_later(self, name: str) -> None:
        if self._evict:
            evict = partial(hub.retried, partial(self._downloads.evict, name))  # beside other sweeps' changes
            self._evictions.append(self._worker.submit(evict))
