"""How the time of a measurement grows with rows, width, layers and token types: exponents on
logarithmic scales.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks.rows import VOCABULARY, Measurement
from benchmarks.timing import Slope, clocked, take_turns

SIZES: dict[str, list[int]] = {
    "rows": [2048, 4096, 8192, 16_384],
    "width": [256, 512, 1024, 2048],
    "layers": [2, 4, 8, 16],
    "token types": [64, 512, 4096, 32_768],
}
"""Sizes of each dimension; the others are those of `measurement`."""


def measurement(dimension: str, size: int) -> Measurement:
    """Of one layer of 8 × 512 × 512, but for the size of one dimension."""
    given: dict[str, Any] = {"batch": (8, 512), "d": 512, "num_layers": 1, "num_types": VOCABULARY}
    name = {"rows": "batch", "width": "d", "layers": "num_layers", "token types": "num_types"}[
        dimension
    ]
    return Measurement(**given | {name: (size // 512, 512) if dimension == "rows" else size})


def slopes(rounds: int, sizes: dict[str, list[int]] = SIZES) -> Iterator[Slope]:
    """The exponents of `update` and of `compute`, over medians; all sizes of a dimension take
    turns.
    """
    for dimension, values in sizes.items():
        made = {size: measurement(dimension, size) for size in values}
        for one in made.values():
            one.update()  # there is something to compute
        for what in ("update", "compute"):
            sides = {str(size): clocked(getattr(one, what)) for size, one in made.items()}
            seconds = take_turns(sides, rounds, pause=0.1)
            yield Slope(
                f"{what}, {dimension}",
                values,
                [float(np.median(times)) for times in seconds.values()],
            )
