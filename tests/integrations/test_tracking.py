"""Comet, MLflow and Trackio, each on this machine alone, are given the values at their steps: by
Lightning's logger, by the Hugging Face Trainer and in a plain loop.
"""

import json
from zipfile import ZipFile

import comet_ml
import mlflow
import pytest
import trackio
from lightning.pytorch.loggers import CometLogger, MLFlowLogger
from trackio.sqlite_storage import SQLiteStorage

from embedgeo import GeometryCallback, GeometryMonitor, StepMonitor
from tests.models import gpt_neox, token_batch
from tests.training.hf_runs import hf_trainer
from tests.training.loops import run_whole
from tests.training.runs import OPTIONS, fit, steps, value

TAG = "geometry.V/mean"


def by_lightning(folder, logger):
    monitor = GeometryMonitor(**OPTIONS)
    fit(folder, monitor, logger=logger, max_steps=2)
    return monitor


def by_trainer(folder, name, **options):
    monitor = GeometryCallback(**OPTIONS)
    hf_trainer(folder, monitor, report_to=name, max_steps=2, **options).train()
    return monitor


def by_hand(log):
    model = gpt_neox()
    monitor = StepMonitor(model, log=log, **OPTIONS)
    run_whole(monitor, 2, lambda: model(**token_batch()), token_batch())
    return monitor


def assert_values(found, monitor):
    assert found == pytest.approx({step: value(monitor, step, "mean", "V") for step in (0, 2)})
    assert steps(monitor) == [0, 2]


def test_comet(tmp_path, monkeypatch):
    offline = {"START_ONLINE": "0", "AUTO_LOG_CODE": "0", "AUTO_LOG_GIT_PATCH": "0"}
    for name, setting in {**offline, "OFFLINE_DIRECTORY": str(tmp_path)}.items():
        monkeypatch.setenv(f"COMET_{name}", setting)
    # without a network it leaves a socket open
    monkeypatch.setattr("comet_ml.env_logging.get_ip", lambda: None)
    ways = {
        "": lambda: by_lightning(tmp_path, CometLogger(offline_directory=str(tmp_path))),
        "train/": lambda: by_trainer(tmp_path, "comet_ml"),
        "loop": lambda: by_hand(comet_ml.OfflineExperiment(offline_directory=str(tmp_path))),
    }
    for way, train in ways.items():
        monitor = train()
        comet_ml.end()
        (path,) = tmp_path.glob("*.zip")
        with ZipFile(path) as archive:
            messages = [json.loads(line) for line in archive.read("messages.json").splitlines()]
        path.unlink()
        metrics = [each["payload"]["metric"] for each in messages if each["type"] == "metric_msg"]
        tag = TAG if way == "loop" else way + TAG
        found = {each["step"]: each["metricValue"] for each in metrics if each["metricName"] == tag}
        assert_values(found, monitor)


# of SQLAlchemy, for how MLflow's own tables are declared
@pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy is deprecated")
def test_mlflow(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    store = f"sqlite:///{tmp_path / 'mlflow.db'}"
    mlflow.set_tracking_uri(store)
    logger = MLFlowLogger("lightning", tracking_uri=store)
    runs = {"lightning": (by_lightning(tmp_path, logger), logger.run_id)}
    monitor = by_trainer(tmp_path / "trainer", "mlflow", run_name="trainer")
    (run,) = mlflow.search_runs(output_format="list")
    assert run.info.status == "FINISHED"
    runs["trainer"] = monitor, run.info.run_id
    with mlflow.start_run() as run:
        runs["loop"] = by_hand(mlflow), run.info.run_id
    client = mlflow.MlflowClient()
    for monitor, run_id in runs.values():
        history = client.get_metric_history(run_id, TAG)
        assert_values({metric.step: metric.value for metric in history}, monitor)
    mlflow.set_tracking_uri(None)


def test_trackio(tmp_path):
    quiet = {"embed": False, "auto_log_cpu": False}
    for given in ("run", "module"):
        run = trackio.init(project=given, name="tiny", **quiet)
        monitor = by_hand(run if given == "run" else trackio)
        trackio.finish()
        rows = SQLiteStorage.get_logs(given, "tiny")
        assert_values({row["step"]: row[TAG] for row in rows if TAG in row}, monitor)
    monitor = by_trainer(tmp_path, "trackio", project="trainer", run_name="tiny")
    rows, tag = SQLiteStorage.get_logs("trainer", "tiny"), f"train/{TAG}"
    at = {row["step"]: row["train/global_step"] for row in rows if "train/global_step" in row}
    assert_values({at[row["step"]]: row[tag] for row in rows if tag in row}, monitor)
