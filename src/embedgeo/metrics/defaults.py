"""Sets of metrics for a layer, given its width: the default and the streaming one."""

from collections.abc import Iterable
from functools import partial

from torchmetrics import Metric

from embedgeo.functional.sampling import require_seed
from embedgeo.metrics.anisotropy import Anisotropy
from embedgeo.metrics.base import state_bytes
from embedgeo.metrics.dimension import IntrinsicDimension
from embedgeo.metrics.layer import LayerMetrics, MetricFactory, require_num_groups
from embedgeo.metrics.moments import EmbeddingMoments
from embedgeo.metrics.tokens import TokenMoments

_SCATTER_BYTES = 2**28  # that the scatter of a layer may take before a sample is in its place
SAMPLED_ROWS = 1024  # of the sample that stands in for a scatter which is too large


def default_metrics(
    dim: int,
    seed: int = 0,
    *,
    type_tables: bool = True,
    scatter: bool = True,
    count_range: tuple[int, int] | None = None,
    spectrum: bool = False,
    discard_fraction: float = 0.1,
    id_batches: int = 1,
    anisotropy_batch: int | None = None,
) -> list[Metric]:
    """The default metrics of a layer: `TokenMoments`, `Anisotropy` and `IntrinsicDimension`.

    Without ``scatter``, and above a width of 5792, where it takes more than 268 MB, `Anisotropy`
    holds a sample of 1,024 rows instead, unless ``spectrum`` or ``anisotropy_batch`` ask for what
    only a scatter tells.

    Args:
        dim: d, the width of the layer.
        seed: of the rows that are sampled.
        type_tables: with tables of token types; else there is `EmbeddingMoments` in place of
            `TokenMoments`.
        scatter: with the scatter of all rows.
        count_range: of `TokenMoments`.
        spectrum: of `Anisotropy`.
        discard_fraction: of `IntrinsicDimension`.
        id_batches: ``num_batches`` of `IntrinsicDimension`.
        anisotropy_batch: ``batch_size`` of `Anisotropy`.

    Raises:
        ValueError: as these metrics do.

    >>> default_metrics(4096)[1].sample_size, default_metrics(8192)[1].sample_size
    (None, 1024)
    """
    whole = Anisotropy(dim, spectrum, anisotropy_batch)
    fits = scatter and state_bytes(whole, 0)[0] <= _SCATTER_BYTES
    is_whole = spectrum or anisotropy_batch or fits
    if count_range is not None and not type_tables:
        raise ValueError("count_range needs token tables; there are none. Leave it out.")
    return [
        TokenMoments(dim, count_range) if type_tables else EmbeddingMoments(dim, seed=seed),
        whole if is_whole else Anisotropy(dim, sample_size=SAMPLED_ROWS, seed=seed),
        IntrinsicDimension(
            dim, num_batches=id_batches, discard_fraction=discard_fraction, seed=seed
        ),
    ]


streaming_metrics = partial(default_metrics, type_tables=False)
"""The metrics of `default_metrics` without a table of token types: memory does not grow with the
vocabulary.

So there is no ``count_range``, and `EmbeddingMoments` is in place of `TokenMoments`.
"""


def metric_factory(
    metrics: MetricFactory | None, *, seed: int = 0, jackknife: int = 0
) -> MetricFactory:
    """The maker of a layer's metrics: a function of its width; None: `default_metrics`."""
    require_num_groups(jackknife)
    require_seed(seed)
    if metrics is None:
        return partial(default_metrics, seed=seed)
    if not callable(metrics):
        raise TypeError(
            f'metrics must be a function of a layer\'s width, or of a monitor "auto"; got '
            f"{metrics!r}."
        )
    return metrics


def require_samples(layers: Iterable[LayerMetrics]) -> None:
    """Raise ValueError where there are layers none of whose metrics has samples."""
    num_samples = [len(layer.wanted(lambda metric: metric.has_samples)) for layer in layers]
    if num_samples and not any(num_samples):
        raise ValueError(
            "save_samples needs IntrinsicDimension or Anisotropy among the metrics, the latter "
            "without sample_size=; neither is."
        )
