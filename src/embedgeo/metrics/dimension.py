"""Intrinsic dimension of the embeddings."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from embedgeo.functional.dimension import GlobalEstimator, estimated_dimension, twonn_dimension
from embedgeo.functional.distributed import Ranks, current_rank
from embedgeo.functional.rows import Rows
from embedgeo.functional.sampling import Sample, extend_sample, merge_samples, sample_batches
from embedgeo.metrics.base import GeometryMetric


class IntrinsicDimension(GeometryMetric):
    """Intrinsic dimension of a uniform sample of the embeddings, by TwoNN.

    Keeps ``batch_size * num_batches`` rows, drawn without replacement from all updates and ranks. ``compute()``
    gives float64 scalars: ``intrinsic_dimension``, the mean over batches of ``batch_size`` rows (one smaller batch
    where fewer were seen); ``intrinsic_dimension_std`` over batches (NaN for one); ``duplicate_fraction``, the share
    of rows that equal another one exactly and are merged with it first; ``n_points``, the distinct rows used, over
    all batches. The estimate is NaN where it is undefined: fewer than three distinct rows.

    Sources: Facco et al. 2017; Razzhigaev et al. 2024 (arXiv 2311.05928).

    Args:
        dim: d, the width of the embeddings.
        batch_size: rows per estimate. TwoNN depends on it: compare only estimates of one ``batch_size``.
        num_batches: estimates to average.
        estimator: ``"twonn"``, or any scikit-dimension global estimator object, such as ``skdim.id.lPCA()``.
        discard_fraction: share of the largest distance ratios that the TwoNN fit leaves out, in (0, 1).
        seed: of the sample. Metrics that are to be merged by ``merge_state`` need different ones.
        kwargs: of `torchmetrics.Metric`.

    Raises:
        ValueError: an argument outside its range, or an estimator that is neither.

    >>> metric = IntrinsicDimension(3)
    >>> metric.update(torch.rand(2000, 2, generator=torch.Generator().manual_seed(0)) @ torch.ones(2, 3).triu())
    >>> round(metric.compute()["intrinsic_dimension"].item())
    2
    """

    def __init__(
        self,
        dim: int,
        batch_size: int = 4096,
        num_batches: int = 1,
        estimator: str | GlobalEstimator = "twonn",
        discard_fraction: float = 0.1,
        seed: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(dim, **kwargs)
        if batch_size < 3 or num_batches < 1:
            raise ValueError(
                f"batch_size must be at least 3 rows and num_batches at least 1; got {batch_size} and {num_batches}."
            )
        if not 0 < discard_fraction < 1:
            raise ValueError(f"discard_fraction must be between 0 and 1, both excluded; got {discard_fraction}.")
        if estimator != "twonn" and (isinstance(estimator, type) or not hasattr(estimator, "fit")):
            raise ValueError(f'estimator must be "twonn" or a scikit-dimension estimator object; got {estimator!r}.')
        self.batch_size = batch_size
        self.num_batches = num_batches
        self.estimator = estimator
        self.discard_fraction = discard_fraction
        self.seed = seed
        self.declare(Sample.empty(dim))

    def observe(self, rows: Rows) -> None:
        stream = current_rank(self.process_group)
        self.store(extend_sample(self.load(Sample), rows.embeddings, self._size, seed=self.seed, stream=stream))

    def merge(self, before: Mapping[str, Tensor]) -> None:
        self.store(merge_samples(self.load(Sample, states=before), self.load(Sample), self._size))

    def all_reduce(self, ranks: Ranks) -> None:
        self.store(ranks.sample(self.load(Sample), self._size))

    def compute(self) -> dict[str, Tensor]:
        """The values named above."""
        sample = self.load(Sample)
        batches = sample_batches(sample, self.batch_size)
        estimates = [self._estimate(batch) for batch in batches]
        dimensions = sample.keys.new_tensor([estimate.dimension for estimate in estimates])
        num_rows, num_points = sum(map(len, batches)), sum(estimate.num_points for estimate in estimates)
        return {
            "intrinsic_dimension": dimensions.mean(),
            "intrinsic_dimension_std": dimensions.std() if len(dimensions) > 1 else dimensions.new_tensor(torch.nan),
            "duplicate_fraction": dimensions.new_tensor(1 - num_points / num_rows if num_rows else torch.nan),
            "n_points": dimensions.new_tensor(float(num_points)),
        }

    @property
    def _size(self) -> int:
        return self.batch_size * self.num_batches

    def _estimate(self, x: Tensor) -> Any:
        if isinstance(self.estimator, str):
            return twonn_dimension(x, discard_fraction=self.discard_fraction)
        return estimated_dimension(x, self.estimator)
