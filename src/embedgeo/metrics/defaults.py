"""Sets of metrics for a layer, given its width: the default, the streaming, the full and the
automatic one.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from math import inf
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from embedgeo.formatting import did_you_mean, size
from embedgeo.functional.rows import Rows, row_ids
from embedgeo.functional.sampling import require_seed
from embedgeo.metrics.anisotropy import Anisotropy
from embedgeo.metrics.base import GeometryMetric, require_values
from embedgeo.metrics.coordinates import OutlierCoordinates
from embedgeo.metrics.dimension import IntrinsicDimension
from embedgeo.metrics.layer import (
    MetricFactory,
    compute_alone,
    named,
    require_num_groups,
    update_metric,
)
from embedgeo.metrics.moments import EmbeddingMoments
from embedgeo.metrics.next_token import NextTokenGeometry
from embedgeo.metrics.processing import AfterProcessing
from embedgeo.metrics.similarity import TokenSimilarity
from embedgeo.metrics.tokens import TokenMoments

MAX_STATE_BYTES = 2**28
"""Default of the bytes that the metrics of a layer may hold where they are chosen by width: 268 MB.
"""

SAMPLED_ROWS = 1024  # of the sample that stands in for a scatter which is too large

EXTRA_METRICS: dict[str, Callable[[int, int], GeometryMetric]] = {
    "scales": lambda dim, seed: IntrinsicDimension(dim, estimator="gride", seed=seed),
    "coordinates": lambda dim, seed: OutlierCoordinates(dim),
    "next_token": lambda dim, seed: NextTokenGeometry(dim),
    "similarity": lambda dim, seed: TokenSimilarity(dim),
}
"""Makes each of them, given the width of a layer and the seed of samples."""

_NUM_TYPES = 2**14  # of a token table, at most: 65,536 tokens of text have about 10,000
_NUM_ROWS = 2**20  # more than any sample draws


def extra_metrics(dim: int, names: Sequence[str], *, seed: int = 0) -> list[Metric]:
    """The metrics with these names, of `EXTRA_METRICS`.

    Args:
        dim: d, the width of the layer.
        names: of metrics; each once.
        seed: of the rows that are sampled.

    Raises:
        ValueError: a name that is none of them, or is given twice.
    """
    if (
        isinstance(names, str)
        or len(set(names)) < len(names)
        or not EXTRA_METRICS.keys() >= set(names)
    ):
        given = [names] if isinstance(names, str) else names
        unknown = next((name for name in given if name not in EXTRA_METRICS), "")
        raise ValueError(
            f"extra must be a list of names out of {', '.join(EXTRA_METRICS)}, each once; got "
            f"{names!r}."
            f"{did_you_mean(unknown, EXTRA_METRICS)}"
        )
    return [EXTRA_METRICS[name](dim, seed) for name in names]


def default_metrics(
    dim: int,
    seed: int = 0,
    *,
    count_range: tuple[int, int] | None = None,
    spectrum: bool = False,
    discard_fraction: float = 0.1,
    id_batches: int = 1,
    anisotropy_batch: int | None = None,
    after_processing: bool = False,
    removed_directions: Sequence[int] = (),
    extra: Sequence[str] = (),
    max_state_bytes: float = MAX_STATE_BYTES,
) -> list[Metric]:
    """The default metrics of a layer: `TokenMoments`, `Anisotropy` and `IntrinsicDimension`.

    Where the scatter of `Anisotropy` takes more than ``max_state_bytes``, above a width of 5792 if
    that is not said, it has a sample of 1,024 rows instead, unless ``spectrum`` or
    ``anisotropy_batch`` ask for what only a scatter tells.

    Args:
        dim: d, the width of the layer.
        seed: of the rows that are sampled.
        count_range: of `TokenMoments`.
        spectrum: of `Anisotropy`.
        discard_fraction: of `IntrinsicDimension`.
        id_batches: ``num_batches`` of `IntrinsicDimension`.
        anisotropy_batch: ``batch_size`` of `Anisotropy`.
        after_processing: `AfterProcessing`, too.
        removed_directions: ``top`` of `AfterProcessing`; default: 3.
        extra: names of further metrics: see `embedgeo.metrics.extra_metrics`.
        max_state_bytes: what a scatter may take.

    Raises:
        ValueError: as these metrics do.

    >>> default_metrics(4096)[1].sample_size, default_metrics(8192)[1].sample_size
    (None, 1024)
    """
    whole = Anisotropy(dim, spectrum, anisotropy_batch)
    is_small = spectrum or anisotropy_batch or whole.state_bytes(0) <= max_state_bytes
    return [
        TokenMoments(dim, count_range),
        whole if is_small else _of_a_sample(whole, seed),
        IntrinsicDimension(
            dim, num_batches=id_batches, discard_fraction=discard_fraction, seed=seed
        ),
        *(
            [AfterProcessing(dim, tuple(removed_directions) or 3, seed=seed)]
            if after_processing
            else []
        ),
        *extra_metrics(dim, extra, seed=seed),
    ]


def streaming_metrics(
    dim: int,
    seed: int = 0,
    *,
    spectrum: bool = False,
    discard_fraction: float = 0.1,
    id_batches: int = 1,
    anisotropy_batch: int | None = None,
    after_processing: bool = False,
    removed_directions: Sequence[int] = (),
    extra: Sequence[str] = (),
    max_state_bytes: float = MAX_STATE_BYTES,
) -> list[Metric]:
    """The metrics of `default_metrics` without a table of token types: memory does not grow with
    the vocabulary.

    So there is no ``count_range``, and `EmbeddingMoments` is in place of `TokenMoments`.
    """
    _, *others = default_metrics(
        dim,
        seed,
        spectrum=spectrum,
        discard_fraction=discard_fraction,
        id_batches=id_batches,
        anisotropy_batch=anisotropy_batch,
        after_processing=after_processing,
        removed_directions=removed_directions,
        extra=extra,
        max_state_bytes=max_state_bytes,
    )
    return [EmbeddingMoments(dim), *others]


def full_metrics(
    dim: int,
    seed: int = 0,
    *,
    count_range: tuple[int, int] | None = None,
    spectrum: bool = True,
    discard_fraction: float = 0.1,
    id_batches: int = 4,
    anisotropy_batch: int | None = 4096,
    after_processing: bool = True,
    removed_directions: Sequence[int] = (),
    extra: Sequence[str] = tuple(EXTRA_METRICS),
) -> list[Metric]:
    """Every number there is: `default_metrics` with all that can be added to them.

    That is the whole spectrum, the anisotropy also as mean and standard deviation over batches of
    4096 rows, the intrinsic dimension as those over 4 such batches, `AfterProcessing`, and all
    `extra_metrics`. Each layer takes eigendecompositions of d × d matrices, and its samples hold 5
    batches of rows.
    """
    return default_metrics(
        dim,
        seed,
        count_range=count_range,
        spectrum=spectrum,
        discard_fraction=discard_fraction,
        id_batches=id_batches,
        anisotropy_batch=anisotropy_batch,
        after_processing=after_processing,
        removed_directions=removed_directions,
        extra=extra,
    )


def auto_metrics(
    dim: int,
    seed: int = 0,
    *,
    max_state_bytes: float = MAX_STATE_BYTES,
    num_token_types: int = _NUM_TYPES,
    jackknife: int = 0,
    count_range: tuple[int, int] | None = None,
    spectrum: bool = False,
    discard_fraction: float = 0.1,
    id_batches: int = 1,
    anisotropy_batch: int | None = None,
    after_processing: bool = False,
    removed_directions: Sequence[int] = (),
    extra: Sequence[str] = (),
) -> list[Metric]:
    """Those of the `default_metrics` whose states are small enough together at this width:
    ``metrics="auto"``.

    `EmbeddingMoments`, of 24 d bytes, always are. The others are taken in the order of their bytes
    as long as the sum stays within ``max_state_bytes``; a `TokenMoments` takes the place of the
    `EmbeddingMoments`. With the default limit of 268 MB all are taken up to a width of 1600. Above
    it there is no token table: 8 d bytes a token type. `Anisotropy`, whose scatter takes 8 d²
    bytes, is taken up to a width of 4800, and above it with a sample of 1,024 rows (4096 d bytes)
    in place of the scatter where there is still room; `IntrinsicDimension`, whose sample takes
    16,384 d bytes, up to one of 16,000.

    Args:
        dim: d, the width of the layer.
        seed: of the rows that are sampled.
        max_state_bytes: what the states of a layer may take together.
        num_token_types: how many token types a token table may come to have. `Geometry` gives that
            of the model's vocabulary if it is smaller.
        jackknife: number of groups for standard errors: each has a token table and a scatter of its
            own.
        count_range: of `TokenMoments`.
        spectrum: of `Anisotropy`.
        discard_fraction: of `IntrinsicDimension`.
        id_batches: ``num_batches`` of `IntrinsicDimension`.
        anisotropy_batch: ``batch_size`` of `Anisotropy`.
        after_processing: `AfterProcessing`, too.
        removed_directions: ``top`` of `AfterProcessing`; default: 3.
        extra: names of further metrics: see `embedgeo.metrics.extra_metrics`.

    >>> [metric_name(metric) for metric in auto_metrics(4096)]
    ['EmbeddingMoments', 'Anisotropy', 'IntrinsicDimension']
    >>> [metric_name(metric) for metric in auto_metrics(8192)]
    ['EmbeddingMoments', 'Anisotropy (sample)', 'IntrinsicDimension']
    """
    moments = EmbeddingMoments(dim)
    wanted: list[Any] = default_metrics(
        dim,
        seed,
        count_range=count_range,
        spectrum=spectrum,
        discard_fraction=discard_fraction,
        id_batches=id_batches,
        anisotropy_batch=anisotropy_batch,
        after_processing=after_processing,
        removed_directions=removed_directions,
        extra=extra,
        max_state_bytes=inf,
    )
    num_bytes = partial(_held_bytes, num_token_types=num_token_types, jackknife=jackknife)
    # by place: that of `TokenMoments`, then that of `Anisotropy`
    kept: dict[int, Metric] = {0: moments}
    left = max_state_bytes - num_bytes(moments)
    for place, metric in sorted(enumerate(wanted), key=lambda each: num_bytes(each[1])):
        more = num_bytes(metric) - (num_bytes(moments) if place == 0 else 0)
        if more <= left:
            kept[place] = metric
            left -= more
    sampled = _of_a_sample(wanted[1], seed)
    if 1 not in kept and num_bytes(sampled) <= left:
        kept[1] = sampled
    return [kept[place] for place in sorted(kept)]


def metric_factory(
    metrics: MetricFactory | str | None,
    *,
    seed: int = 0,
    max_state_bytes: float = MAX_STATE_BYTES,
    jackknife: int = 0,
) -> MetricFactory:
    """The maker of a layer's metrics: a function of its width, ``"auto"`` (`auto_metrics`) or None
    (the default).
    """
    require_num_groups(jackknife)
    require_seed(seed)
    if not max_state_bytes > 0:
        raise ValueError(
            f"max_state_bytes must be a positive number of bytes a layer; got {max_state_bytes!r}."
        )
    if metrics is None:
        return partial(default_metrics, seed=seed, max_state_bytes=max_state_bytes)
    if metrics == "auto":
        return partial(
            auto_metrics, seed=seed, max_state_bytes=max_state_bytes, jackknife=jackknife
        )
    if not callable(metrics):
        raise TypeError(
            f'metrics must be "auto" or a function of a layer\'s width; got {metrics!r}.'
        )
    require_distinct_keys(metrics)
    return metrics


def is_auto(make: MetricFactory) -> bool:
    """Tell metrics that `auto_metrics` makes from others."""
    return _as_partial(make).func is auto_metrics


def for_token_types(make: MetricFactory, num_token_types: int) -> MetricFactory:
    """The maker of the metrics for a model of so many token types, which matters to
    `auto_metrics`.
    """
    return (
        partial(_as_partial(make), num_token_types=min(num_token_types, _NUM_TYPES))
        if is_auto(make)
        else make
    )


def width_notes(make: MetricFactory, width: int) -> Iterator[str]:
    """Sentences on what is left out at a width, and on a sample in place of a scatter; none where
    nothing is.
    """
    function = _as_partial(make)
    if function.func not in (default_metrics, streaming_metrics, auto_metrics):
        return
    metrics = make(width)
    if is_auto(make):
        sizes = {
            name: value
            for name, value in function.keywords.items()
            if name in ("num_token_types", "jackknife")
        }
        kept = {type(metric) for metric in metrics}
        every = [
            metric
            for metric in function(width, max_state_bytes=inf)
            if isinstance(metric, GeometryMetric)
        ]
        missing = [metric for metric in every if type(metric) not in kept]
        if names := {
            type(metric).__name__: size(_held_bytes(metric, **sizes)) for metric in missing
        }:
            listing = ", ".join(f"{name} ({held})" for name, held in names.items())
            moments = (
                ", with EmbeddingMoments in place of TokenMoments"
                if "TokenMoments" in names
                else ""
            )
            yield (
                f'metrics="auto" leaves out {listing} at layers of width {width}{moments}. '
                f"To have {'it' if len(names) == 1 else 'them'} raise max_state_bytes."
            )
    for metric in metrics:
        if isinstance(metric, GeometryMetric) and metric.compromise:
            yield f"{metric.compromise} To have the scatter raise max_state_bytes."


def _as_partial(make: MetricFactory) -> partial[list[Metric]]:
    return make if isinstance(make, partial) else partial(make)


def metric_name(metric: Metric) -> str:
    """The name of a metric's class and, where that matters to its memory, of its arguments."""
    return metric.label if isinstance(metric, GeometryMetric) else type(metric).__name__


