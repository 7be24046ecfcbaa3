"""When to measure while a model trains, and what becomes of a failure: what the monitors for all trainers share."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn
from torchmetrics import Metric

from embedgeo.functional.distributed import all_reduce_max, current_rank, is_distributed
from embedgeo.functional.rows import RowUnit, require_row_unit
from embedgeo.geometry import Geometry
from embedgeo.metrics import default_metrics
from embedgeo.results.schema import Record, StepRecord
from embedgeo.training.schedule import Schedule


@dataclass(frozen=True)
class TrainerAdapter:
    """A training run, as a monitor sees it.

    Attributes:
        model: in which layers are looked up.
        device: of this process.
        to_device: moves a batch there.
        forward: runs the model on a probe batch.
        log: takes the step and what was measured at it.
        process_group: the ranks with different rows; None: all.
    """

    model: nn.Module
    device: torch.device
    to_device: Callable[[Any], Any]
    forward: Callable[[Any], object]
    log: Callable[[int, list[Record]], None]
    process_group: dist.ProcessGroup | None = None


class Monitor:
    """Measures the geometry of the embeddings at chosen layers, at chosen steps of training.

    Step s is the number of optimizer steps that the measured weights have taken, also under gradient accumulation.
    With several optimizers, each step of each of them counts, as in the trainer's own ``global_step``: a step to
    measure that falls inside a batch is measured, and dated, at the start of the next one.

    Between measured steps nothing is attached to the model, and training is bit for bit what it is without the
    monitor. A measured step of a compiled model runs eagerly.

    Args:
        every_n_steps: measure at steps 0, n, 2n …
        extra_steps: measure at these steps too; see `log_spaced_steps`.
        layers: ``"blocks"``, patterns of module names, a list of these or a callable on the model: see
            `embedgeo.capture.layers.resolve_layers`. A callable may also return a module inside it, to watch its
            blocks.
        metrics: makes the metrics of a layer, given its width; default: `embedgeo.default_metrics`.
        window: pool the batches of this many optimizer steps, from the measured one on; logged at that one.
        probe: measure these held-out batches instead of the training batches, in eval mode and without gradients;
            under several ranks they are dealt out over the ranks. The last weights are measured too.
        probe_forward: runs the model on a probe batch, given the module that is trained and the batch. Default: the
            outermost Hugging Face model, called with the batch's items by keyword; else that module.
        skip_first_positions: leave out this many real positions at the start of every sequence.
        ignore_token_ids: leave out these token ids.
        token_ids: takes the token ids from a batch; default: what the input embedding is called with.
        mask: takes the mask (True = count) from a batch; default: the attention mask the model is called with.
        prefix: of the tags. Monitors of one trainer need different ones.
        on_error: ``"warn"``: a failure in here turns monitoring off, on all ranks, with one warning, and training
            goes on. ``"raise"`` raises it.
        seed: of the rows that the default metrics sample.
        rows: ``"tokens"``, or sequences: ``"mean"``, ``"first"`` or ``"last"`` of their tokens that count.

    Raises:
        TypeError: a probe that can be gone through only once.
        ValueError: an argument outside its range, here; layers that are not found or metrics that share a key, when
            training starts.
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
    ) -> None:
        require_row_unit(rows)
        self.schedule = Schedule(every_n_steps, extra_steps, window)
        if skip_first_positions < 0:
            raise ValueError(f"skip_first_positions must not be negative; got {skip_first_positions}.")
        if on_error not in ("warn", "raise"):
            raise ValueError(f'on_error must be "warn" or "raise"; got {on_error!r}.')
        if isinstance(probe, Iterator):
            raise TypeError("probe must give its batches again and again, as a DataLoader does; got an iterator.")
        if window > 1 and probe is not None:
            raise ValueError(f"window pools training batches and must be 1 when a probe is given; got {window}.")
        self.layers = layers
        self.metrics = metrics or partial(default_metrics, seed=seed)
        self.probe = probe
        self.probe_forward = probe_forward
        self.skip_first_positions = skip_first_positions
        self.ignore_token_ids = ignore_token_ids
        self.token_ids = token_ids
        self.mask = mask
        self.prefix = prefix
        self.on_error = on_error
        self.rows = rows
        self.history: list[StepRecord] = []
        self._run: TrainerAdapter | None = None
        self._geometry: Geometry | None = None
        self._reset()

    def _reset(self) -> None:
        """Another run begins."""
        self._window_start: int | None = None
        self._last_step: int | None = None  # up to here the schedule has been followed
        self._failed = False
        self._described = False

    def _start(self, run: TrainerAdapter, step: int) -> None:
        """Before the first batch; ``step`` optimizer steps have been taken."""
        self._geometry = Geometry(
            run.model,
            self.layers,
            self.metrics,
            self.skip_first_positions,
            self.ignore_token_ids,
            rows=self.rows,
            on_error=self._fail,
            device=run.device,
            process_group=run.process_group,
        )
        self._run = run
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
        """After the last batch: measure what is left to measure. `_stop` follows."""
        self._detach()
        if self._window_start is not None:
            self._end_window()
        elif self.probe is not None and self._geometry is not None and self._is_due(step):
            self._measure_probe(step)

    def _stop(self) -> None:
        """Leave the run, however it has ended; where the schedule stands may still be saved."""
        self._detach()
        self._run = self._geometry = None

    def _is_due(self, step: int) -> bool:
        assert self._last_step is not None
        return self.schedule.reached(self._last_step, step)

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
        assert self._run is not None
        assert self._geometry is not None
        with isolate_rng(), self._guarded():
            try:
                with self._geometry.probe.exclusive(), _eval_mode(self._run.model), torch.no_grad():
                    self._run_probe(chain.from_iterable([self.probe]), self._run)
            finally:
                self._detach()
        self._measure(step)

    def _run_probe(self, batches: Iterator[Any], run: TrainerAdapter) -> None:
        """Deal the batches out over the ranks and run the model, in rounds; an error of one rank ends it on all.

        All ranks run the model in a round, or none, for together they gather sharded parameters: one that no batch is
        left for runs another's, unmeasured.
        """
        world = dist.get_world_size(run.process_group) if is_distributed() else 1
        rank = current_rank(run.process_group)
        error: Exception | None = None
        dealt = world
        while dealt:
            dealt, placed = 0, None
            try:
                for dealt, batch in enumerate(islice(batches, 0 if error else world), 1):
                    if dealt <= rank + 1:
                        placed = batch
                if dealt:
                    placed = run.to_device(placed)
                    if rank < dealt:
                        self._attach(placed)
            except Exception as caught:
                error = caught
            error = _agreed(error, dealt, run.device)
            if error is not None:
                raise error
            if dealt:
                try:
                    run.forward(placed)
                except Exception as caught:  # the others hear of it in the next round
                    error = caught
                self._detach()

    def _end_window(self) -> None:
        step, self._window_start = self._window_start, None
        assert step is not None
        self._measure(step)

    def _measure(self, step: int) -> None:
        """Compute and log, if no rank has failed; every rank calls this at the same steps."""
        geometry, run = self._geometry, self._run
        assert geometry is not None
        assert run is not None
        failed = torch.tensor(int(self._failed), device=run.device)
        if bool(all_reduce_max(failed) if is_distributed() else failed):
            if not self._failed:
                self._warn(f"it failed on another rank before step {step}")
            self._geometry = None
            return
        with isolate_rng(), self._guarded():
            records = geometry.records()
            reached = {record["layer"] for record in records}
            silent = [layer.name for layer in geometry.layers if layer.name not in reached]
            self.history += [StepRecord(step=step, **record) for record in records]
            run.log(step, records)
            geometry.reset()
            if silent and not self._described:
                warnings.warn(f"{type(self).__name__}: no forward pass reached {', '.join(silent)}.", stacklevel=2)
            self._described = True

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        """Turn monitoring off on this rank; the others follow at the next measurement."""
        if self.on_error == "raise":
            raise error
        if not self._failed:
            self._failed = True
            self._warn(" ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])]))
        if self._geometry is not None:
            self._geometry.switch_off()

    def _warn(self, cause: str) -> None:
        warnings.warn(f"{type(self).__name__} is off for the rest of this run, training goes on: {cause}", stacklevel=2)


def _agreed(error: Exception | None, dealt: int, device: torch.device) -> Exception | None:
    """What every rank raises, or none: its own error, or that another has one or was left another number of batches."""
    if not is_distributed():
        return error
    told = torch.tensor([int(error is not None), dealt, -dealt], device=device)
    failed, most, least = all_reduce_max(told).tolist()
    if error is None and failed:
        return RuntimeError("it failed on another rank")
    if error is None and most != -least:
        return ValueError(
            f"probe must give the same batches on every rank, and they are dealt out; {-least} were left on one rank "
            f"where another had {most}."
        )
    return error


@contextmanager
def _eval_mode(module: nn.Module) -> Iterator[None]:
    training = [(m, m.training) for m in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for m, was_training in training:
            m.training = was_training
