"""The presets and the examples: files that come with the package, by name."""

from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


def preset_files() -> dict[str, Path]:
    """YAML file of each preset, by name: options of a sweep, below a line that says of what."""
    return {path.stem: path for path in sorted(_shipped("configs").glob("[!.]*.yaml"))}


def preset_file(name: str) -> Path:
    """Path of the YAML file of a preset, such as ``pythia`` or ``yamagiwa2025``.

    Raises:
        ValueError: there is no such preset.
    """
    return _named(name, preset_files(), "a preset")


def example_files() -> dict[str, list[Path]]:
    """Files of each example, by name: the script, after it what it is run with."""
    by_name: dict[str, list[Path]] = {}
    for path in sorted(_shipped("examples").glob("[!.]*")):
        if path.is_file():
            by_name.setdefault(path.stem, []).append(path)
    return by_name


def write_example(name: str, folder: Path) -> list[Path]:
    """Write the files of an example, such as ``plain_loop``, into a folder, and return their paths.

    Raises:
        ValueError: there is no such example.
        FileExistsError: one of the files is there already; then none is written.
    """
    files = _named(name, example_files(), "an example")
    targets = [folder / path.name for path in files]
    if there := [str(target) for target in targets if target.exists()]:
        raise FileExistsError(
            f"an example never replaces a file; there already: {', '.join(there)}. Rename or "
            f"remove that first."
        )
    for path, target in zip(files, targets, strict=True):
        target.write_bytes(path.read_bytes())
    return targets


def _named(name: str, known: dict[str, T], kind: str) -> T:
    if name not in known:
        raise ValueError(f"the name of {kind} must be one of {', '.join(known)}; got {name!r}.")
    return known[name]


def _shipped(folder: str) -> Path:
    """A folder inside the installed package; in a checkout, which the package is run from, that at
    its top.
    """
    installed = Path(__file__).parent / folder
    return installed if installed.is_dir() else Path(__file__).parents[2] / folder
