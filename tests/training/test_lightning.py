"""GeometryMonitor in a real Lightning Trainer."""

import os
import signal
import subprocess
import sys
from contextlib import suppress

import pandas as pd
import pytest
import pytorch_lightning
import torch
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from embedgeo import GeometryMonitor
from embedgeo.report.runs import read_runs
from embedgeo.results.parquet import HISTORY
from tests.files import events_of
from tests.training.runs import (
    TinyLM,
    WithoutDropout,
    fit,
    loader,
    moments,
    steps,
    token_moments,
    value,
)


def test_probe_forward_and_batch_callables_override(tmp_path):
    class Tokens(TinyLM):
        def forward(self, batch):
            return self.model(inputs_embeds=self.model.get_input_embeddings()(batch["input_ids"]))

        def on_before_batch_transfer(self, batch, dataloader_idx):
            batch["changed"] = batch["input_ids"]
            return batch

    probe = [*loader(8)]
    monitor = GeometryMonitor(
        every_n_steps=2,
        probe=probe,
        probe_forward=lambda pl_module, batch: pl_module(batch),
        token_ids=lambda batch: batch["input_ids"] * 0 + 7,
        mask=lambda batch: batch["changed"] % 2 == 0,
        on_error="raise",
    )
    fit(tmp_path, monitor, module=Tokens(), max_steps=2)
    assert "changed" not in probe[0]
    even = sum(int((batch["input_ids"] % 2 == 0).sum()) for batch in loader(8))
    assert value(monitor, 0, "block.00", "token_types") == 1
    assert value(monitor, 0, "block.00", "n") == even


class Masks(TinyLM):
    """Masks all tokens in training."""

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return {**batch, "input_ids": batch["input_ids"] * self.trainer.validating}


def test_a_probe_goes_the_way_of_validation_and_the_last_training_batches_do_not(tmp_path):
    options = {"metrics": token_moments, "on_error": "raise"}
    held = GeometryMonitor(10, probe=loader(4), **options)
    last = GeometryMonitor(10, prefix="last", **options)
    fit(tmp_path, held, last, module=Masks(), max_steps=1)
    for step in (0, 1):
        assert value(held, step, "block.00", "token_types") > 1
        assert value(last, step, "block.00", "token_types") == 1


class LogsInForward(WithoutDropout):
    def forward(self, batch):
        out = self.model(**batch, labels=batch["input_ids"])
        self.log_dict({"norm": out.logits.norm()}, on_epoch=True, batch_size=1)
        return out.loss

    def training_step(self, batch, batch_idx):
        return self(batch)


def test_what_a_module_logs_in_forward_is_of_training_alone(tmp_path):
    options = {"probe_forward": lambda module, batch: module.training_step(batch, 0)}
    monitor = GeometryMonitor(4, probe=loader(8), metrics=moments, **options)
    last = GeometryMonitor(5, prefix="last", metrics=moments, **options)
    plain, run = (
        fit(tmp_path, *monitors, module=LogsInForward(), max_epochs=1)[1]
        for monitors in ((), (monitor, last))
    )
    assert (steps(monitor), steps(last)) == ([0, 4, 8, 12, 16], [0, 5, 10, 15, 16])
    means = run.callback_metrics
    assert all(torch.equal(means[name], mean) for name, mean in plain.callback_metrics.items())
    assert "log" not in vars(run.lightning_module)


def test_the_trainer_of_the_other_package_is_refused():
    other = pytorch_lightning.Trainer(accelerator="cpu", logger=False, max_epochs=1)
    with pytest.raises(TypeError, match=r"got one of pytorch_lightning\S*\. Write"):
        GeometryMonitor().setup(other, None, "fit")


@pytest.mark.slow
@pytest.mark.usefixtures("unpainted")
def test_scalars_reach_every_logger_and_histories_are_in_the_folder_of_the_first(tmp_path):
    monitor = GeometryMonitor(every_n_steps=2, on_error="raise")
    held = GeometryMonitor(every_n_steps=2, metrics=moments, prefix="held", on_error="raise")
    board = TensorBoardLogger(tmp_path, name="board", version="")
    csv = CSVLogger(tmp_path, name="csv", version="")
    fit(tmp_path, monitor, held, max_steps=5, logger=[csv, board])
    mean = sum(value(monitor, 5, f"block.0{i}", "V") for i in range(3)) / 3
    layers = {"embed", "block.00", "block.01", "block.02", "final_norm", "mean"}
    events = events_of(board.log_dir)
    tags = events.Tags()["scalars"]
    for prefix in ("geometry", "held"):
        assert {tag for tag in tags if tag.startswith(f"{prefix}.V/")} == {
            f"{prefix}.V/{layer}" for layer in layers
        }
    found = {event.step: event.value for event in events.Scalars("geometry.V/mean")}
    assert [*found] == [0, 2, 4, 5]
    assert found[5] == pytest.approx(mean)

    folder = tmp_path / "csv"
    table = pd.read_csv(folder / "metrics.csv").set_index("step")
    assert table["geometry.V/mean"].dropna().loc[5] == pytest.approx(mean)

    names = ["step", "layer", "layer_index", "width", "metric", "value", "stderr"]
    history = pd.read_parquet(folder / "history.parquet")
    assert list(history) == HISTORY.names == [*names, "deviations"]
    assert history.pop("deviations").isna().all()  # there is no jackknife
    expected = pd.DataFrame(monitor.history, columns=names)
    pd.testing.assert_frame_equal(history, expected, check_exact=True)
    written = {folder / f"history{name}.parquet" for name in ("", ".held")}
    assert {*tmp_path.rglob("*.parquet")} == written
    assert {run.label: run.steps for run in read_runs([folder])} == {
        name: [0, 2, 4, 5] for name in ("csv", "csv held")
    }


@pytest.mark.slow
def test_fit_returns_from_the_processes_that_lightning_forks(tmp_path):
    code = f"""if True:
        from embedgeo import GeometryMonitor
        from tests.training.runs import fit
        run = fit({str(tmp_path)!r}, GeometryMonitor(), max_steps=1, strategy="ddp_fork", devices=2)
        assert "geometry" not in str(run[1].callback_metrics)
    """
    process = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    try:
        assert process.wait(timeout=120) == 0
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
