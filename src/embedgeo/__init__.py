"""Embedding geometry of transformers, while they train and over their checkpoints."""

import random
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from embedgeo.checkpoints.iteration import iter_checkpoints as iter_checkpoints
    from embedgeo.doctor import describe as describe
    from embedgeo.drift import Drift as Drift
    from embedgeo.geometry import Geometry as Geometry, observe as observe
    from embedgeo.metrics import (
        Anisotropy as Anisotropy,
        EmbeddingMoments as EmbeddingMoments,
        IntrinsicDimension as IntrinsicDimension,
        TokenMoments as TokenMoments,
        default_metrics as default_metrics,
        streaming_metrics as streaming_metrics,
    )
    from embedgeo.plotting import plot as plot
    from embedgeo.report.verdicts import compare as compare
    from embedgeo.results import load_results as load_results
    from embedgeo.results.samples import load_sample as load_sample
    from embedgeo.training.lightning import GeometryMonitor as GeometryMonitor
    from embedgeo.training.monitor import log_spaced_steps as log_spaced_steps
    from embedgeo.training.steps import StepMonitor as StepMonitor
    from embedgeo.training.transformers import GeometryCallback as GeometryCallback

__version__ = "0.1.0"

_MODULES = {  # by public name
    "Anisotropy": "metrics",
    "Drift": "drift",
    "EmbeddingMoments": "metrics",
    "Geometry": "geometry",
    "GeometryCallback": "training.transformers",
    "GeometryMonitor": "training.lightning",
    "IntrinsicDimension": "metrics",
    "StepMonitor": "training.steps",
    "TokenMoments": "metrics",
    "compare": "report.verdicts",
    "default_metrics": "metrics",
    "describe": "doctor",
    "iter_checkpoints": "checkpoints.iteration",
    "load_results": "results",
    "load_sample": "results.samples",
    "log_spaced_steps": "training.monitor",
    "observe": "geometry",
    "plot": "plotting",
    "streaming_metrics": "metrics",
}

__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    """Import what is asked for when it is: `embedgeo --help` must not wait for torch and
    Lightning.
    """
    if name in _MODULES:
        state = random.getstate()  # rich, which Lightning imports, draws from it
        try:
            return getattr(import_module(f"embedgeo.{_MODULES[name]}"), name)
        finally:
            random.setstate(state)
    if name.startswith("_") or find_spec(f"embedgeo.{name}") is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module(f"embedgeo.{name}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
