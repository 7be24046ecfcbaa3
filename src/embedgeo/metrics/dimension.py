"""Intrinsic dimension of the embeddings."""

from typing import Any

import torch
from torch import Tensor

from embedgeo.functional.dimension import GlobalEstimator, estimated_dimension, twonn_dimension
from embedgeo.functional.distributed import current_rank
from embedgeo.functional.duplicates import DUPLICATE_TOLERANCE
from embedgeo.functional.rows import Rows
from embedgeo.functional.sampling import Sample, sample_batches
from embedgeo.metrics.base import GeometryMetric


class IntrinsicDimension(GeometryMetric):
    """Intrinsic dimension of a uniform sample of the embeddings, by TwoNN.

    ``batch_size * num_batches`` rows are drawn without replacement from all updates and ranks. ``compute()`` returns
    float64 scalars: ``intrinsic_dimension``, the mean over batches of ``batch_size`` rows (one smaller batch where
    fewer rows were seen; NaN for fewer than three distinct rows); ``intrinsic_dimension_std`` over batches (NaN for
    one); ``duplicate_fraction``, the share of rows left out because they equal another one, exactly or but for
    rounding; ``n_points``, the number of distinct rows in all batches.

    Sources: Facco et al. 2017; Razzhigaev et al. 2024 (arXiv 2311.05928).

    Args:
        dim: d, the width of the embeddings.
        batch_size: rows per estimate. TwoNN depends on it: compare only estimates of one ``batch_size``.
        num_batches: estimates to average.
        estimator: ``"twonn"`` or any scikit-dimension global estimator object, such as ``skdim.id.lPCA()``.
        discard_fraction: share of the largest distance ratios that the TwoNN fit leaves out, in (0, 1).
        duplicate_tolerance: how near to each other rows are merged, relative to their distance from the mean: see
            `embedgeo.functional.merge_duplicates`; 0 merges exact copies only.
        seed: of the sample. Metrics that are to be merged by ``merge_state`` need different ones.
        kwargs: of `torchmetrics.Metric`.

    Raises:
        ValueError: an argument is out of its range, or the estimator is neither.

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
        duplicate_tolerance: float = DUPLICATE_TOLERANCE,
        seed: int = 0,
        **kwargs: Any,
    ) -> None:
        arguments = batch_size, num_batches, estimator, discard_fraction, duplicate_tolerance, seed
        super().__init__(dim, *arguments, **kwargs)
        if batch_size < 3 or num_batches < 1:
            raise ValueError(
                f"batch_size must be at least 3 rows and num_batches at least 1; got {batch_size} and {num_batches}."
            )
        if not 0 < discard_fraction < 1:
            raise ValueError(f"discard_fraction must be between 0 and 1, both excluded; got {discard_fraction}.")
        if not 0 <= duplicate_tolerance < 1:
            raise ValueError(f"duplicate_tolerance must be at least 0 and less than 1; got {duplicate_tolerance}.")
        if estimator != "twonn" and (isinstance(estimator, type) or not hasattr(estimator, "fit")):
            raise ValueError(f'estimator must be "twonn" or a scikit-dimension estimator object; got {estimator!r}.')
        self.batch_size = batch_size
        self.num_batches = num_batches
        self.estimator = estimator
        self.discard_fraction = discard_fraction
        self.duplicate_tolerance = duplicate_tolerance
        self.seed = seed
        self.declare(Sample.empty(dim, batch_size * num_batches))

    def update_states(self, rows: Rows) -> None:
        stream = current_rank(self.process_group)
        self.store(self.load(Sample).extend(rows.embeddings, seed=self.seed, stream=stream))

    def compute(self) -> dict[str, Tensor]:
        sample = self.load(Sample)
        batches = sample_batches(sample, self.batch_size)
        estimates = [
            twonn_dimension(batch, discard_fraction=self.discard_fraction, duplicate_tolerance=self.duplicate_tolerance)
            if isinstance(self.estimator, str)
            else estimated_dimension(batch, self.estimator, duplicate_tolerance=self.duplicate_tolerance)
            for batch in batches
        ]
        dimensions = sample.keys.new_tensor([estimate.dimension for estimate in estimates])
        num_rows, num_points = sum(map(len, batches)), sum(estimate.num_points for estimate in estimates)
        return {
            "intrinsic_dimension": dimensions.mean(),
            "intrinsic_dimension_std": dimensions.std() if len(dimensions) > 1 else dimensions.new_tensor(torch.nan),
            "duplicate_fraction": dimensions.new_tensor(1 - num_points / num_rows if num_rows else torch.nan),
            "n_points": dimensions.new_tensor(float(num_points)),
        }
