"""A checkpoint: its name, where it is, and what its files hold."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from embedgeo.checkpoints import hub
from embedgeo.checkpoints.files import Contents, StoredFile, hashed_file, needed_files
from embedgeo.checkpoints.steps import Position

UNREADABLE = -1
"""The step of a Lightning file that does not name one and from which none can be read: its contents fail."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint of a training run, or a model that is none: a final one.

    Attributes:
        name: unique among the checkpoints listed together, and valid as a file name.
        model: the repository, or the local folder as it was given.
        revision: branch or tag; for a local checkpoint, the name of its folder or file, of a link that of the link.
        position: step, tokens seen and series.
        commit: that the revision points to; empty for a local checkpoint.
        path: the folder or file; None for a checkpoint on the Hub.
        has_step: whether it is a checkpoint of a step; a final model is not, and is at step 0.
    """

    name: str
    model: str
    revision: str
    position: Position
    commit: str = ""
    path: Path | None = None
    has_step: bool = True

    @property
    def step(self) -> int:
        """Optimizer steps taken."""
        return self.position.step

    def contents(self) -> Contents:
        """The files to load with their hashes, which the Hub lists and which are computed for local files.

        Raises:
            FileNotFoundError: weights or ``config.json`` are missing.
            ValueError: its step cannot be read.
        """
        if self.step == UNREADABLE:
            from embedgeo.checkpoints.loading import lightning_step

            assert self.path is not None
            lightning_step(self.path)
        if self.path is None:
            return needed_files(hub.list_files(self.model, self.commit))
        return Contents(*(tuple(map(hashed_file, paths)) for paths in local_files(self.path)))

    def weights_state(self) -> str:
        """Sizes and times of local weight files, which change when these are replaced; empty on the Hub.

        Raises:
            OSError: weights or ``config.json`` are missing.
        """
        if self.path is None:
            return ""
        found = {path.name: path.stat() for path in local_files(self.path)[0]}
        return json.dumps({name: [stat.st_size, stat.st_mtime_ns] for name, stat in found.items()})

    def config_digest(self) -> str:
        """`Contents.config_digest`, without reading the weights."""
        if self.path is None:
            return self.contents().config_digest
        return hashed_file(self.path / "config.json").digest if self.path.is_dir() else ""


def local_files(path: Path) -> tuple[list[Path], list[Path]]:
    """The weights of a local checkpoint, and the other files that are needed.

    Raises:
        OSError: weights or ``config.json`` are missing.
    """
    if path.is_file():
        return [path], []
    needed = needed_files(StoredFile(p.name, p.stat().st_size, "") for p in path.iterdir() if p.is_file())
    return [path / file.name for file in needed.weights], [path / file.name for file in needed.others]


def joined(own: str, name: str) -> str:
    """A name with that of its model before it, where several models are listed together."""
    return f"{own}--{name}" if own else name


def file_name(name: str) -> str:
    """A name as that of a file, which is not hidden."""
    return re.sub(r"^\.", "%2E", quote(name, safe=" =+,@~"))
