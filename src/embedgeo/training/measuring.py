"""What a monitor has measured in a run, where that goes, and what becomes of a failure."""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Literal

import torch

from embedgeo.functional.distributed import all_reduce_max, is_distributed
from embedgeo.geometry import Geometry
from embedgeo.results.schema import StepRecord
from embedgeo.results.wording import reason
from embedgeo.training import messages
from embedgeo.training.adapter import TrainerAdapter
from embedgeo.training.states import kept_random_states

if TYPE_CHECKING:
    from embedgeo.results.history import HistoryFile


class Measuring:
    """Computes, keeps and logs what a `Geometry` has seen; a failure turns it off and ends no training run.

    Args:
        on_error: of `embedgeo.GeometryMonitor`.
        exclusions: its arguments that leave out rows, for a message.

    Raises:
        ValueError: ``on_error`` is neither ``"warn"`` nor ``"raise"``.
    """

    def __init__(self, on_error: Literal["warn", "raise"], exclusions: Mapping[str, object]) -> None:
        if on_error not in ("warn", "raise"):
            raise ValueError(f'on_error must be "warn" or "raise"; got {on_error!r}.')
        self.on_error, self._exclusions = on_error, exclusions
        self.history: list[StepRecord] = []
        self._geometry: Geometry | None = None
        self._adapter: TrainerAdapter | None = None
        self._file: HistoryFile | None = None

    def _reset(self) -> None:
        self._measured_step: int | None = None  # the last one
        self._failed = self._cannot_write = False

    def _measure(self, step: int) -> None:
        """Compute and log the metrics, unless a rank has failed; every rank calls this at the same steps."""
        geometry, adapter = self._geometry, self._adapter
        assert geometry is not None
        assert adapter is not None
        failed = torch.tensor(int(self._failed), device=adapter.device)
        if bool(all_reduce_max(failed) if is_distributed() else failed):
            if not self._failed:
                warnings.warn(messages.off(self, f"it failed on another rank before step {step}"), stacklevel=2)
            self._geometry = None
            return
        is_first, self._measured_step = self._measured_step is None, step
        with self._guarded():
            records = geometry.records()
            gap = messages.gap(self, step, records, geometry.why_silent(), self._exclusions)
            measured = [StepRecord(step=step, **record) for record in records]
            self.history += measured
            if self._file is not None:
                self._write(partial(self._file.add, measured))
            adapter.log(step, records)
            geometry.reset()
            if is_first and gap:
                warnings.warn(gap, stacklevel=2)

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Context for the monitor's own work: keeps the random states and passes exceptions to `_fail`."""
        with kept_random_states():
            try:
                yield
            except Exception as error:
                self._fail(error)

    def _write(self, write: Callable[[], None]) -> None:
        """Write the history file; where that fails, loggers still get what is measured, and it is tried again."""
        try:
            write()
        except (OSError, ValueError) as error:
            if self.on_error == "raise":
                raise
            if not self._cannot_write:
                self._cannot_write = True
                warnings.warn(messages.not_written(self, reason(error)), stacklevel=2)

    def _fail(self, error: Exception) -> None:
        """Turn monitoring off on this rank; the other ranks follow at the next measurement."""
        if self.on_error == "raise":
            raise error
        if not self._failed:
            self._failed = True
            warnings.warn(messages.failed(self, error), stacklevel=2)
        if self._geometry is not None:
            self._geometry.switch_off()
