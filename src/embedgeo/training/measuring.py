"""What a monitor has measured in a run, where that goes, and what becomes of a failure."""

import atexit
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import wait
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from lightning.pytorch.utilities import rank_zero_info

from embedgeo.capture.states import kept_random_states
from embedgeo.functional.distributed import all_reduce_max, has_other_ranks, is_distributed
from embedgeo.geometry import Geometry
from embedgeo.geometry.computing import HandedOver, can_start_threads
from embedgeo.results.schema import Record, StepRecord, dated
from embedgeo.results.wording import reason
from embedgeo.training import messages
from embedgeo.training.adapter import TrainerAdapter

if TYPE_CHECKING:
    from embedgeo.results.history import HistoryFile


class Pending(NamedTuple):
    """A measurement in the background.

    Attributes:
        step: at which it was made.
        geometry: what has handed it over.
        handed_over: its numbers.
        is_first: whether it is the first one of the run.
        process: the one with the thread that computes it; a fork of it has none.
    """

    step: int
    geometry: Geometry
    handed_over: HandedOver
    is_first: bool
    process: int


class Measuring:
    """Computes, keeps and logs what a `Geometry` has seen; a failure turns it off and ends no training run.

    Args:
        on_error: of `embedgeo.GeometryMonitor`.
        background: of `embedgeo.GeometryMonitor`.
        exclusions: its arguments that leave out rows, for a message.

    Raises:
        ValueError: ``on_error`` is neither ``"warn"`` nor ``"raise"``.
    """

    def __init__(
        self, on_error: Literal["warn", "raise"], *, background: bool, exclusions: Mapping[str, object]
    ) -> None:
        if on_error not in ("warn", "raise"):
            raise ValueError(f'on_error must be "warn" or "raise"; got {on_error!r}.')
        self.on_error, self.background, self._exclusions = on_error, background, exclusions
        self.history: list[StepRecord] = []
        self._geometry: Geometry | None = None
        self._adapter: TrainerAdapter | None = None
        self._file: HistoryFile | None = None
        self._pending: Pending | None = None

    def _reset(self) -> None:
        self._measured_step: int | None = None  # the last one
        self._failed = self._cannot_write = False

    def _measure(self, step: int) -> None:
        """Compute and log the metrics, unless a rank has failed; every rank calls this at the same steps."""
        self._complete()
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
            if self.background and not adapter.is_followed and can_start_threads():
                self._pending = Pending(step, geometry, geometry.hand_over(), is_first=is_first, process=os.getpid())
                atexit.register(self._complete, alone=True)
            else:
                self._record(step, geometry.records(), geometry.why_silent(), is_first=is_first)
                geometry.reset()

    def _complete(self, *, alone: bool = False) -> None:
        """Wait for the measurement in the background, if there is one, and log it.

        Args:
            alone: whether this rank may be the only one that calls this now; what needs them all is left pending then.
        """
        if self._pending is None or self._pending.process != os.getpid():
            return
        step, geometry, handed_over, is_first, _ = self._pending
        wait([handed_over.computed])
        if alone and geometry.needs_all_ranks:
            return
        self._forget()
        with self._guarded():
            records = geometry.agreed(handed_over.computed.result())
            self._record(step, records, handed_over.why_silent, is_first=is_first)

    def _complete_if_done(self) -> None:
        """The same without waiting; ranks would differ in when they are done, and wait for the next measured step."""
        if self._pending is not None and self._pending.handed_over.computed.done() and not has_other_ranks():
            self._complete()

    def _forget(self) -> None:
        self._pending = None
        atexit.unregister(self._complete)

    def _stop_measuring(self) -> None:
        """Log what is in the background, after an exception too, which nothing here takes the place of."""
        try:
            self._complete(alone=True)
        except Exception as error:
            warnings.warn(messages.failed(self, error), stacklevel=2)
        self._forget()
        if self._file is not None:
            self._write(self._file.close)
            if self._file.path.exists() and not self._cannot_write:
                rank_zero_info(messages.closing(self, self._file))
        self._adapter = self._geometry = self._file = None

    def _record(self, step: int, records: list[Record], why_silent: str, *, is_first: bool) -> None:
        assert self._adapter is not None
        gap = messages.gap(self, step, records, why_silent, self._exclusions)
        measured = [dated(step, record) for record in records]
        self.history += measured
        if self._file is not None:
            self._write(partial(self._file.add, measured))
        self._adapter.log(step, records)
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
