"""Runs of MLflow in a local sqlite store."""

import re
from pathlib import Path

import mlflow
import pandas as pd
import pytest
from lightning.pytorch.loggers import CSVLogger, MLFlowLogger

from embedgeo import GeometryMonitor
from embedgeo.training.transformers import GeometryCallback
from tests.integrations.drawn import assert_all_pictures, few, loop, same_pixels, values
from tests.training.hf_runs import hf_trainer
from tests.training.runs import fit, steps

# of SQLAlchemy, for how MLflow's own tables are declared
pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy is deprecated")


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return f"sqlite:///{tmp_path_factory.mktemp('mlflow') / 'mlflow.db'}"


@pytest.fixture(autouse=True)
def tracking(store, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    mlflow.set_tracking_uri(store)
    yield
    mlflow.set_tracking_uri(None)


def assert_complete(run_id, monitor, folder, tag_start=""):
    """The run has the values at their steps, the pictures and the explanation."""
    client = mlflow.MlflowClient()
    history = client.get_metric_history(run_id, f"{tag_start}geometry.anisotropy/block.01")
    assert {metric.step: metric.value for metric in history} == values(monitor)
    text = Path(
        client.download_artifacts(run_id, "geometry/what the numbers mean.md", str(folder))
    ).read_text()
    assert text.startswith("| number |")
    assert "\n| anisotropy | " in text
    pictures = {}
    for path in Path(client.download_artifacts(run_id, "images", str(folder))).glob("*.png"):
        key, step = re.fullmatch(r"(.+)\+step\+(\d+)\+timestamp.+", path.stem).groups()
        pictures[key.replace("~", "/"), int(step)] = path.read_bytes()
    assert_all_pictures(pictures, monitor, same_pixels, lambda tag: tag.replace(",", ""))


def test_lightnings_logger_is_given_values_pictures_and_the_explanation(store, tmp_path):
    monitor = GeometryMonitor(metrics=few, on_error="raise")
    logger = MLFlowLogger("lightning", tracking_uri=store)
    fit(tmp_path, monitor, logger=logger, max_steps=2)
    assert_complete(logger.run_id, monitor, tmp_path)


def test_the_hugging_face_trainers_run_is(tmp_path):
    monitor = GeometryCallback(metrics=few, on_error="raise")
    hf_trainer(tmp_path, monitor, report_to="mlflow", max_steps=2, run_name="trainer").train()
    (run,) = mlflow.search_runs(output_format="list")
    assert run.info.status == "FINISHED"
    assert_complete(run.info.run_id, monitor, tmp_path)


def test_the_active_run_of_a_plain_loop_is(tmp_path):
    with mlflow.start_run() as run:
        monitor = loop(mlflow)
    assert_complete(run.info.run_id, monitor, tmp_path)


def test_a_logger_that_takes_no_picture_costs_one_warning_and_nothing_else(
    store, tmp_path, monkeypatch
):
    monkeypatch.setattr(mlflow.MlflowClient, "log_image", lambda *args, **kwargs: 1 / 0)
    monitor = GeometryMonitor(metrics=few)
    logger = MLFlowLogger("fails", tracking_uri=store)
    with pytest.warns(UserWarning, match="mlflow") as warned:
        fit(tmp_path, monitor, logger=[logger, CSVLogger(tmp_path)], max_steps=2)
    assert sum("gets no more" in str(warning.message) for warning in warned) == 1
    assert steps(monitor) == [0, 2]
    history = logger.experiment.get_metric_history(logger.run_id, "geometry.anisotropy/block.01")
    assert [metric.step for metric in history] == [0, 2]


def test_the_history_is_an_artifact_of_its_run(store, tmp_path):
    runs = {}
    for every in (1, 2):
        logger = MLFlowLogger(
            "histories", tracking_uri=store, artifact_location=f"file://{tmp_path}/my%20artifacts"
        )
        fit(
            tmp_path,
            GeometryMonitor(every, metrics=few, pictures=False, on_error="raise"),
            logger=logger,
            max_steps=4,
        )
        runs[logger.run_id] = [*range(0, 5, every)]
    with mlflow.start_run() as run:
        loop(mlflow)
    runs[run.info.run_id] = [0, 2]
    for run_id, expected in runs.items():
        path = mlflow.MlflowClient().download_artifacts(run_id, "history.parquet", str(tmp_path))
        assert sorted(pd.read_parquet(path)["step"].unique()) == expected


@pytest.mark.parametrize("place", ["mlflow-artifacts:/1/abc", "dbfs:/mlflow/1"])
def test_artifacts_on_a_server_are_no_folder_here(store, tmp_path, place):
    logger = MLFlowLogger(place, tracking_uri=store, artifact_location=place)
    with pytest.warns(UserWarning, match="gets no more"):  # that server does not answer
        fit(tmp_path, GeometryMonitor(1, metrics=few, pictures=False), logger=logger, max_steps=1)
    assert not (tmp_path / place.partition("/")[0]).exists()
    assert not list(tmp_path.rglob("*.parquet"))
