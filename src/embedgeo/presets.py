"""The presets: options of a sweep under a name, as files that come with the package."""

from pathlib import Path
from typing import Any

from embedgeo.formatting import did_you_mean


def preset_file(name: str) -> Path:
    """Path of the YAML file of a preset, such as ``pythia`` or ``yamagiwa2025``.

    Raises:
        ValueError: there is no such preset.
    """
    known = {
        path.stem: path for path in _folder().glob("*.yaml") if path.stem != "pretrain"
    }  # that is a LightningCLI's
    if name not in known:
        names = ", ".join(sorted(known)) or "none here"
        raise ValueError(f"a preset must be one of {names}; got {name!r}.{did_you_mean(name, known)}")
    return known[name]


def preset(name: str) -> dict[str, Any]:
    """The options of a preset, as keyword arguments of `embedgeo.sweep.SweepSettings`.

    Args:
        name: of its file, without the ending.

    Returns:
        The options by name, as the file has them.

    Raises:
        ValueError: there is no such preset.

    >>> preset("yamagiwa2025")["unit"]
    'sentence'
    """
    import yaml

    options: dict[str, Any] = yaml.safe_load(preset_file(name).read_text(encoding="utf-8"))
    return options


def _folder() -> Path:
    """``configs`` in the installed package; in a checkout, which the package is run from, that at its top."""
    installed = Path(__file__).parent / "configs"
    return installed if installed.is_dir() else Path(__file__).parents[2] / "configs"
