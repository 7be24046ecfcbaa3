"""Intrinsic dimension of the embeddings."""

import math
from collections.abc import Sequence
from copy import copy
from functools import cache, partial
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from embedgeo.functional.dimension import (
    DISCARD_FRACTIONS,
    SCALES,
    DimensionEstimate,
    GlobalEstimator,
    ScaleEstimates,
    estimated_dimension,
    gride_dimensions,
    most_likely_dimension,
    twonn_dimension,
)
from embedgeo.functional.distributed import current_rank, num_ranks
from embedgeo.functional.jackknife import standard_error
from embedgeo.functional.neighbors import DUPLICATE_TOLERANCE
from embedgeo.functional.rows import Rows
from embedgeo.functional.sampling import Sample, sample_batches
from embedgeo.glossary import Term, in_group
from embedgeo.metrics.base import GeometryMetric, Table, ValuesAndErrors
from embedgeo.metrics.gaussian import Array, GaussianRows

_AT_SCALES = {f"intrinsic_dimension_at_{scale}": scale for scale in SCALES}
_OF_TWONN = "intrinsic_dimension", "intrinsic_dimension_next_scale"
_NUM_CENTRES = 1024  # rows whose neighbours are drawn: as many as give a dimension to about 3 %

# fmt: off
_TERMS = {
    "intrinsic_dimension": Term("intrinsic dimension", "dimensions, TwoNN",
        "Dimension of the surface that the embeddings lie on, at the scale of neighbouring rows; it grows with the "
        "number of rows, so compare estimates from equally many.", ranges=True, group="at a glance", order=130,
        spread="intrinsic_dimension_std"),
    **in_group("rows counted", 610,
        intrinsic_dimension_std=Term("spread of the dimension", "std over batches, TwoNN",
            "How much the estimate varies.", ranges=True),
        duplicate_fraction=Term("duplicate rows", "share of the sampled rows",
            "Rows equal to another one but for rounding, merged before the intrinsic dimension is estimated; many are "
            "to be expected at `embed` of a model with rotary positions.", gaussian=0.0),
        n_points=Term("distinct rows", "rows used by TwoNN",
            "What the intrinsic dimension rests on.", ranges=True, is_drawn=False),
    ),
    **in_group("more", 705,
        intrinsic_dimension_next_scale=Term("intrinsic dimension at the next scale",
            "dimensions, GRIDE, neighbours 2 and 4",
            "As TwoNN, from neighbours that are a little farther away. Where it is far larger, rows have near copies, "
            "which pull TwoNN down.", ranges=True, is_drawn=False),
    ),
    **in_group("more", 710, **{
        key: Term(f"intrinsic dimension at scale {scale}", f"dimensions, GRIDE, neighbours {scale} and {2 * scale}",
            f"Dimension of the surface that the embeddings lie on, as far as the neighbour of rank {2 * scale}: noise "
            "counts the less the larger the scale. Where it is the same at all scales it does not depend on the number "
            "of rows.", ranges=True, is_drawn=False)
        for key, scale in _AT_SCALES.items()
    }, **{
        f"{key}_error": Term(f"error of the intrinsic dimension at scale {scale}", "standard error, maximum likelihood",
            "How much the estimate would vary if rows were independent; those of one text are not.",
            ranges=True, is_drawn=False)
        for key, scale in _AT_SCALES.items()
    }),
}
# fmt: on


