"""When to measure while a model trains: the part that all trainers share."""

import atexit
import math
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn

from embedgeo.capture.calls import kept_random_states
from embedgeo.capture.forward_inputs import require_exclusions
from embedgeo.formatting import reason, shell_command
from embedgeo.functional.distributed import all_reduce_max, has_other_ranks, is_distributed
from embedgeo.functional.representations import NEIGHBORS
from embedgeo.functional.rows import RowUnit, require_word_ids
from embedgeo.geometry import Geometry
from embedgeo.geometry.computing import can_start_threads
from embedgeo.geometry.drift import Drift
from embedgeo.metrics import MAX_STATE_BYTES
from embedgeo.metrics.defaults import metric_factory
from embedgeo.metrics.layer import MetricFactory
from embedgeo.results.records import Record, dated
from embedgeo.training.adapter import (
    Compiled,
    TrainerAdapter,
    listen,
    prepare,
    require_compiled,
    run_model,
)
from embedgeo.training.describe import Description, describe, drift_notes, opening, outline
from embedgeo.training.schedule import Place, Schedule

if TYPE_CHECKING:
    from embedgeo.results.parquet import HistoryFile


NUM_ROWS = 1024
"""Rows of a layer that are compared, where their number is not given."""


def instantiated(value: Any) -> Any:
    """The value with each dict of a ``class_path`` and its ``init_args`` replaced by an instance, from the inside out.

    A command line made by `lightning.pytorch.cli.LightningCLI` leaves these dicts to the monitor, because jsonargparse
    would not pass arguments on to a data set inside a ``torch.utils.data.DataLoader``.

    >>> instantiated({"class_path": "fractions.Fraction", "init_args": {"numerator": 3}})
    Fraction(3, 1)
    """
    if isinstance(value, list):
        return [instantiated(item) for item in value]
    if not isinstance(value, dict):
        return value
    items = {key: instantiated(item) for key, item in value.items()}
    if "class_path" not in items:
        return items
    from lightning.pytorch.cli import instantiate_class  # needs jsonargparse, as what has read the file

    return instantiate_class((), items)


def probe_batches(probe: Iterable[Any] | dict[str, Any] | None, window: int) -> Iterable[Any] | None:
    """The batches of a probe; None if there is none.

    Raises:
        TypeError: they can be iterated over only once.
        ValueError: there is a window of several steps, too.
    """
    batches: Iterable[Any] | None = instantiated(probe) if isinstance(probe, dict) else probe
    if isinstance(batches, Iterator):
        raise TypeError("probe must be iterable more than once, as a DataLoader is; got an iterator.")
    if window > 1 and batches is not None:
        raise ValueError(f"window combines training batches and must be 1 when a probe is given; got {window}.")
    return batches


def drift_rows(drift: bool | int, *, has_probe: bool) -> int:
    """The number of rows that are compared, given that or True; 0 for False.

    Raises:
        ValueError: they are fewer than a row with its neighbours, or there is no probe.
    """
    if not isinstance(drift, int) or (not isinstance(drift, bool) and drift < NEIGHBORS + 2):
        raise ValueError(f"drift must be True, False, or a number of rows, {NEIGHBORS + 2} or more; got {drift!r}.")
    if drift and not has_probe:
        raise ValueError(
            f"drift compares the same rows at every measurement and needs a probe; got drift={drift!r} without one. "
            "Give probe=, fixed held-out batches, or leave drift out."
        )
    return NUM_ROWS if drift is True else int(drift)


def closing(monitor: object, file: "HistoryFile") -> str:
    """Where the history is, and the command that draws it, which can be pasted."""
    command = shell_command("embedgeo", "report", file.path.parent)
    return f"{type(monitor).__name__}: its history is in {file.path}; to look at it: {command}"


def off(monitor: object, cause: str) -> str:
    """That a failure has turned the monitor off."""
    return f"{type(monitor).__name__} is off for the rest of this run, training goes on: {cause}"


def not_written(monitor: object, cause: str) -> str:
    """That the history file cannot be written, though the monitor goes on."""
    return f"{type(monitor).__name__}: its history file cannot be written, measuring and logging go on: {cause}"


