"""Where checkpoints come from: repositories on the Hub, local folders, and files of Lightning."""

import json
import os
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from urllib.parse import quote

from embedgeo.checkpoints import hub
from embedgeo.checkpoints.files import Contents, StoredFile, hashed_file, needed_files
from embedgeo.checkpoints.steps import Position, looks_like_step, parse_position
from embedgeo.results.wording import listed

_REPOSITORY = re.compile(r"\w[\w.-]*(/[\w*?\[][\w.*?\[\]-]*)?")
UNREADABLE = -1
"""The step of a Lightning file that does not name one and from which none can be read: its contents fail."""
_MOST_BYTES = 200
"""Of a checkpoint's name: file systems take 255 for a file, whose name also says what it holds, of which step."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint of a training run.

    Attributes:
        name: unique among the checkpoints listed together, and valid as a file name.
        model: the repository, or the local folder as it was given.
        revision: branch or tag; for a local checkpoint, the name of its folder or file, of a link that of the link.
        position: step, tokens seen and series.
        commit: that the revision points to; empty for a local checkpoint.
        path: the folder or file; None for a checkpoint on the Hub.
    """

    name: str
    model: str
    revision: str
    position: Position
    commit: str = ""
    path: Path | None = None

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
            assert self.path is not None
            _read_step(self.path)
        if self.path is None:
            return needed_files(hub.list_files(self.model, self.commit))
        return Contents(*(tuple(map(hashed_file, paths)) for paths in _local_files(self.path)))

    def weights_state(self) -> str:
        """Sizes and times of local weight files, which change when these are replaced; empty on the Hub.

        Raises:
            OSError: weights or ``config.json`` are missing.
        """
        if self.path is None:
            return ""
        found = {path.name: path.stat() for path in _local_files(self.path)[0]}
        return json.dumps({name: [stat.st_size, stat.st_mtime_ns] for name, stat in found.items()})

    def config_digest(self) -> str:
        """`Contents.config_digest`, without reading the weights."""
        if self.path is None:
            return self.contents().config_digest
        return hashed_file(self.path / "config.json").digest if self.path.is_dir() else ""


def _local_files(path: Path) -> tuple[list[Path], list[Path]]:
    """The weights of a local checkpoint, and the other files that are needed."""
    if path.is_file():
        return [path], []
    needed = needed_files(StoredFile(p.name, p.stat().st_size, "") for p in path.iterdir() if p.is_file())
    return [path / file.name for file in needed.weights], [path / file.name for file in needed.others]


def list_checkpoints(model: str | Sequence[str], revisions: str = "*") -> list[Checkpoint]:
    """List checkpoints, sorted by series and step.

    Args:
        model: a repository on the Hub, a pattern or a list of repositories, or a local folder: one of checkpoints
            (``step100/``, ``checkpoint-100/`` …, Lightning's ``.ckpt`` files), or a checkpoint itself.
        revisions: take only the branches and tags that match this pattern.

    Names that look like steps and are none are left out, with one warning that lists them.

    Raises:
        FileNotFoundError: there is no name with a step.
        ValueError: neither a folder nor a repository, revisions of a local folder, two checkpoints of one step or of
            one name, or a name that is too long for a file.
    """
    models = [model] if isinstance(model, str) else list(model)
    runs = Counter(_absolute(m).name for m in models if is_local(m))
    if runs and max(runs.values()) > 1:
        raise ValueError(
            f"folders must differ in their names, by which their results are kept apart; {listed(models)} do not. "
            "Give links to them under other names, or sweep each into an out of its own."
        )
    found = [each for m in models for each in _list(m, revisions, is_only=len(models) == 1)]
    if not found:
        chosen = "" if revisions == "*" else f" among the revisions that match {revisions!r}"
        raise FileNotFoundError(
            f"model must name checkpoints with their steps, such as step1000 or checkpoint-1000; {listed(models)} has "
            f"none{chosen}."
        )
    found.sort(key=lambda c: (c.position.series, c.step, c.name))
    twice = [
        name
        for name, count in Counter((c.position.series, c.step) for c in found if c.step != UNREADABLE).items()
        if count > 1
    ]
    if twice:
        names = [c.path or c.name for c in found if (c.position.series, c.step) == twice[0]]
        are_local = any(is_local(m) for m in models)
        remedy = "Move all but one of them to another folder" if are_local else "Choose by revisions="
        raise ValueError(f"a step must be named once; {listed(names)} all name step {twice[0][1]}. {remedy}.")
    _require_file_names(found)
    return found


