"""Intrinsic dimension of the embeddings."""

import math
from collections.abc import Sequence
from functools import cache
from statistics import fmean
from typing import Any, Literal, Self, get_args

import torch
from torch import Tensor

from embedgeo.functional.dimension import (
    DISCARD_FRACTION,
    GlobalEstimator,
    LabelledEstimates,
    RowLabels,
    estimated_dimension,
    labelled_dimensions,
    twonn_dimension,
)
from embedgeo.functional.distributed import Ranks
from embedgeo.functional.jackknife import deviations
from embedgeo.functional.moments import directions, mean_cosine
from embedgeo.functional.precision import accumulator_dtype, row_norms
from embedgeo.functional.rows import NO_TYPE, Rows
from embedgeo.functional.sampling import Sample, sample_batches
from embedgeo.glossary import Term, in_group
from embedgeo.metrics.base import GeometryMetric, Table, ValuesAndErrors
from embedgeo.metrics.gaussian import Array, GaussianRows

Neighbors = Literal["all", "other_sequences"]

_TERMS = {
    "intrinsic_dimension_between": Term(
        "dimension between tokens",
        "dimensions, TwoNN, one row a token type",
        "Dimension of the surface that rows of different tokens lie on, each in its context; types "
        "weigh equally. It changes with the number of types.",
        ranges=True,
        group="at a glance",
        order=130,
        rows=4096,
    ),
    **in_group(
        "shape",
        330,
        intrinsic_dimension=Term(
            "intrinsic dimension",
            "dimensions, TwoNN",
            "Dimension of the surface that the embeddings lie on, at the distance of neighbouring "
            "rows: compare estimates from equally many rows. Noise makes it larger; rows of one "
            "token or text, which are near each other, make it smaller: see those between and "
            "within tokens.",
            ranges=True,
            is_scalar=True,
        ),
        intrinsic_dimension_within=Term(
            "dimension within tokens",
            "dimensions, TwoNN among a token's occurrences",
            "Dimension of the surface that the occurrences of one token lie on, from those in "
            "different sequences; it grows with the number of occurrences.",
            ranges=True,
        ),
        same_type_neighbors=Term(
            "neighbours of the same token",
            "share of the sampled rows",
            "How often a row's nearest distinct row is of its own token type. Where it is often, "
            "the intrinsic dimension of all rows says little of a surface.",
        ),
        same_type_neighbors_null=Term(
            "random neighbours of the same token",
            "share of the sampled rows",
            "How often a random row is of a row's token type.",
            is_drawn=False,
        ),
        same_sequence_neighbors=Term(
            "neighbours of the same text",
            "share of the sampled rows",
            "How often a row's nearest distinct row is of its own sequence. Where it is often, the "
            "intrinsic dimension of all rows is that of single texts.",
        ),
        same_sequence_neighbors_null=Term(
            "random neighbours of the same text",
            "share of the sampled rows",
            "How often a random row is of a row's sequence.",
            is_drawn=False,
        ),
    ),
    **in_group(
        "rows counted",
        610,
        intrinsic_dimension_std=Term(
            "spread of the dimension",
            "std over batches, TwoNN",
            "How much the estimate varies.",
            ranges=True,
        ),
        duplicate_fraction=Term(
            "duplicate rows",
            "share of the sampled rows",
            "Rows equal to another one but for rounding, merged before the intrinsic dimension is "
            "estimated; many are to be expected at `embed` of a model with rotary positions.",
            gaussian=0.0,
        ),
        n_points=Term(
            "distinct rows",
            "rows used by TwoNN",
            "What the intrinsic dimension rests on.",
            ranges=True,
            is_drawn=False,
        ),
        n_points_between=Term(
            "rows of different tokens",
            "rows used by TwoNN, one a token type",
            "What the dimension between tokens rests on.",
            ranges=True,
            is_drawn=False,
        ),
        n_points_within=Term(
            "rows of repeated tokens",
            "rows used by TwoNN within token types",
            "What the dimension within tokens rests on: rows of types with 8 distinct ones or "
            "more.",
            ranges=True,
            is_drawn=False,
        ),
    ),
}

