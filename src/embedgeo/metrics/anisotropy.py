"""Anisotropy of the embeddings."""

from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embedgeo.formatting import size
from embedgeo.functional.lockstep import Computation, on_host, steps, stepwise
from embedgeo.functional.rows import Rows
from embedgeo.functional.spectrum import (
    ALPHA_WINDOW,
    AnisotropyBatches,
    Scatter,
    ScatterSketch,
    batch_values,
    covariance_eigenvalues,
    entropy_rank,
    full_spectrum_values,
    row_scatter,
    row_sketch,
    sketch_values,
    spectrum_values,
)
from embedgeo.glossary import Term, in_group
from embedgeo.metrics.base import GeometryMetric, Table, Tables
from embedgeo.metrics.gaussian import Array, GaussianRows

_OF_A_SKETCH = (
    "How far the estimate may be from the exact value, where wide layers have a sketch of their "
    "scatter."
)

_SPECTRUM = {
    "effective_rank": Term(
        "effective rank", "exp of the entropy of the σ", "How many directions matter.", ranges=True
    ),
    "rankme": Term(
        "RankMe",
        "exp of the entropy of the σ of the rows as they are",
        "The effective rank of rows that are not centred: the common offset is one more direction, "
        "and a long one "
        "makes the others count less.",
        ranges=True,
    ),
    "effective_rank_eigenvalues": Term(
        "effective rank of eigenvalues",
        "exp of the entropy of the λ",
        "How many directions the variance needs; some papers call it RankMe. Small λ count less "
        "than in "
        "the other two.",
        ranges=True,
    ),
    "isoscore": Term(
        "IsoScore", "score, 0 to 1", "How evenly the variance is spread over all directions."
    ),
    "top1_share": Term(
        "top-1 share",
        "share of the variance",
        "Variance along the largest direction: the anisotropy, by another name.",
        is_drawn=False,
    ),
    "top5_share": Term(
        "top-5 share", "share of the variance", "Variance along the five largest directions."
    ),
    "anisotropy_without_top5": Term(
        "anisotropy without the top 5",
        "λ₆ / Σλ beyond the fifth",
        "Anisotropy that is left without the five largest directions.",
    ),
    "alpha_req": Term(
        "α-ReQ",
        "exponent α of λᵢ ∝ i^−α, fitted over i = 11 … 99 (alpha_window)",
        "How fast the spectrum decays: near 0 the directions matter alike, from 1 on a few of them "
        "hold most.",
    ),
    "alpha_req_r2": Term(
        "R² of α-ReQ", "R², weighted like the fit", "How well a power law describes the spectrum."
    ),
}

_TERMS = {
    "anisotropy": Term(
        "anisotropy",
        "σ₁² / Σσ² of the centred rows",
        "Share of the variance along one direction.",
        group="at a glance",
        order=120,
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
            "How many directions the variance is spread over.",
            ranges=True,
        ),
        **_SPECTRUM,
        anisotropy_error=Term(
            "error of the anisotropy", "half-width", _OF_A_SKETCH, is_drawn=False
        ),
        participation_ratio_error=Term(
            "error of the participation ratio", "half-width", _OF_A_SKETCH, is_drawn=False
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
            spread="anisotropy_batch_std",
            follows="anisotropy",
        ),
        anisotropy_batch_std=Term(
            "spread of the anisotropy",
            "std over batches of rows",
            "How much the anisotropy of batches varies.",
        ),
    ),
}


