"""The output folder of a command."""

import shutil
from collections.abc import Sequence
from pathlib import Path


def make_empty(marker: Path, text: str, command: str, *, is_earlier: bool, remove: Sequence[str]) -> None:
    """Make the output folder of a command, or remove from it what an earlier run of the command wrote.

    Args:
        marker: the file in the folder by which a later run recognizes it.
        text: what to write into that file, before anything else is written.
        command: what the folder is the result of, for error messages.
        is_earlier: whether the folder holds an earlier result; only such a folder may hold anything.
        remove: names of the files and folders to remove.

    Raises:
        FileExistsError: the folder holds something else.
        OSError: the folder cannot be written.
    """
    out = marker.parent
    if out.is_dir() and any(out.iterdir()) and not is_earlier:
        raise FileExistsError(
            f"--out must be a new or empty folder, or an earlier {command}; {out} holds something else."
        )
    try:
        out.mkdir(parents=True, exist_ok=True)
        for path in (out / name for name in remove):
            if path.is_dir():
                shutil.rmtree(path)
            path.unlink(missing_ok=True)
        marker.write_text(text, encoding="utf-8")
    except OSError as error:
        raise OSError(f"--out must be a folder that can be written; {out} is not ({error}).") from error
