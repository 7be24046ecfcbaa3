"""The geometry of one model over the probe text, and its loss there."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import pandas as pd
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset
from transformers import PreTrainedModel

from embedgeo.checkpoints.loading import LoadedModel
from embedgeo.geometry import Geometry
from embedgeo.layers import measured_model
from embedgeo.metrics import default_metrics

MODEL = "model"
"""Layer name of what is measured of the whole model."""

MASKED_SHARE = 0.15

_POSITIONS = 128
"""At a time, in the loss."""

Row = tuple[str, int, str, float]
"""Layer, layer index (-1 for the whole model), metric, value."""


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


class Measurement(LightningModule):
    """One checkpoint under ``Trainer.predict``; ``rows`` and ``tokens`` are the results, on every rank.

    Args:
        loaded: the model.
        layers: see `embedgeo.layers.resolve_layers`.
        skip_first_positions: leave out this many real positions at the start of every sequence.
        ignore_token_ids: leave out these token ids.
        mask_token_id: what stands for a masked token, for an encoder's loss; None to leave that out.
        token_tables: also make the table of token types.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        layers: str | Sequence[str] = "blocks",
        *,
        skip_first_positions: int = 0,
        ignore_token_ids: Sequence[int] = (),
        mask_token_id: int | None = None,
        token_tables: bool = False,
    ) -> None:
        super().__init__()
        self.model: nn.Module | None = loaded.model
        self.is_encoder = loaded.is_encoder
        self.wants_loss = loaded.has_head and (not loaded.is_encoder or mask_token_id is not None)
        self.mask_token_id = mask_token_id
        self.token_tables = token_tables
        self.rows: list[Row] = []
        self.tokens: pd.DataFrame | None = None
        self._make_geometry = partial(
            Geometry,
            layers=layers,
            metrics=default_metrics,
            skip_first_positions=skip_first_positions,
            ignore_token_ids=ignore_token_ids,
        )
        self._geometry: Geometry | None = None
        self._error: Exception | None = None

    def release(self) -> None:
        """Free the memory of the model and its states at once: the Trainer holds on to this until the next one."""
        if self.model is not None:
            for tensor in (*self.model.parameters(), *self.model.buffers()):
                tensor.data = tensor.data.new_empty(0)
        if self._geometry is not None:
            self._geometry.reset()
        self.model = self._geometry = None

    def on_predict_start(self) -> None:  # noqa: D102
        assert self.model is not None
        self._geometry = self._make_geometry(self.model)
        self._loss = torch.zeros(2, dtype=torch.float64)  # sum, count

    def predict_step(self, batch: Mapping[str, Tensor], batch_idx: int) -> int:
        """Measure a batch; what goes wrong is raised at the end, on all ranks. Returns the number of sequences."""
        if self._error is None:
            try:
                self._measure(batch)
            except Exception as error:
                self._error = error
        return len(batch["token_ids"])

    def _measure(self, batch: Mapping[str, Tensor]) -> None:
        assert self._geometry is not None
        token_ids = batch["token_ids"]
        with self._geometry.probe:
            output = self._forward(token_ids)
        if not self.wants_loss:
            return
        if not self.is_encoder:
            self._add_loss(output, token_ids, None)
        elif self.mask_token_id is not None and bool(batch["masked"].any()):
            masked = batch["masked"]
            self._add_loss(self._forward(token_ids.masked_fill(masked, self.mask_token_id)), token_ids, masked)

    def on_predict_epoch_end(self) -> None:  # noqa: D102
        assert self._geometry is not None
        if not self.trainer.strategy.reduce_boolean_decision(self._error is None):
            raise self._error or RuntimeError("it failed on another rank")
        values = self._geometry.compute()
        names = [layer.name for layer in self._geometry.layers]
        silent = [name for name in names if name not in values]
        if silent:
            raise ValueError(f"layers must be reached by a forward pass; {', '.join(silent)} never was. Leave it out.")
        if self.token_tables:
            self.tokens = self._geometry.token_tables()
        loss, count = self.trainer.strategy.reduce(self._loss.to(self.device), reduce_op="sum").tolist()
        self.rows = [(name, i, key, v) for i, name in enumerate(names) for key, v in values[name].items()]
        if self.wants_loss and count:
            self.rows.append((MODEL, -1, "loss", loss / count))

    def _forward(self, token_ids: Tensor) -> Any:
        assert self.model is not None
        model = measured_model(self.model)
        return model(input_ids=token_ids) if isinstance(model, PreTrainedModel) else model(token_ids)

    def _add_loss(self, output: Any, token_ids: Tensor, masked: Tensor | None) -> None:
        """Add the loss of a batch, a few positions at a time: its logits are the largest tensor there is already."""
        logits = getattr(output, "logits", output)
        if not isinstance(logits, Tensor) or logits.shape[:-1] != token_ids.shape:
            self.wants_loss = False
            return
        for row, ids, chosen in zip(logits, token_ids, token_ids if masked is None else masked, strict=True):
            predicted, wanted = (row[:-1], ids[1:]) if masked is None else (row[chosen], ids[chosen])
            for part, target in zip(predicted.split(_POSITIONS), wanted.split(_POSITIONS), strict=True):
                total = F.cross_entropy(part.float(), target, reduction="sum")
                self._loss += torch.tensor([float(total), len(target)], dtype=torch.float64)


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
