"""Embedding geometry of transformers, while they train and over their checkpoints."""

from embedgeo.callback import GeometryMonitor, log_spaced_steps
from embedgeo.geometry import Geometry, observe
from embedgeo.metrics import (
    Anisotropy,
    EmbeddingMoments,
    IntrinsicDimension,
    TokenMoments,
    default_metrics,
    streaming_metrics,
)

__version__ = "0.1.0"

__all__ = [
    "Anisotropy",
    "EmbeddingMoments",
    "Geometry",
    "GeometryMonitor",
    "IntrinsicDimension",
    "TokenMoments",
    "default_metrics",
    "log_spaced_steps",
    "observe",
    "streaming_metrics",
]
