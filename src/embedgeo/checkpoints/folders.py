"""Checkpoints in local folders, and files of Lightning."""

import os
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from embedgeo.checkpoints.checkpoint import UNREADABLE, Checkpoint, file_name, joined, local_files
from embedgeo.checkpoints.steps import Position, name_overlooked, parse_position


def list_folder(model: str, is_only: bool) -> Iterator[Checkpoint]:
    """List the checkpoints of steps in a folder, and the folder itself where it is a model of no step.

    Args:
        model: the folder, or a file of Lightning, as it was given.
        is_only: whether no other model is listed; otherwise names and series start with the folder's name.

    Raises:
        FileNotFoundError: there is no checkpoint.
    """
    folder = absolute(model)
    own = "" if is_only else folder.name
    candidates = [folder] if folder.is_file() else sorted(p for p in folder.iterdir() if not p.name.startswith("."))
    paths = [p for p in candidates if p.is_dir() or p.suffix == ".ckpt"]
    positions = {path: position for path in paths if (position := parse_position(path.name.removesuffix(".ckpt")))}
    positions.update(_unnamed(paths, positions))
    if not positions and (folder / "config.json").is_file():
        itself = folder if parse_position(folder.name) else folder.resolve()
        if position := parse_position(itself.name):
            positions = {itself: position}
    is_final = _is_final(folder, positions)
    if is_final:
        positions.pop(folder, None)
    elif not positions:
        raise FileNotFoundError(_neither(model, paths))
    name_overlooked(model, {p.name for p in paths if p.is_dir()} - {path.name for path in positions})
    for path, position in positions.items():
        series = "" if path.is_file() else position.series
        named = position._replace(series=joined(own, series))
        yield Checkpoint(file_name(joined(own, path.name)), model, path.name, named, path=path)
    if is_final:
        final = Position(0, None, own)
        yield Checkpoint(file_name(folder.name), model, folder.name, final, path=folder, has_step=False)


def absolute(model: str) -> Path:
    """The path of a folder or file under the name that was given: links are not followed."""
    return Path(os.path.abspath(Path(model).expanduser()))


def read_step(path: Path) -> int:
    """The step inside a file of Lightning; see `embedgeo.checkpoints.loading.lightning_step`."""
    from embedgeo.checkpoints.loading import lightning_step

    return lightning_step(path)


def _unnamed(paths: Sequence[Path], named: Mapping[Path, Position]) -> dict[Path, Position]:
    """Lightning files without a step in their name, as ``last.ckpt``, unless another file has the step inside them."""
    steps = {position.step for position in named.values()}
    found: dict[Path, Position] = {}
    for path in paths:
        if path.is_file() and path not in named:
            try:
                step = read_step(path)
            except ValueError:
                step = UNREADABLE
            if step not in steps:
                steps |= {step} - {UNREADABLE}
                found[path] = Position(step, None, "")
    return found


def _is_final(folder: Path, positions: Mapping[Path, Position]) -> bool:
    """Whether a folder or file is itself a model, and not of one of the steps that were found."""
    if folder.is_file():
        return folder in positions and positions[folder].step == UNREADABLE and _holds_weights(folder)
    if {folder, folder.resolve()} & positions.keys() or not (folder / "config.json").is_file():
        return False
    try:
        return not positions or bool(local_files(folder))
    except (OSError, ValueError):  # beside the checkpoints, the configuration alone
        return False


def _holds_weights(path: Path) -> bool:
    from embedgeo.checkpoints.reading import stored_values

    with suppress(ValueError, TypeError):
        return "state_dict" in stored_values(path)
    return False


def _neither(model: str, paths: Collection[Path]) -> str:
    """What to do about a folder that holds no checkpoint."""
    inside = [str(Path(model) / path.name) for path in paths if (path / "config.json").is_file()]
    remedy = f" To measure the models in it, name them: --model {shlex.join(inside[:8])}" if inside else ""
    return (
        "model must be a folder with config.json, a .ckpt file, or a folder of checkpoints with their steps in their "
        f"names, such as step1000 or checkpoint-1000; {model} is none of these.{remedy}"
    )
