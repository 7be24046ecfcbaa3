"""Intrinsic dimension of the embeddings."""

from collections.abc import Sequence
from copy import copy
from typing import Any, Self

import torch
from torch import Tensor

from embedgeo.functional.dimension import (
    DimensionEstimate,
    GlobalEstimator,
    estimated_dimension,
    twonn_dimension,
)
from embedgeo.functional.distributed import current_rank
from embedgeo.functional.duplicates import DUPLICATE_TOLERANCE
from embedgeo.functional.jackknife import standard_error
from embedgeo.functional.rows import Rows
from embedgeo.functional.sampling import Sample, sample_batches
from embedgeo.metrics.base import GeometryMetric, ValuesAndErrors


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

    has_copies = False
    plotted = ("intrinsic_dimension",)

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
        given = rows.embeddings, rows.sequence_ids, rows.finite
        self.store(self.load(Sample).extend(*given, seed=self.seed, stream=stream))

    def state_bytes(self, num_rows: int, num_types: int = 0, itemsize: int = 4) -> int:
        num_sampled = min(num_rows, self.batch_size * self.num_batches)
        return super().state_bytes(num_rows) + num_sampled * (itemsize * self.dim + 24)

    def sample(self) -> Sample:
        """The sampled rows in the order in which they are drawn: the first k are a sample of k rows.

        They are drawn from those that this process has seen or, within ``sync_context()``, from those of all ranks.
        """
        sample = self.load(Sample)
        return sample.select(sample.keys.argsort())

    def compute(self) -> dict[str, Tensor]:
        sample = self.load(Sample)
        return self._values([self._estimate(rows) for rows, _ in sample_batches(sample, self.batch_size)], sample)

    def compute_with_errors(self, groups: Sequence[Self] = ()) -> ValuesAndErrors:
        """The values of ``compute``, and the standard error of TwoNN; the other keys have NaN.

        The groups of the jackknife are the ``sequence_ids`` of the sampled rows: see
        `embedgeo.functional.twonn_dimension`. ``groups`` are not used.
        """
        sample = self.load(Sample)
        batches = sample_batches(sample, self.batch_size)
        labels, group = torch.cat([labels for _, labels in batches]).unique(return_inverse=True)
        of_batches = group.split([len(rows) for rows, _ in batches])
        estimates = [
            self._estimate(rows, of_batch, len(labels)) for (rows, _), of_batch in zip(batches, of_batches, strict=True)
        ]
        values = self._values(estimates, sample)
        errors = {key: torch.full_like(value, torch.nan) for key, value in values.items()}
        left_out = [estimate.left_out for estimate in estimates if estimate.left_out is not None]
        if left_out:
            value, mean = values["intrinsic_dimension"], torch.stack(left_out).mean(0).to(sample.keys.device)
            errors["intrinsic_dimension"] = standard_error(value, mean, group.bincount())
        return values, errors

    def _estimate(self, rows: Tensor, groups: Tensor | None = None, num_groups: int = 0) -> DimensionEstimate:
        tolerance = self.duplicate_tolerance
        if not isinstance(self.estimator, str):
            own = copy(self.estimator)  # several layers, which may be given the same one, are computed at a time
            return estimated_dimension(rows, own, duplicate_tolerance=tolerance)
        return twonn_dimension(
            rows,
            discard_fraction=self.discard_fraction,
            duplicate_tolerance=tolerance,
            groups=groups,
            num_groups=num_groups,
        )

    def _values(self, estimates: Sequence[DimensionEstimate], sample: Sample) -> dict[str, Tensor]:
        dimensions = sample.keys.new_tensor([estimate.dimension for estimate in estimates])
        num_rows = min(len(sample.rows), self.batch_size * len(estimates))
        num_points = sum(estimate.num_points for estimate in estimates)
        return {
            "intrinsic_dimension": dimensions.mean(),
            "intrinsic_dimension_std": dimensions.std() if len(dimensions) > 1 else dimensions.new_tensor(torch.nan),
            "duplicate_fraction": dimensions.new_tensor(1 - num_points / num_rows if num_rows else torch.nan),
            "n_points": dimensions.new_tensor(float(num_points)),
        }
