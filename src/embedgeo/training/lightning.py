"""The monitor for Lightning."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities.seed import isolate_rng
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from embedgeo.capture.structure import measured_model, unwrapped
from embedgeo.report.live import TensorBoardPictures
from embedgeo.results.events import custom_scalars_layout, tagged_scalars
from embedgeo.results.schema import Record
from embedgeo.training.monitor import Monitor, TrainerAdapter


class GeometryMonitor(Monitor, Callback):
    """Measures the geometry of the embeddings at chosen layers, at chosen steps of training with Lightning.

    Scalars go to every logger under ``{prefix}.{metric}/{layer}``, with their mean over blocks under
    ``{prefix}.{metric}/mean``; the same values are in ``trainer.callback_metrics``, and in ``history`` as a list of
    dicts (step, layer, layer_index, width, metric,
    value), in the processes that train: with ``ddp_spawn``, not in the one
    that calls ``fit``. Nothing is measured in validation, test and predict.

    A checkpoint holds where the schedule and the window stand, not the rows seen: a window that a resumed run
    finds open is pooled over the steps that are left of it.

    Arguments and errors are those of `embedgeo.training.monitor.Monitor`.
    """

    @property
    def state_key(self) -> str:
        return self._generate_state_key(prefix=self.prefix)

    def state_dict(self) -> dict[str, Any]:
        if self._last_step is None:
            return {}
        return {"last_step": self._last_step, "window_start": self._window_start}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._last_step, self._window_start = state_dict["last_step"], state_dict["window_start"]

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._reset()  # before the state of a checkpoint is loaded

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._chart_metrics: list[str] = []
        self._pictures = TensorBoardPictures(self.prefix, len(self.history))
        strategy, group = trainer.strategy, None
        if isinstance(strategy, ModelParallelStrategy):
            group = strategy.device_mesh["data_parallel"].get_group()
        run = TrainerAdapter(
            model=pl_module,
            device=strategy.root_device,
            to_device=strategy.batch_to_device,
            forward=partial(self._forward, trainer, pl_module),
            log=partial(self._log, trainer),
            process_group=group,
        )
        self._start(run, trainer.global_step)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._before_batch(trainer.global_step, batch)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._after_batch(trainer.global_step)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._detach()  # a batch that the module skips has a start and no end

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._finish(trainer.global_step)
        with isolate_rng(), self._guarded():
            self._write_pictures(trainer, last=True)
        self._stop()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._stop()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._stop()

    def _forward(self, trainer: Trainer, pl_module: LightningModule, batch: Any) -> None:
        assert self._geometry is not None
        model = measured_model(self._geometry.model)
        by_keyword = self.probe_forward is None and model is not pl_module and isinstance(batch, Mapping)

        def call() -> None:
            if self.probe_forward is not None:
                self.probe_forward(pl_module, batch)
            elif by_keyword:
                next(m for m in pl_module.modules() if unwrapped(m) is model)(**batch)
            else:
                pl_module(batch)

        sharded = (FullyShardedDataParallel, FSDPModule) if by_keyword else (FullyShardedDataParallel,)
        with trainer.precision_plugin.forward_context():
            if isinstance(trainer.model, sharded):
                _inside(trainer.model, pl_module, call)
            else:
                call()

    def _log(self, trainer: Trainer, step: int, records: list[Record]) -> None:
        scalars = tagged_scalars(records, self.prefix)
        trainer.callback_metrics.update(
            {tag: torch.tensor(value, dtype=torch.float64) for tag, value in scalars.items()}
        )
        is_first = not self._chart_metrics
        if is_first:
            self._chart_metrics = list(dict.fromkeys(record["metric"] for record in records))
        for logger in trainer.loggers:
            if is_first and isinstance(logger, TensorBoardLogger):
                logger.experiment.add_custom_scalars(_charts(trainer))
            logger.log_metrics(scalars, step=step)
        self._write_pictures(trainer)

    def _write_pictures(self, trainer: Trainer, *, last: bool = False) -> None:
        """Images and text for TensorBoard, on rank zero."""
        loggers = [logger for logger in trainer.loggers if isinstance(logger, TensorBoardLogger)]
        if trainer.is_global_zero and not self._failed:
            self._pictures.write([logger.experiment for logger in loggers], self.history, last=last)


def _charts(trainer: Trainer) -> dict[str, dict[str, list[Any]]]:
    """The charts of all monitors of the trainer that have something to show: TensorBoard keeps only the last layout."""
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    monitors = [callback for callback in callbacks if isinstance(callback, GeometryMonitor)]
    layouts = [custom_scalars_layout(m._chart_metrics, m.prefix) for m in monitors if m._chart_metrics]
    return {category: charts for layout in layouts for category, charts in layout.items()}


def _inside(wrapper: nn.Module, module: nn.Module, call: Callable[[], None]) -> None:
    """Run ``call`` as the forward pass of ``module``, inside that of its wrapper: FSDP gathers parameters there."""
    forward = module.forward

    def redirected(*args: Any) -> None:
        module.forward = forward
        call()

    module.forward = redirected
    try:
        wrapper()
    finally:
        module.forward = forward
