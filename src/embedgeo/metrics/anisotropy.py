"""Anisotropy of the embeddings."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from embedgeo.functional.distributed import Ranks
from embedgeo.functional.moments import pool
from embedgeo.functional.precision import to_state
from embedgeo.functional.rows import Rows
from embedgeo.functional.spectrum import Scatter, anisotropy, pool_scatter, row_scatter, spectrum_values
from embedgeo.metrics.base import GeometryMetric

_BATCH = "batch_"


class Spread(NamedTuple):
    """Count, mean and squared deviations of the anisotropies of the batches so far, scalars."""

    n: Tensor
    mean: Tensor
    m2: Tensor


class Anisotropy(GeometryMetric):
    """Anisotropy σ₁²/Σσ² of the centred embeddings, from their mean and d × d scatter.

    ``compute()`` gives float64 scalars: ``anisotropy``, ``participation_ratio``, ``anisotropy_standardized``
    (of the z-scored rows) and ``anisotropy_null`` (of an isotropic Gaussian of the same n and d); see
    `embedgeo.functional.spectrum.spectrum_values` for them and for those that ``spectrum`` adds. NaN where the rows
    do not vary.

    Source: Razzhigaev et al. 2024 (arXiv 2311.05928).

    Args:
        dim: d, the width of the embeddings.
        spectrum: also ``effective_rank``, ``isoscore``, ``top5_share`` and ``anisotropy_without_top5``.
        batch_size: also ``anisotropy_batch_mean`` and ``anisotropy_batch_std`` (over at least two batches) over
            consecutive batches of this many rows, as published curves are averaged. Batches do not span ranks, and
            rows that do not fill one are left out.
        kwargs: of `torchmetrics.Metric`.

    Raises:
        ValueError: ``batch_size`` is less than 2.

    >>> metric = Anisotropy(2)
    >>> metric.update(torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 0.5], [0.0, -0.5]]))
    >>> metric.compute()["anisotropy"].item()
    0.8
    """

    batch_pending: Tensor

    def __init__(self, dim: int, spectrum: bool = False, batch_size: int | None = None, **kwargs: Any) -> None:
        super().__init__(dim, **kwargs)
        if batch_size is not None and batch_size < 2:
            raise ValueError(f"batch_size must be at least 2 rows, or None for no batches; got {batch_size}.")
        self.spectrum = spectrum
        self.batch_size = batch_size
        self.declare(Scatter.empty(dim))
        if batch_size is not None:
            zero = torch.zeros((), dtype=torch.float64)
            self.declare(Spread(zero, zero, zero), _BATCH)
            self.add_state("batch_pending", torch.zeros(0, dim), dist_reduce_fx=None)

    def observe(self, rows: Rows) -> None:
        self.store(pool_scatter([self.load(Scatter), to_state(row_scatter(rows.embeddings))]))
        if self.batch_size is not None:
            self._fill_batches(self.batch_pending, rows.embeddings.to(self.device))

    def merge(self, before: Mapping[str, Tensor]) -> None:
        self.store(pool_scatter([self.load(Scatter, states=before), self.load(Scatter)]))
        if self.batch_size is not None:
            self._merge_batches(self.load(Spread, _BATCH, before))
            self._fill_batches(before["batch_pending"], self.batch_pending)

    def all_reduce(self, ranks: Ranks) -> None:
        self.store(pool_scatter([self.load(Scatter)], ranks.total_of))
        if self.batch_size is not None:
            self.store(Spread(*pool(*self.load(Spread, _BATCH), ranks.total)), _BATCH)

    def compute(self) -> dict[str, Tensor]:
        """The values named above."""
        n, mean, scatter = self.load(Scatter)
        values = spectrum_values(Scatter(n, mean, scatter.expand(self.dim, self.dim)), full=self.spectrum)
        if self.batch_size is not None:
            batches = self.load(Spread, _BATCH)
            values["anisotropy_batch_mean"] = torch.where(batches.n > 0, batches.mean, torch.nan)
            values["anisotropy_batch_std"] = torch.where(batches.n > 1, batches.m2 / (batches.n - 1), torch.nan).sqrt()
        return values

    def _fill_batches(self, pending: Tensor, x: Tensor) -> None:
        assert self.batch_size is not None
        dtype = torch.promote_types(torch.promote_types(pending.dtype, x.dtype), torch.float32)
        batches = torch.cat((pending.to(dtype), x.to(dtype))).split(self.batch_size)
        for batch in batches:
            if len(batch) == self.batch_size:
                value = anisotropy(batch)
                self._merge_batches(Spread(torch.ones_like(value), value, torch.zeros_like(value)))
        rest = batches[-1]
        self.batch_pending = (rest[:0] if len(rest) == self.batch_size else rest).clone()

    def _merge_batches(self, batches: Spread) -> None:
        held = self.load(Spread, _BATCH)
        n, mean, m2 = (torch.stack(pair) for pair in zip(held, batches, strict=True))
        self.store(Spread(*pool(n, mean, m2, lambda t: t.sum(0))), _BATCH)
