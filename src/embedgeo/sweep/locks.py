"""Locks by which processes share out the checkpoints of a sweep folder."""

import hashlib
from contextlib import suppress
from pathlib import Path

from filelock import Timeout, UnixFileLock

_LOCK = ".lock-"


class Locks:
    """Locks on names, each by a hidden file in a folder; they end with the process.

    A file system may have no locks. Then a name is refused, or every name can be taken where
    ``is_alone`` says that no other process works on these.
    """

    def __init__(self, folder: Path, *, is_alone: bool = False) -> None:
        self._folder = folder
        self._is_alone = is_alone
        self._held: dict[str, UnixFileLock] = {}

    def take(self, name: str) -> bool:
        """Take a name, which this process may hold already; false if another process holds it.

        Raises:
            OSError: the file system has no locks.
        """
        if name in self._held:
            return True
        path = self._folder / f"{_LOCK}{hashlib.sha256(name.encode()).hexdigest()[:16]}"
        lock = UnixFileLock(path, blocking=False, thread_local=False, fallback_to_soft=False)
        try:
            lock.acquire()
        except Timeout:
            return False
        except (OSError, NotImplementedError) as error:
            if self._is_alone:
                return True
            raise OSError(
                f"a sweep folder must be on a file system with locks; {self._folder} cannot be "
                f"locked ({error}). Give each process --steps of its own, as 0,1,512, and an --out."
            ) from error
        self._held[name] = lock
        return True

    def release(self, name: str) -> None:
        """Leave a name to other processes."""
        if (lock := self._held.pop(name, None)) is not None:
            _remove(lock)

    def close(self) -> None:
        """Release all names, and remove what killed processes have left."""
        for name in [*self._held]:
            self.release(name)
        for path in self._folder.glob(f"{_LOCK}*"):
            lock = UnixFileLock(path, blocking=False, fallback_to_soft=False)
            with suppress(OSError):  # another process holds it
                lock.acquire()
                _remove(lock)


def _remove(lock: UnixFileLock) -> None:
    # before it is released: who waits for a file that is gone looks for another one
    with suppress(OSError):
        Path(lock.lock_file).unlink()
    lock.release()