def _require_file_names(found: Sequence[Checkpoint]) -> None:
    """Check that the results of each checkpoint go into a file of their own, also where case does not count."""
    for checkpoint in found:
        if len(checkpoint.name) > _MOST_BYTES:
            raise ValueError(
                f"the name of a checkpoint must take at most {_MOST_BYTES} bytes in a file name; "
                f"{checkpoint.revision[:40]}… takes {len(checkpoint.name)}. Rename it, or name a link to it."
            )
    owners: dict[str, Checkpoint] = {}
    for checkpoint in found:
        other = owners.setdefault(checkpoint.name.casefold(), checkpoint)
        if other is not checkpoint:
            raise ValueError(
                f"checkpoints must differ in their names, not only in case; {other.path or other.name} and "
                f"{checkpoint.path or checkpoint.name} would share a file of results. Choose by revisions=, or rename."
            )


def is_local(model: str) -> bool:
    """Whether ``model`` is a folder or file rather than a repository."""
    return Path(model).expanduser().exists()


def require_source(name: str, source: str) -> None:
    """Check that an argument may name something: a path that exists, or else what a repository can be called.

    Raises:
        ValueError: it is a path that does not exist.
    """
    if not is_local(source) and not _REPOSITORY.fullmatch(source):
        raise ValueError(f"{name} must be a local path that exists or a repository on the Hub; got {source!r}.")


def _list(model: str, revisions: str, is_only: bool) -> Iterator[Checkpoint]:
    if is_local(model):
        if revisions != "*":
            raise ValueError(
                f"revisions chooses branches and tags on the Hub; {model} is local. Use steps for folders."
            )
        yield from _list_folder(model, is_only)
    else:
        require_source("model", model)
        is_pattern = bool(set(model) & set("*?["))
        for repository in hub.list_repositories(model) if is_pattern else [model]:
            yield from _list_repository(repository, revisions, is_only and not is_pattern)


def _list_repository(repository: str, revisions: str, is_only: bool) -> Iterator[Checkpoint]:
    prefix = "" if is_only else f"{repository.replace('/', '--')}--"
    commits = {name: c for name, c in hub.list_revisions(repository).items() if fnmatchcase(name, revisions)}
    positions = {name: position for name in commits if (position := parse_position(name))}
    if not positions and "main" in commits and (position := parse_position(repository.rpartition("/")[2])):
        positions = {"main": position}
    _name_overlooked(repository, commits.keys() - positions.keys())
    for name, position in positions.items():
        series = position._replace(series=prefix + position.series) if name != "main" else position
        yield Checkpoint(_file_name(prefix + name), repository, name, series, commits[name])


def _list_folder(model: str, is_only: bool) -> Iterator[Checkpoint]:
    folder = _absolute(model)
    prefix = "" if is_only else f"{folder.name}--"
    candidates = [folder] if folder.is_file() else sorted(p for p in folder.iterdir() if not p.name.startswith("."))
    paths = [p for p in candidates if p.is_dir() or p.suffix == ".ckpt"]
    positions = {path: position for path in paths if (position := parse_position(path.name.removesuffix(".ckpt")))}
    positions.update(_unnamed(paths, positions))
    if not positions and (folder / "config.json").is_file():
        itself = folder if parse_position(folder.name) else folder.resolve()
        if position := parse_position(itself.name):
            positions = {itself: position}
    _name_overlooked(model, {p.name for p in paths if p.is_dir()} - {path.name for path in positions})
    for path, position in positions.items():
        series = "" if path.is_file() else position.series
        named = position._replace(series=prefix + series)
        yield Checkpoint(_file_name(prefix + path.name), model, path.name, named, path=path)


def _absolute(model: str) -> Path:
    """The path of a folder or file under the name that was given: links are not followed."""
    return Path(os.path.abspath(Path(model).expanduser()))


def _name_overlooked(model: str, names: Iterable[str]) -> None:
    overlooked = sorted(name for name in names if looks_like_step(name))
    if overlooked:
        warnings.warn(
            f"{model}: left out {listed([repr(name) for name in overlooked])}, in which no step is read. Names with a "
            "step are such as step1000, checkpoint-1000 or epoch=1-step=1000; rename these to have them measured.",
            stacklevel=2,
        )


def _unnamed(paths: Sequence[Path], named: Mapping[Path, Position]) -> dict[Path, Position]:
    """Lightning files without a step in their name, as ``last.ckpt``, unless another file has the step inside them."""
    steps = {position.step for position in named.values()}
    found: dict[Path, Position] = {}
    for path in paths:
        if path.is_file() and path not in named:
            try:
                step = _read_step(path)
            except ValueError:
                step = UNREADABLE
            if step not in steps:
                steps |= {step} - {UNREADABLE}
                found[path] = Position(step, None, "")
    return found


def _read_step(path: Path) -> int:
    from embedgeo.checkpoints.loading import lightning_step

    return lightning_step(path)


def _file_name(name: str) -> str:
    return re.sub(r"^\.", "%2E", quote(name, safe=" =+,@~"))  # those that begin with a dot are hidden
