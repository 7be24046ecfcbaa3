"""What is in a folder, and a pickle that does harm."""

import os
from pathlib import Path


def contents(folder: Path) -> dict[str, bytes]:
    """Files in a folder and in those inside it: path -> bytes."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


class Payload:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (os.mkdir, (self.path,))
