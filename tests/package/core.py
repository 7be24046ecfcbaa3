"""What the package does with torch, lightning, torchmetrics, numpy and tensorboard alone; what it
names beyond that.

`smoke.py` runs it where nothing else is installed.
"""

import contextlib
import io
import logging
import re
import sys
from functools import partial
from importlib import import_module
from pathlib import Path

import lightning as L
import numpy as np
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.tensorboard import SummaryWriter

import embedgeo
from embedgeo.demo import DemoSettings, demo
from embedgeo.metrics.gaussian import GaussianRows, baseline_values

LAYERS = ["embed", "block.00", "block.01", "final_norm"]


class Model(nn.Module):
    """Two blocks on embedded tokens."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 8)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(8, 2, 16, batch_first=True) for _ in range(2)
        )
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 50)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Module(L.LightningModule):
    """Trains it to name its own input."""

    def __init__(self):
        super().__init__()
        self.model = Model()

    def forward(self, batch):
        return self.model(batch)

    def training_step(self, batch, _):
        return loss_of(self.model, batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def loss_of(model, batch):
    return nn.functional.cross_entropy(model(batch).flatten(0, 1), batch.flatten())


def batches():
    return DataLoader(
        torch.randint(50, (6, 16), generator=torch.Generator().manual_seed(0)), batch_size=3
    )


def scalars_of(folder):
    """The scalars in event files, by tag and step."""
    events = EventAccumulator(str(folder)).Reload()
    return {
        (tag, each.step): each.value
        for tag in events.Tags()["scalars"]
        for each in events.Scalars(tag)
    }


def trained_by_lightning(folder):
    """Two steps in a Trainer: there are values in the event file and in the history, and what is
    missing is said once.
    """
    said = io.StringIO()
    handler = logging.StreamHandler(said)
    logging.getLogger("lightning.pytorch").addHandler(handler)
    monitor = embedgeo.GeometryMonitor(1, on_error="raise", jackknife=2)
    logger = TensorBoardLogger(folder, "", "")
    quiet = ("enable_progress_bar", "enable_model_summary", "enable_checkpointing")
    options = {**dict.fromkeys(quiet, False), "accelerator": "cpu", "log_every_n_steps": 1}
    trainer = L.Trainer(max_epochs=1, logger=logger, callbacks=[monitor], **options)
    trainer.fit(Module(), batches())
    logging.getLogger("lightning.pytorch").removeHandler(handler)
    assert {record["step"] for record in monitor.history} == {0, 1, 2}
    written = scalars_of(folder)
    for key in ("anisotropy", "intrinsic_dimension", "V_W_unbiased", "mean_cosine"):
        assert {(f"geometry.{key}/{layer}", 2) for layer in (*LAYERS, "mean")} <= written.keys()
    assert not [*folder.rglob("*.parquet")]
    for missing in ("history.parquet", "pictures"):
        told = re.findall(rf"{missing}.*pip install 'embedgeo\[report\]'", said.getvalue())
        assert len(told) == 1, said.getvalue()


def trained_by_hand(folder):
    """Two steps in a loop of one's own, with all metrics."""
    model = Model()
    writer = SummaryWriter(folder)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    metrics = partial(embedgeo.default_metrics, spectrum=True)
    monitor = embedgeo.StepMonitor(model, 1, log=writer, on_error="raise", metrics=metrics)
    for step, batch in enumerate(batches()):
        with monitor.step(step, batch):
            loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    writer.close()
    assert {step for _, step in scalars_of(folder)} == {0, 1}
    assert {"effective_rank", "participation_ratio"} <= {each["metric"] for each in monitor.history}


def observed(folder):
    """Numbers by hand; each way to what is not installed names it and the command."""
    model = Model()
    with embedgeo.observe(model) as geometry, torch.no_grad():
        model(next(iter(batches())))
    assert list(geometry.compute()) == LAYERS
    assert geometry.compute()["embed"]["n"] == 48
    named("report", "pandas", geometry.to_frame)
    named("report", "pandas", geometry.token_tables)
    named("report", "pandas, pyarrow", lambda: geometry.save(folder / "saved", model="mine"))
    named(
        "report", "scipy", lambda: baseline_values(GaussianRows(frozenset({"M"}), {}, np.ones(1)))
    )
    assert not (folder / "saved").exists()


def named(extra, packages, use):
    """The error is one line with what is missing and the command that installs it."""
    said = ""
    try:
        use()
    except ImportError as error:
        said = str(error)
    assert re.search(
        rf"needs .*{packages}.* not installed: pip install 'embedgeo\[{extra}\]'$", said
    ), (use, said)


def refused(arguments, said):
    """The command answers with one line and status 2."""
    stderr = io.StringIO()
    with contextlib.redirect_stderr(stderr):
        status = embedgeo.cli.main(arguments)
    assert status == 2, (arguments, status)
    assert re.fullmatch(rf"embedgeo: error: .*{said}.*\n", stderr.getvalue()), stderr.getvalue()


def main(folder):
    trained_by_lightning(folder / "lightning")
    trained_by_hand(folder / "hand")
    observed(folder)
    named("report", "pandas, pyarrow", lambda: embedgeo.load_results(folder))
    named("report", "safetensors", lambda: embedgeo.load_sample(folder, "any"))
    named("report", "matplotlib", lambda: embedgeo.plot)
    named("accelerate", "transformers", lambda: embedgeo.GeometryCallback)
    named("accelerate", "transformers", lambda: import_module("embedgeo.training.transformers"))
    for module, extra in (
        ("plotting", "report"),
        ("report", "report"),
        ("text", "sweep"),
        ("checkpoints", "sweep"),
    ):
        named(extra, "pandas, pyarrow", lambda module=module: import_module(f"embedgeo.{module}"))
    settings = embedgeo.sweep.SweepSettings(model=str(folder))
    named("sweep", "transformers", lambda: embedgeo.sweep.sweep(settings))
    named("sweep", "transformers", lambda: embedgeo.sweep.check(str(folder)))
    named(
        "accelerate",
        "accelerate",
        lambda: embedgeo.sweep.SweepSettings(model=str(folder), device_map="auto"),
    )
    named(
        "report,sweep",
        "matplotlib",
        lambda: demo(DemoSettings()),
    )
    for arguments in (["--help"], ["report", str(folder)], []):
        refused(arguments, r"jsonargparse.*pip install 'embedgeo\[report,sweep\]'")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    print("the core alone works")
