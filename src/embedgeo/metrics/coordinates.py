"""Coordinates that stand out, and massive activations."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from embedgeo.functional.coordinates import (
    CoordinateMoments,
    coordinate_table,
    outlier_values,
    row_coordinates,
)
from embedgeo.functional.rows import Rows
from embedgeo.glossary import Term, in_group
from embedgeo.metrics.base import GeometryMetric, Tables
from embedgeo.metrics.gaussian import Array, GaussianRows

_OF_ROWS = {
    "": ("", ""),
    "_first": (
        ", first positions",
        " Here of the first row of each sequence: attention sinks show here.",
    ),
    "_rest": (", the rest", " Here of the rows that are not the first of their sequence."),
}
_OF_ALL_ROWS = {
    "kurtosis": Term(
        "kurtosis of coordinates",
        "excess kurtosis over rows, mean over coordinates",
        "How heavy the tails of the coordinates are: 0 for a Gaussian, large where few rows hold "
        "most of the variance.",
        ranges=True,
    ),
    "kurtosis_median": Term(
        "kurtosis, median",
        "excess kurtosis over rows, median over coordinates",
        "How heavy the tails of most coordinates are: a few heavy ones move the mean alone.",
        ranges=True,
    ),
    "max_abs": Term(
        "largest entry",
        "max |x|, embedding units",
        "The largest magnitude of an entry.",
        ranges=True,
    ),
    "massive_fraction": Term(
        "massive rows",
        "share of rows with |x| > 100 and > 1000 × median |x|",
        "Rows with a massive activation: an entry over 100 that is over 1000 times the median one "
        "of its row.",
        gaussian=0.0,
    ),
}


_TERMS = {
    key + suffix: term._replace(
        name=term.name + name,
        meaning=term.meaning + meaning,
        # the others have one figure together
        is_drawn=key in ("kurtosis", "max_abs") and not suffix,
    )
    for key, term in _OF_ALL_ROWS.items()
    for suffix, (name, meaning) in _OF_ROWS.items()
}


class OutlierCoordinates(GeometryMetric):
    """Outlier coordinates and massive activations, also of first positions and of the rest apart
    (attention sinks).

    ``compute()`` returns float64 scalars: ``kurtosis`` and ``kurtosis_median``, the mean and the
    median over coordinates of the excess kurtosis over rows; ``max_abs``, the largest magnitude of
    an entry; ``massive_fraction``, the share of the rows with an entry of a magnitude over 100 that
    is over 1000 times the median magnitude of its row; and each of these with ``_first``, of the
    first row of each sequence that counts, and with ``_rest``, of the other rows: see
    `embedgeo.functional.outlier_values`. What too few rows leave undefined is NaN.

    "First" is what is left as such: with ``skip_first_positions=k`` it is position k + 1, and where
    the first row has a NaN or Inf, the next one. Where each row is a sequence of its own, all of
    them are first ones: that is so of (n, d) rows without ``sequence_ids`` and of ``rows="mean"``,
    ``"first"`` and ``"last"``.

    Memory is O(d): 12 numbers a coordinate. It is not among the default metrics, for it takes about
    as long as `TokenMoments`.

    Sources: Pébay 2008 for the merge; Timkey & van Schijndel 2021; Sun et al. 2024.

    Args:
        dim: d, the width of the embeddings.
        kwargs: of `torchmetrics.Metric`.

    >>> metric = OutlierCoordinates(4)
    >>> metric.update(
    ...     torch.tensor([[[0.1, 0.1, 0.1, 900.0], [1.0, -1.0, 0.5, 2.0], [0.5, 1.0, 1.0, 2.0]]])
    ... )
    >>> values = metric.compute()
    >>> [
    ...     round(values[key].item(), 3)
    ...     for key in ("massive_fraction", "massive_fraction_first", "max_abs_rest")
    ... ]
    [0.333, 1.0, 2.0]
    """

    terms = in_group("more", 720, **_TERMS)

    def __init__(self, dim: int, **kwargs: Any) -> None:
        super().__init__(dim, **kwargs)
        self.declare(CoordinateMoments.empty(dim))

    def update_states(self, rows: Rows) -> None:
        self.extend(row_coordinates(rows.embeddings, rows.ids.is_first))

    def coordinates(self) -> dict[str, Tensor]:
        """The `embedgeo.functional.coordinate_table`, float64, of the rows that this process has
        seen or, within ``sync_context()``, of those of all ranks.
        """
        return coordinate_table(self.load(CoordinateMoments))

    def largest_coordinates(self, most: int = 16) -> dict[str, Tensor]:
        """``coordinate``, their places, and what `coordinates` says of those with the largest
        shares, ascending.

        They are the ``most`` with the largest share of each of M, V and the mean cosine together;
        empty without rows.
        """
        table = self.coordinates()
        shares = [table[f"share_of_{whole}"].nan_to_num(nan=-1) for whole in ("M", "V", "cosine")]
        places = torch.cat([share.topk(min(most, self.dim)).indices for share in shares]).unique()
        places = places[~table["mean"][places].isnan()]
        return {"coordinate": places, **{name: column[places] for name, column in table.items()}}

    def layer_tables(self) -> Tables:
        return {"coordinates": self.largest_coordinates}

    @staticmethod
    def baseline(rows: GaussianRows) -> dict[str, Array]:
        from scipy import stats

        return {
            "kurtosis": -6 / (rows.n + 1),
            "max_abs": np.sqrt(rows.Q / rows.dim)
            * stats.norm.ppf((1 + 0.5 ** (1 / (rows.n * rows.dim))) / 2),
        }

    def compute(self) -> dict[str, Tensor]:
        return outlier_values(self.load(CoordinateMoments))
