"""The metrics of a layer, given its width: those that are measured unless others are asked for, and all there are."""

from collections.abc import Sequence

from torchmetrics import Metric

from embedgeo.metrics.anisotropy import Anisotropy
from embedgeo.metrics.dimension import IntrinsicDimension
from embedgeo.metrics.extra import EXTRA_METRICS, extra_metrics
from embedgeo.metrics.moments import EmbeddingMoments
from embedgeo.metrics.processing import AfterProcessing
from embedgeo.metrics.tokens import TokenMoments

MAX_STATE_BYTES = 2**28
"""What the metrics of a layer may hold if they are chosen by width, unless it is said otherwise: 268 MB."""

SKETCH_COLUMNS = 512
"""Columns of the sketch that stands in for a scatter which is too large."""


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
    extra: Sequence[str] = (),
    max_state_bytes: float = MAX_STATE_BYTES,
) -> list[Metric]:
    """The default metrics of a layer: `TokenMoments`, `Anisotropy` and `IntrinsicDimension`.

    Where the scatter of `Anisotropy` takes more than ``max_state_bytes``, above a width of 5792 if that is not said, it
    has a sketch of 512 columns instead, unless ``spectrum`` or ``anisotropy_batch`` ask for what only a scatter tells.

    Args:
        dim: d, the width of the layer.
        seed: of the rows that are sampled.
        count_range: of `TokenMoments`.
        spectrum: of `Anisotropy`.
        discard_fraction: of `IntrinsicDimension`.
        id_batches: ``num_batches`` of `IntrinsicDimension`.
        anisotropy_batch: ``batch_size`` of `Anisotropy`.
        after_processing: `AfterProcessing`, too.
        extra: names of further metrics: see `embedgeo.metrics.extra_metrics`.
        max_state_bytes: what a scatter may take.

    Raises:
        ValueError: as these metrics do.

    >>> default_metrics(4096)[1].sketch, default_metrics(8192)[1].sketch
    (None, 512)
    """
    whole = Anisotropy(dim, spectrum, anisotropy_batch)
    is_small = spectrum or anisotropy_batch or whole.state_bytes(0) <= max_state_bytes
    return [
        TokenMoments(dim, count_range),
        whole if is_small else sketch_in_place_of(whole),
        IntrinsicDimension(dim, num_batches=id_batches, discard_fraction=discard_fraction, seed=seed),
        *([AfterProcessing(dim, seed=seed)] if after_processing else []),
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
    extra: Sequence[str] = (),
    max_state_bytes: float = MAX_STATE_BYTES,
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
    extra: Sequence[str] = tuple(EXTRA_METRICS),
) -> list[Metric]:
    """Every number there is: `default_metrics` with all that can be added to them.

    That is the whole spectrum, the anisotropy also as mean and standard deviation over batches of 4096 rows, the
    intrinsic dimension as those over 4 such batches, `AfterProcessing`, and all `extra_metrics`. Each layer
    takes eigendecompositions of d × d matrices, and its samples hold 5 batches of rows.
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
        extra=extra,
    )


def sketch_in_place_of(whole: Anisotropy) -> Anisotropy:
    """The same with a sketch in place of the scatter, if that is smaller."""
    sketched = Anisotropy(whole.dim, sketch=SKETCH_COLUMNS)
    return sketched if sketched.state_bytes(0) < whole.state_bytes(0) else whole
