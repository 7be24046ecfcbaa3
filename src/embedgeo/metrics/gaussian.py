"""Gaussian embeddings beside those measured: the sizes that baselines of metrics are computed
from.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from embedgeo.extras import require_extra
from embedgeo.glossary import term
from embedgeo.metrics.base import metric_classes

Array = NDArray[np.float64]

_MOST, _WIDEST = 1e15, 1e6  # rows and width beyond which nothing is simulated


@dataclass(frozen=True)
class GaussianRows:
    """Isotropic Gaussian embeddings of the number, width and size of those measured.

    Rows are drawn from N(0, Q/d · I), without regard to their tokens. Every array has an entry for
    each step and layer, NaN where something is unknown.

    Attributes:
        keys: the metrics whose baseline is asked for: what takes long is left out for others.
        measured: values of the embeddings themselves, by metric.
        widths: d of each layer.
    """

    keys: frozenset[str]
    measured: Mapping[str, Array]
    widths: Array

    def value(self, key: str) -> Array:
        """Values measured of a metric."""
        return self.measured.get(key, np.full(len(self.widths), np.nan))

    @property
    def n(self) -> Array:
        """The number of rows."""
        return self.value("n")

    @property
    def Q(self) -> Array:  # noqa: N802 - its name everywhere
        """The mean of ‖x‖²."""
        return self.value("Q")

    @property
    def dim(self) -> Array:
        """The width d, of two rows or more."""
        return np.where(self.n >= 2, self.widths, np.nan)

    def simulated(self, key: str, simulate: Callable[[int, int], float], n: Array) -> Array:
        """Values of a key, made once for each ``n`` and width; NaN where out of reach, or where the
        key is not asked for.
        """
        pairs = list(zip(n, self.dim, strict=True))
        known = {
            (a, b): simulate(int(a), int(b))
            for a, b in set(pairs if key in self.keys else ())
            if 3 <= a <= _MOST and 2 <= b <= _WIDEST
        }
        return np.array([known.get(pair, np.nan) for pair in pairs])


@np.errstate(all="ignore")  # sizes are what somebody has measured, and may be anything
def baseline_values(rows: GaussianRows) -> dict[str, Array]:
    """The expected values (medians of largest ones) by key, of those keys that have any.

    Raises:
        ImportError: scipy, of the extra ``report``, is not installed.
    """
    require_extra("report", "a baseline on Gaussian rows", "scipy")
    constants = {key: term(key).gaussian for key in rows.keys}
    values = {
        key: np.where(np.isnan(rows.n), np.nan, each)
        for key, each in constants.items()
        if each is not None
    }
    for metric in metric_classes():
        values = {**metric.baseline(rows), **values}
    return {key: value for key, value in values.items() if key in rows.keys}
