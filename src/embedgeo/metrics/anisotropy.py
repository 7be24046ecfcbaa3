"""Anisotropy of the embeddings."""

from typing import Any

from torch import Tensor

from embedgeo.functional.batches import AnisotropyBatches, batch_values
from embedgeo.functional.rows import Rows
from embedgeo.functional.spectrum import Scatter, covariance_eigenvalues, row_scatter, spectrum_values
from embedgeo.metrics.base import GeometryMetric


class Anisotropy(GeometryMetric):
    """Anisotropy σ₁²/Σσ² of the centred embeddings, from their mean and d × d scatter.

    ``compute()`` returns float64 scalars: ``anisotropy``, ``participation_ratio``, ``anisotropy_standardized`` (of the
    z-scored rows) and ``anisotropy_null`` (the Gaussian baseline: that of an isotropic Gaussian of the same n and d);
    see `embedgeo.functional.spectrum_values` for their definitions. All but the baseline are NaN where the rows do not
    vary.

    Source: Razzhigaev et al. 2024 (arXiv 2311.05928).

    Args:
        dim: d, the width of the embeddings.
        spectrum: also compute ``effective_rank``, ``isoscore``, ``top5_share`` and ``anisotropy_without_top5``.
        batch_size: also compute ``anisotropy_batch_mean`` and ``anisotropy_batch_std`` (of at least two batches) over
            consecutive batches of this many rows, as published curves are averaged. Batches do not span ranks, and
            rows that do not fill one are left out.
        kwargs: of `torchmetrics.Metric`.

    Raises:
        ValueError: ``batch_size`` is less than 2.

    >>> import torch
    >>> metric = Anisotropy(2)
    >>> metric.update(torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 0.5], [0.0, -0.5]]))
    >>> metric.compute()["anisotropy"].item()
    0.8
    """

    plotted = ("anisotropy", "anisotropy_batch_mean", "anisotropy_standardized", "anisotropy_null")

    def __init__(self, dim: int, spectrum: bool = False, batch_size: int | None = None, **kwargs: Any) -> None:
        super().__init__(dim, spectrum, batch_size, **kwargs)
        if batch_size is not None and batch_size < 2:
            raise ValueError(f"batch_size must be at least 2 rows, or None for no batches; got {batch_size}.")
        self.spectrum = spectrum
        self.batch_size = batch_size
        self.declare(Scatter.empty(dim))
        if batch_size is not None:
            self.declare(AnisotropyBatches.empty(dim, batch_size), "batch_")

    def update_states(self, rows: Rows) -> None:
        self.extend(row_scatter(rows.embeddings))
        if self.batch_size is not None:
            self.store(self.load(AnisotropyBatches).extend(rows.embeddings))

    def state_bytes(self, num_rows: int, num_types: int = 0, itemsize: int = 4) -> int:
        pending = num_rows % self.batch_size if self.batch_size else 0
        return super().state_bytes(num_rows) + 8 * (self.dim**2 - 1) + pending * itemsize * self.dim

    def eigenvalues(self) -> Tensor:
        """Eigenvalues of the covariance of the rows, shape (d,), float64, in descending order; their sum is V.

        The rows are those that this process has seen or, within ``sync_context()``, those of all ranks;
        ``mean``, shape (d,), is the mean row of the same.
        """
        return covariance_eigenvalues(self.load(Scatter).expanded())

    def compute(self) -> dict[str, Tensor]:
        values = spectrum_values(self.load(Scatter).expanded(), full=self.spectrum)
        return values if self.batch_size is None else values | batch_values(self.load(AnisotropyBatches))
