"""Anisotropy and mean cosine of the embeddings after z-scoring, whitening and removal of the top
directions.
"""

import re
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from embedgeo.functional.distributed import Ranks
from embedgeo.functional.processing import processed_values, require_removed
from embedgeo.functional.rows import Rows
from embedgeo.functional.sampling import Sample
from embedgeo.functional.spectrum import Scatter, row_scatter
from embedgeo.glossary import Term, term
from embedgeo.metrics.base import GeometryMetric
from embedgeo.metrics.gaussian import Array, GaussianRows

_PROCESSED = re.compile(r"(anisotropy|mean_cosine)_(centered|z_scored|whitened|top(\d+)_removed)")


class AfterProcessing(GeometryMetric):
    """Anisotropy and mean cosine of the embeddings after each after-processing.

    ``compute()`` returns float64 scalars: ``anisotropy_z_scored``, ``anisotropy_whitened`` and
    ``anisotropy_top{top}_removed``, exactly, from the mean and scatter of all rows;
    ``mean_cosine_centered``, ``mean_cosine_z_scored``, ``mean_cosine_whitened`` and
    ``mean_cosine_top{top}_removed`` of a uniform sample of the rows: see
    `embedgeo.functional.processed_values`. The values before any processing are ``anisotropy`` of
    `Anisotropy` and ``mean_cosine`` of `TokenMoments`. NaN where the rows do not vary. This metric
    is not among the default ones because it takes an eigendecomposition of a d × d matrix.

    Source: Mu & Viswanath 2018.

    Args:
        dim: d, the width of the embeddings.
        top: how many principal axes are removed; the source takes about d / 100. Several numbers:
            each of them, with keys of its own.
        sample_size: number of rows that the mean cosines are computed from.
        seed: of the sample. Metrics that are to be merged by ``merge_state`` need different ones,
            unless the one that is merged into the other has seen no more rows than it draws.
        kwargs: of `torchmetrics.Metric`.

    Raises:
        ValueError: ``top`` has a negative number, or one twice, or ``sample_size`` is less than 2.

    >>> import torch
    >>> metric = AfterProcessing(2, top=1)
    >>> metric.update(torch.tensor([[9.0, 1.0], [7.0, 1.0], [8.0, 1.5], [8.0, 0.5]]))
    >>> {
    ...     key: round(value.item(), 3)
    ...     for key, value in metric.compute().items()
    ...     if "whitened" in key
    ... }
    {'anisotropy_whitened': 0.5, 'mean_cosine_whitened': -0.333}
    """

    has_copies = False

    def __init__(
        self,
        dim: int,
        top: int | Sequence[int] = 3,
        sample_size: int = 4096,
        seed: int = 0,
        **kwargs: Any,
    ) -> None:
        top = top if isinstance(top, int) else tuple(top)
        super().__init__(dim, top, sample_size, seed, **kwargs)
        require_removed((top,) if isinstance(top, int) else top, "top", least=0)
        if sample_size < 2:
            raise ValueError(f"sample_size must be at least 2 rows; got {sample_size}.")
        self.top = top
        self.sample_size = sample_size
        self.seed = seed
        self.declare(Scatter.empty(dim))
        self.declare(Sample.empty(dim, sample_size, seed=seed))

    def update_states(self, rows: Rows) -> None:
        self.extend(row_scatter(rows.embeddings))
        self.store(self.load(Sample).extend(rows, ranks=Ranks.of(self.process_group)))

    @staticmethod
    def family_term(key: str) -> Term | None:
        processed = _PROCESSED.fullmatch(key)
        if processed is None:
            return None
        base = term(processed[1])
        how = f"top {processed[3]} removed" if processed[3] else processed[2].replace("_", "-")
        meaning = f"{base.meaning} Here of the rows after processing: {how}."
        # whitening makes the anisotropy 1 / d, of which there is nothing to draw
        is_drawn = key != "anisotropy_whitened"
        return Term(
            f"{base.name}, {how}", base.unit, meaning, is_drawn=is_drawn, gaussian=base.gaussian
        )

    @staticmethod
    def baseline(rows: GaussianRows) -> dict[str, Array]:
        return {"anisotropy_z_scored": rows.value("anisotropy_null")}

    def compute(self) -> dict[str, Tensor]:
        rows = self.load(Sample).rows
        return processed_values(self.load(Scatter).expanded(), rows, top=self.top)
