"""Runs of Trackio in a local database; no server is started."""

import os
from pathlib import Path

import pytest
import trackio
from trackio.sqlite_storage import SQLiteStorage

from embedgeo.training.transformers import GeometryCallback
from tests.integrations.drawn import assert_all_pictures, few, loop, values
from tests.training.hf_runs import hf_trainer


def assert_complete(project, monitor, step_of, tag="geometry.anisotropy/block.01"):
    """The run "tiny" has the values at their steps, the pictures and the explanation.

    ``step_of`` gives the step of training of each row.
    """
    rows = SQLiteStorage.get_logs(project, "tiny")
    assert {step_of(row): row[tag] for row in rows if tag in row} == pytest.approx(values(monitor))
    media = [
        (row, key, value) for row in rows for key, value in row.items() if isinstance(value, dict)
    ]
    ((_, key, text),) = [each for each in media if each[2]["_type"] == "trackio.markdown"]
    assert key == "geometry/what the numbers mean"
    assert text["_value"].startswith("| number |")
    pictures = {}
    for row, key, value in media:
        if value["_type"] == "trackio.image":
            assert value["caption"] == f"step {step_of(row)}"
            pictures[key, step_of(row)] = Path(
                os.environ["TRACKIO_DIR"], "media", value["file_path"]
            ).read_bytes()
    assert_all_pictures(pictures, monitor)


@pytest.mark.parametrize("given", ["run", "module"])
def test_a_run_of_a_plain_loop_is_given_values_pictures_and_the_explanation(given):
    run = trackio.init(project=f"plain-{given}", name="tiny", embed=False, auto_log_cpu=False)
    monitor = loop({"run": run, "module": trackio}[given])
    trackio.finish()
    assert_complete(run.project, monitor, lambda row: row["step"])


def test_the_hugging_face_trainers_run_is(tmp_path):
    monitor = GeometryCallback(metrics=few, on_error="raise")
    hf_trainer(
        tmp_path, monitor, report_to="trackio", max_steps=2, project="trainer", run_name="tiny"
    ).train()
    rows = SQLiteStorage.get_logs("trainer", "tiny")
    steps = {row["step"]: row["train/global_step"] for row in rows if "train/global_step" in row}
    assert sorted(steps) == list(range(len(steps)))  # pictures are not counted
    assert_complete(
        "trainer", monitor, lambda row: steps[row["step"]], "train/geometry.anisotropy/block.01"
    )
