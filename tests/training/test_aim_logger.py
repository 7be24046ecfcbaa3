"""Aim's loggers, in place of which stand objects with their interface: Aim is not among the packages of the tests."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
from lightning.pytorch.loggers.logger import DummyLogger
from PIL import Image

from embedgeo import GeometryMonitor
from tests.training.runs import fit, moments


class AimLogger(DummyLogger):
    """Keeps what it is given, as Aim's logger for Lightning gives it to its run."""

    def __init__(self):
        super().__init__()
        self.tracked = []
        self.run = SimpleNamespace(track=lambda value, name, step: self.tracked.append((value, name, step)))

    @property
    def experiment(self):
        return self.run


@pytest.fixture
def aim(monkeypatch):
    package = ModuleType("aim")
    package.Image, package.Text = (lambda image: image), (lambda text: text)
    monkeypatch.setitem(sys.modules, "aim", package)
    monkeypatch.setitem(sys.modules, "aim.sdk.adapters.pytorch_lightning", sys.modules[__name__])


def test_aims_logger_is_given_pictures_and_the_explanation(tmp_path, aim, monkeypatch):
    picture = Image.new("RGB", (3, 2), "red")
    picture.save(tmp_path / "drawn.png")
    drawn = (tmp_path / "drawn.png").read_bytes(), 3, 2
    monkeypatch.setattr("embedgeo.drawing.png", lambda *args: drawn)
    logger = AimLogger()
    fit(tmp_path, GeometryMonitor(metrics=moments, on_error="raise"), logger=logger, max_steps=1)
    texts = [(name, step) for value, name, step in logger.tracked if isinstance(value, str)]
    images = {(name, step): value for value, name, step in logger.tracked if not isinstance(value, str)}
    assert texts == [("geometry/what the numbers mean", 0)]
    assert {("geometry.heatmap/M_over_Q", 0), ("geometry.heatmap/M_over_Q", 1)} <= set(images)
    assert all(image.tobytes() == picture.tobytes() for image in images.values())