def failed(monitor: object, error: Exception) -> str:
    """That this failure has turned the monitor off."""
    return off(monitor, " ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])]))


def not_measured(monitor: object, step: int, cause: str) -> str:
    """Why the last weights could not be measured on training batches, and what to do."""
    return (
        f"{type(monitor).__name__}: the weights of the last step, {step}, are not measured, because the model could "
        f"not be run on a training batch outside of its training step ({cause}). Give probe_forward=, a function of "
        "the module and a batch, or measure_last=False."
    )


def gap_message(
    monitor: object,
    step: int,
    records: Sequence[Record],
    why_silent: str,
    exclusions: Mapping[str, object],
) -> str | None:
    """What a measurement lacks, and why: layers that no forward pass has reached, or all rows."""
    name = type(monitor).__name__
    if why_silent:
        return f"{name}: {why_silent}"
    if any(record["value"] and not math.isnan(record["value"]) for record in records):
        return None
    causes = [*(f"{name}={value!r}" for name, value in exclusions.items() if value), "the mask"]
    verb = "leave" if len(causes) > 1 else "leaves"
    return f"{name}: no token is left to measure at step {step}; {' and '.join(causes)} {verb} out all of them."


class Pending(NamedTuple):
    """A measurement in the background.

    Attributes:
        step: at which it was made.
        geometry: what has handed it over.
        records: those of this rank, in time.
        why_silent: see `embedgeo.geometry.Geometry.why_silent`.
        is_first: whether it is the first one of the run.
        process: the one with the thread that computes it; a fork of it has none.
    """

    step: int
    geometry: Geometry
    records: Future[list[Record]]
    why_silent: str
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
        self.history: list[Record] = []
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
                warnings.warn(off(self, f"it failed on another rank before step {step}"), stacklevel=2)
            self._geometry = None
            return
        is_first, self._measured_step = self._measured_step is None, step
        with self._guarded():
            if self.background and not adapter.is_followed and can_start_threads():
                records, why_silent = geometry.hand_over()
                self._pending = Pending(step, geometry, records, why_silent, is_first, os.getpid())
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
        step, geometry, computed, why_silent, is_first, _ = self._pending
        wait([computed])
        if alone and geometry.needs_all_ranks:
            return
        self._forget()
        with self._guarded():
            records = geometry.agreed(computed)
            self._record(step, records, why_silent, is_first=is_first)

    def _complete_if_done(self) -> None:
        """The same without waiting; ranks would differ in when they are done, and wait for the next measured step."""
        if self._pending is not None and self._pending.records.done() and not has_other_ranks():
            self._complete()

    def _forget(self) -> None:
        self._pending = None
        atexit.unregister(self._complete)

    def _stop_measuring(self) -> None:
        """Log what is in the background, after an exception too, which nothing here takes the place of."""
        try:
            self._complete(alone=True)
        except Exception as error:
            warnings.warn(failed(self, error), stacklevel=2)
        self._forget()
        if self._file is not None:
            self._write(self._file.close)
            if self._file.path.exists() and not self._cannot_write:
                rank_zero_info(closing(self, self._file))
        self._adapter = self._geometry = self._file = None

    def _record(self, step: int, records: list[Record], why_silent: str, *, is_first: bool) -> None:
        assert self._adapter is not None
        gap = gap_message(self, step, records, why_silent, self._exclusions)
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
                warnings.warn(not_written(self, reason(error)), stacklevel=2)

    def _fail(self, error: Exception) -> None:
        """Turn monitoring off on this rank; the other ranks follow at the next measurement."""
        if self.on_error == "raise":
            raise error
        if not self._failed:
            self._failed = True
            warnings.warn(failed(self, error), stacklevel=2)
        if self._geometry is not None:
            self._geometry.switch_off()


class Monitor(Measuring):
    """Measures the geometry of embeddings at chosen steps of training: the base class of the monitors for trainers.

    `embedgeo.GeometryMonitor` has arguments and errors. A subclass makes a `TrainerAdapter`, and calls on every rank:

    - ``_reset()`` before another run, and ``_start(adapter, step)`` before its first batch;
    - ``_before_batch(step, batch)`` and ``_after_batch(step)`` before the forward pass of each training batch and after
      its backward pass and, where there is one, the optimizer step;
    - ``_finish(step)`` after the last batch, and ``_stop()`` at the end, also after an exception.

    ``step`` is the number of optimizer steps taken so far. Between measured steps nothing but the hooks of `prepare` is
    on the model, the random states are left as they are, and no exception in here reaches the training loop unless
    ``on_error="raise"``.

    Attributes:
        history: what this process has measured, one record for each step, layer and metric.
    """

    def __init__(
        self,
        every_n_steps: int = 100,
        extra_steps: Sequence[int] = (),
        layers: str | Sequence[Any] | Callable[[nn.Module], Any] = "blocks",
        metrics: MetricFactory | Literal["auto"] | None = None,
        window: int = 1,
        probe: Iterable[Any] | dict[str, Any] | None = None,
        probe_forward: Callable[[Any, Any], Any] | None = None,
        skip_first_positions: int = 0,
        ignore_token_ids: Sequence[int] = (),
        token_ids: Callable[[Any], Tensor] | None = None,
        mask: Callable[[Any], Tensor] | None = None,
        prefix: str = "geometry",
        on_error: Literal["warn", "raise"] = "warn",
        seed: int = 0,
        rows: RowUnit = "tokens",
        measure_last: bool = True,
        folder: str | Path | None = None,
        no_grad_passes: bool = False,
        jackknife: int = 0,
        word_ids: Callable[[Any], Tensor] | None = None,
        max_state_bytes: float = MAX_STATE_BYTES,
        compiled: Compiled = "eager",
        background: bool = False,
        drift: bool | int = False,
    ) -> None:
        require_compiled(compiled)
        require_word_ids(rows, word_ids)
        require_exclusions(skip_first_positions, ignore_token_ids)
        self.schedule = Schedule(every_n_steps, extra_steps, window)
        exclusions = {"skip_first_positions": skip_first_positions, "ignore_token_ids": ignore_token_ids}
        super().__init__(on_error, background=background, exclusions=exclusions)
        self.probe, self.probe_forward = probe_batches(probe, window), probe_forward
        self.token_ids, self.mask, self.word_ids, self.max_state_bytes = token_ids, mask, word_ids, max_state_bytes
        self.prefix, self.folder, self.measure_last = prefix, folder, measure_last
        self.drift = drift_rows(drift, has_probe=probe is not None)
        self._keeps_batches = measure_last and probe is None
        self.compiled, self._is_told = compiled, False
        make = metric_factory(metrics, seed=seed, max_state_bytes=max_state_bytes, jackknife=jackknife)
        given: dict[str, Any] = {"rows": rows, "no_grad_passes": no_grad_passes, **exclusions}
        self._make_geometry: Callable[..., Geometry] = partial(
            Geometry, layers=layers, metrics=make, jackknife=jackknife, **given
        )
        self._reset()

    def describe(self, model: nn.Module, batch: Any = None, *, batch_size: int = 8, seq_len: int = 512) -> Description:
        """Describe what the monitor would do on a model: see `embedgeo.training.describe.describe`."""
        return describe(self, self._make_geometry, model, batch, batch_size=batch_size, seq_len=seq_len)

    def prepare(self, model: nn.Module) -> None:
        """Put the hooks of ``compiled="stable"`` on a model, before it is compiled; otherwise this does nothing.

        They stay, between measured steps as one operator each that finds nobody listening, and add no parameters or
        buffers. On several ranks every rank calls this.
        """
        if self.compiled == "stable":
            self._is_told = not prepare(self, self._make_geometry(model))

    def _reset(self) -> None:
        super()._reset()
        self._place = Place(self.schedule)
        self._recent: list[tuple[int, Any]] = []  # the batches of the last window, for `measure_last`
        self._drift = Drift(self.drift) if self.drift else None

    def _state(self) -> dict[str, Any]:
        """How far the run has come, for a checkpoint: numbers and, for the drift, tensors. Empty before the start."""
        if self._place.last_step is None:
            return {}
        place = {"last_step": self._place.last_step, "window_start": self._place.window_start}
        return place if self._drift is None else {**place, "drift": self._drift.state()}

    def _load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from what `_state` has returned; before the start."""
        self._place.last_step, self._place.window_start = state.get("last_step"), state.get("window_start")
        if self._drift is not None and "drift" in state:
            self._drift.load(state["drift"])

    def _start(self, adapter: TrainerAdapter, step: int) -> None:
        self._adapter = adapter
        options = {"on_error": self._fail, "device": adapter.device, "process_group": adapter.process_group}
        self._geometry, self._first_step = self._make_geometry(adapter.model, drift=self._drift, **options), step
        if self.compiled == "stable":
            self._is_told = not listen(self, self._geometry, was_told=self._is_told)
        self._place.start(step)
        self._file = adapter.history_file(self.folder, self.prefix)
        outlined = outline(adapter.model, self._geometry)
        notes: list[str] = []
        if self._drift is not None:
            notes += drift_notes(outlined, self.drift, starts_at=None if self._drift.has_rows else step)
        path = None if self._file is None else self._file.path
        rank_zero_info(opening(type(self).__name__, outlined, self.schedule, path, notes))

    def _before_batch(self, step: int, batch: Any) -> None:
        self._complete_if_done()
        if self._geometry is None:
            return
        if self._keeps_batches and batch is not None:
            self._keep(step, batch)
        if self._place.window_start is None and self._place.take_due(step):
            if self.probe is not None:
                self._measure_probe(step)
            else:
                self._place.window_start = step
        if self._place.window_start is not None:
            with self._guarded():
                self._attach(batch)

    def _keep(self, step: int, batch: Any) -> None:
        """Keep a reference to the batch, and to those of the last window."""
        while self._recent and self._recent[0][0] <= step - self.schedule.window:
            del self._recent[0]
        self._recent.append((step, batch))

    def _after_batch(self, step: int) -> None:
        self._detach()
        if self._place.is_window_over(step):
            self._measure(self._place.close_window())
        elif self.probe is not None and self._geometry is not None and self._place.take_due(step):
            self._measure_probe(step)

    def _finish(self, step: int) -> None:
        self._detach()
        if self._place.window_start is not None:
            self._measure(self._place.close_window())
        if self.measure_last and self._geometry is not None and step not in (self._first_step, self._measured_step):
            (self._measure_recent if self.probe is None else self._measure_probe)(step)
        self._complete()

    def _stop(self) -> None:
        """Leave the run; `_place` stays, as it may still be saved to a checkpoint."""
        self._detach()
        self._stop_measuring()
        self._recent = []

    def _attach(self, batch: Any) -> None:
        assert self._geometry is not None
        probe = self._geometry.probe
        probe.attach()
        probe.token_ids = None if self.token_ids is None else self.token_ids(batch)
        probe.mask = None if self.mask is None else self.mask(batch)
        probe.word_ids = None if self.word_ids is None else self.word_ids(batch)

    def _fail(self, error: Exception) -> None:
        super()._fail(error)
        if self._drift is not None:
            self._drift.forget()

    def _detach(self) -> None:
        if self._geometry is not None:
            self._geometry.probe.detach()

    def _measure_probe(self, step: int) -> None:
        assert self.probe is not None
        with self._guarded():
            self._run(self.probe)
        self._measure(step)

    def _measure_recent(self, step: int) -> None:
        """Measure the last weights on the last training batches, if there are any, run again as in a training step."""
        if not self._recent:
            return
        assert self._geometry is not None
        try:
            with kept_random_states():
                self._run([batch for _, batch in self._recent], as_training=True)
        except Exception as error:
            if self.on_error == "raise":
                raise
            self._geometry.reset()
            warnings.warn(not_measured(self, step, reason(error)), stacklevel=2)
        else:
            self._measure(step)

    def _run(self, batches: Iterable[Any], *, as_training: bool = False) -> None:
        """Run the model on batches while the probe of `Geometry`, and no other one, reads it."""
        assert self._geometry is not None
        assert self._adapter is not None
        with self._geometry.probe.exclusive():
            run_model(batches, self._adapter, self._attach, self._detach, as_training=as_training)
