"""Files written whole or not at all, however a process ends; folders of one's own."""

import errno
import hashlib
import json
import os
import re
import shutil
import socket
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from tempfile import TemporaryFile
from urllib.parse import quote

from embedgeo.formatting import listed

_TEMPORARY = ".embedgeo-"
_ONE_DAY = 86_400


def file_name(name: str) -> str:
    """A name as that of a file, which is not hidden."""
    return re.sub(r"^\.", "%2E", quote(name, safe=" =+,@~"))


def digest(path: Path) -> str:
    """The sha256 of a file, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def temporary_path(path: Path) -> Path:
    """A hidden path beside ``path`` whose name says which process of which machine uses it."""
    end = path.name[-100:]  # all of a long name could be too long for the file system
    return path.parent / f"{_TEMPORARY}{socket.gethostname()}-{os.getpid()}-{end}"


def require_writable(folder: Path) -> None:
    """Raise an OSError that names a folder in which no file can be made."""
    try:
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(folder)) from error


@contextmanager
def replacing(path: Path, *, keep: bool = False) -> Iterator[Path]:
    """A temporary file beside ``path`` that takes its place at the end; with ``keep``, only if
    there is none.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_path(path)
    try:
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        if keep:
            link(temporary, path)
        else:
            temporary.replace(path)
    except OSError as error:
        # of the folder, which nothing can be written to
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise OSError(error.errno, os.strerror(error.errno), str(path.parent)) from error
        error.filename = error.filename or str(path)  # of a full disk, the system names none
        raise
    finally:
        temporary.unlink(missing_ok=True)


def link(path: Path, other: Path) -> bool:
    """Give a file another name if that is free; tell whether it was.

    A folder, or a file where the file system has no hard links, has the other name alone.
    """
    try:
        os.link(path, other)
    except FileExistsError:
        return False
    except OSError:
        if other.exists():
            return False
        path.rename(other)
    return True


def claim(path: Path) -> bool:
    """Make an empty file under a name if that is free; tell whether it was."""
    try:
        path.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def remove_leftovers(*folders: Path) -> None:
    """Remove the files and folders that killed processes left: those of this machine, and of others
    after a day.

    This process must not be writing yet: what has its id was left by an earlier one, as in a
    container.
    """
    own = f"{_TEMPORARY}{socket.gethostname()}-"
    for path in chain.from_iterable(folder.glob(f"{_TEMPORARY}*") for folder in folders):
        pid = path.name.removeprefix(own).partition("-")[0]
        is_dead = pid.isdigit() and (int(pid) == os.getpid() or not _is_alive(int(pid)))
        with suppress(OSError):  # it is gone, or another user's
            is_left = is_dead or path.stat().st_mtime < time.time() - _ONE_DAY
            if is_left and path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            elif is_left:
                path.unlink()


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError as error:
        return not isinstance(error, ProcessLookupError)
    return True


@contextmanager
def replacing_contents(out: Path, command: str) -> Iterator[Path]:
    """A temporary folder in ``out`` whose entries take the place of those of the same names at the
    end, all or none.

    ``embedgeo-COMMAND.json`` lists the files with their digests. Others that are in the folders of
    an earlier result stay there, as do links and folders.

    Raises:
        FileExistsError: the folder holds what no earlier run of the command wrote, also in the
            place of an entry.
    """
    _require_own(out, command)
    is_new = not out.exists()
    new = temporary_path(out / "new")
    marker = _marker(out, command)
    earlier = _listed(marker)
    _require_unchanged(out, command, earlier, earlier)  # before work that takes time
    try:
        remove_leftovers(out)
        new.mkdir(parents=True)
        yield new
        names = [path.name for path in new.iterdir()]
        written = _digests(new, names)
        _require_unchanged(out, command, earlier, [*names, *written])
        (new / marker.name).write_text(json.dumps(written, indent=0), encoding="utf-8")
        own = {*earlier, *written}
        for path in chain.from_iterable((out / name).rglob("*") for name in names):
            name = path.relative_to(out).as_posix()
            if path.is_dir() and not path.is_symlink():
                (new / name).mkdir(exist_ok=True)
            elif name not in own:
                shutil.copy2(path, new / name, follow_symlinks=False)
        _exchange(new, out)
    finally:
        shutil.rmtree(new, ignore_errors=True)
        if is_new:
            with suppress(OSError):  # it holds the new contents
                out.rmdir()


