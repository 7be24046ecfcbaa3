"""Metrics chosen by the width of a layer, so that their states stay small: ``metrics="auto"``."""

from functools import partial
from math import inf
from typing import Any

from torchmetrics import Metric

from embedgeo.metrics.anisotropy import Anisotropy
from embedgeo.metrics.base import GeometryMetric
from embedgeo.metrics.defaults import MAX_STATE_BYTES, default_metrics, sketch_in_place_of, streaming_metrics
from embedgeo.metrics.layer import MetricFactory
from embedgeo.metrics.moments import EmbeddingMoments
from embedgeo.metrics.tokens import TokenMoments

_NUM_TYPES = 2**14
"""Token types that a token table is expected to have at most: 65,536 tokens of text have about 10,000."""

_NUM_ROWS = 2**20
"""More rows than any sample draws."""


def auto_metrics(
    dim: int,
    seed: int = 0,
    *,
    max_state_bytes: float = MAX_STATE_BYTES,
    num_token_types: int = _NUM_TYPES,
    jackknife: int = 0,
    **options: Any,
) -> list[Metric]:
    """Those of the `default_metrics` whose states are small enough together at this width: ``metrics="auto"``.

    `EmbeddingMoments`, of 24 d bytes, always are. The others are taken in the order of their bytes as long as the sum
    stays within ``max_state_bytes``; a `TokenMoments` takes the place of the `EmbeddingMoments`. With the default
    limit of 268 MB all are taken up to a width of 1600. Above it there is no token table: 8 d bytes a token type.
    `Anisotropy`, whose scatter takes 8 d² bytes, is taken up to a width of 4800, and above it with a sketch of 512
    columns (4096 d bytes) in place of the scatter where there is still room; `IntrinsicDimension`, whose sample takes
    16,384 d bytes, up to one of 16,000.

    Args:
        dim: d, the width of the layer.
        seed: of the rows that are sampled.
        max_state_bytes: what the states of a layer may take together.
        num_token_types: how many token types a token table may come to have. `Geometry` gives that of the model's
            vocabulary if it is smaller.
        jackknife: number of groups for standard errors: each has a token table and a scatter of its own.
        options: of `default_metrics`.

    >>> [metric_name(metric) for metric in auto_metrics(4096)]
    ['EmbeddingMoments', 'Anisotropy', 'IntrinsicDimension']
    >>> [metric_name(metric) for metric in auto_metrics(8192)]
    ['EmbeddingMoments', 'Anisotropy (sketch)', 'IntrinsicDimension']
    """
    moments = EmbeddingMoments(dim)
    wanted: list[Any] = default_metrics(dim, seed, max_state_bytes=inf, **options)
    size = partial(_largest, num_token_types=num_token_types, jackknife=jackknife)
    left = max_state_bytes - size(moments)
    kept: set[int] = set()  # by identity: two may be of one class
    for metric in sorted(wanted, key=size):
        more = size(metric) - (size(moments) if isinstance(metric, TokenMoments) else 0)
        if more <= left:
            kept.add(id(metric))
            left -= more
    table, whole, *others = wanted
    smaller = whole if id(whole) in kept else sketch_in_place_of(whole)
    if smaller is not whole and size(smaller) <= left:
        kept.add(id(smaller))
    others = [smaller, *others]
    return [table if id(table) in kept else moments, *(metric for metric in others if id(metric) in kept)]


def metric_name(metric: Metric) -> str:
    """The name of a metric's class, and whether it holds a sketch."""
    is_sketched = isinstance(metric, Anisotropy) and metric.sketch is not None
    return f"{type(metric).__name__}{' (sketch)' if is_sketched else ''}"


def sketched(make: MetricFactory, dim: int) -> tuple[int, int] | None:
    """Bytes of a sketch, and of the scatter in whose place it is at a width; None where it is not for the width."""
    if getattr(make, "func", make) not in (default_metrics, streaming_metrics, auto_metrics):
        return None
    columns = [metric.sketch for metric in make(dim) if isinstance(metric, Anisotropy) and metric.sketch is not None]
    return (8 * dim * columns[0], 8 * dim * dim) if columns else None


def _largest(metric: GeometryMetric, num_token_types: int = _NUM_TYPES, jackknife: int = 0) -> int:
    """Bytes of a metric's states with so many token types, and with their copies for standard errors."""
    return (1 + (jackknife if metric.has_copies else 0)) * metric.state_bytes(_NUM_ROWS, num_token_types)


def metric_factory(
    metrics: MetricFactory | str | None, *, seed: int = 0, max_state_bytes: float = MAX_STATE_BYTES, jackknife: int = 0
) -> MetricFactory:
    """What makes the metrics of a layer: a function of its width, ``"auto"`` (`auto_metrics`) or None (the default).

    Raises:
        TypeError: ``metrics`` is none of these.
        ValueError: ``max_state_bytes`` is not positive.
    """
    if not max_state_bytes > 0:
        raise ValueError(f"max_state_bytes must be a positive number of bytes a layer; got {max_state_bytes!r}.")
    if metrics is None:
        return partial(default_metrics, seed=seed, max_state_bytes=max_state_bytes)
    if metrics == "auto":
        return partial(auto_metrics, seed=seed, max_state_bytes=max_state_bytes, jackknife=jackknife)
    if not callable(metrics):
        raise TypeError(f'metrics must be "auto" or a function of a layer\'s width; got {metrics!r}.')
    return metrics


def for_token_types(make: MetricFactory, num_token_types: int) -> MetricFactory:
    """The same, and if it is `auto_metrics`, for a model of so many token types."""
    function: Any = make
    return partial(function, num_token_types=min(num_token_types, _NUM_TYPES)) if is_auto(make) else make


def left_out(make: MetricFactory, dim: int) -> dict[str, int]:
    """The default metrics that `auto_metrics` leaves out at a width, with their bytes; none of another function."""
    if not is_auto(make):
        return {}
    kept = [type(metric) for metric in make(dim)]
    function: Any = make
    whole = partial(function, max_state_bytes=inf)(dim)
    given: dict[str, Any] = getattr(make, "keywords", {})
    counted = {name: given[name] for name in ("num_token_types", "jackknife") if name in given}
    return {type(m).__name__: _largest(m, **counted) for m in whole if type(m) not in kept}


def is_auto(make: MetricFactory) -> bool:
    """Whether what makes the metrics is `auto_metrics`."""
    return getattr(make, "func", make) is auto_metrics
