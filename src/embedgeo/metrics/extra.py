"""Metrics that are measured only if they are asked for by name."""

from collections.abc import Callable, Sequence

from torchmetrics import Metric

from embedgeo.metrics.coordinates import OutlierCoordinates
from embedgeo.metrics.dimension import IntrinsicDimension
from embedgeo.metrics.next_token import NextTokenGeometry
from embedgeo.metrics.similarity import TokenSimilarity

EXTRA_METRICS: dict[str, Callable[[int, int], Metric]] = {
    "scales": lambda dim, seed: IntrinsicDimension(dim, estimator="gride", seed=seed),
    "coordinates": lambda dim, seed: OutlierCoordinates(dim),
    "next_token": lambda dim, seed: NextTokenGeometry(dim),
    "similarity": lambda dim, seed: TokenSimilarity(dim),
}
"""What makes each of them, given the width of a layer and the seed of samples."""


def extra_metrics(dim: int, names: Sequence[str], *, seed: int = 0) -> list[Metric]:
    """The metrics with these names, of `EXTRA_METRICS`.

    Args:
        dim: d, the width of the layer.
        names: of metrics; each once.
        seed: of the rows that are sampled.

    Raises:
        ValueError: a name that is none of them, or is given twice.
    """
    require_extra_names(names)
    return [EXTRA_METRICS[name](dim, seed) for name in names]


def require_extra_names(names: Sequence[str]) -> None:
    """Raise ValueError unless these are names of extra metrics, each once."""
    if isinstance(names, str) or len(set(names)) < len(names) or not EXTRA_METRICS.keys() >= set(names):
        raise ValueError(f"extra must be a list of names out of {', '.join(EXTRA_METRICS)}, each once; got {names!r}.")