class Anisotropy(GeometryMetric):
    """Anisotropy σ₁²/Σσ² of the centred embeddings, from their mean and d × d scatter.

    ``compute()`` returns float64 scalars: ``anisotropy``, ``participation_ratio``,
    ``anisotropy_standardized`` (of the z-scored rows) and ``anisotropy_null`` (the Gaussian
    baseline: that of an isotropic Gaussian of the same n and d); see
    `embedgeo.functional.spectrum_values` for their definitions. All but the baseline are NaN where
    the rows do not vary.

    With ``sketch=k`` the scatter is not held: of a random d × k projection of it ``anisotropy`` and
    ``participation_ratio`` are estimated, and ``anisotropy_error`` and
    ``participation_ratio_error`` say how far from the exact values they may be (see
    `embedgeo.functional.spectrum_values`); the standardized anisotropy is absent.

    Source: Razzhigaev et al. 2024 (arXiv 2311.05928).

    Args:
        dim: d, the width of the embeddings.
        spectrum: also compute ``effective_rank``, ``rankme``, ``effective_rank_eigenvalues``,
            ``isoscore``, ``top1_share``, ``top5_share``, ``anisotropy_without_top5``, ``alpha_req``
            and ``alpha_req_r2``.
        batch_size: also compute ``anisotropy_batch_mean`` and ``anisotropy_batch_std`` (of at least
            two batches) over consecutive batches of this many rows, as published curves are
            averaged. Batches do not span ranks, and rows that do not fill one are left out.
        sketch: k, the columns of the sketch: 8 d k bytes in place of 8 d². None: the scatter is
            held.
        alpha_window: the first and the last of the eigenvalues that ``alpha_req`` is fitted to,
            counted from 1.
        kwargs: of `torchmetrics.Metric`.

    Raises:
        ValueError: ``batch_size`` is less than 2, ``sketch`` less than 8, ``alpha_window`` holds
            less than three, or a sketch is to tell what it cannot.

    >>> import torch
    >>> metric = Anisotropy(2)
    >>> metric.update(torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 0.5], [0.0, -0.5]]))
    >>> metric.compute()["anisotropy"].item()
    0.8
    """

    terms = _TERMS
    plotted = ("anisotropy", "anisotropy_batch_mean", "anisotropy_standardized", "anisotropy_null")
    has_samples = True

    mean: Tensor

    def __init__(
        self,
        dim: int,
        spectrum: bool = False,
        batch_size: int | None = None,
        sketch: int | None = None,
        alpha_window: tuple[int, int] = ALPHA_WINDOW,
        **kwargs: Any,
    ) -> None:
        match alpha_window:
            case (int(first), int(last)) if 1 <= first <= last - 2:
                alpha_window = first, last
            case _:
                raise ValueError(
                    "alpha_window must be the first and the last of three eigenvalues or more, "
                    "counted from 1, such as "
                    f"(11, 99); got {alpha_window!r}."
                )
        others = [each for each in (sketch, alpha_window) if each not in (None, ALPHA_WINDOW)]
        super().__init__(dim, spectrum, batch_size, *others, **kwargs)
        if batch_size is not None and batch_size < 2:
            raise ValueError(
                f"batch_size must be at least 2 rows, or None for no batches; got {batch_size}."
            )
        if sketch is not None and (
            isinstance(sketch, bool) or not isinstance(sketch, int) or sketch < 8
        ):
            raise ValueError(
                f"sketch must be a number of columns, 8 or more (512, say), or None for none; got "
                f"{sketch!r}."
            )
        if sketch is not None and (spectrum or batch_size is not None):
            raise ValueError(
                f"sketch must be None with spectrum or batch_size, which need the scatter; got "
                f"{sketch}. Leave one out."
            )
        self.spectrum = spectrum
        self.batch_size = batch_size
        self.sketch = sketch
        self.alpha_window = alpha_window
        self.declare(Scatter.empty(dim) if sketch is None else ScatterSketch.empty(dim, sketch))
        if batch_size is not None:
            self.declare(AnisotropyBatches.empty(dim, batch_size), "batch_")

    def update_states(self, rows: Rows) -> None:
        if self.sketch is None:
            self.extend(row_scatter(rows.embeddings, small=self.spectrum))
        else:
            self.extend(row_sketch(rows.embeddings, self.sketch))
        if self.batch_size is not None:
            self.store(self.load(AnisotropyBatches).extend(rows.embeddings))

    def state_bytes(self, num_rows: int, num_types: int = 0, itemsize: int = 4) -> int:
        pending = num_rows % self.batch_size if self.batch_size else 0
        matrix = self.dim**2 - 1 if self.sketch is None else (self.dim - 1) * self.sketch
        return super().state_bytes(num_rows) + 8 * matrix + pending * itemsize * self.dim

    @property
    def label(self) -> str:
        return "Anisotropy" if self.sketch is None else "Anisotropy (sketch)"

    @property
    def compromise(self) -> str:
        if self.sketch is None:
            return ""
        return (
            f"Anisotropy holds a sketch ({size(8 * self.dim * self.sketch)}) at layers of width "
            f"{self.dim}, not the "
            f"scatter ({size(8 * self.dim**2)}): anisotropy_error says how far off it may be, "
            f"anisotropy_standardized "
            "is absent."
        )

    def eigenvalues(self) -> Tensor:
        """Eigenvalues of the covariance of the rows, shape (d,), float64, in descending order;
        their sum is V.

        The rows are those that this process has seen or, within ``sync_context()``, those of all
        ranks; ``mean``, shape (d,), is the mean row of the same.

        Raises:
            ValueError: the metric holds a sketch.
        """
        if self.sketch is not None:
            raise ValueError(
                f"eigenvalues need the whole scatter; got sketch={self.sketch}. Leave sketch= out."
            )
        return covariance_eigenvalues(self.load(Scatter).expanded())

    def layer_tables(self) -> Tables:
        return {"spectra": self._spectrum} if self.spectrum else {}

    def samples(self) -> Table:
        held = {"mean": self.mean.where(self.num_finite > 0, torch.nan)}
        return held if self.sketch is not None else {**held, "eigenvalues": self.eigenvalues()}

    @staticmethod
    def baseline(rows: GaussianRows) -> dict[str, Array]:
        gaussian = rows.value("anisotropy_null")
        free = rows.n - 1
        return {
            **rows.simulated(_SPECTRUM, _gaussian_spectrum, rows.n),
            "anisotropy": gaussian,
            "top1_share": gaussian,
            "anisotropy_standardized": gaussian,
            "participation_ratio": (rows.dim * free + 2) / (free + rows.dim + 1),
        }

    @stepwise
    def compute(self) -> Computation[dict[str, Tensor]]:
        if self.sketch is not None:
            return sketch_values(self.load(ScatterSketch))
        scatter = self.load(Scatter).expanded()
        values = yield from steps(
            spectrum_values, scatter, full=self.spectrum, alpha_window=self.alpha_window
        )
        if self.batch_size is None:
            return values
        batches = self.load(AnisotropyBatches)
        of_batches = yield from on_host(batches.n, batches.mean, batches.m2)
        return values | batch_values(*of_batches)

    def _spectrum(self) -> Table:
        index = torch.arange(1, self.dim + 1)
        return {
            "index": index,
            "eigenvalue": self.eigenvalues(),
            "n": self.num_finite.expand(self.dim),
        }


@cache
def gaussian_eigenvalues(free: int, dim: int) -> Array:
    """Eigenvalues of Σ x xᵀ, descending, of Gaussian rows of ``free`` degrees of freedom (Dumitriu
    & Edelman 2002).
    """
    from scipy import linalg

    small, large = sorted((free, dim))
    random = np.random.default_rng(0)
    diagonal = np.sqrt(random.chisquare(large - np.arange(small)))
    beside = np.sqrt(random.chisquare(small - 1 - np.arange(small - 1)))
    squares = diagonal**2 + np.append(0, beside**2)
    eigenvalues = np.zeros(dim)
    eigenvalues[:small] = linalg.eigvalsh_tridiagonal(squares, diagonal[:-1] * beside)[::-1].clip(0)
    return eigenvalues


@cache
def _gaussian_spectrum(n: int, dim: int) -> dict[str, float]:
    centred = torch.from_numpy(gaussian_eigenvalues(n - 1, dim))
    uncentred = torch.from_numpy(gaussian_eigenvalues(n, dim))
    values = {**full_spectrum_values(centred), "rankme": entropy_rank(uncentred.sqrt())}
    return {key: float(value) for key, value in values.items()}
