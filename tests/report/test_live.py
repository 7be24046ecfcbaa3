"""Pictures for loggers while a model trains."""

import io

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

from embedgeo.drawing import FigureData
from embedgeo.report import figures, live
from embedgeo.results.records import Records
from embedgeo.training.loggers import Illustrations
from tests.records import layer_records

LAYERS = ("embed", "block.00", "block.01", "final_norm")


@pytest.mark.slow
def test_pictures_are_of_headlines_and_of_shares():
    history = []
    for step in (0, 2):
        for metric, value in (("M_over_Q", 0.5), ("M", 1.0), ("V", 1.0)):
            history += layer_records(step, value + step, layers=LAYERS, metrics=[metric])
    found = dict(live.draw_pictures(history, "geometry"))
    assert found.keys() == {
        "geometry.heatmap/M_over_Q",
        "geometry.profile/M_over_Q",
        "geometry.shares/M, V_W, V_B",
    }
    for tag, (png, width, height) in found.items():
        image = Image.open(io.BytesIO(png))
        # twice what TensorBoard shows: it leaves out pixels, and blends none
        assert image.width == 700, tag
        assert image.size == (width, height), tag
        assert len(np.unique(np.asarray(image.convert("RGB")).reshape(-1, 3), axis=0)) > 10


def test_pictures_of_a_long_run_are_of_few_steps_more_of_them_early(monkeypatch):
    drawn = []

    def draw(run, metric):
        drawn.append(run.steps)
        return FigureData("", Figure(), run.values, "", "")

    for kind in ("heatmap", "profile"):
        monkeypatch.setattr(figures, kind, draw)
    history = Records()
    for step in range(3000):
        records = layer_records(step, 10.0 if step == 1 else 1.0, metrics=["M_over_Q"])
        history.extend([*records, {**records[0], "layer": "mean", "layer_index": -1}])
    assert dict(live.draw_pictures(history, "geometry"))
    assert all(len(steps) <= 128 and {0, 1, 2, 2999} <= {*steps} for steps in drawn)


def test_pictures_are_drawn_at_the_first_measurement_at_each_doubling_and_at_the_last(
    tmp_path, monkeypatch
):
    drawn = [0, 1, 3, 7, 15, 19]
    monkeypatch.setattr(
        live, "draw_pictures", lambda history, prefix: [(f"{prefix}.profile/M", (b"", 1, 1))]
    )
    illustrations, history = Illustrations("geometry"), []
    writer = SummaryWriter(str(tmp_path))
    for step in range(20):
        history += layer_records(step, layers=LAYERS[:1], metrics=["M"])
        illustrations.write([writer], history)
    illustrations.write([writer], history, last=True)
    writer.flush()
    events = EventAccumulator(str(tmp_path), size_guidance={"images": 0}).Reload()
    assert [each.step for each in events.Images("geometry.profile/M")] == drawn
    illustrations.write([writer], [], last=True)  # a history that was cleared
