"""What the glossary says of one metric."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Term(NamedTuple):
    """How people read a metric.

    Attributes:
        name: short, for titles and axes.
        unit: unit and, where there are several, the estimator.
        meaning: one or two sentences.
        ranges: its values may span orders of magnitude.
        is_drawn: the report has figures of it; else it is only in the table, in the flags or a dashed line.
        group: one of `embedgeo.results.glossary.GROUPS`.
    """

    name: str
    unit: str
    meaning: str
    ranges: bool = False
    is_drawn: bool = True
    group: str = "more"

    def is_logarithmic(self, values: NDArray[np.float64]) -> bool:
        """Whether values go on a logarithmic scale: all of them positive, over more than a factor of 10."""
        finite = values[np.isfinite(values)]
        return bool(self.ranges and finite.size and 1e-200 < 10 * finite.min() < finite.max() < 1e200)