class IntrinsicDimension(GeometryMetric):
    """Intrinsic dimension of a uniform sample of the embeddings, by TwoNN, or by GRIDE at several scales.

    ``batch_size * num_batches`` rows are drawn without replacement from all updates and ranks. ``compute()`` returns
    float64 scalars: ``intrinsic_dimension``, the mean over batches of ``batch_size`` rows (one smaller batch where
    fewer rows were seen; NaN for fewer than three distinct rows); ``intrinsic_dimension_std`` over batches (NaN for
    one); ``intrinsic_dimension_next_scale``, GRIDE's at scale 2 of at most 1,024 rows of each batch, far larger where
    rows have near copies (NaN for fewer than five); ``duplicate_fraction``, the share of rows left out because they
    equal another one, exactly or but for rounding; ``n_points``, the number of distinct rows in all batches.

    With ``estimator="gride"`` it returns, for each of the ``scales``, ``intrinsic_dimension_at_{scale}`` from the
    neighbours of rank ``scale`` and twice that, and ``intrinsic_dimension_at_{scale}_error``, its standard error by
    maximum likelihood (of the mean over batches); NaN where a batch has not more than 2 ``scale`` distinct rows. So it
    may stand beside TwoNN. A dimension that is the same at all scales does not depend on the number of rows: see
    `embedgeo.functional.gride_dimensions`.

    Sources: Facco et al. 2017; Razzhigaev et al. 2024 (arXiv 2311.05928); Denti et al. 2022 (GRIDE).

    Args:
        dim: d, the width of the embeddings.
        batch_size: rows per estimate. TwoNN depends on it: compare only estimates of one ``batch_size``.
        num_batches: estimates to average.
        estimator: ``"twonn"``, ``"gride"`` or any scikit-dimension global estimator object, such as
            ``skdim.id.lPCA()``.
        discard_fraction: share of the largest distance ratios that TwoNN does not use, in (0, 1), or 0 with ``"mle"``.
            Default: 0.1 of the fit, 0 of the maximum likelihood.
        duplicate_tolerance: how near to each other rows are merged, relative to their distance from the mean: see
            `embedgeo.functional.merge_duplicates`; 0 merges exact copies only.
        seed: of the sample. Metrics that are to be merged by ``merge_state`` need different ones.
        scales: of GRIDE: ranks of neighbours, distinct, each at least 1.
        method: of TwoNN: ``"fit"``, the least-squares fit, or ``"mle"``, maximum likelihood: see
            `embedgeo.functional.twonn_dimension`.
        kwargs: of `torchmetrics.Metric`.

    Raises:
        ValueError: an argument is out of its range, or the estimator is neither.

    >>> metric = IntrinsicDimension(3)
    >>> metric.update(torch.rand(2000, 2, generator=torch.Generator().manual_seed(0)) @ torch.ones(2, 3).triu())
    >>> round(metric.compute()["intrinsic_dimension"].item())
    2
    """

    terms = _TERMS
    has_copies = False
    has_samples = True
    plotted: Sequence[str] = ("intrinsic_dimension",)

    def __init__(
        self,
        dim: int,
        batch_size: int = 4096,
        num_batches: int = 1,
        estimator: str | GlobalEstimator = "twonn",
        discard_fraction: float | None = None,
        duplicate_tolerance: float = DUPLICATE_TOLERANCE,
        seed: int = 0,
        scales: Sequence[int] = SCALES,
        method: str = "fit",
        **kwargs: Any,
    ) -> None:
        if method not in DISCARD_FRACTIONS:
            raise ValueError(f'method must be one of "fit" and "mle"; got {method!r}.')
        usual = DISCARD_FRACTIONS[method]
        discard_fraction = usual if discard_fraction is None else discard_fraction
        scales = tuple(scales)
        arguments = batch_size, num_batches, estimator, discard_fraction, duplicate_tolerance, seed, scales, method
        super().__init__(dim, *arguments, **kwargs)
        if batch_size < 3 or num_batches < 1:
            raise ValueError(
                f"batch_size must be at least 3 rows and num_batches at least 1; got {batch_size} and {num_batches}."
            )
        if not (0 < discard_fraction < 1 or discard_fraction == usual):
            ends = "both" if usual else "1"
            raise ValueError(f"discard_fraction must be between 0 and 1, {ends} excluded; got {discard_fraction}.")
        if not 0 <= duplicate_tolerance < 1:
            raise ValueError(f"duplicate_tolerance must be at least 0 and less than 1; got {duplicate_tolerance}.")
        if estimator not in ("twonn", "gride") and (isinstance(estimator, type) or not hasattr(estimator, "fit")):
            raise ValueError(
                f'estimator must be "twonn", "gride" or a scikit-dimension estimator object; got {estimator!r}.'
            )
        are_ranks = all(isinstance(scale, int) and scale >= 1 for scale in scales)
        if not scales or not are_ranks or len(set(scales)) < len(scales):
            raise ValueError(f"scales must be ranks of neighbours, distinct integers from 1 up; got {scales}.")
        self.batch_size = batch_size
        self.num_batches = num_batches
        self.estimator = estimator
        self.discard_fraction = discard_fraction
        self.duplicate_tolerance = duplicate_tolerance
        self.seed = seed
        self.scales = scales
        self.method = method
        if estimator == "gride":
            self.plotted = [f"intrinsic_dimension_at_{scale}" for scale in scales]
        self.declare(Sample.empty(dim, batch_size * num_batches, seed=seed))

    def update_states(self, rows: Rows) -> None:
        stream, num_streams = current_rank(self.process_group), num_ranks(self.process_group)
        sample = self.load(Sample)
        self.store(
            sample.extend(
                rows.embeddings,
                rows.sequence_ids,
                rows.finite,
                stream=stream,
                num_streams=num_streams,
                first=rows.first,
            )
        )

    def state_bytes(self, num_rows: int, num_types: int = 0, itemsize: int = 4) -> int:
        num_sampled = min(num_rows, self.batch_size * self.num_batches)
        return super().state_bytes(num_rows) + num_sampled * (itemsize * self.dim + 24)

    def sample(self) -> Sample:
        """The sampled rows in the order in which they are drawn: the first k are a sample of k rows.

        They are drawn from those that this process has seen or, within ``sync_context()``, from those of all ranks.
        """
        sample = self.load(Sample)
        return sample.select(sample.keys.argsort())

    def samples(self) -> Table:
        sample = self.sample()
        return {"rows": sample.rows, "positions": sample.positions}

    @staticmethod
    def baseline(rows: GaussianRows) -> dict[str, Array]:
        num_points = rows.measured.get("n_points", rows.n)
        return {
            **rows.simulated(_OF_TWONN, lambda n, dim: _gaussian_twonn(_power(n), dim), num_points),
            **rows.simulated(_AT_SCALES, lambda n, dim: _gaussian_gride(_power(n), dim), num_points),
        }

    def compute(self) -> dict[str, Tensor]:
        sample = self.load(Sample)
        return self._values([self._estimate(rows) for rows, _ in sample_batches(sample, self.batch_size)], sample)

    def compute_with_errors(self, groups: Sequence[Self] = ()) -> ValuesAndErrors:
        """The values of ``compute``, and the standard errors of TwoNN and GRIDE; the other keys have NaN.

        The groups of the jackknife are the ``sequence_ids`` of the sampled rows; ``groups`` are not used.
        """
        sample = self.load(Sample)
        batches = sample_batches(sample, self.batch_size)
        labels, group = torch.cat([labels for _, labels in batches]).unique(return_inverse=True)
        of_batches = group.split([len(rows) for rows, _ in batches])
        estimates = [
            self._estimate(rows, of_batch, len(labels)) if len(labels) else self._estimate(rows)
            for (rows, _), of_batch in zip(batches, of_batches, strict=True)
        ]
        values = self._values(estimates, sample)
        errors = {key: torch.full_like(value, torch.nan) for key, value in values.items()}
        left_out = [estimate.left_out for estimate in estimates if estimate.left_out is not None]
        if left_out:
            mean = torch.stack(left_out).mean(0).to(sample.keys.device)
            mean = mean.view(len(mean), -1)  # a column for each of the keys below
            for key, without in zip(self.plotted, mean.unbind(1), strict=True):
                errors[key] = standard_error(values[key], without, group.bincount())
        return values, errors

    def _estimate(
        self, rows: Tensor, groups: Tensor | None = None, num_groups: int = 0
    ) -> DimensionEstimate | ScaleEstimates:
        if not isinstance(self.estimator, str):
            own = copy(self.estimator)  # several layers, which may be given the same one, are computed at a time
            return estimated_dimension(rows, own, duplicate_tolerance=self.duplicate_tolerance)
        estimate = (
            partial(gride_dimensions, scales=self.scales)
            if self.estimator == "gride"
            else partial(twonn_dimension, method=self.method, discard_fraction=self.discard_fraction)
        )
        return estimate(rows, duplicate_tolerance=self.duplicate_tolerance, groups=groups, num_groups=num_groups)

    def _values(self, estimates: Sequence[Any], sample: Sample) -> dict[str, Tensor]:
        if self.estimator == "gride":
            dimensions = torch.stack([each.dimensions for each in estimates]).mean(0).to(sample.keys)
            errors = torch.stack([each.errors for each in estimates]).square().mean(0).div(len(estimates)).sqrt()
            pairs = zip(self.plotted, dimensions.unbind(), errors.to(sample.keys).unbind(), strict=True)
            return {name: value for key, mean, error in pairs for name, value in ((key, mean), (f"{key}_error", error))}
        dimensions = sample.keys.new_tensor([estimate.dimension for estimate in estimates])
        num_rows = min(len(sample.rows), self.batch_size * len(estimates))
        num_points = sum(estimate.num_points for estimate in estimates)
        next_scale = dimensions.new_tensor([estimate.next_scale for estimate in estimates]).mean()
        return {
            "intrinsic_dimension": dimensions.mean(),
            "intrinsic_dimension_std": dimensions.std() if len(dimensions) > 1 else dimensions.new_tensor(torch.nan),
            **({"intrinsic_dimension_next_scale": next_scale} if self.estimator == "twonn" else {}),
            "duplicate_fraction": dimensions.new_tensor(1 - num_points / num_rows if num_rows else torch.nan),
            "n_points": dimensions.new_tensor(float(num_points)),
        }


