"""Hooks that are on a model only while someone reads it, and the eager mode that lets them run."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn


class Hook:
    """A hook of one module, which does nothing on another one; its copies and pickles hold, and do, nothing."""

    def __init__(self, module: nn.Module | None = None, run: Callable[..., None] | None = None) -> None:
        self._module, self._run = module, run

    def __call__(self, module: nn.Module, *call: Any) -> None:
        """Run, if the module is its own."""
        if self._run is not None and module is self._module:
            self._run(module, *call)

    def __reduce__(self) -> tuple[type["Hook"], tuple[()]]:
        return Hook, ()


class _EagerMode:
    """Context in which modules run eagerly and call their hooks; contexts may overlap, and the last one ends it."""

    def __init__(self) -> None:
        self._num_open = 0
        self._settings = ExitStack()

    def __enter__(self) -> None:
        if not self._num_open:
            self._settings.enter_context(torch.compiler.set_stance("force_eager"))
            self._settings.callback(torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled())
            torch.backends.mha.set_fastpath_enabled(False)
        self._num_open += 1

    def __exit__(self, *error: object) -> None:
        self._num_open -= 1
        if not self._num_open:
            self._settings.close()


eager_mode = _EagerMode()
"""The one of this process."""


def first_float(value: Any) -> Tensor | None:
    """The first floating-point tensor in the arguments or the output of a module."""
    if isinstance(value, Tensor):
        return value if value.is_floating_point() else None
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, tuple | list):
        for each in value:  # no generator: torch.compile follows this
            found = first_float(each)
            if found is not None:
                return found
    return None


def first_input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """The first floating-point tensor that a module is called with; of those given by name ``hidden_states``."""
    return first_float((*args, kwargs.get("hidden_states"), *kwargs.values()))
