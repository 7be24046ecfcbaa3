"""Pictures for TensorBoard while a model trains."""

import io

import numpy as np
import pytest
from lightning.pytorch.loggers import TensorBoardLogger
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from embedgeo import GeometryMonitor
from embedgeo.glossary import headlines, known_terms
from embedgeo.report import live
from embedgeo.training.loggers import Adapter, Illustrations
from tests.records import layer_records
from tests.training.runs import fit

LAYERS = ["embed", "block.00", "block.01", "final_norm"]


def events(folder):
    return EventAccumulator(
        str(folder), size_guidance={"images": 0, "scalars": 0, "tensors": 0}
    ).Reload()


def records(step, value=1.0, layers=LAYERS, metrics=("mean_cosine", "M", "V")):
    return layer_records(step, value, layers=layers, metrics=metrics)


class Writer(Adapter):
    """Takes what is written instead of a logger."""

    def __init__(self):
        self.images, self.texts = [], []

    def write_image(self, tag, picture, step):
        self.images.append((tag, step))

    def write_text(self, tag, markdown, step):
        self.texts.append(tag)


@pytest.mark.slow
def test_tensorboard_gets_images_and_a_text_of_each_run(tmp_path):
    monitor = GeometryMonitor(every_n_steps=1, on_error="raise")
    for name, max_steps in (("first", 3), ("second", 1)):
        logger = TensorBoardLogger(tmp_path, name=name, version="")
        fit(tmp_path, monitor, max_steps=max_steps, logger=logger)
    found = events(tmp_path / "first")
    steps = {tag: [event.step for event in found.Images(tag)] for tag in found.Tags()["images"]}
    drawn = {tag.partition("/")[2] for tag in steps if tag.startswith("geometry.curves/")}
    assert {"M_over_Q", "anisotropy"} <= drawn <= {*headlines()}
    kinds = ("curves", "heatmap", "profile")
    assert steps.keys() == {
        *(f"geometry.{kind}/{metric}" for kind in kinds for metric in drawn),
        "geometry.shares/M, V_W, V_B",
    }
    for tag, at in steps.items():
        assert at == [0, 1, 3], tag  # of 4 measurements
        image = Image.open(io.BytesIO(found.Images(tag)[-1].encoded_image_string))
        # twice what TensorBoard shows: it leaves out pixels, and blends none
        assert image.width == 700, tag
        assert len(np.unique(np.asarray(image.convert("RGB")).reshape(-1, 3), axis=0)) > 10
    (text,) = found.Tensors("geometry/what the numbers mean/text_summary")
    assert known_terms()["M_over_Q"].meaning in text.tensor_proto.string_val[0].decode()
    second = events(tmp_path / "second").Images("geometry.curves/M_over_Q")
    assert [event.step for event in second] == [0, 1]


@pytest.mark.parametrize(
    ("count", "drawn"),
    [(1, [0]), (3, [0, 1, 2]), (8, [0, 1, 3, 7]), (100, [0, 1, 3, 7, 15, 31, 63, 99])],
)
def test_pictures_are_drawn_at_the_first_measurement_at_each_doubling_and_at_the_last(
    monkeypatch, count, drawn
):
    monkeypatch.setattr(
        live, "draw_pictures", lambda history, prefix: [(f"{prefix}.curves/M", (b"", 1, 1))]
    )
    writer, illustrations, history = Writer(), Illustrations("geometry"), []
    for step in range(count):
        history += records(step, layers=LAYERS[:1], metrics=["M"])
        illustrations.write([writer], history)
    illustrations.write([writer], history, last=True)
    assert writer.images == [("geometry.curves/M", step) for step in drawn]
    assert writer.texts.count("geometry/what the numbers mean") == 1
    illustrations.write([writer], [], last=True)  # a history that was cleared
