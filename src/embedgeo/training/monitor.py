"""When to measure while a model trains: the part that all trainers share."""

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn

from embedgeo.capture.rows import require_exclusions
from embedgeo.capture.states import kept_random_states
from embedgeo.functional.rows import RowUnit, require_word_ids
from embedgeo.geometry import Geometry
from embedgeo.geometry.drift import Drift
from embedgeo.metrics import MAX_STATE_BYTES
from embedgeo.metrics.auto import metric_factory
from embedgeo.metrics.layer import MetricFactory, require_num_groups
from embedgeo.results.wording import reason
from embedgeo.training import messages
from embedgeo.training.adapter import TrainerAdapter, run_model
from embedgeo.training.compiling import Compiled, listen, prepare, require_compiled
from embedgeo.training.configuration import drift_rows, probe_batches
from embedgeo.training.describing import describe
from embedgeo.training.description import Description
from embedgeo.training.measuring import Measuring
from embedgeo.training.schedule import Place, Schedule


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
        require_num_groups(jackknife)
        make = metric_factory(metrics, seed=seed, max_state_bytes=max_state_bytes, jackknife=jackknife)
        given: dict[str, Any] = {"rows": rows, "no_grad_passes": no_grad_passes, **exclusions}
        self._make_geometry: partial[Any] = partial(Geometry, layers=layers, metrics=make, jackknife=jackknife, **given)
        self._reset()

    def describe(self, model: nn.Module, batch: Any = None, **sizes: int) -> Description:
        """What the monitor would do on a model: see `embedgeo.training.describing.describe` for its arguments."""
        return describe(self, model, batch, **sizes)

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
        said: dict[str, Any] = {"num_kept": self.drift}
        said["anew_at"] = step if self._drift is not None and not self._drift.has_rows else 0
        rank_zero_info(messages.opening(self, self._geometry, self.schedule, self._file, **said))

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
            warnings.warn(messages.not_measured(self, step, reason(error)), stacklevel=2)
        else:
            self._measure(step)

    def _run(self, batches: Iterable[Any], *, as_training: bool = False) -> None:
        """Run the model on batches while the probe of `Geometry`, and no other one, reads it."""
        assert self._geometry is not None
        assert self._adapter is not None
        with self._geometry.probe.exclusive():
            run_model(batches, self._adapter, self._attach, self._detach, as_training=as_training)
