"""Anisotropy and mean cosine of the embeddings after z-scoring, whitening and removal of the top directions."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from embedgeo.functional.distributed import Ranks, current_rank
from embedgeo.functional.precision import to_state
from embedgeo.functional.processing import processed_values
from embedgeo.functional.rows import Rows
from embedgeo.functional.sampling import Sample, extend_sample, merge_samples
from embedgeo.functional.spectrum import Scatter, pool_scatter, row_scatter
from embedgeo.metrics.base import GeometryMetric


class AfterProcessing(GeometryMetric):
    """What after-processing makes of anisotropy and mean cosine, from the embeddings' mean and scatter and a sample.

    ``compute()`` gives float64 scalars: ``anisotropy_z_scored``, ``anisotropy_whitened``,
    ``anisotropy_top{top}_removed`` (exact), and ``mean_cosine_centered``, ``mean_cosine_z_scored``,
    ``mean_cosine_whitened``, ``mean_cosine_top{top}_removed`` (of a uniform sample of the rows): see
    `embedgeo.functional.processed_values`. Before it they are `Anisotropy`'s ``anisotropy`` and
    `TokenMoments`' ``mean_cosine``. NaN where the rows do not vary. Not among the default metrics: it takes an
    eigendecomposition of a d × d matrix.

    Source: Mu & Viswanath 2018.

    Args:
        dim: d, the width of the embeddings.
        top: how many principal axes are removed; the source takes about d / 100.
        sample_size: rows of which the mean cosines are taken.
        seed: of the sample. Metrics that are to be merged by ``merge_state`` need different ones.
        kwargs: of `torchmetrics.Metric`.

    Raises:
        ValueError: ``top`` is negative or ``sample_size`` less than 2.

    >>> import torch
    >>> metric = AfterProcessing(2, top=1)
    >>> metric.update(torch.tensor([[9.0, 1.0], [7.0, 1.0], [8.0, 1.5], [8.0, 0.5]]))
    >>> {key: round(value.item(), 3) for key, value in metric.compute().items() if "whitened" in key}
    {'anisotropy_whitened': 0.5, 'mean_cosine_whitened': -0.333}
    """

    def __init__(self, dim: int, top: int = 3, sample_size: int = 4096, seed: int = 0, **kwargs: Any) -> None:
        super().__init__(dim, **kwargs)
        if top < 0:
            raise ValueError(f"top must not be negative; got {top}.")
        if sample_size < 2:
            raise ValueError(f"sample_size must be at least 2 rows; got {sample_size}.")
        self.top, self.sample_size, self.seed = top, sample_size, seed
        self.declare(Scatter.empty(dim))
        self.declare(Sample.empty(dim))

    def observe(self, rows: Rows) -> None:
        self.store(pool_scatter([self.load(Scatter), to_state(row_scatter(rows.embeddings))]))
        sample, stream = self.load(Sample), current_rank(self.process_group)
        self.store(extend_sample(sample, rows.embeddings, self.sample_size, seed=self.seed, stream=stream))

    def merge(self, before: Mapping[str, Tensor]) -> None:
        self.store(pool_scatter([self.load(Scatter, states=before), self.load(Scatter)]))
        self.store(merge_samples(self.load(Sample, states=before), self.load(Sample), self.sample_size))

    def all_reduce(self, ranks: Ranks) -> None:
        self.store(pool_scatter([self.load(Scatter)], ranks.total_of))
        self.store(ranks.sample(self.load(Sample), self.sample_size))

    def compute(self) -> dict[str, Tensor]:
        """The values named above."""
        n, mean, scatter = self.load(Scatter)
        whole = Scatter(n, mean, scatter.expand(self.dim, self.dim))
        return processed_values(whole, self.load(Sample).rows, top=self.top)
