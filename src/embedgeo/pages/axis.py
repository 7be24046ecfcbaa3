"""The axis of steps, and how numbers and layers are written on axes."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


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


def short(number: float) -> str:
    """A number for an axis.

    >>> short(143_000), short(2e6), short(0.12345), short(1e-7)
    ('143k', '2M', '0.123', '1e-07')
    """
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= size:
            return f"{number / size:.3g}{letter}"
    return f"{number:.3g}"


def shortened(layer: str) -> str:
    """A layer's name for an axis.

    >>> shortened("final_norm"), shortened("layers.11.attention.dense")
    ('final_norm', '…tion.dense')
    """
    return layer if len(layer) <= 11 else f"…{layer[-10:]}"