def _marker(out: Path, command: str) -> Path:
    return out / f"embedgeo-{command}.json"


def _listed(marker: Path) -> dict[str, str]:
    """The files that a command wrote, with their digests; none where it is not known."""
    try:
        digests: dict[str, str] = json.loads(marker.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # there is none, or a damaged one
        return {}
    return digests


def _exchange(new: Path, out: Path) -> None:
    names = sorted(path.name for path in new.iterdir())
    old = new / "old"
    old.mkdir()
    try:
        for name in names:
            if (out / name).exists():
                (out / name).rename(old / name)
            (new / name).rename(out / name)
    except BaseException:
        for name in (path.name for path in old.iterdir()):
            if (out / name).exists():
                (out / name).rename(new / name)
            (old / name).rename(out / name)
        raise


def _require_own(out: Path, command: str) -> None:
    """Check that an output folder is new or empty, or holds an earlier result of the command."""
    is_empty = not out.is_dir() or all(path.name.startswith(_TEMPORARY) for path in out.iterdir())
    if not is_empty and not _marker(out, command).exists():
        raise FileExistsError(
            f"--out must be a new or empty folder, or an earlier {command}; {out} holds something "
            f"else."
        )


def _require_unchanged(
    out: Path, command: str, earlier: Mapping[str, str], names: Iterable[str]
) -> None:
    """Check that files and links of these names are as an earlier run of the command has left
    them.
    """
    foreign = [name for name in names if _content(out / name) not in ("", earlier.get(name))]
    if foreign:
        raise FileExistsError(
            f"--out must be a folder in which the {command} replaces only what it wrote; in {out} "
            f"it did not write {listed(sorted(foreign), 3)}, or not as it is now. Move it away, or "
            "give another --out."
        )


@contextmanager
def emptied(out: Path, command: str, names: Sequence[str]) -> Iterator[None]:
    """Context in which a command writes files under these names into its output folder.

    At the end ``embedgeo-COMMAND.json`` lists the files with their digests. At the start the files
    that an earlier list has are removed. If a file or a link under the names is not on it, or is
    another one now, nothing is removed.

    Raises:
        FileExistsError: the folder holds what no earlier run of the command wrote.
    """
    marker = _marker(out, command)
    _require_own(out, command)
    there = _digests(out, names)
    _require_unchanged(out, command, _listed(marker), there)
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name in there:
            (out / name).unlink()
        for path in (out / name for name in names):
            for folder in sorted(path.rglob("*/"), reverse=True) + [path] * path.is_dir():
                folder.rmdir()
        marker.write_text("{}")
    except OSError as error:
        raise OSError(
            f"--out must be a folder that can be written; {out} is not ({error})."
        ) from error
    try:
        yield
    finally:
        marker.write_text(json.dumps(_digests(out, names), indent=0), encoding="utf-8")


def _digests(out: Path, names: Sequence[str]) -> dict[str, str]:
    """What the files and links under some names in a folder hold, by their own names."""
    paths = chain.from_iterable(((out / name), *(out / name).rglob("*")) for name in names)
    held = {path.relative_to(out).as_posix(): _content(path) for path in paths}
    return {name: content for name, content in held.items() if content}


def _content(path: Path) -> str:
    """The digest of a file, or where a link leads; "" where there is neither."""
    if path.is_symlink():
        return f"link to {path.readlink()}"
    return digest(path) if path.is_file() else ""
