"""A tiny training run: a GPT-NeoX with dropout in a LightningModule."""

import pickle
import random
import re
import warnings
from contextlib import contextmanager

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader
from torchmetrics import Metric

from embedgeo import EmbeddingMoments, TokenMoments, observe
from tests.models import gpt_neox, token_batch

_SAID = (
    "Checkpoint directory .* exists and is not empty",
    "Using ModelCheckpoint with manual optimization",
    "You're resuming from a checkpoint that ended before the epoch ended",
)
RESUMED = [pytest.mark.filterwarnings(f"ignore:{words}") for words in _SAID]
"""What Lightning says of runs that go on from a checkpoint."""


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


class WithoutDropout(TinyLM):
    """A forward pass gives the same hidden states each time."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.model = gpt_neox()


class ValidatedLM(TinyLM):
    """With a validation loop."""

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
    quiet = {
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
    }
    defaults = {
        "accelerator": "cpu",
        "devices": 1,
        "log_every_n_steps": 1,
        "logger": False,
        "max_epochs": -1,
    }
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


OPTIONS = {"metrics": moments, "on_error": "raise"}
"""Of most monitors in tests, which are cheap and hide no failure."""


def token_moments(dim):
    return [TokenMoments(dim)]


def steps(monitor):
    """The steps a monitor has measured."""
    return sorted({record["step"] for record in monitor.history})


def value(monitor, step, layer, metric):
    """What a monitor has measured, once, at a step and a layer."""
    (found,) = (
        r["value"]
        for r in monitor.history
        if r["step"] == step and r["layer"] == layer and r["metric"] == metric
    )
    return found


def row_counts(monitor):
    """How many rows each measurement has of each layer."""
    return [record["value"] for record in monitor.history if record["metric"] == "n"]


def n_at(monitor):
    """How many rows a monitor has measured at each step."""
    return {step: value(monitor, step, "block.00", "n") for step in steps(monitor)}


class Answers(Metric):
    """A user's metric; of rows it raises, or returns, what it is given."""

    full_state_update = False

    def __init__(self, answer, place="compute"):
        super().__init__()
        self.answer, self.place = answer, place
        self.add_state("rows", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, embeddings):
        self.rows = self.rows + len(embeddings)
        if self.place == "update" and self.rows:
            raise self.answer("no rows")

    def compute(self):
        if not self.rows:
            return {"share": torch.tensor(1)}  # an integer is a number
        if self.answer is ZeroDivisionError:
            raise self.answer("no rows")
        return self.answer


ANSWERS = [
    (ZeroDivisionError, "compute", "no rows"),
    (ZeroDivisionError, "update", "no rows"),
    (None, "compute", "must return a dict of real tensors .*; got NoneType"),
    ({"share": 0.5}, "compute", "got 0.5 for 'share'"),
    ({"share": torch.ones(3)}, "compute", r"got tensor\(\[1., 1., 1.\]\) for 'share'"),
    ({3: torch.tensor(0.5)}, "compute", r"got tensor\(0.5000\) for 3"),
    ({"share": torch.tensor(1j)}, "compute", r"got tensor\(0.\+1.j\) for 'share'"),
]
"""What a metric may do wrong, where, and what is said of it."""


class UserError(Exception):
    """Raised by the user's code."""


def random_state():
    return torch.get_rng_state(), random.getstate(), pickle.dumps(np.random.get_state())  # noqa: NPY002


def assert_same_random_state(before, after):
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]


class Manual(TinyLM):
    """Manual optimisation, one or two optimizers; the gradients of `accumulate` batches are
    accumulated.
    """

    def __init__(self, optimizers=1, accumulate=1):
        super().__init__()
        self.automatic_optimization = False
        self.num_optimizers, self.accumulate = optimizers, accumulate

    def training_step(self, batch, batch_idx):
        self.manual_backward(super().training_step(batch, batch_idx))
        if (batch_idx + 1) % self.accumulate == 0:
            optimizers = self.optimizers()
            for optimizer in optimizers if self.num_optimizers > 1 else [optimizers]:
                optimizer.step()
                optimizer.zero_grad()

    def configure_optimizers(self):
        return [torch.optim.SGD(self.parameters(), lr=1e-3) for _ in range(self.num_optimizers)]


def interrupted(folder, before, after, *, at, end=9, make=lambda: None, **options):
    """Train to a checkpoint at step `at` and on from it, with other monitors."""
    options = {"data": loader(), "enable_checkpointing": True, **options}
    saving = ModelCheckpoint(folder / "saved", every_n_train_steps=at, save_top_k=-1)
    fit(folder, *before, saving, module=make(), max_steps=at, **options)
    (saved,) = (folder / "saved").glob(f"*step={at}.ckpt")
    again = ModelCheckpoint(folder / "saved", every_n_train_steps=at, save_top_k=-1)
    fit(folder, *after, again, module=make(), max_steps=end, ckpt_path=saved, **options)


@contextmanager
def all_warnings():
    """Gives what is warned of in the block, each time it is."""
    with warnings.catch_warnings(record=True, action="always") as caught:
        yield caught


def of_monitors(caught):
    """What a monitor has warned of."""
    said = (str(warning.message) for warning in caught)
    return [message for message in said if re.search("Monitor|Callback|ranks must", message)]


def by_step(history):
    """{step: {layer: {metric: value}}}, without means over blocks."""
    table = {}
    for record in (record for record in history if record["layer_index"] >= 0):
        table.setdefault(record["step"], {}).setdefault(record["layer"], {})[record["metric"]] = (
            record["value"]
        )
    return table


def assert_same_values(table, expected, rel=1e-9):
    assert table.keys() == expected.keys()
    for layer, values in expected.items():
        assert table[layer].keys() == values.keys(), layer
        for key in table[layer].keys() & values.keys():
            value = values[key]
            near = 1e-6 if "dimension" in key else rel  # distances are exact to that
            expected_value = pytest.approx(value, rel=near, abs=1e-12, nan_ok=True)
            assert table[layer][key] == expected_value, (layer, key)


def observed_on(model, batches, **options):
    """What `observe` gives of a model on these batches."""
    with observe(model, **options) as geometry, torch.no_grad():
        for batch in batches:
            model(**batch)
    return geometry


def in_one_process(model, batches, **options):
    """Values of a model on these batches, which `observe` gives in this process alone."""
    return observed_on(model, batches, **options).compute()
