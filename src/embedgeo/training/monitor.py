"""When to measure while a model trains, and what to do about a failure: the part that all trainers share."""

import random
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torchmetrics import Metric

from embedgeo.capture.forward_inputs import require_exclusions
from embedgeo.functional.distributed import all_reduce_max, is_distributed
from embedgeo.functional.rows import RowUnit, require_row_unit
from embedgeo.geometry import Geometry
from embedgeo.metrics import default_metrics
from embedgeo.results.schema import StepRecord
from embedgeo.training.adapter import TrainerAdapter, run_probe
from embedgeo.training.schedule import Schedule


class Monitor:
    """Measures the geometry of embeddings at chosen steps of training: the base class of the monitors for trainers.

    Arguments and errors are documented in `embedgeo.GeometryMonitor`. A subclass ties the monitor to one trainer. It
    makes a `TrainerAdapter` and calls, at the same steps on every rank:

    - ``_reset()`` before another run, and ``_start(adapter, step)`` before its first batch;
    - ``_before_batch(step, batch)`` and ``_after_batch(step)`` before the forward pass of each training batch and
      after its backward pass and, where there is one, the optimizer step;
    - ``_finish(step)`` after the last batch;
    - ``_stop()`` at the end, also after an exception: nothing stays attached to the model.

    ``step`` is the number of optimizer steps taken so far. Between measured steps nothing is attached to the model,
    the random states are left as they are, and an exception in here never reaches the training loop unless
    ``on_error="raise"``.

    Attributes:
        history: what this process has measured, one record for each step, layer and metric.
    """

    def __init__(
        self,
        every_n_steps: int = 100,
        extra_steps: Sequence[int] = (),
        layers: str | Sequence[Any] | Callable[[nn.Module], Any] = "blocks",
        metrics: Callable[[int], list[Metric]] | None = None,
        window: int = 1,
        probe: Iterable[Any] | None = None,
        probe_forward: Callable[[Any, Any], Any] | None = None,
        skip_first_positions: int = 0,
        ignore_token_ids: Sequence[int] = (),
        token_ids: Callable[[Any], Tensor] | None = None,
        mask: Callable[[Any], Tensor] | None = None,
        prefix: str = "geometry",
        on_error: Literal["warn", "raise"] = "warn",
        seed: int = 0,
        rows: RowUnit = "tokens",
        *,
        no_grad_passes: bool = False,
    ) -> None:
        require_row_unit(rows)
        require_exclusions(skip_first_positions, ignore_token_ids)
        self.schedule = Schedule(every_n_steps, extra_steps, window)
        if on_error not in ("warn", "raise"):
            raise ValueError(f'on_error must be "warn" or "raise"; got {on_error!r}.')
        if isinstance(probe, Iterator):
            raise TypeError("probe must be iterable more than once, as a DataLoader is; got an iterator.")
        if window > 1 and probe is not None:
            raise ValueError(f"window combines training batches and must be 1 when a probe is given; got {window}.")
        self.probe = probe
        self.probe_forward = probe_forward
        self.token_ids = token_ids
        self.mask = mask
        self.prefix = prefix
        self.on_error = on_error
        self.history: list[StepRecord] = []
        self._make_geometry = partial(
            Geometry,
            layers=layers,
            metrics=metrics or partial(default_metrics, seed=seed),
            skip_first_positions=skip_first_positions,
            ignore_token_ids=ignore_token_ids,
            rows=rows,
            no_grad_passes=no_grad_passes,
        )
        self._geometry: Geometry | None = None
        self._adapter: TrainerAdapter | None = None
        self._reset()

    def _reset(self) -> None:
        self._window_start: int | None = None
        self._last_step: int | None = None  # scheduled steps up to this one are done
        self._failed = False
        self._has_measured = False

    def _start(self, adapter: TrainerAdapter, step: int) -> None:
        device, group = adapter.device, adapter.process_group
        self._geometry = self._make_geometry(adapter.model, on_error=self._fail, device=device, process_group=group)
        self._adapter = adapter
        if self._last_step is None:
            self._last_step = step - 1
        if self._window_start is not None and step >= self._window_start + self.schedule.window:
            self._window_start = None

    def _before_batch(self, step: int, batch: Any) -> None:
        if self._geometry is None:
            return
        if self._window_start is None:
            due, self._last_step = self._is_due(step), step
            if due and self.probe is not None:
                self._measure_probe(step)
            elif due:
                self._window_start = step
        if self._window_start is not None:
            with self._guarded():
                self._attach(batch)

    def _after_batch(self, step: int) -> None:
        self._detach()
        if self._window_start is not None and step >= self._window_start + self.schedule.window:
            self._end_window()

    def _finish(self, step: int) -> None:
        self._detach()
        if self._window_start is not None:
            self._end_window()
        elif self.probe is not None and self._geometry is not None and self._is_due(step):
            self._measure_probe(step)

    def _stop(self) -> None:
        """Leave the run; `_last_step` and `_window_start` stay, as they may still be saved to a checkpoint."""
        self._detach()
        self._adapter = self._geometry = None

    def _is_due(self, step: int) -> bool:
        assert self._last_step is not None
        return self.schedule.is_due(self._last_step, step)

    def _attach(self, batch: Any) -> None:
        assert self._geometry is not None
        probe = self._geometry.probe
        probe.attach()
        probe.token_ids = None if self.token_ids is None else self.token_ids(batch)
        probe.mask = None if self.mask is None else self.mask(batch)

    def _detach(self) -> None:
        if self._geometry is not None:
            self._geometry.probe.detach()

    def _measure_probe(self, step: int) -> None:
        assert self.probe is not None
        assert self._geometry is not None
        assert self._adapter is not None
        with self._guarded():
            try:
                with self._geometry.probe.exclusive():
                    run_probe(self.probe, self._adapter, self._attach, self._detach)
            finally:
                self._detach()
        self._measure(step)

    def _end_window(self) -> None:
        step, self._window_start = self._window_start, None
        assert step is not None
        self._measure(step)

    def _measure(self, step: int) -> None:
        """Compute and log the metrics, unless a rank has failed; every rank calls this at the same steps."""
        geometry, adapter = self._geometry, self._adapter
        assert geometry is not None
        assert adapter is not None
        failed = torch.tensor(int(self._failed), device=adapter.device)
        if bool(all_reduce_max(failed) if is_distributed() else failed):
            if not self._failed:
                self._warn(f"it failed on another rank before step {step}")
            self._geometry = None
            return
        with self._guarded():
            records = geometry.records()
            silent = geometry.why_silent()
            self.history += [StepRecord(step=step, **record) for record in records]
            adapter.log(step, records)
            geometry.reset()
            if silent and not self._has_measured:
                warnings.warn(f"{type(self).__name__}: {silent}", stacklevel=2)
            self._has_measured = True

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Context for the monitor's own work: keeps the random states and passes exceptions to `_fail`."""
        with _kept_random_states():
            try:
                yield
            except Exception as error:
                self._fail(error)

    def _fail(self, error: Exception) -> None:
        """Turn monitoring off on this rank; the other ranks follow at the next measurement."""
        if self.on_error == "raise":
            raise error
        if not self._failed:
            self._failed = True
            self._warn(" ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])]))
        if self._geometry is not None:
            self._geometry.switch_off()

    def _warn(self, cause: str) -> None:
        warnings.warn(f"{type(self).__name__} is off for the rest of this run, training goes on: {cause}", stacklevel=2)


@contextmanager
def _kept_random_states() -> Iterator[None]:
    """Restores the global random states of Python, NumPy and torch (CPU and all GPUs) on exit."""
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002 (the state that user code draws from)
    try:
        with torch.random.fork_rng(range(torch.cuda.device_count()), device_type="cuda"):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002
