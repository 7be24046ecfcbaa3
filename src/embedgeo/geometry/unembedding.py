"""The output embedding of a model, for the metrics that compare rows with what predicts the next token."""

from collections.abc import Iterable

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from embedgeo.capture.structure import measured_model
from embedgeo.metrics import NextTokenGeometry
from embedgeo.metrics.layer import LayerMetrics, MetricFactory


class Unembedding:
    """The weights of a model's output embedding, held where a metric asks for them, also when the model's are gone.

    Args:
        model: any module; a model of transformers, or another one with ``get_output_embeddings()``, has them.
        make_metrics: makes the metrics of a layer.
    """

    def __init__(self, model: nn.Module, make_metrics: MetricFactory) -> None:
        self._weights: Tensor | None = None
        if any(isinstance(metric, NextTokenGeometry) for metric in make_metrics(2)):
            head = getattr(measured_model(model), "get_output_embeddings", lambda: None)()
            weights = getattr(head, "weight", None)
            if isinstance(weights, Tensor) and weights.is_floating_point() and not weights.is_meta:
                self._weights = weights

    def give(self, layers: Iterable[LayerMetrics], *, copied: bool) -> None:
        """Give the metrics the weights as they are now; every rank must call this, as each may have a part of them.

        Args:
            layers: the metrics of all layers.
            copied: whether the weights may change before the metrics are computed.
        """
        if self._weights is None:
            return
        weights = self._weights.detach()
        if isinstance(weights, DTensor):
            weights = weights.full_tensor()
        elif copied:
            weights = weights.clone()
        for metrics in layers:
            metrics.set_unembedding(weights)