def _power(n: int) -> int:
    """The power of 2 nearest to a number of rows, of which a batch has at most 4096."""
    return min(round(math.log2(n)), 12)


@cache
def _gaussian_twonn(power: int, dim: int) -> dict[str, float]:
    rows = torch.randn(2**power, dim, generator=torch.Generator().manual_seed(0))
    found = twonn_dimension(rows)
    values = zip(_OF_TWONN, (found.dimension, found.next_scale), strict=True)
    return {key: float(f"{value:.4g}") for key, value in values}


@cache
def _gaussian_gride(power: int, dim: int) -> dict[str, float]:
    """GRIDE of 2**power Gaussian rows at each scale, as some of them see it.

    Given a row, the squared distances of the others to it are independent, of a noncentral χ² law.
    """
    random = np.random.default_rng(0)
    others = 2**power - 1
    ranks = [scale for scale in SCALES if 2 * scale <= others]
    places = [rank - 1 for rank in sorted({each for scale in ranks for each in (scale, 2 * scale)})]
    nearest = []
    for norm in np.sqrt(random.chisquare(dim, _NUM_CENTRES)).astype(np.float32):
        beside = 2 * random.standard_gamma((dim - 1) / 2, others, dtype=np.float32)
        squared = (random.standard_normal(others, dtype=np.float32) - norm) ** 2 + beside
        nearest.append(np.partition(squared, places)[: places[-1] + 1])
    log_distance = torch.from_numpy(np.log(nearest, dtype=np.float64)) / 2
    of_ratios = {scale: log_distance[:, 2 * scale - 1] - log_distance[:, scale - 1] for scale in ranks}
    found = {scale: float(most_likely_dimension(log_mu, scale)[0]) for scale, log_mu in of_ratios.items()}
    return {key: float(f"{found.get(scale, math.nan):.4g}") for key, scale in _AT_SCALES.items()}
