"""Metrics over rows of embeddings: `torchmetrics.Metric` subclasses whose states merge."""

from torchmetrics import Metric

from embedgeo.metrics.anisotropy import Anisotropy as Anisotropy
from embedgeo.metrics.dimension import IntrinsicDimension as IntrinsicDimension
from embedgeo.metrics.moments import EmbeddingMoments as EmbeddingMoments
from embedgeo.metrics.processing import AfterProcessing as AfterProcessing
from embedgeo.metrics.tokens import TokenMoments as TokenMoments


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
) -> list[Metric]:
    """The default metrics of a layer: `TokenMoments`, `Anisotropy` and `IntrinsicDimension`.

    Args:
        dim: d, the width of the layer.
        seed: of the rows that are sampled.
        count_range: of `TokenMoments`.
        spectrum: of `Anisotropy`.
        discard_fraction: of `IntrinsicDimension`.
        id_batches: ``num_batches`` of `IntrinsicDimension`.
        anisotropy_batch: ``batch_size`` of `Anisotropy`.
        after_processing: `AfterProcessing`, too.

    Raises:
        ValueError: as these metrics do.
    """
    return [
        TokenMoments(dim, count_range),
        Anisotropy(dim, spectrum, anisotropy_batch),
        IntrinsicDimension(dim, num_batches=id_batches, discard_fraction=discard_fraction, seed=seed),
        *([AfterProcessing(dim, seed=seed)] if after_processing else []),
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
) -> list[Metric]:
    """Like `default_metrics`, but without a table of token types: memory does not grow with the vocabulary.

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
) -> list[Metric]:
    """Every number there is: `default_metrics` with all that can be added to them.

    That is the whole spectrum, the anisotropy also as mean and standard deviation over batches of 4096 rows, the
    intrinsic dimension as those over 4 such batches, and `AfterProcessing`. Each layer takes eigendecompositions of d ×
    d matrices, and its samples hold 5 batches of rows.
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
    )
