"""Metrics over rows of embeddings: `torchmetrics.Metric` subclasses whose states merge."""

from importlib import import_module
from pkgutil import iter_modules

from embedgeo.metrics.anisotropy import Anisotropy as Anisotropy
from embedgeo.metrics.base import GeometryMetric as GeometryMetric
from embedgeo.metrics.coordinates import OutlierCoordinates as OutlierCoordinates
from embedgeo.metrics.defaults import (
    default_metrics as default_metrics,
    extra_metrics as extra_metrics,
    full_metrics as full_metrics,
    streaming_metrics as streaming_metrics,
)
from embedgeo.metrics.dimension import IntrinsicDimension as IntrinsicDimension
from embedgeo.metrics.ledger import ResidualLedger as ResidualLedger
from embedgeo.metrics.moments import EmbeddingMoments as EmbeddingMoments
from embedgeo.metrics.next_token import NextTokenGeometry as NextTokenGeometry
from embedgeo.metrics.processing import AfterProcessing as AfterProcessing
from embedgeo.metrics.similarity import TokenSimilarity as TokenSimilarity
from embedgeo.metrics.tokens import TokenMoments as TokenMoments

# so that the glossary knows each metric that has a file here
for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
