"""Comet's offline experiments: the archive that would be uploaded is opened."""

import json
from zipfile import ZipFile

import comet_ml
import pytest
from lightning.pytorch.loggers import CometLogger

from embedgeo import GeometryMonitor
from embedgeo.training.transformers import GeometryCallback
from tests.integrations.drawn import assert_all_pictures, few, loop, values
from tests.training.hf_runs import hf_trainer
from tests.training.runs import fit


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path):
    settings = {
        "START_ONLINE": "0",
        "OFFLINE_DIRECTORY": str(tmp_path),
        "AUTO_LOG_CODE": "0",
        "AUTO_LOG_GIT_PATCH": "0",
    }
    for name, value in settings.items():
        monkeypatch.setenv(f"COMET_{name}", value)
    # without a network it leaves a socket open
    monkeypatch.setattr("comet_ml.env_logging.get_ip", lambda: None)
    yield
    if comet_ml.get_running_experiment():
        comet_ml.end()


def assert_complete(folder, monitor, tag="geometry.anisotropy/block.01"):
    """The archive has the values at their steps, the pictures and the explanation."""
    comet_ml.end()
    (path,) = folder.glob("*.zip")
    with ZipFile(path) as archive:
        messages = [json.loads(line) for line in archive.read("messages.json").splitlines()]
        metrics = [each["payload"]["metric"] for each in messages if each["type"] == "metric_msg"]
        files = {}
        for message in messages:
            if message["type"] == "file_upload":
                payload = message["payload"]
                files.setdefault(payload["upload_type"], []).append(
                    (
                        payload["additional_params"],
                        payload["metadata"],
                        archive.read(payload["file_path"]),
                    )
                )
    found = {each["step"]: each["metricValue"] for each in metrics if each["metricName"] == tag}
    assert found == pytest.approx(values(monitor), rel=1e-12)
    ((_, metadata, text),) = files["text-sample"]
    assert metadata == {"name": "geometry/what the numbers mean"}
    assert text.startswith(b"| number |")
    images = {(params["figName"], params["step"]): png for params, _, png in files["visualization"]}
    assert_all_pictures(images, monitor)


def test_lightnings_logger_is_given_values_pictures_and_the_explanation(tmp_path):
    monitor = GeometryMonitor(metrics=few, on_error="raise")
    fit(tmp_path, monitor, logger=CometLogger(offline_directory=str(tmp_path)), max_steps=2)
    assert_complete(tmp_path, monitor)


def test_the_hugging_face_trainers_experiment_is(tmp_path):
    monitor = GeometryCallback(metrics=few, on_error="raise")
    hf_trainer(tmp_path, monitor, report_to="comet_ml", max_steps=2).train()
    assert_complete(tmp_path, monitor, "train/geometry.anisotropy/block.01")


def test_an_experiment_of_a_plain_loop_is(tmp_path):
    monitor = loop(comet_ml.OfflineExperiment(offline_directory=str(tmp_path)))
    assert_complete(tmp_path, monitor)
