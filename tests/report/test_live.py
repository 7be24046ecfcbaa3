"""Pictures for TensorBoard while a model trains."""

import io

import numpy as np
import pytest
from lightning.pytorch.loggers import TensorBoardLogger
from PIL import Image

from embedgeo.glossary import known_terms
from embedgeo.report import live
from embedgeo.results.events import event_contents
from embedgeo.training.loggers import Adapter, Illustrations
from tests.records import layer_records

LAYERS = ("embed", "block.00", "block.01", "final_norm")


class Writer(Adapter):
    """Takes what is written instead of a logger."""

    def __init__(self):
        self.images, self.texts = [], []

    def write_image(self, tag, picture, step):
        self.images.append((tag, step))

    def write_text(self, tag, markdown, step):
        self.texts.append(tag)


@pytest.mark.slow
def test_tensorboard_gets_images_and_a_text(tmp_path):
    logger, history = TensorBoardLogger(tmp_path, "", ""), []
    illustrations = Illustrations("geometry", on_error="raise")
    for step in (0, 2):
        for metric, value in (("M_over_Q", 0.5), ("M", 1.0), ("V", 1.0)):
            history += layer_records(step, value + step, layers=LAYERS, metrics=[metric])
        illustrations.write([logger], history)
    illustrations.write([logger], history, last=True)
    logger.experiment.flush()
    found = event_contents(tmp_path)
    kinds = ("curves", "heatmap", "profile")
    expected = {*(f"geometry.{kind}/M_over_Q" for kind in kinds), "geometry.shares/M, V_W, V_B"}
    assert {*found.Tags()["images"]} == expected
    for tag in expected:
        assert [event.step for event in found.Images(tag)] == [0, 2], tag
        image = Image.open(io.BytesIO(found.Images(tag)[-1].encoded_image_string))
        # twice what TensorBoard shows: it leaves out pixels, and blends none
        assert image.width == 700, tag
        assert len(np.unique(np.asarray(image.convert("RGB")).reshape(-1, 3), axis=0)) > 10
    (text,) = found.Tensors("geometry/what the numbers mean/text_summary")
    assert known_terms()["M_over_Q"].meaning in text.tensor_proto.string_val[0].decode()


@pytest.mark.parametrize(("count", "drawn"), [(3, [0, 1, 2]), (20, [0, 1, 3, 7, 15, 19])])
def test_pictures_are_drawn_at_the_first_measurement_at_each_doubling_and_at_the_last(
    monkeypatch, count, drawn
):
    monkeypatch.setattr(
        live, "draw_pictures", lambda history, prefix: [(f"{prefix}.curves/M", (b"", 1, 1))]
    )
    writer, illustrations, history = Writer(), Illustrations("geometry"), []
    for step in range(count):
        history += layer_records(step, layers=LAYERS[:1], metrics=["M"])
        illustrations.write([writer], history)
    illustrations.write([writer], history, last=True)
    assert writer.images == [("geometry.curves/M", step) for step in drawn]
    assert writer.texts.count("geometry/what the numbers mean") == 1
    illustrations.write([writer], [], last=True)  # a history that was cleared
