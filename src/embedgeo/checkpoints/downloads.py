"""What has been downloaded into the cache, and taking it out again."""

import json
import os
import re
from collections.abc import Collection, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from uuid import uuid4

from filelock import FileLock, Timeout
from huggingface_hub import constants, scan_cache_dir

from embedgeo.checkpoints.files import Contents
from embedgeo.checkpoints.hub import cache_lock, lock_file, repository_folder, snapshot_folder
from embedgeo.results.atomic import replacing

_HASH = re.compile(r"[0-9a-f]{40,64}")


class Downloads:
    """What a sweep has downloaded: written down before each download, so that it is evicted also after a kill.

    Between `lease` and `release` no sweep with this cache evicts the commit; any number of them may hold a lease.

    Args:
        journal: a folder of its own, in another one, for the notes.
    """

    def __init__(self, journal: Path) -> None:
        self.journal = journal
        self._leases: dict[str, FileLock] = {}

    def lease(self, name: str, repository: str, commit: str) -> None:
        """Keep the commit from being evicted."""
        if name not in self._leases:
            lock = lock_file(f"{commit}-{uuid4().hex}")
            with cache_lock(repository):
                lock.acquire()
            self._leases[name] = lock

    def release(self, name: str) -> None:
        """Let the commit be evicted; does nothing where there is no lease."""
        lock = self._leases.pop(name, None)
        if lock is not None:
            lock.release()
            Path(lock.lock_file).unlink(missing_ok=True)

    def note(self, name: str, repository: str, commit: str, contents: Contents) -> None:
        """Note which files of a commit are about to be downloaded; those in the cache already are not ours."""
        path = self._path(name)
        before = json.loads(path.read_text()) if path.exists() else {}
        ours = before["files"] if before.get("cache") == _cache_id() else []  # an earlier run has begun
        snapshot = snapshot_folder(repository, commit)
        note = {
            "cache": _cache_id(),
            "repository": repository,
            "commit": commit,
            "files": [file for file in contents.names if file in ours or not (snapshot / file).exists()],
            "blobs": [file.digest.removeprefix("git:") for file in (*contents.weights, *contents.others)],
        }
        self.journal.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(note))
        temporary.replace(path)

    def evict(self, name: str) -> bool:
        """Take out of the cache what was noted, and the note away; returns False, at once, where others use it."""
        path = self._path(name)
        if not path.exists():
            return True
        note = json.loads(path.read_text())
        if note["cache"] != _cache_id():
            return True  # another machine's, which shares the sweep folder
        try:
            with cache_lock(note["repository"]):
                _require_no_lease(note["commit"])
                _remove(note["repository"], note["commit"], note["files"], note["blobs"])
        except Timeout:
            return False
        path.unlink(missing_ok=True)
        with suppress(OSError):
            self.journal.rmdir()
            self.journal.parent.rmdir()
        return True

    def noted(self) -> list[str]:
        """Names of the checkpoints of which there is a note."""
        return sorted(path.stem for path in self.journal.glob("*.json"))

    def _path(self, name: str) -> Path:
        return self.journal / f"{name}.json"


def _cache_id() -> str:
    """What tells this cache from those of other machines, which may have the same path."""
    path = Path(constants.HF_HUB_CACHE, ".locks", "embedgeo-cache-id")
    if not path.exists():
        with replacing(path, keep=True) as temporary:
            temporary.write_text(uuid4().hex)
    return path.read_text()


def _require_no_lease(commit: str) -> None:
    """Raises Timeout where a sweep holds one; removes those of sweeps that were killed."""
    for path in Path(constants.HF_HUB_CACHE, ".locks").glob(f"embedgeo-{commit}-*.lock"):
        with FileLock(path, blocking=False):
            pass
        path.unlink(missing_ok=True)


def _remove(repository: str, commit: str, files: Sequence[str], blobs: Sequence[str]) -> None:
    """Take files of a commit out of the cache, what a killed process has left of their blobs, and empty folders.

    Raises:
        OSError: the client cannot read its folder of the repository.
    """
    folder, snapshot = repository_folder(repository), snapshot_folder(repository, commit)
    digests = [digest for digest in blobs if _HASH.fullmatch(digest)]
    with ExitStack() as locks:
        for digest in digests:
            if _leftovers(folder, digest):
                lock = Path(
                    constants.HF_HUB_CACHE, ".locks", folder.name, f"{digest}.lock"
                )  # the client's, of a download
                lock.parent.mkdir(parents=True, exist_ok=True)
                locks.enter_context(FileLock(lock, blocking=False))
                for leftover in _leftovers(folder, digest):  # what is left now that no download is under way
                    if leftover.name == digest and leftover.exists():  # for the client to remove, wherever it keeps it
                        snapshot.mkdir(parents=True, exist_ok=True)
                        (snapshot / digest).symlink_to(os.path.relpath(leftover, snapshot))
                    else:
                        leftover.unlink(missing_ok=True)
        _delete(folder, {snapshot / name for name in (*files, *digests)})
    for probe in folder.glob("blobs/tmp_*"):  # empty: the client looks what mode new files get, and can do without
        if not probe.stat().st_size:
            probe.unlink(missing_ok=True)
    if not any(snapshot.glob("*")):
        (folder / "trees" / f"{commit}.json").unlink(missing_ok=True)
    for empty in (snapshot, *(folder / part for part in ("snapshots", "blobs", "trees", "refs")), folder):
        with suppress(OSError):  # not empty, or not there
            empty.rmdir()


def _leftovers(folder: Path, digest: str) -> list[Path]:
    """What a killed process has left of a blob: parts of its download, and itself where no snapshot refers to it."""
    blob = folder / "blobs" / digest
    entries = (path for path in folder.glob("snapshots/*/**/*") if path.is_symlink())
    is_left = os.path.lexists(blob) and all(path.readlink().name != digest for path in entries)
    return [*folder.glob(f"blobs/{digest}*.incomplete"), *([blob] if is_left else [])]


def _delete(folder: Path, paths: Collection[Path]) -> None:
    """Delete snapshots' entries, and those of their blobs that no other entry refers to."""
    if not any(map(os.path.lexists, paths)):
        return
    cache = scan_cache_dir(constants.HF_HUB_CACHE)
    repository = next((repo for repo in cache.repos if repo.repo_path == folder), None)
    if repository is None:
        raise OSError(f"{folder} must be readable by huggingface_hub; it says: {'; '.join(map(str, cache.warnings))}")
    cached = (file for revision in repository.revisions for file in revision.files)
    cache.delete_files(*(file for file in cached if file.file_path in paths)).execute()
