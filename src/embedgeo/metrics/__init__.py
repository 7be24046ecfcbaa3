"""Metrics over rows of embeddings: `torchmetrics.Metric` subclasses whose states merge."""

from importlib import import_module
from pkgutil import iter_modules

from embedgeo.metrics.anisotropy import Anisotropy
from embedgeo.metrics.base import GeometryMetric
from embedgeo.metrics.defaults import (
    default_metrics,
    streaming_metrics,
)
from embedgeo.metrics.dimension import IntrinsicDimension
from embedgeo.metrics.moments import EmbeddingMoments
from embedgeo.metrics.tokens import TokenMoments

__all__ = [
    "Anisotropy",
    "EmbeddingMoments",
    "GeometryMetric",
    "IntrinsicDimension",
    "TokenMoments",
    "default_metrics",
    "streaming_metrics",
]

# so that the glossary knows each metric that has a file here
for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
