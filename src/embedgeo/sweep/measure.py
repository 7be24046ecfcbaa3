"""The geometry of one model over the probe text, and its loss there."""

from collections.abc import Mapping, Sequence

import pandas as pd
import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset
from torchmetrics import Metric

from embedgeo.checkpoints.loading import LoadedModel
from embedgeo.geometry import Geometry
from embedgeo.metrics import AfterProcessing, default_metrics
from embedgeo.results.schema import Record, model_record
from embedgeo.sweep.loss import TokenLoss
from embedgeo.sweep.settings import SweepSettings

MASKED_SHARE = 0.15


class Sequences(Dataset[dict[str, Tensor]]):
    """Sequences of token ids; for an encoder also which of them its loss is about.

    Args:
        token_ids: shape (sequences, seq_len).
        masked: shape (sequences, seq_len), bool.
    """

    def __init__(self, token_ids: Tensor, masked: Tensor | None = None) -> None:
        self.items = {"token_ids": token_ids} if masked is None else {"token_ids": token_ids, "masked": masked}

    def __len__(self) -> int:
        return len(self.items["token_ids"])

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: tensor[index] for name, tensor in self.items.items()}


def choose_masked(token_ids: Tensor, special: Sequence[int], seed: int = 0) -> Tensor:
    """Which tokens to mask: 15 % of those that are not special, the same ones every time. Shape of ``token_ids``."""
    drawn = torch.rand(token_ids.shape, generator=torch.Generator().manual_seed(seed)) < MASKED_SHARE
    return drawn & ~torch.isin(token_ids, torch.tensor(list(special), dtype=token_ids.dtype))


def with_after_processing(dim: int) -> list[Metric]:
    """The default metrics, and what after-processing would make of them."""
    return [*default_metrics(dim), AfterProcessing(dim)]


class Measurement(LightningModule):
    """One checkpoint under ``Trainer.predict``; ``records`` and ``tables`` are the results, on every rank.

    Args:
        loaded: the model.
        settings: of the sweep.
        mask_token_id: what stands for a masked token, for an encoder's loss; None to leave that out.
    """

    def __init__(self, loaded: LoadedModel, settings: SweepSettings, mask_token_id: int | None = None) -> None:
        super().__init__()
        self.model = loaded.model
        self.records: list[Record] = []
        self.tables: dict[str, pd.DataFrame] = {}
        self._loaded, self._settings, self._mask_token_id = loaded, settings, mask_token_id
        self._geometry: Geometry | None = None
        self._loss: TokenLoss | None = None
        self._error: Exception | None = None

    def release(self) -> None:
        """Free the memory of the model and its states at once: the Trainer holds on to this until the next one."""
        for tensor in (*self.model.parameters(), *self.model.buffers()):
            tensor.data = tensor.data.new_empty(0)
        if self._geometry is not None:
            self._geometry.reset()

    def on_predict_start(self) -> None:
        """Begin, now that the model is on its device."""
        asked = self._settings
        metrics = with_after_processing if asked.after_processing else None
        self._geometry = Geometry(self.model, asked.layers, metrics, asked.skip_first_positions, asked.ignore_token_ids)
        measured = [call.module for layer in self._geometry.layers for call in layer.calls]
        self._loss = TokenLoss(self._loaded, measured, self._mask_token_id)

    def predict_step(self, batch: Mapping[str, Tensor], batch_idx: int) -> int:
        """Measure a batch; what goes wrong is raised at the end, on all ranks. Returns the number of sequences."""
        if self._error is None:
            try:
                self._measure(batch, batch_idx)
            except Exception as error:
                self._error = error
        return len(batch["token_ids"])

    def _measure(self, batch: Mapping[str, Tensor], batch_idx: int) -> None:
        assert self._geometry is not None
        assert self._loss is not None
        token_ids = batch["token_ids"]
        if batch_idx == 0:
            self._loss.find_head(token_ids[:1, :8])
        with self._geometry.probe:
            states = self._loss.run(token_ids)
        self._loss.add(states, token_ids, batch.get("masked"))

    def on_predict_epoch_end(self) -> None:
        """Compute."""
        assert self._geometry is not None
        assert self._loss is not None
        if not self.trainer.strategy.reduce_boolean_decision(self._error is None):
            raise self._error or RuntimeError("it failed on another rank")
        self.records = self._geometry.records()
        reached = {record["layer"] for record in self.records}
        silent = [layer.name for layer in self._geometry.layers if layer.name not in reached]
        if silent:
            raise ValueError(f"layers must be reached by a forward pass; {', '.join(silent)} never was. Leave it out.")
        if self._settings.token_tables:
            self.tables = {"tokens": self._geometry.token_tables(), "projections": self._geometry.token_planes()}
        loss, count = self.trainer.strategy.reduce(self._loss.total.to(self.device), reduce_op="sum").tolist()
        if self._loss.is_wanted and count:
            self.records.append(model_record("loss", loss / count))


def probe_loader(
    token_ids: Tensor, masked: Tensor | None, batch_size: int, *, rank: int = 0, world_size: int = 1
) -> DataLoader[dict[str, Tensor]]:
    """The batches of one rank. They are the same however many ranks there are: dealt out whole, so is every sum.

    Raises:
        ValueError: there is no batch for some rank.
    """
    batches = [list(range(i, min(i + batch_size, len(token_ids)))) for i in range(0, len(token_ids), batch_size)]
    if len(batches) < world_size:
        raise ValueError(
            f"batch_size must leave a batch to each of {world_size} processes; {len(token_ids)} sequences make "
            f"{len(batches)}. Take a smaller one, or more tokens."
        )
    mine = [index for batch in batches[rank::world_size] for index in batch]  # only the very last may be smaller
    return DataLoader(Subset(Sequences(token_ids, masked), mine), batch_size=batch_size)
