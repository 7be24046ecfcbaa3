"""The monitor as a Lightning callback."""

import math
import re
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.trainer.states import RunningStage
from torch import Tensor, nn

from embedgeo.capture.meshes import sequence_mesh
from embedgeo.capture.structure import measured_model, unwrapped
from embedgeo.capture.torch_names import are_equal
from embedgeo.formatting import did_you_mean, listed
from embedgeo.results.events import tagged_scalars
from embedgeo.results.records import Record
from embedgeo.training.distributed import kept_sharded, run_inside
from embedgeo.training.loggers import logger_folder
from embedgeo.training.monitor import Monitor, TrainingRun
from embedgeo.training.weights import first_numbers

# of ddp_spawn and ddp_fork: sends callback_metrics by a pipe that is read once processes have ended
_WITH_PIPE = "_MultiProcessingLauncher"


class GeometryMonitor(Monitor, Callback):
    """Measures the geometry of embeddings at chosen layers, at chosen steps of training with
    Lightning.

    Step s is the number of optimizer steps that the measured weights have taken, also under
    gradient accumulation. With several optimizers each step of each of them counts, as in
    ``trainer.global_step``; a scheduled step that falls inside a batch is measured, and dated, at
    the start of the next batch. Nothing is measured in validation, test and predict. On a CPU
    training is bit for bit what it is without the monitor, except that in measured steps
    what torch.compile has made runs eagerly.

    Every logger gets the scalars that ``scalars`` names as ``{prefix}.{metric}/{layer}``, and their
    mean over blocks, ``{prefix}.{metric}/mean``; TensorBoard and Weights & Biases also
    pictures. All values are in ``trainer.callback_metrics`` and, as a list of dicts (step, layer,
    layer_index, width, metric, value, stderr), in ``history``. With ``ddp_spawn``, ``ddp_fork`` and
    ``ddp_notebook`` both are in the processes that train, until ``fit`` ends there, and not where
    ``fit`` is called.

    A checkpoint does not hold the rows seen: a run resumed inside a window measures its remaining
    steps.

    Args:
        every_n_steps: measure at steps 0, n, 2n …
        extra_steps: measure at these steps too; see `embedgeo.log_spaced_steps`.
        layers: ``"blocks"``, ``"hidden_states"``, a pattern of names, a list of
            these or a callable on the model: see `embedgeo.capture.layers.resolve_layers`. The
            callable may also return a module, whose blocks are measured.
        metrics: makes the metrics of a layer, given the layer's width. Default, ``"auto"``:
            `embedgeo.default_metrics`, bounded by ``max_bytes``.
        window: measure the batches of this many consecutive optimizer steps together, logged at the
            first of them.
        probe: measure these held-out batches instead of the training batches, in eval mode and
            without gradients, as soon as the weights have taken a step to measure at, before a
            checkpoint of them is saved. Ranks share the batches. In a configuration file: a dict of
            ``class_path`` and ``init_args``.
        probe_forward: runs the model on a batch of the probe, given the module that is trained and
            the batch. Default: the outermost Hugging Face model is called with the batch's items by
            keyword, another module with the batch; of a module without a ``forward``, the Hugging
            Face model inside it is called with the batch.
        skip_first_positions: leave out this many real positions at the start of every sequence.
        ignore_token_ids: leave out these token ids.
        token_ids: returns the token ids of a batch; default: those that the input embedding is
            called with.
        mask: returns the mask of a batch (True = count); default: the attention mask that the model
            is called with.
        prefix: start of the tags; monitors of one trainer need different ones.
        on_error: ``"warn"``: a failure of the monitor turns it off, on all ranks, with one warning,
            and training goes on; ``"raise"``: it is raised in the training loop.
        seed: seed of the rows that the default metrics sample, 0 or more and less than 2**63.
        rows: what a row is: a token (``"tokens"``), or a sequence, by the ``"mean"``,
            the ``"first"`` or the ``"last"`` of its tokens that count; or a word
            (``"words"``), by the mean of its tokens that count: see `embedgeo.observe`.
        measure_last: measure the last weights, too, whether or not their step is one to measure at:
            on the probe, or on the last full training batches (of ``window`` steps, not those left
            over at the end of an epoch). These are run again by a plain forward pass, as a batch of
            the probe is, in train mode and without gradients. References to these batches are kept
            until then. Where the model cannot be run on them, a warning says that the last weights
            are not measured; give ``probe_forward`` then.
        folder: where to write ``history.parquet`` (``history.{prefix}.parquet`` for another prefix
            than the default one); default: the folder of the first logger. See
            `embedgeo.results.parquet.HistoryFile`.
        jackknife: number of groups of whole sequences for the standard errors in ``history``, such
            as 16, which takes 4 times the memory and computing time; 0: there are none.
            See `embedgeo.observe`.
        word_ids: for words, returns the number of the word of each of a batch's tokens, -1 for
            tokens of no word.
        pictures: draw pictures for loggers that show them, at the first measurement, whenever there
            are twice as many, and at the last; ``False``: none.
        scalars: what loggers get at each layer and as means over blocks: ``"headlines"`` (those of
            `embedgeo.glossary.Term.is_scalar`, ``n_nonfinite`` where it is not 0, and all keys of
            metrics from outside the package), ``"all"``, or a list of keys and patterns of them.
            ``history``, ``callback_metrics`` and the files have all.
        listeners: functions that are called as ``listener(step, records, geometry)`` after each
            measurement, on every rank, such as `embedgeo.Drift`. The records are copies, with the
            means over blocks. ``geometry.samples()`` has the sampled rows of all ranks, so that a
            listener needs no collective. What it returns, if anything, are records that join the
            others. Its ``state_dict`` is saved where it has one. One that fails is taken out on
            all ranks, with one warning, or raises with ``on_error="raise"``. In a YAML
            configuration each is a ``class_path`` and its ``init_args``.
        skip_massive: leave massive rows out of all numbers (True), or those beyond so many times
            the median norm of their forward pass on this rank: see `embedgeo.observe`.
        max_bytes: bytes of the device of a rank that a measurement may take beside the model. Where
            the default metrics could take more, they hold samples in place of scatters, or no token
            tables, or neither. That is chosen at the first batch, alike on all ranks and for the
            whole run, and said then.

    Raises:
        TypeError: ``probe`` can be iterated over only once, or an argument that must be an integer
            is not; when training starts: the Trainer is one of the package ``pytorch_lightning``.
        ValueError: an argument is outside its range, or there is no probe for an `embedgeo.Drift`;
            when training starts: layers are not found, two metrics have the same key, or a
            ModelCheckpoint monitors values of training batches, which are those of the weights
            before the step.

    Example::

        monitor = GeometryMonitor(every_n_steps=100, extra_steps=log_spaced_steps())
        trainer = Trainer(max_steps=10_000, callbacks=[monitor])
        trainer.fit(model, train_dataloader)
    """

    _trainer: Trainer  # while it trains
    _step_rule = (
        "trainer.global_step does not count this optimizer. Call step() of those that "
        "self.optimizers() returns."
    )

    def _reset(self) -> None:
        super()._reset()
        self._last_values: dict[str, float] = {}
        self._followers: list[Any] = []  # what acts on a value
        self._made_lenient: list[tuple[Any, str]] = []  # of these, and the attribute
        self._scores = set[str]()  # tags by which checkpoints are kept
        self._was_given = False  # values of this run
        self._left: list[Tensor] = []  # numbers of a few parameters after the last batch
        self._are_moved = False  # by the run itself, after each batch

    @property
    def state_key(self) -> str:
        return self._generate_state_key(prefix=self.prefix)

    def state_dict(self) -> dict[str, Any]:
        self._write_rest()
        return {**self._state(), "last_values": self._last_values}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._load_state(state_dict)
        self._last_values = state_dict.get("last_values", {})

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        if not isinstance(trainer, Trainer):
            raise TypeError(
                f"trainer must be one of the package lightning; got one of "
                f"{type(trainer).__module__}. Write import lightning in place of import "
                "pytorch_lightning, for the module, callbacks and loggers, too."
            )
        self._reset()  # Lightning loads the state of a checkpoint after setup
        self._trainer = trainer
        tags = (getattr(each, "monitor", None) for each in trainer.checkpoint_callbacks)
        self._scores = {tag for tag in tags if tag and self._is_own(tag)}
        for tag in self._scores if self.probe is None else ():
            raise ValueError(
                f"ModelCheckpoint(monitor={tag!r}) needs a value of the weights that it saves; "
                "that of a training batch is of the weights before the step. Give "
                "GeometryMonitor held-out batches: probe=."
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        strategy = trainer.strategy
        group = None
        if isinstance(strategy, ModelParallelStrategy):
            group = strategy.device_mesh["data_parallel"].get_group()
            self._sequence_mesh = sequence_mesh(strategy.device_mesh)
        folder = None
        with self._own_work():
            folder = logger_folder(trainer.loggers) if trainer.is_global_zero else None
        run = TrainingRun(
            model=pl_module,
            device=strategy.root_device,
            process_group=group,
            writes_files=trainer.is_global_zero,
            folder=folder,
            batches_a_step=trainer.accumulate_grad_batches,
        )
        self._has_forward = type(pl_module).forward is not LightningModule.forward
        self._start(run, trainer.global_step)
        every: list[Any] = [*trainer.early_stopping_callbacks, *trainer.lr_scheduler_configs]
        self._followers = [each for each in every if self._is_own(each.monitor or "")]
        for each in self._followers:  # without a value, or where it is NaN, these would end the run
            for name in ["strict", *(["check_finite"] if each.monitor in self._scores else [])]:
                if getattr(each, name, False):
                    setattr(each, name, False)
                    self._made_lenient.append((each, name))
        self._give_values(self._last_values)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._before_batch(trainer.global_step, batch)
        if trainer.global_step in (self._window_start, self._measured_step):
            self._are_moved |= self._are_others()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._after_batch(trainer.global_step)
        self._left = first_numbers(self._watched)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._detach()  # no on_train_batch_end follows where the module skips a batch

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._finish(trainer.global_step)
        self._stop()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        self._stop()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._stop()
        if stage == "fit" and type(trainer.strategy.launcher).__name__ == _WITH_PIPE:
            for tag in filter(self._is_own, [*trainer.callback_metrics]):
                del trainer.callback_metrics[tag]

    def _are_others(self) -> bool:
        """Tell whether other weights are in the place of those after the last batch."""
        return not all(map(are_equal, first_numbers(self._watched), self._left))

    def _why_not_last(self, step: int) -> str:
        if self._are_moved or not self._are_others():
            return ""
        self._warn(
            f"the weights of the last step, {step}, are not measured, because others have been put "
            "in their place since, such as averages or the best ones. List the monitor before the "
            "callback that does it in callbacks=, which changes nothing else."
        )
        return "other weights"

    def _give_values(self, scalars: dict[str, float]) -> None:
        """Give callbacks the values of these weights. One that is undefined is none to those that
        act on it; ModelCheckpoint takes NaN for the worst, and would raise without.
        """
        metrics = self._trainer.callback_metrics
        for tag in self._last_values.keys() - scalars.keys():
            metrics.pop(tag, None)
        metrics.update(_tensors(dict.fromkeys(self._scores, math.nan) | scalars))
        for tag in {each.monitor for each in self._followers} - self._scores:
            if math.isnan(metrics.get(tag, 0)):
                del metrics[tag]

    def _stop(self) -> None:
        for each, name in self._made_lenient:
            setattr(each, name, True)
        self._made_lenient.clear()
        super()._stop()
        self._followers.clear()
        self._left = []
        if hasattr(self, "_trainer"):
            del self._trainer

    def _is_own(self, tag: str) -> bool:
        # a longer prefix is another's
        return bool(re.fullmatch(rf"{re.escape(self.prefix)}\.[^./]+/.*", tag))

    def _run_model(self, batches: Iterable[Any], *, as_training: bool = False) -> int:
        """A probe goes the way of validation, whose stage hooks and forward passes ask for."""
        state = self._trainer.state
        stage = state.stage
        state.stage = stage if as_training else RunningStage.VALIDATING
        try:
            return super()._run_model(batches, as_training=as_training)
        finally:
            state.stage = stage

    def _to_device(self, batch: Any) -> Any:
        batch = self._trainer.precision_plugin.convert_input(batch)
        batch = self._trainer.lightning_module._on_before_batch_transfer(batch)  # noqa: SLF001
        return self._trainer.strategy.batch_to_device(batch)

    def _forward(self, batch: Any) -> None:
        assert self._geometry is not None
        pl_module = self._trainer.lightning_module
        model = measured_model(self._geometry.model)
        called: nn.Module = pl_module
        is_named = isinstance(batch, Mapping)
        if self.probe_forward is not None:
            call = partial(self.probe_forward, pl_module, batch)
        elif model is pl_module or (self._has_forward and not is_named):
            call = partial(pl_module, batch)
        else:
            called = next(each for each in pl_module.modules() if unwrapped(each) is model)
            call = partial(called, **batch) if is_named else partial(called, batch)
        for module in pl_module.modules():
            if isinstance(module, LightningModule):  # `kept_state` takes it off again
                vars(module).update(dict.fromkeys(("log", "log_dict"), _nothing))
        outer: Any = self._trainer.model
        with kept_sharded(outer), self._trainer.precision_plugin.forward_context():
            run_inside(outer, called, call)

    def _log(self, step: int, records: list[Record]) -> None:
        scalars = tagged_scalars(records, self.prefix)
        self._give_values(scalars)
        if not self._was_given:
            self._was_given = True
            tags = {each.monitor for each in self._followers} | self._scores
            if missing := sorted(tags - scalars.keys()):
                hint = did_you_mean(missing[0], scalars)
                self._warn(f"what acts on {listed(missing)} does nothing: no value yet.{hint}")
        self._last_values = scalars
        logged = self._scalars(records)
        for logger in self._trainer.loggers:
            logger.log_metrics(logged, step=step)

    def _loggers(self) -> Iterable[object]:
        return self._trainer.loggers if self._trainer.is_global_zero else ()


def _nothing(*args: object, **kwargs: object) -> None:
    """Log nothing: what is logged in training is of training's passes."""


def _tensors(scalars: Mapping[str, float]) -> dict[str, torch.Tensor]:
    return {tag: torch.tensor(value, dtype=torch.float64) for tag, value in scalars.items()}
