"""Anisotropy of the embeddings."""

from typing import Any

import torch
from torch import Tensor

from embedgeo.formatting import size
from embedgeo.functional.distributed import Ranks
from embedgeo.functional.rows import Rows
from embedgeo.functional.sampling import Sample
from embedgeo.functional.spectrum import (
    AnisotropyBatches,
    Scatter,
    batch_values,
    covariance_eigenvalues,
    row_scatter,
    sampled_spectrum_values,
    spectrum_values,
)
from embedgeo.glossary import Term, in_group, left_without
from embedgeo.metrics.base import GeometryMetric, Table
from embedgeo.metrics.gaussian import Array, GaussianRows

_OF_A_SAMPLE = (
    "Of layers too wide for a scatter it is that of a sample of the rows, as is the Gaussian one."
)

_SPECTRUM = {
    "effective_rank": Term(
        "effective rank", "exp of the entropy of the σ", "How many directions matter.", ranges=True
    ),
    "rankme": Term(
        "RankMe",
        "exp of the entropy of the σ of the rows as they are",
        "The effective rank of rows that are not centred: the common offset is one more direction, "
        "and a long one makes the others count less.",
        ranges=True,
    ),
    "effective_rank_eigenvalues": Term(
        "effective rank of eigenvalues",
        "exp of the entropy of the λ",
        "How many directions the variance needs; some papers call it RankMe. Small λ count less "
        "than in the other two.",
        ranges=True,
    ),
    "isoscore": Term(
        "IsoScore", "score, 0 to 1", "How evenly the variance is spread over all directions."
    ),
    "top5_share": Term(
        "top-5 share", "share of the variance", "Variance along the five largest directions."
    ),
    "anisotropy_without_top5": Term(
        "anisotropy without the top 5",
        "λ₆ / Σλ beyond the fifth",
        "Anisotropy that is left without the five largest directions.",
    ),
}

_TERMS = {
    "anisotropy": Term(
        "anisotropy",
        "σ₁² / Σσ² of the centred rows",
        f"Share of the variance along one direction. {_OF_A_SAMPLE}",
        group="at a glance",
        order=120,
        rows_per_dimension=16,
    ),
    **in_group(
        "shape",
        310,
        anisotropy_standardized=Term(
            "anisotropy, standardized",
            "σ₁² / Σσ² of the z-scored rows",
            "Anisotropy with every coordinate scaled to variance 1: is there more to it than a few "
            "large coordinates?",
        ),
        participation_ratio=Term(
            "participation ratio",
            "directions, (Σλ)² / Σλ²",
            f"How many directions the variance is spread over. {_OF_A_SAMPLE}",
            ranges=True,
        ),
        **_SPECTRUM,
        constant_dims=Term(
            "constant coordinates",
            "coordinates left out of the standardized anisotropy",
            "Coordinates whose variance is no more than rounding of their mean, or out of range.",
            ranges=True,
            is_drawn=False,
            gaussian=0.0,
        ),
        anisotropy_null=Term(
            "anisotropy of a Gaussian",
            "expected σ₁² / Σσ²",
            "What isotropic Gaussian rows of the same number and width show.",
            is_drawn=False,
        ),
    ),
    **in_group(
        "shape",
        330,
        anisotropy_batch_mean=Term(
            "anisotropy of batches",
            "mean over batches of rows",
            "Anisotropy as papers report it: batch by batch.",
        ),
        anisotropy_batch_std=Term(
            "spread of the anisotropy",
            "std over batches of rows",
            "How much the anisotropy of batches varies.",
        ),
    ),
}


_TERMS["anisotropy_without_top_dim"] = left_without(_TERMS["anisotropy"], "the largest coordinate")