_TERMS["mean_cosine_without_top_dim"] = Term(
    "mean cosine without the largest coordinate",
    "cosine of two distinct sampled rows, mean over all pairs",
    "Mean cosine of the sampled rows without their coordinate of largest second moment.",
    gaussian=0.0,
    is_drawn=False,
    order=800,
)


class IntrinsicDimension(GeometryMetric):
    """Intrinsic dimension of a uniform sample of the embeddings, by TwoNN.

    ``batch_size * num_batches`` rows are drawn without replacement from all updates and ranks.
    ``compute()`` returns float64 scalars: ``intrinsic_dimension``, the mean over batches of
    ``batch_size`` rows (one smaller batch where fewer rows were seen; NaN for fewer than three
    distinct rows); ``intrinsic_dimension_std`` over batches (NaN for one);
    ``duplicate_fraction``, the
    share of rows left out because they equal another one, exactly or but for rounding;
    ``n_points``, the number of distinct rows in all batches.

    Where rows came with token ids, also ``intrinsic_dimension_between`` of one row of each token
    type; with sequences, ``intrinsic_dimension_within``, of rows among the occurrences of their
    type in other sequences: see `embedgeo.functional.labelled_dimensions`; what they rest on,
    ``n_points_between`` and ``n_points_within``; and how many rows have a nearest distinct row of
    their own type and sequence, ``same_type_neighbors`` and ``same_sequence_neighbors``, beside
    what random neighbours would give, ``…_null``.

    Sources: Facco et al. 2017; Razzhigaev et al. 2024 (arXiv 2311.05928).

    Args:
        dim: d, the width of the embeddings.
        batch_size: rows per estimate. TwoNN depends on it: compare only estimates of one
            ``batch_size``.
        num_batches: estimates to average.
        estimator: ``"twonn"`` or any scikit-dimension global estimator object, such as
            ``skdim.id.lPCA()``.
        discard_fraction: share of the largest distance ratios that TwoNN does not use, in (0, 1).
        seed: of the sample; another one for each of metrics that ``merge_state`` joins.
        neighbors: whose distances are taken for ``intrinsic_dimension``: ``"all"`` or, of TwoNN,
            those of rows in ``"other_sequences"``, so that rows of one text, which are alike, are
            not each other's neighbours.
        kwargs: of `torchmetrics.Metric`.

    Raises:
        ValueError: an argument is out of its range, or the estimator is neither.

    >>> metric = IntrinsicDimension(3)
    >>> metric.update(
    ...     torch.rand(2000, 2, generator=torch.Generator().manual_seed(0))
    ...     @ torch.ones(2, 3).triu()
    ... )
    >>> round(metric.compute()["intrinsic_dimension"].item())
    2
    """

    terms = _TERMS
    keys_without_massive = ("intrinsic_dimension_between", "mean_cosine_without_top_dim")
    has_copies = False
    keys_of_types = ("intrinsic_dimension_between",)
    has_samples = True

    def __init__(
        self,
        dim: int,
        batch_size: int = 4096,
        num_batches: int = 1,
        estimator: str | GlobalEstimator = "twonn",
        discard_fraction: float = DISCARD_FRACTION,
        seed: int = 0,
        neighbors: Neighbors = "all",
        **kwargs: Any,
    ) -> None:
        super().__init__(
            dim,
            batch_size,
            num_batches,
            estimator,
            discard_fraction,
            seed,
            neighbors,
            **kwargs,
        )
        _require_arguments(batch_size, num_batches, discard_fraction)
        _require_estimator(estimator, neighbors)
        self.batch_size = batch_size
        self.num_batches = num_batches
        self.estimator = estimator
        self.discard_fraction = discard_fraction
        self.seed = seed
        self.neighbors = neighbors
        self.declare(Sample.empty(dim, batch_size * num_batches, seed=seed))

    def working_bytes(self, num_types: int, device: torch.device) -> int:
        return 6 * 4 * self.batch_size * self.dim

    def update_states(self, rows: Rows) -> None:
        self.store(self.load(Sample).extend(rows, Ranks.of(self.process_group)))

    def sample(self) -> Sample:
        """The sampled rows in the order in which they are drawn: the first k are a sample of k
        rows.

        They are drawn from those that this process has seen or, within ``sync_context()``, from
        those of all ranks.
        """
        sample = self.load(Sample)
        return sample.select(sample.keys.argsort())

    def samples(self) -> Table:
        sample = self.sample()
        labels = RowLabels(*sample.types_and_sequences())
        ids = {"sequence_ids": labels.sequences}
        if labels.types is not None:
            ids["token_ids"] = labels.types.where(labels.types >= 0, NO_TYPE)
        known = {name: each for name, each in ids.items() if each is not None and len(each)}
        return {"rows": sample.rows, "positions": sample.positions, **known}

    @staticmethod
    def baseline(rows: GaussianRows) -> dict[str, Array]:
        of_points = {
            "intrinsic_dimension": rows.measured.get("n_points", rows.n),
            "intrinsic_dimension_between": rows.value("n_points_between"),
        }
        return {
            **{key: rows.simulated(key, _gaussian_twonn, n) for key, n in of_points.items()},
            **{
                f"same_{kind}_neighbors": rows.value(f"same_{kind}_neighbors_null")
                for kind in ("type", "sequence")
            },
        }

    def compute(self) -> dict[str, Tensor]:
        batches = self._batches()
        estimates = [self._estimates(batch) for batch in batches]
        return self._values(estimates, sum(len(batch.rows) for batch in batches))

    def _mean_cosine(self) -> Tensor:
        """That of the sampled rows without their coordinate of largest second moment."""
        held = self.load(Sample).on(self.device).rows
        # squares of float32 may leave its range
        rows = held.to(accumulator_dtype(held.device), copy=True)
        rows[:, rows.square().sum(0).argmax()] = 0
        return mean_cosine(*directions(rows, row_norms(rows)))

    def compute_with_errors(self, groups: Sequence[Self] = ()) -> ValuesAndErrors:
        """The values of ``compute``, and the standard errors of TwoNN; the other keys have NaN.

        The groups of the jackknife are those of the sampled rows, by default their
        ``sequence_ids``; ``groups`` are not used.
        """
        batches = self._batches()
        labels, group = torch.cat([batch.labels[:, 0] for batch in batches]).unique(
            return_inverse=True
        )
        of_batches = group.split([len(batch.rows) for batch in batches])
        estimates = [
            self._estimates(batch, of_batch, len(labels))
            for batch, of_batch in zip(batches, of_batches, strict=True)
        ]
        values = self._values(estimates, len(group))
        errors = {key: torch.full_like(value, torch.nan) for key, value in values.items()}
        self.deviations = {}
        for infix, each in _by_infix(estimates).items():
            left_out = [estimate.left_out for estimate in each if estimate.left_out is not None]
            if left_out and len(labels):
                key = f"intrinsic_dimension{infix}"
                without = torch.stack(left_out).mean(0)
                self.deviations[key] = deviations(values[key], without, group.bincount())
                errors[key] = self.deviations[key].square().sum(0).sqrt()
        return values, errors

    def _batches(self) -> list[Sample]:
        """Batches of the sampled rows."""
        return sample_batches(self.load(Sample), self.batch_size)

    def _estimates(
        self,
        batch: Sample,
        groups: Tensor | None = None,
        num_groups: int = 0,
    ) -> LabelledEstimates:
        batch = batch.on(self.device)
        if not isinstance(self.estimator, str):
            return LabelledEstimates(estimated_dimension(batch.rows, self.estimator))
        return labelled_dimensions(
            batch.rows,
            RowLabels(*batch.types_and_sequences()),
            discard_fraction=self.discard_fraction,
            groups=groups,
            num_groups=num_groups,
            apart=self.neighbors == "other_sequences",
            between_alone=self.is_ordinary,
        )

    def _values(self, estimates: Sequence[LabelledEstimates], num_rows: int) -> dict[str, Tensor]:
        """Means over the estimates of batches, which have so many rows together."""
        values: dict[str, Tensor] = {}
        for infix, each in _by_infix(estimates).items():
            of_batches = [estimate.dimension for estimate in each]
            dimensions = torch.tensor(of_batches, dtype=torch.float64, device="cpu")
            num_points = dimensions.new_tensor(sum(estimate.num_points for estimate in each))
            values[f"intrinsic_dimension{infix}"] = dimensions.mean()
            if not infix:
                unknown = dimensions.new_tensor(torch.nan)
                values["intrinsic_dimension_std"] = dimensions.std() if len(each) > 1 else unknown
                values["duplicate_fraction"] = 1 - num_points / num_rows if num_rows else unknown
            values[f"n_points{infix}"] = num_points
        for key in ("same_type", "same_sequence"):
            shares = [
                share for estimate in estimates if (share := getattr(estimate, key)) is not None
            ]
            if len(shares) == len(estimates):
                share, at_random = torch.stack(shares).mean(0).cpu().double()
                values |= {f"{key}_neighbors": share, f"{key}_neighbors_null": at_random}
        if self.estimator == "twonn":  # which may stand beside the others
            values["mean_cosine_without_top_dim"] = self._mean_cosine()
        return values


