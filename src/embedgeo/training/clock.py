"""What measuring takes of the time of a run."""

from collections import deque
from statistics import median
from time import perf_counter

import torch

_REMEMBERED = 101  # plain batches, whose median tells what one takes


class Clock:
    """The seconds that measured batches take beyond those of plain ones.

    A plain batch is timed up to the start of the next one, for no device is waited for after it.
    What comes between batches, such as loading data, is taken from that. It is timed after measured
    batches, at whose end the device has nothing left to do.
    """

    def __init__(self, device: torch.device) -> None:
        self.num_measured = 0  # measurements
        self._device = device
        self._start = perf_counter()
        self._plain = deque[float](maxlen=_REMEMBERED)
        self._between = list[float]()  # measured batches and those after them
        self._seconds = list[float]()  # of batches that are measured
        self._num_in_first = 1  # of these, in the first measurement
        self._began: float | None = None
        self._ended: float | None = None  # of a measured one
        self._is_plain = False

    def begin(self, *, is_plain: bool) -> None:
        """A batch begins, which is measured or not."""
        if not is_plain and self._device.type == "cuda" and torch.cuda.is_initialized():
            torch.cuda.synchronize(self._device)  # with the plain batches before
        now = perf_counter()
        if self._is_plain and self._began is not None:
            self._plain.append(now - self._began)
        if self._ended is not None:
            self._between.append(now - self._ended)
            self._ended = None
        self._began = now
        self._is_plain = is_plain

    def end(self) -> None:
        """What is measured of a batch has been."""
        if not self._is_plain and self._began is not None:
            self._ended = perf_counter()
            self._seconds.append(self._ended - self._began)
            self._began = None

    def count(self) -> None:
        """The batch that is under way completes a measurement."""
        self.num_measured += 1
        if self.num_measured == 1:
            self._num_in_first = len(self._seconds) + 1

    def __str__(self) -> str:
        """A sentence; empty where no plain batch tells what one takes."""
        if not (self._plain and self.num_measured):
            return ""
        plain = max(0.0, median(self._plain) - median(self._between or [0.0]))
        beyond = [max(0.0, seconds - plain) for seconds in self._seconds]
        share = sum(beyond) / (perf_counter() - self._start)
        first = sum(beyond[: self._num_in_first])
        return (
            f"measured {self.num_measured} steps in {sum(beyond):.1f} s, {100 * share:.1f} % of "
            f"the run; the first took {first:.1f} s"
        )
