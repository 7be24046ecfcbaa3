"""How the monitors read a model that is compiled: by permanent hooks in its graphs, or by running it eagerly."""

import importlib
import warnings
from importlib.metadata import version
from typing import Literal

from embedgeo.capture.structure import is_compiled
from embedgeo.geometry import Geometry
from embedgeo.results.wording import reason

Compiled = Literal["eager", "stable"]
"""How a measured step of a compiled model runs."""


def require_compiled(compiled: str) -> None:
    """Raise ValueError if ``compiled`` is neither ``"eager"`` nor ``"stable"``, or the latter not for this torch."""
    if compiled not in ("eager", "stable"):
        raise ValueError(f'compiled must be "eager" or "stable"; got {compiled!r}.')
    if compiled == "stable":
        try:
            importlib.import_module("embedgeo.capture.listening")  # which takes names that torch may change
        except Exception as error:
            torch = version("torch")
            cause = f'compiled="stable" does not work with torch {torch} ({reason(error)}). Use compiled="eager".'
            raise ValueError(cause) from error


def prepare(monitor: object, geometry: Geometry) -> bool:
    """Put permanent hooks on a model that is not compiled; of another one say, once, that it is measured eagerly."""
    if not geometry.probe.is_prepared():
        if is_compiled(geometry.model):
            warnings.warn(_message(monitor, "the model was compiled before"), stacklevel=4)
            return False
        geometry.probe.prepare(geometry.model)
    return True


def listen(monitor: object, geometry: Geometry, *, was_told: bool) -> bool:
    """Have a prepared model read in its graphs; of another one say, once, that it is measured eagerly."""
    geometry.probe.is_stable = geometry.probe.is_prepared()
    if not (geometry.probe.is_stable or was_told):
        warnings.warn(_message(monitor, "it was not called"), stacklevel=4)
    return geometry.probe.is_stable


def _message(monitor: object, cause: str) -> str:
    return (
        f'{type(monitor).__name__}: compiled="stable" needs prepare(model) before torch.compile; {cause}, so measured '
        "steps run eagerly. Call prepare(model) first."
    )
