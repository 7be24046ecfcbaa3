"""Where checkpoints come from: repositories on the Hub and local folders, one or several."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from embedgeo.checkpoints import hub
from embedgeo.checkpoints.checkpoint import UNREADABLE, Checkpoint, file_name, joined
from embedgeo.checkpoints.folders import absolute, list_folder
from embedgeo.checkpoints.steps import Position, name_overlooked, parse_position
from embedgeo.results.wording import listed

_REPOSITORY = re.compile(r"\w[\w.-]*(/[\w*?\[][\w.*?\[\]-]*)?")
_MOST_BYTES = 200
"""Of a checkpoint's name: file systems take 255 for a file, whose name also says what it holds, of which step."""


def list_checkpoints(model: str | Sequence[str], revisions: str = "*", *, final: bool = False) -> list[Checkpoint]:
    """List the checkpoints of one or several models, sorted by series and step.

    Args:
        model: a repository on the Hub, a pattern or a list of repositories, or a local folder: one of checkpoints
            (``step100/``, ``checkpoint-100/`` …, Lightning's ``.ckpt`` files), or a checkpoint itself. A repository or
            folder without steps is one checkpoint, of step 0.
        revisions: take only the branches and tags that match this pattern.
        final: take the branch ``main`` of a repository, also of one with steps, and a folder that is itself a model; of
            others the last step of each series.

    Names that look like steps and are none are left out, with one warning that lists them.

    Raises:
        FileNotFoundError: a model has no checkpoint.
        ValueError: neither a folder nor a repository, revisions of a local folder, two checkpoints of one step or of
            one name, or a name that is too long for a file.
    """
    models = [model] if isinstance(model, str) else list(model)
    runs = Counter(absolute(m).name for m in models if is_local(m))
    if runs and max(runs.values()) > 1:
        raise ValueError(
            f"folders must differ in their names, by which their results are kept apart; {listed(models)} do not. "
            "Give links to them under other names, or sweep each into an out of its own."
        )
    found: list[Checkpoint] = []
    for each in models:
        of_steps: list[Checkpoint] = []
        of_none: list[Checkpoint] = []
        for checkpoint in _list(each, revisions, is_only=len(models) == 1):
            (of_steps if checkpoint.has_step else of_none).append(checkpoint)
        if final:
            of_steps = list({c.position.series: c for c in sorted(of_steps, key=lambda c: c.step)}.values())
        found += (of_none or of_steps) if final else (of_steps or of_none)
    found.sort(key=lambda c: (c.position.series, c.step, c.name))
    _require_distinct(found)
    _require_file_names(found)
    return found


def _require_distinct(found: Sequence[Checkpoint]) -> None:
    """Check that each step of a series is there once, and each final model."""
    counts = Counter((c.position.series, c.step) for c in found if c.step != UNREADABLE)
    for (series, step), count in counts.items():
        if count > 1:
            twice = [c for c in found if (c.position.series, c.step) == (series, step)]
            names = listed([c.path or (c.name if c.has_step else c.model) for c in twice])
            if not all(c.has_step for c in twice):
                raise ValueError(
                    f"models must differ in their names, by which their results are kept apart; {names} do not. Give "
                    "each once, and links to folders under other names."
                )
            are_local = any(c.path for c in twice)
            remedy = "Move all but one of them to another folder" if are_local else "Choose by revisions="
            raise ValueError(f"a step must be named once; {names} all name step {step}. {remedy}.")


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


def _list(model: str, revisions: str, is_only: bool) -> list[Checkpoint]:
    if is_local(model):
        if revisions != "*":
            raise ValueError(
                f"revisions chooses branches and tags on the Hub; {model} is local. Use steps for folders."
            )
        return list(list_folder(model, is_only))
    require_source("model", model)
    is_pattern = bool(set(model) & set("*?["))
    repositories = hub.list_repositories(model) if is_pattern else [model]
    found = [each for one in repositories for each in _list_repository(one, revisions, is_only and not is_pattern)]
    if not found:
        chosen = "" if revisions == "*" else f" among the revisions that match {revisions!r}"
        raise FileNotFoundError(
            f"model must have a branch main, or branches or tags that name steps, such as step1000; {model} has "
            f"none{chosen}."
        )
    return found


def _list_repository(repository: str, revisions: str, is_only: bool) -> Iterator[Checkpoint]:
    own = "" if is_only else repository.replace("/", "--")
    commits = {name: c for name, c in hub.list_revisions(repository).items() if fnmatchcase(name, revisions)}
    positions = {name: position for name in commits if (position := parse_position(name))}
    name_overlooked(repository, commits.keys() - positions.keys())
    for name, position in positions.items():
        series = position._replace(series=joined(own, position.series))
        yield Checkpoint(file_name(joined(own, name)), repository, name, series, commits[name])
    name = "main" if "main" in commits else revisions  # one that is named exactly
    if name in commits and name not in positions:
        named = None if positions else parse_position(repository.rpartition("/")[2])
        position = named or Position(0, None, own)
        yield Checkpoint(
            file_name(joined(own, name)), repository, name, position, commits[name], has_step=named is not None
        )
