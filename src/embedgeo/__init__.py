"""Embedding geometry of transformers, while they train and over their checkpoints."""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from embedgeo.geometry import Geometry, observe
    from embedgeo.metrics import (
        AfterProcessing,
        Anisotropy,
        EmbeddingMoments,
        IntrinsicDimension,
        TokenMoments,
        default_metrics,
        streaming_metrics,
    )
    from embedgeo.training.lightning import GeometryMonitor
    from embedgeo.training.schedule import log_spaced_steps
    from embedgeo.training.transformers import GeometryCallback

__version__ = "0.1.0"

__all__ = [
    "AfterProcessing",
    "Anisotropy",
    "EmbeddingMoments",
    "Geometry",
    "GeometryCallback",
    "GeometryMonitor",
    "IntrinsicDimension",
    "TokenMoments",
    "default_metrics",
    "log_spaced_steps",
    "observe",
    "streaming_metrics",
]

_MODULES = {
    "Geometry": "geometry",
    "GeometryCallback": "training.transformers",
    "GeometryMonitor": "training.lightning",
    "log_spaced_steps": "training.schedule",
    "observe": "geometry",
}
"""Where each name is, if not in ``metrics``."""


def __getattr__(name: str) -> Any:
    """Import what is asked for when it is: `embedgeo --help` must not wait for torch and Lightning."""
    if name in __all__:
        return getattr(import_module(f"embedgeo.{_MODULES.get(name, 'metrics')}"), name)
    if name.startswith("_") or find_spec(f"embedgeo.{name}") is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module(f"embedgeo.{name}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
