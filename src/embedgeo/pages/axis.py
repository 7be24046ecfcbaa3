"""The axes of steps and layers."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from embedgeo.names import layer_label


class StepAxis:
    """Steps on an axis that is logarithmic if the first ones are much closer together than most are.

    Args:
        steps: ascending.

    >>> StepAxis([0, 1, 2, 4, 8, 16, 32]).is_log, StepAxis([0, 100, 200, 300]).is_log
    (True, False)
    """

    def __init__(self, steps: Sequence[int]) -> None:
        gaps = np.diff(steps)
        self.is_log = bool(len(gaps) and np.median(gaps) >= 3 * gaps[0])
        self.first, self.last = steps[0], steps[-1]

    def place(self, steps: Sequence[int]) -> NDArray[np.float64]:
        """Where steps are, 0 for the first and 1 for the last of those given at first."""
        low, high = self._scale([self.first, self.last])
        return (self._scale(steps) - low) / (high - low or 1)

    def ticks(self) -> list[int]:
        """Steps to name, within what was given."""
        if self.is_log:
            round_steps = [0, *(10**k for k in range(12))]
        else:
            units = (digit * 10**k for k in range(20) for digit in (1, 2, 5))
            unit = next(unit for unit in units if self.last - self.first <= 6 * unit)
            round_steps = list(range(0, self.last + 1, unit))
        return [step for step in round_steps if self.first <= step <= self.last] or [self.first]

    def _scale(self, steps: Sequence[int]) -> NDArray[np.float64]:
        at = np.asarray(steps, dtype=np.float64)
        return np.log2(1 + at) if self.is_log else at

    def __str__(self) -> str:
        return "optimizer step" + (" (log scale)" if self.is_log else "")


def named(layer: str) -> str:
    """A layer on an axis that does not say what its numbers are.

    >>> named("block.03"), named("final_norm"), named("encoder.block.03")
    ('block 3', 'norm', 'enc 3')
    """
    label = layer_label(layer)
    return f"block {label}" if label.isdecimal() else label
