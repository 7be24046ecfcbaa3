"""The folder of a sweep, and what is rebuilt from its Parquet files."""

import json
import os
import shutil
from tempfile import TemporaryDirectory

import pandas as pd
import pytest

from embedgeo.results.folder import SweepFolder, drift_file
from embedgeo.results.parquet import SCHEMA, write_parquet
from tests.files import contents
from tests.report.synthetic import make_sweep

STEPS = (0, 1, 8)


def test_names_that_a_spreadsheet_would_compute_are_text(tmp_path):
    folder = SweepFolder(make_sweep(tmp_path, (0,), 1))
    records = folder.read("step0")
    odd = ["=1+1", "-a", "a=b"]
    records.loc[:2, "metric"] = odd
    records.loc[:2, "value"] = -1.0
    folder.write("step0", records)
    folder.rebuild()
    table = pd.read_csv(tmp_path / "metrics.csv")
    assert table["metric"][:3].tolist() == ["'=1+1", "'-a", "a=b"]
    assert (table["value"][:3] == -1.0).all()


@pytest.mark.parametrize(("again", "has_failed"), [("step1", 0), ("step1", 1), ("step8", 0)])
def test_what_is_measured_again_has_nothing_that_is_of_earlier_weights(tmp_path, again, has_failed):
    folder = SweepFolder(make_sweep(tmp_path, STEPS, 1))
    for name in ("step1", "step8"):
        folder.write(name, folder.read(name), {"own": pd.DataFrame({"x": [1]})})
    assert folder.tables("own").keys() == {"step1", "step8"}
    drift = folder.read("step8")[:1].assign(metric="cka_to_previous")
    write_parquet(drift_file(tmp_path, "step8"), drift, SCHEMA, folder.origin(["step8", "step1"]))
    folder.rebuild()
    events = folder.tensorboard / "tiny" / "events.out.tfevents.000000000008.step8"
    assert b"cka_to_previous" in events.read_bytes()
    assert "cka_to_previous" in {*folder.runs()["tiny"]["step8"]["metric"]}
    records = folder.read(again)
    if has_failed:
        folder.write_failure(again, "it cannot be read")
    else:
        folder.write(again, records.assign(value=records["value"] + 1))
    folder.rebuild()
    assert again not in (folder.runs()["tiny"] if has_failed else folder.tables("own"))
    assert "cka_to_previous" not in {*folder.runs()["tiny"]["step8"]["metric"]}
    assert b"cka_to_previous" not in events.read_bytes()


def test_a_folder_that_cannot_be_written_is_named():
    with TemporaryDirectory(dir="/tmp") as name:
        out = SweepFolder(name)
        out.open({}, {})
        for folder in (out.path, out.checkpoints):
            folder.chmod(0o555)
        try:
            if os.geteuid() == 0:  # who may write anywhere
                os.seteuid(65534)
            with pytest.raises(
                OSError, match=r"a folder that can be written; it is not .*denied: '[^']*'\)\.$"
            ) as at:
                out.open({}, {})
            with pytest.raises(PermissionError) as written:
                write_parquet(out.checkpoints / "step1.parquet", pd.DataFrame({"n": [1]}), None)
        finally:
            os.seteuid(os.getuid())
            out.path.chmod(0o755)
            out.checkpoints.chmod(0o755)
        assert written.value.filename == str(out.checkpoints)
        assert ".embedgeo-" not in f"{at.value} {written.value}"


@pytest.mark.parametrize(
    ("models", "run"),
    [
        (["lab/tiny", ".."], "step"),
        (["lab/tiny", "/runs/lab/tiny/"], "tiny"),
        ([".."], "%2E."),
        (["."], "other"),
        (["C:\\x y"], "C%3A%5Cx y"),
    ],
)
def test_a_run_is_called_after_its_model_or_series_and_stays_inside_the_folder(
    tmp_path, models, run
):
    folder = SweepFolder(make_sweep(tmp_path, range(len(models)), 1, metrics=("M",)))
    for step, model in enumerate(models):
        folder.write(f"step{step}", folder.read(f"step{step}").assign(model=model))
    assert [*folder.runs()] == [run]


def events(run, *steps):
    return {f"{run}/events.out.tfevents.{step:012d}.step{step}" for step in steps}


def test_one_series_is_a_run_called_after_the_model_and_moves_when_another_one_comes(tmp_path):
    folder = SweepFolder(make_sweep(tmp_path, STEPS, 1, series={0: "b", 1: "b", 8: "a/ä"}))
    others = folder.tensorboard / "mine" / "events.out.tfevents.1700000000.host.1234.0"
    others.parent.mkdir(parents=True)
    others.touch()
    late = folder.checkpoints / "step8.parquet"
    shutil.move(late, tmp_path / "late.parquet")
    folder.rebuild()
    kept = {"mine/events.out.tfevents.1700000000.host.1234.0"}
    assert {*contents(folder.tensorboard)} == events("tiny", 0, 1) | kept
    assert [*folder.runs()] == ["tiny"]
    assert pd.read_csv(tmp_path / "metrics.csv")["step"].unique().tolist() == [0, 1]
    shutil.move(tmp_path / "late.parquet", late)
    folder.rebuild()
    other = "a%2F%C3%A4"
    assert {*contents(folder.tensorboard)} == events("b", 0, 1) | events(other, 8) | kept
    runs = {run: [*checkpoints] for run, checkpoints in folder.runs().items()}
    assert runs == {other: ["step8"], "b": ["step0", "step1"]}
    assert [*runs] == [other, "b"]
    assert pd.read_csv(tmp_path / "metrics.csv")["step"].unique().tolist() == [8, 0, 1]
    (folder.checkpoints / "step1.parquet").unlink()  # whose events go
    folder.rebuild()
    assert {*contents(folder.tensorboard)} == events("b", 0) | events(other, 8) | kept


def test_another_version_goes_on_where_no_number_is_another(tmp_path):
    SweepFolder(tmp_path).open({"steps": "all", "colour": None}, {"versions": {"embedgeo": "0.0"}})
    SweepFolder(tmp_path).open({"steps": "all", "newer": False}, {})
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    (tmp_path / "manifest.json").write_text(json.dumps({**manifest, "definitions": 0}))
    message = r"embedgeo 0\.0, has others: definitions was 0, is \d+, rows was None, is 'tokens'\. "
    with pytest.raises(ValueError, match=message):
        SweepFolder(tmp_path).open({"steps": "all", "rows": "tokens"}, {})
    assert {*contents(tmp_path)} == {"manifest.json"}
