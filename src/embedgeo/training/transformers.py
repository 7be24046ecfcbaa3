"""The monitor as a callback of the Hugging Face Trainer."""

from embedgeo.extras import require_extra

require_extra("accelerate", "embedgeo.GeometryCallback")

import inspect
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from accelerate.utils.memory import should_reduce_batch_size
from torch import nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from embedgeo.results.records import MEANS, Record
from embedgeo.training.monitor import Monitor, TrainingRun

_INTEGRATIONS = "transformers.integrations."


class GeometryCallback(Monitor, TrainerCallback):
    """Measures the geometry of embeddings at chosen layers, at chosen steps of a
    ``transformers.Trainer``.

    Scalars go to every integration in ``report_to``, dated with the measured step. Other callbacks,
    and the console, do not get them. ``trainer.state.log_history`` has the means over blocks alone,
    for every checkpoint holds it. Integrations that show more than scalars get charts and
    pictures, too. Names, and the records in ``history``, are those of `embedgeo.GeometryMonitor`,
    and so are the arguments; ``probe_forward`` is given the model that the Trainer runs, and the
    default of ``folder`` is the Trainer's ``output_dir``. Nothing is measured in evaluate and
    predict. The Trainer's checkpoints hold the place in the schedule and the choice of metrics, but
    not the states of listeners.

    Raises:
        TypeError, ValueError: as `embedgeo.GeometryMonitor` does.
        ValueError: when training starts, if it runs one model on several ranks (tensor, context or
            sequence parallel), which repeat rows, or on several GPUs in one process.

    Example::

        callback = GeometryCallback(every_n_steps=100)
        trainer = Trainer(model, args, train_dataset=data, callbacks=[callback])
        trainer.train()
    """

    _trainer: Trainer  # while it trains
    _is_over: bool  # as the last log has told
    _token: object = None  # of the run, which a wrapper of its training step has
    _tag_start = "train/"

    @property
    def _state_name(self) -> str:
        return f"{type(self).__name__} {self.prefix}"

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        self._stop()
        self._reset()
        trainer = _calling_trainer()
        assert isinstance(trainer.model, nn.Module)
        _require_data_parallel(trainer)
        saved: Any = state.stateful_callbacks  # a dict, typed as the list that it is made from
        self._load_state(saved.get(self._state_name, {}))
        run = TrainingRun(
            model=trainer.model,
            device=args.device,
            writes_files=state.is_world_process_zero,
            folder=Path(args.output_dir) if args.output_dir else None,
            batches_a_step=args.gradient_accumulation_steps,
        )
        self._is_over = False
        self._start(run, state.global_step)
        self._trainer = trainer
        self._wrap_training_step(trainer)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._after_batch(state.global_step)
        # as JSON in a checkpoint, which cannot hold what listeners have
        kept = {name: value for name, value in self._state().items() if name != "listeners"}
        saved: Any = state.stateful_callbacks
        saved[self._state_name] = kept

    def on_save(self, *_: Any, **kwargs: Any) -> None:
        self._write_rest()

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        ends = {"train_steps_per_second", "train_loss"}.issubset(kwargs.get("logs", ()))
        if self._run is not None and ends:
            # the weights are still the last ones: the best model may be loaded after this
            self._is_over = True
            self._finish(state.global_step)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._run is not None and not self._is_over:
            self._finish(state.global_step)
        self._stop()

    def _why_not_last(self, step: int) -> str:
        if self._is_over or not self._trainer.args.load_best_model_at_end:
            return ""
        self._warn(
            f"the weights of the last step, {step}, are not measured, because the best ones may "
            "have been put in their place since: no log has told the end of training. Leave "
            "train_steps_per_second in what Trainer.log is given."
        )
        return "the best weights"

    def _wrap_training_step(self, trainer: Trainer) -> None:
        """Wrap ``training_step`` until training ends: the Trainer has no event for a batch or an
        exception.
        """
        training_step = trainer.training_step
        token = object()
        self._token = token

        def measured(model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
            if self._token is not token:  # of an earlier run
                return training_step(model, inputs, *args, **kwargs)
            self._before_batch(trainer.state.global_step, inputs)
            try:
                return training_step(model, inputs, *args, **kwargs)
            except BaseException as error:
                is_again = isinstance(error, Exception) and should_reduce_batch_size(error)
                if self._file is not None and is_again and trainer.args.auto_find_batch_size:
                    self._given_up = *self._given_up, self._file.writer
                self._stop()
                raise
            finally:
                self._detach()

        wrapper: Any = measured
        wrapper.number = id(measured)  # not of what wraps it
        wrapper.inside = training_step
        wrapper.is_over = lambda: self._token is not token
        trainer.training_step = measured  # type: ignore[method-assign]

    def _stop(self) -> None:
        super()._stop()
        self._token = None
        if not hasattr(self, "_trainer"):
            return
        step: Any = self._trainer.training_step
        while getattr(step, "number", None) == id(step) and step.is_over():
            step = step.inside
        vars(self._trainer).pop("training_step", None)
        if self._trainer.training_step != step:  # an instance's own
            self._trainer.training_step = step  # type: ignore[method-assign]
        del self._trainer

    def _set_train_mode(self) -> None:
        assert self._trainer.model is not None
        self._trainer.model.train()

    def _forward(self, batch: Any) -> None:
        model = self._trainer.model_wrapped
        batch = self._to_device(batch)
        with self._trainer.compute_loss_context_manager():
            if self.probe_forward is not None:
                self.probe_forward(model, batch)
            elif isinstance(batch, Mapping):
                model(**batch)
            else:
                model(batch)

    def _log(self, step: int, records: list[Record]) -> None:
        state = self._trainer.state
        control = self._trainer.control
        handler = self._trainer.callback_handler
        now = state.global_step
        before = {**vars(control)}
        callbacks = handler.callbacks
        scalars = self._scalars(records)
        means = {tag: value for tag, value in scalars.items() if tag.rpartition("/")[2] in MEANS}
        epoch = (state.epoch or 0.0) * step / max(now, 1)
        # the summary of training stays the last one
        at = len(state.log_history) - self._is_over
        state.log_history.insert(at, {**means, "epoch": epoch, "step": step})
        state.global_step = step  # integrations date values with it
        # loggers, of ``report_to`` or made from one, and not callbacks that act on logs
        handler.callbacks = [
            callback
            for callback in callbacks
            if any(each.__module__.startswith(_INTEGRATIONS) for each in type(callback).__mro__)
        ]
        try:
            handler.on_log(self._trainer.args, state, control, {**scalars})
        finally:
            handler.callbacks = callbacks
            state.global_step = now
            vars(control).update(before)

    def _loggers(self) -> Iterable[object]:
        return (
            self._trainer.callback_handler.callbacks
            if self._trainer.is_world_process_zero()
            else ()
        )


def _calling_trainer() -> Trainer:
    """The Trainer whose event this is: nothing that an event passes refers to it, so it is the
    nearest one of which a method is being called.
    """
    for caller in inspect.stack(0):
        trainer = caller.frame.f_locals.get("self")
        if isinstance(trainer, Trainer):
            return trainer
    raise RuntimeError("GeometryCallback must be a callback of a transformers.Trainer.")


def _require_data_parallel(trainer: Trainer) -> None:
    if trainer.get_tp_size() * trainer.get_cp_size() * trainer.get_sp_size() > 1:
        raise ValueError(
            "GeometryCallback needs different rows on each rank; this Trainer runs one model on "
            "several ranks (tensor, context or sequence parallel). Use data parallel or FSDP, or "
            "sweep over its checkpoints."
        )
    if trainer.args.n_gpu > 1:
        raise ValueError(
            f"GeometryCallback needs one process for each GPU; this one has {trainer.args.n_gpu} "
            "(torch.nn.DataParallel). Launch it by torchrun or accelerate."
        )
