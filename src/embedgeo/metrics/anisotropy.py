"""Anisotropy of the embeddings."""

from typing import Any

from torch import Tensor

from embedgeo.functional.rows import Rows
from embedgeo.functional.sketch import ScatterSketch, row_sketch, sketch_values
from embedgeo.functional.spectrum import (
    ALPHA_WINDOW,
    AnisotropyBatches,
    Scatter,
    batch_values,
    covariance_eigenvalues,
    row_scatter,
    spectrum_values,
)
from embedgeo.metrics.base import GeometryMetric


class Anisotropy(GeometryMetric):
    """Anisotropy σ₁²/Σσ² of the centred embeddings, from their mean and d × d scatter.

    ``compute()`` returns float64 scalars: ``anisotropy``, ``participation_ratio``, ``anisotropy_standardized`` (of the
    z-scored rows) and ``anisotropy_null`` (the Gaussian baseline: that of an isotropic Gaussian of the same n and d);
    see `embedgeo.functional.spectrum_values` for their definitions. All but the baseline are NaN where the rows do not
    vary.

    With ``sketch=k`` the scatter is not held: of a random d × k projection of it ``anisotropy`` and
    ``participation_ratio`` are estimated, and ``anisotropy_error`` and ``participation_ratio_error`` say how far from
    the exact values they may be (see `embedgeo.functional.sketch_values`); the standardized anisotropy is absent.

    Source: Razzhigaev et al. 2024 (arXiv 2311.05928).

    Args:
        dim: d, the width of the embeddings.
        spectrum: also compute ``effective_rank``, ``rankme``, ``effective_rank_eigenvalues``, ``isoscore``,
            ``top1_share``, ``top5_share``, ``anisotropy_without_top5``, ``alpha_req`` and ``alpha_req_r2``.
        batch_size: also compute ``anisotropy_batch_mean`` and ``anisotropy_batch_std`` (of at least two batches) over
            consecutive batches of this many rows, as published curves are averaged. Batches do not span ranks, and
            rows that do not fill one are left out.
        sketch: k, the columns of the sketch: 8 d k bytes in place of 8 d². None: the scatter is held.
        alpha_window: the first and the last of the eigenvalues that ``alpha_req`` is fitted to, counted from 1.
        kwargs: of `torchmetrics.Metric`.

    Raises:
        ValueError: ``batch_size`` is less than 2, ``sketch`` less than 8, ``alpha_window`` holds less than three, or a
            sketch is to tell what it cannot.

    >>> import torch
    >>> metric = Anisotropy(2)
    >>> metric.update(torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 0.5], [0.0, -0.5]]))
    >>> metric.compute()["anisotropy"].item()
    0.8
    """

    plotted = ("anisotropy", "anisotropy_batch_mean", "anisotropy_standardized", "anisotropy_null")

    def __init__(
        self,
        dim: int,
        spectrum: bool = False,
        batch_size: int | None = None,
        sketch: int | None = None,
        alpha_window: tuple[int, int] = ALPHA_WINDOW,
        **kwargs: Any,
    ) -> None:
        alpha_window = _window(alpha_window)
        others = [each for each in (sketch, alpha_window) if each not in (None, ALPHA_WINDOW)]
        super().__init__(dim, spectrum, batch_size, *others, **kwargs)
        if batch_size is not None and batch_size < 2:
            raise ValueError(f"batch_size must be at least 2 rows, or None for no batches; got {batch_size}.")
        if sketch is not None:
            _require_sketch(sketch, spectrum, batch_size)
        self.spectrum = spectrum
        self.batch_size = batch_size
        self.sketch = sketch
        self.alpha_window = alpha_window
        self.declare(Scatter.empty(dim) if sketch is None else ScatterSketch.empty(dim, sketch))
        if batch_size is not None:
            self.declare(AnisotropyBatches.empty(dim, batch_size), "batch_")

    def update_states(self, rows: Rows) -> None:
        x = rows.embeddings
        self.extend(row_scatter(x, small=self.spectrum) if self.sketch is None else row_sketch(x, self.sketch))
        if self.batch_size is not None:
            self.store(self.load(AnisotropyBatches).extend(x))

    def state_bytes(self, num_rows: int, num_types: int = 0, itemsize: int = 4) -> int:
        pending = num_rows % self.batch_size if self.batch_size else 0
        matrix = self.dim**2 - 1 if self.sketch is None else (self.dim - 1) * self.sketch
        return super().state_bytes(num_rows) + 8 * matrix + pending * itemsize * self.dim

    def eigenvalues(self) -> Tensor:
        """Eigenvalues of the covariance of the rows, shape (d,), float64, in descending order; their sum is V.

        The rows are those that this process has seen or, within ``sync_context()``, those of all ranks;
        ``mean``, shape (d,), is the mean row of the same.

        Raises:
            ValueError: the metric holds a sketch.
        """
        if self.sketch is not None:
            raise ValueError(f"eigenvalues need the whole scatter; got sketch={self.sketch}. Leave sketch= out.")
        return covariance_eigenvalues(self.load(Scatter).expanded())

    def compute(self) -> dict[str, Tensor]:
        if self.sketch is not None:
            return sketch_values(self.load(ScatterSketch))
        scatter = self.load(Scatter).expanded()
        values = spectrum_values(scatter, full=self.spectrum, alpha_window=self.alpha_window)
        return values if self.batch_size is None else values | batch_values(self.load(AnisotropyBatches))


def _window(alpha_window: object) -> tuple[int, int]:
    match alpha_window:
        case (int(first), int(last)) if 1 <= first <= last - 2:
            return first, last
    raise ValueError(
        "alpha_window must be the first and the last of three eigenvalues or more, counted from 1, such as (11, 99); "
        f"got {alpha_window!r}."
    )


def _require_sketch(sketch: int, spectrum: bool, batch_size: int | None) -> None:
    if isinstance(sketch, bool) or not isinstance(sketch, int) or sketch < 8:
        raise ValueError(f"sketch must be a number of columns, 8 or more (512, say), or None for none; got {sketch!r}.")
    if spectrum or batch_size is not None:
        raise ValueError(
            f"sketch must be None with spectrum or batch_size, which need the scatter; got {sketch}. Leave one out."
        )
