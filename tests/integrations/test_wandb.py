import gc
from pathlib import Path

import pandas as pd
import pytest
import torch
import wandb
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger

from embedgeo import GeometryCallback, GeometryMonitor, StepMonitor
from tests.files import events_of
from tests.integrations.wandb_runs import axes, finished, media, rows
from tests.models import gpt_neox, token_batch
from tests.training.hf_runs import hf_trainer
from tests.training.runs import OPTIONS, RESUMED, fit, loader, moments, steps, value

pytestmark = RESUMED


@pytest.fixture(autouse=True)
def _offline(monkeypatch, tmp_path):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_CONSOLE", "off")
    # seconds: its process starts slowly on a busy machine
    monkeypatch.setenv("WANDB__SERVICE_WAIT", "300")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    yield
    wandb.finish()
    gc.collect()


def tensorboard_images(path):
    events = events_of(path)
    return {
        tag: [(e.step, e.encoded_image_string) for e in events.Images(tag)]
        for tag in events.Tags()["images"]
    }


def scalars(run_rows, axis, tag_start=""):
    """Value by step, from all rows that have one."""
    tag = f"{tag_start}geometry.V/block.00"
    return {row[axis]: row[tag] for row in run_rows if tag in row}


def measured(monitor):
    return {step: value(monitor, step, "block.00", "V") for step in steps(monitor)}


def pictures(run, run_rows, axis):
    found = media(run, run_rows, "image-file")
    return {
        tag: [(row[axis], png) for row, png in images if axis in row]
        for tag, images in found.items()
    }


def test_lightning_gives_weights_and_biases_the_same_pictures_as_tensorboard(tmp_path):
    monitor = GeometryMonitor(every_n_steps=1, **OPTIONS)
    board = TensorBoardLogger(tmp_path, name="tb", version="")
    loggers = [board, WandbLogger(save_dir=tmp_path, project="test")]
    fit(tmp_path, monitor, max_steps=3, logger=loggers)
    run = finished()
    found, axis = list(rows(run)), "trainer/global_step"
    assert axes(run)["geometry.*"] == axis
    assert scalars(found, axis) == pytest.approx(measured(monitor), rel=1e-12)
    assert list(scalars(found, axis)) == [0, 1, 2, 3]
    assert sum("geometry" in str(row) for row in found) == 4  # each in one row
    images = pictures(run, found, axis)
    assert images == tensorboard_images(tmp_path / "tb")
    assert images.keys() > {"geometry.heatmap/mean_cosine", "geometry.profile/mean_cosine"}


def history_steps(folder):
    return sorted(pd.read_parquet(folder / "history.parquet")["step"].unique())


@pytest.mark.parametrize("logs", [("loss", "rate"), ("loss",)])
def test_a_loop_loses_neither_its_own_values_nor_those_measured(logs):
    run, model = wandb.init(), gpt_neox()
    monitor = StepMonitor(model, 2, log=run, **OPTIONS)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(7):
        batch = token_batch(4, seed=step)
        with monitor.step(step, batch):
            model(**batch, labels=batch["input_ids"]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        for key in logs:  # with a step where there are two
            run.log({key: step}, **({"step": step} if len(logs) > 1 else {}))
    monitor.close()
    folder = finished()
    found = list(rows(folder))
    assert scalars(found, "geometry/step") == pytest.approx(measured(monitor))
    assert list(measured(monitor)) == [0, 2, 4, 6, 7]
    assert axes(folder)["geometry.*"] == "geometry/step"
    for key in logs:
        assert [row[key] for row in found if key in row] == list(range(7)), key
    drawn = pictures(folder, found, "geometry/step")["geometry.heatmap/mean_cosine"]
    assert drawn[0][0] == 0
    assert history_steps(folder / "files") == [0, 2, 4, 6, 7]


def test_a_loop_that_logs_at_the_number_of_the_epoch_loses_none_of_its_values(recwarn):
    run, model = wandb.init(), gpt_neox()
    monitor = StepMonitor(model, 1, log=run, pictures=False, **OPTIONS)
    for step in range(6):
        with monitor.step(step, batch := token_batch(4, seed=step)):
            model(**batch, labels=batch["input_ids"]).loss.backward()
        run.log({"loss": step}, step=step // 3)
    monitor.close()
    found = list(rows(finished()))
    assert [row["loss"] for row in found if "loss" in row] == [2, 5]
    assert scalars(found, "geometry/step").items() < measured(monitor).items()
    (said,) = recwarn
    assert "of step 1 replaces the one before in W&B" in str(said.message)


def test_the_hugging_face_trainer_gives_every_integration_the_pictures(tmp_path, monkeypatch):
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "tb"))
    callback = GeometryCallback(every_n_steps=2, **OPTIONS)
    hf_trainer(tmp_path / "out", callback, max_steps=3, report_to=["wandb", "tensorboard"]).train()
    run, axis = finished(), "train/global_step"
    found = list(rows(run))
    assert scalars(found, axis, tag_start="train/") == pytest.approx(measured(callback))
    assert list(measured(callback)) == [0, 2, 3]
    images = pictures(run, found, axis)
    assert images
    assert images == tensorboard_images(tmp_path / "tb")


def test_a_run_that_goes_on_in_a_directory_of_its_own_goes_on_in_the_first_ones_history(tmp_path):
    def run(max_steps, ckpt_path=None):
        monitor = GeometryMonitor(
            2, metrics=moments, measure_last=False, pictures=False, on_error="raise"
        )
        saving = ModelCheckpoint(tmp_path / "saved", every_n_train_steps=3, save_top_k=-1)
        options = {
            "logger": WandbLogger(save_dir=tmp_path, project="test", id="a-run"),
            "enable_checkpointing": True,
        }
        fit(
            tmp_path,
            monitor,
            saving,
            data=loader(),
            max_steps=max_steps,
            ckpt_path=ckpt_path,
            **options,
        )
        folder = Path(wandb.run.dir)
        wandb.finish()
        return steps(monitor), folder

    measured, first = run(3)
    assert measured == history_steps(first) == [0, 2]
    assert run(7, tmp_path / "saved" / "epoch=0-step=3.ckpt")[0] == [4, 6]
    assert history_steps(first) == [0, 2, 4, 6]
    assert sorted(tmp_path.rglob("history*.parquet")) == [first / "history.parquet"]
