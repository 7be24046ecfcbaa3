"""Metrics over rows of embeddings: `torchmetrics.Metric` subclasses that keep mergeable states."""

from torchmetrics import Metric

from embedgeo.metrics.anisotropy import Anisotropy
from embedgeo.metrics.dimension import IntrinsicDimension
from embedgeo.metrics.moments import EmbeddingMoments
from embedgeo.metrics.processing import AfterProcessing
from embedgeo.metrics.tokens import TokenMoments

__all__ = [
    "AfterProcessing",
    "Anisotropy",
    "EmbeddingMoments",
    "IntrinsicDimension",
    "TokenMoments",
    "default_metrics",
    "streaming_metrics",
]


def default_metrics(dim: int, seed: int = 0) -> list[Metric]:
    """What the monitor measures at each layer unless told otherwise; ``seed`` is that of the sampled rows."""
    return [TokenMoments(dim), Anisotropy(dim), IntrinsicDimension(dim, seed=seed)]


def streaming_metrics(dim: int, seed: int = 0) -> list[Metric]:
    """The same without a table of token types, so that memory does not grow with the vocabulary."""
    return [EmbeddingMoments(dim), Anisotropy(dim), IntrinsicDimension(dim, seed=seed)]
