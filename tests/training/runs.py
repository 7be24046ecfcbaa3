"""A tiny training run: a GPT-NeoX with dropout in a LightningModule."""

import lightning as L
import torch
from torch.utils.data import DataLoader

from embedgeo import EmbeddingMoments
from tests.models import gpt_neox, token_batch


class TinyLM(L.LightningModule):
    """Causal language modelling on dicts of input_ids and attention_mask."""

    def __init__(self, **changes):
        super().__init__()
        self.model = gpt_neox(hidden_dropout=0.1, attention_dropout=0.1, **changes)
        self.losses = []

    def training_step(self, batch, batch_idx):
        loss = self.model(**batch, labels=batch["input_ids"]).loss
        self.log("loss", loss)
        self.losses.append(loss.detach().clone())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class ValidatedLM(TinyLM):
    """The same with a validation loop."""

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.model(**batch, labels=batch["input_ids"]).loss)


def loader(rows=64, batch_size=4, *, seed=0, shuffle=False, padding=None):
    """A DataLoader of token batches with few enough rows to be quick."""
    batch = token_batch(rows, seed=seed)
    if padding is not None:
        batch["attention_mask"][:, :3] = 0
    items = [{key: value[i] for key, value in batch.items()} for i in range(rows)]
    return DataLoader(items, batch_size=batch_size, shuffle=shuffle)


def trainer(folder, **options):
    """A quiet Trainer on the CPU."""
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    defaults = {"accelerator": "cpu", "devices": 1, "log_every_n_steps": 1, "logger": False, "max_epochs": -1}
    return L.Trainer(default_root_dir=folder, **{**quiet, **defaults, **options})


def fit(folder, *callbacks, module=None, data=None, val=None, ckpt_path=None, **options):
    """Train from a fixed seed; returns the module and the Trainer."""
    L.seed_everything(0, verbose=False)
    module = module or TinyLM()
    run = trainer(folder, callbacks=list(callbacks), **options)
    run.fit(module, loader(shuffle=True) if data is None else data, val, ckpt_path=ckpt_path)
    return module, run


def moments(dim):
    """The cheapest metrics."""
    return [EmbeddingMoments(dim)]


def steps(monitor):
    """The steps a monitor has measured."""
    return sorted({record["step"] for record in monitor.history})


def value(monitor, step, layer, metric):
    """What a monitor has measured, once, at a step and a layer."""
    (found,) = (
        r["value"] for r in monitor.history if r["step"] == step and r["layer"] == layer and r["metric"] == metric
    )
    return found