def _of_a_sample(whole: Anisotropy, seed: int) -> Anisotropy:
    """The metric with a sample of the rows in place of their scatter, if that is smaller."""
    sampled = Anisotropy(whole.dim, sample_size=SAMPLED_ROWS, seed=seed)
    is_smaller = sampled.state_bytes(_NUM_ROWS) < whole.state_bytes(_NUM_ROWS)
    return sampled if is_smaller else whole


def _held_bytes(
    metric: GeometryMetric, num_token_types: int = _NUM_TYPES, jackknife: int = 0
) -> int:
    """Bytes of a metric's states with so many token types, and with their copies for standard
    errors.
    """
    return (1 + (jackknife if metric.has_copies else 0)) * metric.state_bytes(
        _NUM_ROWS, num_token_types
    )


def require_distinct_keys(make: MetricFactory) -> None:
    """Try the metrics made for a width on no rows, which a rank may have.

    Raises:
        TypeError: they are no list of metrics, or one of them does not return numbers.
        ValueError: two of them give one key.
        Exception: as one of them raises, with a note that names it.
    """
    owners: dict[str, str] = {}
    made: object = make(2)
    if not isinstance(made, list | tuple):
        raise TypeError(
            f"metrics must make a list of torchmetrics metrics; got {type(made).__name__}."
        )
    no_rows = torch.zeros(0, 2)
    ids = row_ids(no_rows, no_rows[:, 0].long(), sequence_ids=no_rows[:, 0].long())
    for metric in made:
        if not isinstance(metric, Metric):
            raise TypeError(f"metrics must make torchmetrics metrics; got {type(metric).__name__}.")
        name = type(metric).__name__
        with named(metric, ", given no rows, as a rank may be"):
            update_metric(metric, no_rows, ids, Rows.of(no_rows, ids))
            found = require_values(compute_alone(metric))
        for key in found:
            if key in owners:
                raise ValueError(
                    f"metrics must have distinct keys; {owners[key]} and {name} both give {key!r}. "
                    f"Leave one out."
                )
            owners[key] = name


def keys_of_types(make: MetricFactory) -> list[str]:
    """Keys of the metrics made for a width that are absent where rows have no token ids."""
    without = measured_keys(make, token_ids=False)
    return [key for key in measured_keys(make, token_ids=True) if key not in without]


def measured_keys(make: MetricFactory, *, token_ids: bool) -> list[str]:
    """Keys of the metrics made for a width, of rows in sequences with or without token ids."""
    rows, places = torch.eye(2), torch.arange(2)
    ids = row_ids(rows, places if token_ids else None, sequence_ids=places)
    values = dict[str, Tensor]()
    for metric in make(2):
        with suppress(Exception):  # of a user's, on rows that are none of the model's
            update_metric(metric, rows, ids, Rows.of(rows, ids))
            values.update(require_values(compute_alone(metric)))
    return [*values]


def require_samples(make: MetricFactory) -> None:
    """Raise ValueError unless some of the metrics made hold what ``save_samples`` saves."""
    if not any(metric.has_samples for metric in make(2) if isinstance(metric, GeometryMetric)):
        raise ValueError(
            "save_samples needs IntrinsicDimension or Anisotropy among the metrics; neither is."
        )
