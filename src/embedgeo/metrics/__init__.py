"""Metrics over rows of embeddings: `torchmetrics.Metric` subclasses whose states merge."""

from torchmetrics import Metric

from embedgeo.metrics.anisotropy import Anisotropy as Anisotropy
from embedgeo.metrics.dimension import IntrinsicDimension as IntrinsicDimension
from embedgeo.metrics.moments import EmbeddingMoments as EmbeddingMoments
from embedgeo.metrics.processing import AfterProcessing as AfterProcessing
from embedgeo.metrics.tokens import TokenMoments as TokenMoments


def default_metrics(dim: int, seed: int = 0) -> list[Metric]:
    """The default metrics of a layer of width ``dim``; ``seed`` determines which rows are sampled."""
    return [TokenMoments(dim), Anisotropy(dim), IntrinsicDimension(dim, seed=seed)]


def streaming_metrics(dim: int, seed: int = 0) -> list[Metric]:
    """Like `default_metrics`, but without a table of token types: memory does not grow with the vocabulary."""
    return [EmbeddingMoments(dim), Anisotropy(dim), IntrinsicDimension(dim, seed=seed)]
