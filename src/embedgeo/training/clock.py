"""What measuring takes of the time of a run."""

from collections import deque
from statistics import median
from time import perf_counter

import torch

from embedgeo.formatting import counted

_REMEMBERED = 101  # batches that are not measured, whose median is what one takes


class Clock:
    """Tells the seconds that measured batches take beyond the median of the others.

    Between batches that are not measured a device is not waited for: what one takes is the time
    from its start to that of the next one.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._start = perf_counter()
        self._plain = deque[float](maxlen=_REMEMBERED)
        self._began: float | None = None  # the batch that is under way, if it may be a plain one
        self._measured = list[float]()
        self._num_batches = list[int]()  # of each measurement

    def batch(self) -> None:
        """A batch begins."""
        now = perf_counter()
        if self._began is not None:
            self._plain.append(now - self._began)
        self._began = now
