"""Read the files of a checkpoint: nothing pickled in them is run, and errors name the file."""

import argparse
import errno
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from pickle import UnpicklingError
from types import SimpleNamespace
from typing import Any

import jsonargparse
import torch
from safetensors import safe_open

from embedgeo.results.wording import reason

_PATHS = ("Path", "PosixPath", "WindowsPath", "PurePath", "PurePosixPath", "PureWindowsPath")
_HARMLESS: tuple[Callable[..., Any] | tuple[Callable[..., Any], str], ...] = (
    argparse.Namespace,
    jsonargparse.Namespace,
    SimpleNamespace,
    *((Path, f"{module}.{name}") for module in ("pathlib", "pathlib._local") for name in _PATHS),
)
"""What hyperparameters may hold besides what torch loads by itself: these only keep what they are given."""


@contextmanager
def reading(name: str) -> Iterator[None]:
    """Say of an error which file it is about, without the advice of the library that raised it.

    Raises:
        ValueError: in place of every error.
    """
    try:
        yield
    except Exception as error:
        refused = re.search(r"GLOBAL ([\w.]+)", str(error))
        is_cut = "PytorchStreamReader failed" in str(error)
        is_damaged = is_cut or isinstance(error, UnpicklingError | KeyError | EOFError)  # as torch.load says it
        if refused:
            why = f"it holds a pickled {refused[1]}, which is not loaded, as that may run code; save it without"
        elif is_damaged or (isinstance(error, OSError) and error.errno == errno.EINVAL):
            why = "it is damaged, or was not written by torch.save"
        else:
            why = reason(error).rstrip(".")
        raise ValueError(f"{name} cannot be read: {why}.") from error


def harmless_allowed() -> AbstractContextManager[None]:
    """Let ``weights_only`` loading accept paths and namespaces, which Lightning's hyperparameters may hold."""
    return torch.serialization.safe_globals(list(_HARMLESS))


def stored_values(path: Path) -> Any:
    """What ``torch.save`` has written, with tensors that have no data, and without running code."""
    with reading(path.name), harmless_allowed():
        return torch.load(path, map_location="meta", weights_only=True)


def require_readable(path: Path) -> None:
    """Check that a file of weights is whole, without reading the weights.

    Raises:
        ValueError: it is damaged, or holds no weights.
    """
    if path.suffix == ".safetensors":
        with reading(path.name), safe_open(path, "pt"):
            return
    is_by_name = isinstance(stored_values(path), dict)
    if not is_by_name:
        raise ValueError(f"{path.name} must hold weights by their names; it does not.")
