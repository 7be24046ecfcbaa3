"""The monitor for a training loop that is written by hand."""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from operator import index
from typing import Any, Self
from weakref import WeakMethod

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from embedgeo.capture.calls import mode_restorer
from embedgeo.capture.meshes import (
    data_parallel_group,
    mesh_of,
    require_known_dimensions,
    sequence_mesh,
)
from embedgeo.capture.structure import measured_model, unwrapped, weights_device
from embedgeo.functional.distributed import Group, current_rank, has_other_ranks, is_distributed
from embedgeo.geometry import Geometry
from embedgeo.results.records import Record
from embedgeo.training.distributed import require_same_modules, run_inside
from embedgeo.training.loggers import logger_folder, wandb_scalar_writer
from embedgeo.training.monitor import Monitor, TrainingRun
from embedgeo.training.weights import some_weights, states


class StepMonitor(Monitor):
    """Measures the geometry of embeddings at chosen layers, at chosen steps of a training loop of
    your own.

    `step` is given the number of optimizer steps that the weights have taken, over the whole run;
    under gradient accumulation all batches of one optimizer step are given the same one and make
    one measurement. The optimizer may take its step inside or outside of the ``with``. A
    measurement is logged once the optimizer has taken the last step of its window; where there are
    several ranks, or the optimizer is none of torch's, when the next step begins, or at `close`.
    Numbers, tags and records are those of `embedgeo.GeometryMonitor`, and so are the promises:
    on a CPU training is bit for bit what it is without the monitor, nothing is attached to the
    model between measured steps, and a failure turns the monitor off with one warning.

    `close` the monitor after the last step, or use it as a context manager: it completes the last
    measurement, measures the last weights and writes the rest of the history file. The last weights
    are those that the model has then: close it before others are loaded. A loop that just
    ends loses the last weights, and on several ranks the measurement that the next step would have
    completed; the file is then completed when the interpreter exits.

    Args:
        model: the model as the loop calls it, with its wrappers (compiled, DDP, FSDP).
        every_n_steps: measure at steps 0, n, 2n …
        log: gets the values by tag: a function of the step and a dict, a ``SummaryWriter``, a
            Lightning logger, a run of Weights & Biases, or an object with a method ``log(values,
            step=step)``, such as a run of Trackio, or ``log_metrics(values, step=step)``, such as a
            Comet experiment or the module ``mlflow``. It is called on each rank on which it is
            given: on others leave it out. Some loggers also get charts and pictures.
        process_group: the ranks that have different rows, if these are not all ranks.
        device_mesh: the whole mesh of a model that runs in parallel on several ranks, instead of
            ``process_group``; dimensions are told by their names: see
            `embedgeo.capture.meshes.data_parallel_group`. Default: under tensor parallelism
            that of the parameters, otherwise none.
        options: all other arguments of `embedgeo.GeometryMonitor`. A batch of the probe, and of the
            last step, is given to the model by keyword if it is a mapping, otherwise as one
            argument; ``probe_forward``, of the model and the batch, runs it in another way (under
            autocast, say). Rank 0 writes ``history.parquet``, into ``folder`` or, where there is
            none, the folder of the log.

    Raises:
        TypeError, ValueError: as `embedgeo.GeometryMonitor` does, also for layers that are not
            found; ``log`` is something else.

    Example::

        monitor = StepMonitor(model, every_n_steps=100, log=SummaryWriter("runs/mine"))
        for step, batch in enumerate(loader):
            with monitor.step(step, batch):
                loss = model(**batch).loss
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        monitor.close()
    """

    _num_bare = 0  # of the last calls of `step`: those without a `with`

    def __init__(
        self,
        model: nn.Module,
        every_n_steps: int = 100,
        *,
        log: Any = None,
        process_group: dist.ProcessGroup | None = None,
        device_mesh: DeviceMesh | None = None,
        **options: Any,
    ) -> None:
        super().__init__(every_n_steps, **options)
        if process_group is not None and device_mesh is not None:
            raise ValueError(
                "process_group and device_mesh must not both be given; got both. Leave one out."
            )
        self._model = model
        self._process_group: Group = process_group
        self._take_mesh(device_mesh)
        if not self._failed:
            self.make_geometry(model)  # refused now, not at the first step
        # what follows may fail on one rank: no other waits for it now
        self._write_scalars = wandb_scalar_writer(log, self.prefix) or _scalar_writer(log)
        # has Lightning's make its folder now, which must be empty then
        getattr(log, "experiment", None)
        self._log_folder = logger_folder([] if log is None else [log])
        self._logger = log
        self._at_start: list[object] = []  # their states when its first batch began
        self._are_trained = False  # have changed from step to step
        self._is_inside = False
        self._is_closed = False
        self._has_failed = False  # the last step, before the optimizer took it
        self._has_stepped = False
        self._handled: BaseException | None = None  # when the run began
        self._optimizer_hook: RemovableHandle | None = None
        self._is_in_hook = False

    def _take_mesh(self, mesh: DeviceMesh | None = None) -> None:
        """Make the groups of a mesh, or of the one that the parameters tell, where none is given;
        every rank must call this.
        """
        if mesh is None and self._process_group is None and has_other_ranks():
            mesh = mesh_of(self._model)
        if mesh is not None:
            require_known_dimensions(mesh)  # before anything waits
            with self._own_work():
                self._have_begun()
            if not self._failed:
                self._process_group = data_parallel_group(mesh)
                self._row_group = self._process_group  # ended by `close`, also before a step
                self._sequence_mesh = sequence_mesh(mesh)

    @contextmanager
    def _measured(self, step: int, batch: Any) -> Iterator[None]:
        self._num_bare = 0
        is_first = self._run is None
        self._begin(step, batch)
        self._is_inside = True
        try:
            yield
            if is_first and self._model.training:  # the step may have set it
                self._set_modes = mode_restorer(self._model)
            self._has_failed = False
        except BaseException:
            self._has_failed = not self._has_stepped
            self._reset_rows()  # of what failed, some layers would have rows and others not
            # of the first batch there are none on this rank
            has_none = (self._now, self._num_batches) == (self._window_start, 1)
            is_lost = self._meetings is not None or not has_none
            self._has_lost_rows = is_lost and self._window_start is not None
            self._write_rest()
            raise
        finally:
            self._is_inside = False
            self._detach()
        if self._has_stepped and not has_other_ranks():
            self._after_batch(step + 1)

    def step(self, step: int, batch: Any = None) -> AbstractContextManager[None]:
        """Context for the forward and the backward pass of a training batch; every rank calls this.

        Args:
            step: the number of optimizer steps taken so far, an integer. It must not go back: that
                ends monitoring, with what was being measured.
            batch: the batch, for ``token_ids`` and ``mask`` functions and for measuring the last
                weights.
        """
        self._warn_of_bare()
        self._num_bare += 1
        # a tensor may be counted on in place
        return self._measured(index(step), batch)

    def _warn_of_bare(self) -> None:
        if self._num_bare == 1:  # of more, the second one has warned
            self._warn("step measures nothing by itself. Write: with monitor.step(step, batch): …")

    def close(self, step: int | None = None) -> None:
        """End the run: complete the last measurement, measure the last weights, write the file;
        nothing comes after.

        While an exception is handled (in a ``finally``, say) several ranks only write the file:
        others may not come.

        Args:
            step: the number of optimizer steps that the weights have taken; default: one more than
                the last `step`, or that one, if it has ended with an exception (on all ranks), or
                no optimizer has changed the weights since it began.
        """
        self._warn_of_bare()
        # where an exception is on its way, others wait for this rank in training
        is_alone = self._ranks is not None and sys.exception() is not self._handled
        if self._run is not None and not is_alone:
            has_failed = self._has_failed
            if has_failed and self._meetings is not None and is_distributed():
                # ranks must end alike, also if one alone has failed
                occasion = f"exception in step {self._now}"
                has_failed = self._meetings.come(occasion, 10.0) is not None
            if has_failed:
                self._window_start = None  # nothing of it is left
                self._has_lost_rows = False
            if step is None:
                step = self._now + (not has_failed and self._are_weights_later())
            self._finish(index(step))
        self._stop()

    def _are_weights_later(self) -> bool:
        """Tell whether the weights have taken the last step, on any rank: gradients may have been
        accumulated for one that was not taken.
        """
        same = self._are_trained and states(self._watched) == self._at_start
        # others may be trained now
        same &= [*map(id, some_weights(self._model))] == [*map(id, self._watched)]
        if self._meetings is not None and is_distributed():
            occasion = f"the end of step {self._now}"
            with suppress(Exception):  # the group is gone
                return (
                    self._meetings.come(occasion, self.wait_seconds, "" if same else "taken") != ""
                )
        return not same

    def state_dict(self) -> dict[str, Any]:
        """Place of the run in its schedule, for a checkpoint: plain numbers, and the states
        of the listeners.

        On several ranks a measurement whose last step has just been taken is completed at the next
        step, or by `close`; a run that goes on from the checkpoint does not have it again.
        """
        self._write_rest()
        return self._state()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on in the schedule where a checkpoint was saved; before the first step."""
        self._load_state(state_dict)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is None:
            self.close()
        else:
            self._stop()

    def make_geometry(self, model: nn.Module, run: TrainingRun | None = None) -> Geometry:
        """As of all monitors; ranks must have the same modules."""
        geometry = super().make_geometry(model, run)
        if run is not None and self._ranks is not None:
            require_same_modules(geometry, self._ranks)
        return geometry

    def _begin(self, step: int, batch: Any) -> None:
        if self._has_stepped and step == self._measured_step and not self._warned_of_weights:
            self._warned_of_weights = True
            self._say(
                f"batches that come for step {step} after an optimizer has taken it are not "
                "measured: step must be the number of optimizer steps taken."
            )
        self._has_stepped = False
        if self._is_closed:
            self._warn("step after close measures nothing. Make another StepMonitor.")
            return
        if self._run is None:
            self._handled = sys.exception()
            self._set_modes = mode_restorer(self._model)
            self._take_mesh()  # the model may have been made parallel since
            run = TrainingRun(
                model=self._model,
                device=weights_device(self._model),
                process_group=self._process_group,
                writes_files=current_rank() == 0,
                folder=self._log_folder,
                first_step=1,  # where a loop counts from 1
            )
            self._start(run, step)
        if step != self._now:
            before, self._at_start = self._at_start, states(self._watched)
            self._are_trained |= bool(before) and before != self._at_start
        if self._last_step is not None and step < self._last_step:
            last_step = self._last_step
            if self._window_start is not None:
                self._measure(self._window_start)
            rule = (
                "step must be the number of optimizer steps taken in the whole run, over all epochs"
            )
            remedy = "Count on, or make another StepMonitor for another run"
            self._fail(ValueError(f"{rule}; got {step} after {last_step}. {remedy}."))
        if self._is_inside:
            self._fail(ValueError("step must not begin inside another one. End that one before."))
        self._after_batch(step)  # the steps before this one are over
        self._before_batch(step, batch)
        self._watch_optimizers()

    def _watch_optimizers(self) -> None:
        """While a window is open, have a hook on the steps of all of torch's optimizers, which does
        not keep this object alive.
        """
        is_open = self._geometry is not None and self._window_start is not None
        if is_open and self._optimizer_hook is None:
            after = WeakMethod(self._after_optimizer)

            def hook(optimizer: Optimizer, *call: object) -> None:
                if (method := after()) is not None:
                    method(optimizer)

            # not removed with this object: garbage may be collected while torch goes through its
            # hooks; not compiled, or a compiled step would have the metrics in its graphs
            self._optimizer_hook = register_optimizer_step_post_hook(torch.compiler.disable(hook))
        elif self._optimizer_hook is not None and not (is_open or self._is_in_hook):
            # torch goes through the hooks inside of one
            self._optimizer_hook.remove()
            self._optimizer_hook = None

    def _after_optimizer(self, optimizer: Optimizer) -> None:
        own = {*self._model.parameters()}
        if any(weight in own for group in optimizer.param_groups for weight in group["params"]):
            self._has_stepped = True
            # ranks must agree on when; one of them may skip a step
            if not (self._is_inside or has_other_ranks()):
                self._is_in_hook = True
                try:
                    self._after_batch(self._now + 1)
                finally:
                    self._is_in_hook = False

    def _stop(self) -> None:
        super()._stop()
        self._watch_optimizers()
        self._is_closed = True

    def __getstate__(self) -> dict[str, Any]:
        of_run = ("_optimizer_hook", "_handled", "_set_modes", "_at_start", "_is_inside")
        return super().__getstate__() | dict.fromkeys(of_run)

    def _set_train_mode(self) -> None:
        self._set_modes()

    def _forward(self, batch: Any) -> None:
        batch = self._to_device(batch)
        called = self._model
        if self.probe_forward is not None:
            call = partial(self.probe_forward, called, batch)
        elif isinstance(batch, Mapping):
            inner = measured_model(called)
            called = next(each for each in called.modules() if unwrapped(each) is inner)
            call = partial(called, **batch)
        else:
            call = partial(called, batch)
        run_inside(self._model, called, call)

    def _log(self, step: int, records: list[Record]) -> None:
        self._write_scalars(step, self._scalars(records))

    def _loggers(self) -> Iterable[object]:
        return [self._logger]


def _scalar_writer(log: Any) -> Callable[[int, Mapping[str, float]], object]:
    if log is None:
        return lambda step, scalars: None
    if callable(getattr(log, "log_metrics", None)):
        save = getattr(log, "save", bool)  # of Lightning's, which trainers call, too
        return lambda step, scalars: (log.log_metrics(dict(scalars), step=step), save())
    if callable(getattr(log, "add_scalar", None)):
        return lambda step, scalars: [
            log.add_scalar(tag, value, step) for tag, value in scalars.items()
        ]
    if callable(getattr(log, "log", None)):
        return lambda step, scalars: log.log(scalars, step=step)
    if callable(log):
        return log
    raise TypeError(
        "log must be a function (step, {tag: value}), a SummaryWriter, a Lightning logger or an "
        "object with a method log(values, step=step) or log_metrics(values, step=step), as a "
        f"wandb run or the module mlflow; got {type(log).__name__}."
    )
