"""The monitor: geometry of a model's embeddings while Lightning trains it."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn
from torchmetrics import Metric

from embedgeo.functional.rows import RowUnit, require_row_unit
from embedgeo.geometry import Geometry
from embedgeo.layers import measured_model
from embedgeo.metrics import default_metrics
from embedgeo.pages import Pages
from embedgeo.records import Record, custom_scalars_layout, tagged_scalars
from embedgeo.schedule import Schedule


class GeometryMonitor(Callback):
    """Measures the geometry of the embeddings at chosen layers, at chosen steps of training.

    Scalars go to every logger under ``{prefix}.{metric}/{layer}``, with their mean over blocks under
    ``{prefix}.{metric}/mean``; the same values are in ``trainer.callback_metrics``, and in ``history`` as a list of
    dicts (step, layer, layer_index, metric, value). Step s is the number of optimizer steps that the measured
    weights have taken, also under gradient accumulation.

    Between measured steps nothing is attached to the model, and training is bit for bit what it is without the
    monitor. A measured step of a compiled model runs eagerly.

    Args:
        every_n_steps: measure at steps 0, n, 2n …
        extra_steps: measure at these steps too; see `log_spaced_steps`.
        layers: ``"blocks"``, patterns of module names, a list of these or a callable on the model: see
            `embedgeo.layers.resolve_layers`.
        metrics: makes the metrics of a layer, given its width; default: `embedgeo.default_metrics`.
        window: pool the batches of this many optimizer steps, from the measured one on; logged at that one.
        probe: measure these held-out batches instead of the training batches, in eval mode and without gradients;
            under several ranks they are dealt out over the ranks. The last weights are measured too.
        probe_forward: runs the model on a probe batch, given the LightningModule and the batch. Default: the
            outermost Hugging Face model, called with the batch's items by keyword; else the LightningModule.
        skip_first_positions: leave out this many real positions at the start of every sequence.
        ignore_token_ids: leave out these token ids.
        token_ids: takes the token ids from a batch; default: what the input embedding is called with.
        mask: takes the mask (True = count) from a batch; default: the attention mask the model is called with.
        prefix: of the tags.
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
        probe_forward: Callable[[LightningModule, Any], Any] | None = None,
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
        self.history: list[Record] = []
        self._geometry: Geometry | None = None
        self._window_start: int | None = None
        self._last_step: int | None = None
        self._failed = False
        self._described = False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._geometry = Geometry(
            pl_module,
            self.layers,
            self.metrics,
            self.skip_first_positions,
            self.ignore_token_ids,
            rows=self.rows,
            on_error=self._fail,
        )
        self._window_start = self._last_step = None
        self._failed = self._described = False
        self._pages = Pages(self.prefix)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        step = trainer.global_step
        if self._window_start is None and self._is_due(step):
            self._last_step = step
            if self.probe is not None:
                self._measure_probe(trainer, pl_module, step)
            else:
                self._window_start = step
        if self._window_start is not None:
            with self._guarded():
                self._attach(batch)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._detach()
        if self._window_start is not None and trainer.global_step >= self._window_start + self.schedule.window:
            self._end_window(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._detach()
        if self._window_start is not None:
            self._end_window(trainer)
        elif self.probe is not None and self._is_due(trainer.global_step):
            self._measure_probe(trainer, pl_module, trainer.global_step)
        with isolate_rng(), self._guarded():
            self._write_pages(trainer, last=True)
        self._geometry = None

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._detach()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._detach()

    def _is_due(self, step: int) -> bool:
        return self._geometry is not None and step in self.schedule and step != self._last_step

    def _attach(self, batch: Any) -> None:
        if self._failed or self._geometry is None:
            return
        probe = self._geometry.probe
        probe.attach()
        probe.token_ids = None if self.token_ids is None else self.token_ids(batch)
        probe.mask = None if self.mask is None else self.mask(batch)

    def _detach(self) -> None:
        if self._geometry is not None:
            self._geometry.probe.detach()

    def _measure_probe(self, trainer: Trainer, pl_module: LightningModule, step: int) -> None:
        assert self.probe is not None
        with isolate_rng(), self._guarded():
            try:
                batches = islice(self.probe, trainer.global_rank, None, trainer.world_size)
                with _eval_mode(pl_module), torch.no_grad(), trainer.precision_plugin.forward_context():
                    for batch in batches:
                        moved = trainer.strategy.batch_to_device(batch)
                        self._attach(moved)
                        self._forward(pl_module, moved)
            finally:
                self._detach()
        self._measure(trainer, step)

    def _forward(self, pl_module: LightningModule, batch: Any) -> None:
        model = measured_model(pl_module)
        if self.probe_forward is not None:
            self.probe_forward(pl_module, batch)
        elif model is not pl_module and isinstance(batch, Mapping):
            model(**batch)
        else:
            pl_module(batch)

    def _end_window(self, trainer: Trainer) -> None:
        step, self._window_start = self._window_start, None
        assert step is not None
        self._measure(trainer, step)

    def _measure(self, trainer: Trainer, step: int) -> None:
        """Compute and log, if no rank has failed; every rank calls this at the same steps."""
        geometry = self._geometry
        assert geometry is not None
        if not trainer.strategy.reduce_boolean_decision(not self._failed):
            if not self._failed:
                self._warn(f"it failed on another rank before step {step}")
            self._geometry = None
            return
        with isolate_rng(), self._guarded():
            values = geometry.compute()
            silent = [layer.name for layer in geometry.layers if layer.name not in values]
            self._log(trainer, step, values)
            geometry.reset()
            if silent and not self._described:
                warnings.warn(f"GeometryMonitor: no forward pass reached {', '.join(silent)}.", stacklevel=2)
            self._described = True

    def _log(self, trainer: Trainer, step: int, values: dict[str, dict[str, float]]) -> None:
        assert self._geometry is not None
        index = {layer.name: i for i, layer in enumerate(self._geometry.layers)}
        records = [
            Record(step=step, layer=layer, layer_index=index[layer], metric=metric, value=value)
            for layer, at_layer in values.items()
            for metric, value in at_layer.items()
        ]
        self.history += records
        scalars = tagged_scalars(values, self.prefix)
        trainer.callback_metrics.update(
            {tag: torch.tensor(value, dtype=torch.float64) for tag, value in scalars.items()}
        )
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger) and not self._described:
                layout = custom_scalars_layout(dict.fromkeys(r["metric"] for r in records), self.prefix)
                logger.experiment.add_custom_scalars(layout)
            logger.log_metrics(scalars, step=step)
        self._write_pages(trainer)

    def _write_pages(self, trainer: Trainer, *, last: bool = False) -> None:
        """Images and text for TensorBoard, on rank zero."""
        loggers = [logger for logger in trainer.loggers if isinstance(logger, TensorBoardLogger)]
        if trainer.is_global_zero and not self._failed:
            self._pages.write([logger.experiment for logger in loggers], self.history, last=last)

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

    def _warn(self, cause: str) -> None:
        warnings.warn(f"GeometryMonitor is off for the rest of this run, training goes on: {cause}", stacklevel=2)


@contextmanager
def _eval_mode(module: nn.Module) -> Iterator[None]:
    training = [(m, m.training) for m in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for m, was_training in training:
            m.training = was_training
