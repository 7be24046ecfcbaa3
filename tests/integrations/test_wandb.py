import gc
import io
import json

import numpy as np
import pytest
import wandb
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger, WandbLogger
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from embedgeo import GeometryMonitor
from embedgeo.results.glossary import HEADLINES
from tests.integrations.wandb_runs import axes, charts, folder, media, rows
from tests.training.runs import fit

# the temporary folders of wandb's tables, which it leaves to the garbage collector
pytestmark = pytest.mark.filterwarnings("ignore:Implicitly cleaning up:ResourceWarning")


@pytest.fixture(autouse=True)
def _offline(monkeypatch, tmp_path):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_CONSOLE", "off")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    yield
    wandb.finish()
    gc.collect()


def tensorboard_images(path):
    events = EventAccumulator(str(path), size_guidance={"images": 0}).Reload()
    return {tag: [(e.step, e.encoded_image_string) for e in events.Images(tag)] for tag in events.Tags()["images"]}


def scalars(run_rows, axis, layer="block.00", metric="V", tag_start=""):
    """Value by step, from all rows that have one."""
    tag = f"{tag_start}geometry.{metric}/{layer}"
    return {row[axis]: row[tag] for row in run_rows if tag in row}


def measured(monitor, layer="block.00", metric="V"):
    return {r["step"]: r["value"] for r in monitor.history if r["layer"] == layer and r["metric"] == metric}


def pictures(run, run_rows, axis):
    found = media(run, run_rows, "image-file")
    return {tag: [(row[axis], png) for row, png in images] for tag, images in found.items()}


def table(run, run_rows, metric):
    """The last table of a chart: value by layer and step."""
    tables = media(run, run_rows, "table-file")[f"Custom Chart Tables/geometry.charts/{metric}_table"]
    return {(layer, step): value for step, layer, value in json.loads(tables[-1][1])["data"]}


def test_lightning_gives_weights_and_biases_the_same_pictures_as_tensorboard(tmp_path):
    monitor = GeometryMonitor(every_n_steps=1, on_error="raise")
    board = TensorBoardLogger(tmp_path, name="tb", version="")
    loggers = [board, WandbLogger(save_dir=tmp_path, project="test"), CSVLogger(tmp_path, name="csv")]
    fit(tmp_path, monitor, max_steps=5, logger=loggers)
    wandb.finish()
    run = folder(tmp_path)
    found, axis = list(rows(run)), "trainer/global_step"
    assert axes(run)["geometry.*"] == axis
    assert scalars(found, axis) == pytest.approx(measured(monitor), rel=1e-12)
    assert list(scalars(found, axis)) == [0, 1, 2, 3, 4, 5]
    images = pictures(run, found, axis)
    assert images == tensorboard_images(tmp_path / "tb")
    assert images.keys() > {f"geometry.heatmap/{metric}" for metric in HEADLINES}
    assert {png for each in images.values() for _, png in each} and all(
        Image.open(io.BytesIO(png)).width == 700 for each in images.values() for _, png in each
    )
    metrics = {r["metric"] for r in monitor.history if np.isfinite(r["value"])}
    assert charts(run).keys() == {f"geometry.charts/{metric}" for metric in metrics}
    for metric in ("V", "anisotropy"):
        expected = {(r["layer"], r["step"]): r["value"] for r in monitor.history if r["metric"] == metric}
        assert table(run, found, metric) == pytest.approx(expected)
    ((_, html),) = media(run, found, "html-file")["geometry/what the numbers mean"]
    assert "<td>anisotropy</td>" in html.decode()
    assert (tmp_path / "csv" / "version_0" / "geometry.csv").exists()