def _require_arguments(batch_size: int, num_batches: int, discard_fraction: float) -> None:
    if batch_size < 3 or num_batches < 1:
        raise ValueError(
            f"batch_size must be at least 3 rows and num_batches at least 1; got {batch_size} "
            f"and {num_batches}."
        )
    if not 0 < discard_fraction < 1:
        raise ValueError(
            f"discard_fraction must be between 0 and 1, both excluded; got {discard_fraction}."
        )


def _require_estimator(estimator: str | GlobalEstimator, neighbors: Neighbors) -> None:
    if estimator != "twonn" and (isinstance(estimator, type) or not hasattr(estimator, "fit")):
        raise ValueError(
            f'estimator must be "twonn" or a scikit-dimension estimator object; got {estimator!r}.'
        )
    if neighbors not in get_args(Neighbors):
        raise ValueError(f'neighbors must be "all" or "other_sequences"; got {neighbors!r}.')
    if neighbors != "all" and not isinstance(estimator, str):
        raise ValueError(
            'neighbors="other_sequences" needs estimator="twonn"; got an estimator object.'
        )


def _by_infix(estimates: Sequence[LabelledEstimates]) -> dict[str, list[Any]]:
    """Estimates of batches by what stands in the keys of each kind, without those that some batch
    has not.
    """
    kinds = {"": "every", "_between": "between", "_within": "within"}
    by_infix = {infix: [getattr(each, kind) for each in estimates] for infix, kind in kinds.items()}
    return {infix: each for infix, each in by_infix.items() if None not in each}


def _gaussian_twonn(n: int, dim: int) -> float:
    """Of n rows or the nearest power of 2, up to the 4096 of a batch."""
    return _mean_twonn(min(round(math.log2(n)), 12), dim)


@cache
def _mean_twonn(power: int, dim: int) -> float:
    """The mean over clouds of 2**power rows, 4096 in all."""
    rows = torch.randn(4096, dim, generator=torch.Generator().manual_seed(0))
    return float(f"{fmean(twonn_dimension(each).dimension for each in rows.split(2**power)):.4g}")