class Anisotropy(GeometryMetric):
    """Anisotropy σ₁²/Σσ² of the centred embeddings, from their mean and d × d scatter.

    ``compute()`` returns float64 scalars: ``anisotropy``, ``anisotropy_without_top_dim`` (without
    the coordinate of the largest second moment), ``participation_ratio``,
    ``anisotropy_standardized`` (of the z-scored rows), ``constant_dims`` (the number of coordinates
    that these leave out) and ``anisotropy_null`` (the Gaussian
    baseline: that of an isotropic Gaussian of the same n and d); see
    `embedgeo.functional.spectrum_values` for their definitions. All but the baseline are NaN where
    the rows do not vary.

    With ``sample_size=m`` the scatter is not held: the values, the baseline among them, are those
    of a uniform sample of m rows, from the m × m matrix of their products. They have no standard
    errors by the jackknife.

    Source: Razzhigaev et al. 2024 (arXiv 2311.05928).

    Args:
        dim: d, the width of the embeddings.
        spectrum: also compute ``effective_rank``, ``rankme``, ``effective_rank_eigenvalues``,
            ``isoscore``, ``top5_share`` and ``anisotropy_without_top5``.
        batch_size: also compute ``anisotropy_batch_mean`` and ``anisotropy_batch_std`` (of at least
            two batches) over consecutive batches of this many rows, as published curves are
            averaged. Rows that fill no batch on their rank fill some with those of other ranks;
            those that fill none are left out.
        sample_size: m, the number of rows that are drawn without replacement from all updates and
            ranks: 4 d m bytes in place of 8 d². None: the scatter of all rows is held.
        seed: of the sample; another one for each of metrics that ``merge_state`` joins.
        kwargs: of `torchmetrics.Metric`.

    Raises:
        ValueError: ``batch_size`` or ``sample_size`` is less than 2, or a sample is to tell what
            it cannot.

    >>> import torch
    >>> metric = Anisotropy(2)
    >>> metric.update(torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 0.5], [0.0, -0.5]]))
    >>> metric.compute()["anisotropy"].item()
    0.8
    """

    terms = _TERMS
    keys_without_massive = ("anisotropy", "anisotropy_without_top_dim")

    mean: Tensor

    def __init__(
        self,
        dim: int,
        spectrum: bool = False,
        batch_size: int | None = None,
        sample_size: int | None = None,
        seed: int = 0,
        **kwargs: Any,
    ) -> None:
        others = () if sample_size is None else (sample_size, seed)
        super().__init__(dim, spectrum, batch_size, *others, **kwargs)
        for name, num_rows in (("batch_size", batch_size), ("sample_size", sample_size)):
            if num_rows is not None and num_rows < 2:
                raise ValueError(f"{name} must be at least 2 rows, or None; got {num_rows}.")
        if sample_size is not None and (spectrum or batch_size is not None):
            raise ValueError(
                f"sample_size must be None with spectrum or batch_size, which need all rows; got "
                f"{sample_size}. Leave one out."
            )
        self.spectrum = spectrum
        self.batch_size = batch_size
        self.sample_size = sample_size
        self.seed = seed
        self.has_copies = sample_size is None
        self.has_samples = self.has_copies
        if sample_size is None:
            self.declare(Scatter.empty(dim))
        else:
            self.declare(Sample.empty(dim, sample_size, seed=seed))
            self.compromise = (
                f"Anisotropy is that of a sample of {sample_size:,} rows "
                f"({size(4 * dim * sample_size)}) at layers of width {dim}, not of the scatter of "
                f"all ({size(8 * dim**2)}): compare it with anisotropy_null, and with samples of "
                "as many rows."
            )
        if batch_size is not None:
            self.declare(AnisotropyBatches.of_size(dim, batch_size), "batch_")

    def update_states(self, rows: Rows) -> None:
        if self.sample_size is not None:
            self.store(self.load(Sample).extend(rows, Ranks.of(self.process_group)))
            return
        self.extend(row_scatter(rows.embeddings, small=self.spectrum))
        if self.batch_size is not None:
            self.store(self.load(AnisotropyBatches).extend(rows.embeddings))

    def working_bytes(self, num_types: int, device: torch.device) -> int:
        if self.sample_size is not None:
            return 5 * 8 * self.sample_size * self.dim
        return 5 * 8 * self.dim**2

    def eigenvalues(self) -> Tensor:
        """Eigenvalues of the covariance of the rows, shape (d,), float64, in descending order;
        their sum is V.

        The rows are those that this process has seen or, within ``sync_context()``, those of all
        ranks; ``mean``, shape (d,), is the mean row of the same.

        Raises:
            ValueError: the metric holds a sample.
        """
        if self.sample_size is not None:
            raise ValueError(
                f"eigenvalues need the scatter of all rows; got sample_size={self.sample_size}. "
                "Leave sample_size= out."
            )
        return covariance_eigenvalues(self.load(Scatter).expanded())

    def samples(self) -> Table:
        eigenvalues = self.eigenvalues()  # which a sample does not have
        held = self.load(Scatter)
        return {"mean": held.mean.where(held.n > 0, torch.nan), "eigenvalues": eigenvalues}

    @staticmethod
    def baseline(rows: GaussianRows) -> dict[str, Array]:
        gaussian = rows.value("anisotropy_null")
        free = rows.n - 1
        return {
            "anisotropy": gaussian,
            "anisotropy_standardized": gaussian,
            "participation_ratio": (rows.dim * free + 2) / (free + rows.dim + 1),
        }

    def compute(self) -> dict[str, Tensor]:
        if self.sample_size is not None:
            return sampled_spectrum_values(self.load(Sample).on(self.device).rows)
        values = spectrum_values(self.load(Scatter).expanded(), full=self.spectrum)
        if self.batch_size is not None:
            values |= batch_values(self.load(AnisotropyBatches))
        return values
