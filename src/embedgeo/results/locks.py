"""Names that one process at a time may hold: by locks that the operating system drops when the process ends."""

import hashlib
import os
from pathlib import Path


class Locks:
    """Locks on bytes of a file, one byte for each name; nothing is written into it.

    Where the file system has no locks, every name can be taken, and `error` says why. A process holds its locks until
    it closes the file by any means: it must not open it a second time meanwhile.

    Args:
        path: a file that the processes share.
    """

    def __init__(self, path: Path) -> None:
        self.error = ""
        self._path = path
        self._file: int | None = None

    def take(self, name: str) -> bool:
        """Take a name, which this process may hold already; false if another process holds it."""
        return self._lock(name, is_taken=True)

    def release(self, name: str) -> None:
        """Leave a name to other processes."""
        self._lock(name, is_taken=False)

    def close(self) -> None:
        """Release all names."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _lock(self, name: str, *, is_taken: bool) -> bool:
        byte = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7])
        try:
            import fcntl  # not on every system

            if self._file is None:
                self._file = os.open(self._path, os.O_RDWR)
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB if is_taken else fcntl.LOCK_UN, 1, byte)
        except BlockingIOError:
            return False
        except (ImportError, OSError) as error:
            self.error = str(error)
        return True
