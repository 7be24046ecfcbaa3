import shutil

import numpy as np
import pandas as pd
import pytest

from embedgeo.cli import main
from embedgeo.demo import DemoSettings
from embedgeo.demo.run import compare, show
from embedgeo.results.files import emptied
from tests.files import contents
from tests.shared_runs import DEMO_STEPS

pytestmark = pytest.mark.slow

NAMES = {f"step{step}" for step in DEMO_STEPS}


@pytest.fixture
def records(demo):
    """Those of layers."""
    return pd.read_parquet(demo.out / "history.parquet").query("layer_index >= 0")


def names(folder):
    return {path.stem for path in folder.iterdir()}


def test_says_what_to_open_and_the_sweep_gives_the_monitors_numbers_again(demo, records):
    for name in ("checkpoints", "history.parquet", "probe.txt"):
        assert str(demo.out / name) in demo.printed
    assert f"tensorboard.main --logdir {demo.out / 'tensorboard'}\n" in demo.printed
    assert sorted(records["step"].unique()) == DEMO_STEPS
    swept = demo.out / "sweep"
    assert names(demo.out / "checkpoints") == names(swept / "tokens") == NAMES
    offline = pd.read_csv(swept / "metrics.csv")
    both = records.merge(offline, on=["step", "layer", "metric"], suffixes=("", "_again"))
    np.testing.assert_allclose(both["value_again"], both["value"], rtol=1e-6, atol=1e-12)
    printed = " ".join(demo.printed.split())
    assert f"The sweep gives the monitor's {len(records):,} numbers again" in printed
    figures = names(swept / "report" / "figures")
    assert "mean_cosine-dynamics" in figures


def test_numbers_that_differ_are_owned_up_to(records):
    other = records.assign(value=records["value"].where(records.index != records.index[7], 1e3))
    history = records.to_dict("records")
    for offline in (other, records.drop(index=records.index[7])):
        assert f"only {len(records) - 1:,} of" in compare(history, offline)


def test_paths_are_printed_as_they_are(tmp_path, printed):
    show(tmp_path / "[v2]")
    assert printed().count(f"{tmp_path}/[v2]/") == 7


@pytest.mark.usefixtures("unpainted")
def test_a_second_run_replaces_the_first_and_begins_with_the_same_numbers(demo, records, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(demo.out, out)
    (out / "mine.txt").write_text("not the demo's")
    given = ["--config", str(demo.out.parent / "tiny.yaml"), "--out", str(out), "--max-steps", "1"]
    assert main(["demo", *given]) == 0
    assert names(out / "checkpoints") == {"step0", "step1"}
    assert len(list((out / "tensorboard" / "training").glob("events*"))) == 1
    assert (out / "mine.txt").exists()
    again = pd.read_parquet(out / "history.parquet").query("step == 0 and layer_index >= 0")
    numbers = ["layer", "metric", "value", "stderr"]
    first = records.query("step == 0")
    pd.testing.assert_frame_equal(
        again[numbers].reset_index(drop=True),
        first[numbers].reset_index(drop=True),
        check_exact=True,
    )


def test_a_command_removes_only_what_it_wrote_itself(tmp_path):
    out = tmp_path / "a" / "b"

    def write(text):
        with emptied(out, "thing", ["old", "file"]):
            assert {*contents(out)} == before | {"embedgeo-thing.json"}
            (out / "old" / "x").mkdir(parents=True)
            (out / "old" / "x" / "y").write_text(text)
            (out / "file").write_text(text)

    before = set()
    write("first")
    (out / "mine").touch()
    before = {"mine"}
    write("second")
    for name, text in (("old/x/mine", "of another"), ("old/x/link", None), ("file", "edited")):
        (out / name).write_text(text) if text else (out / name).symlink_to("..")
        kept = contents(out)
        with pytest.raises(FileExistsError, match=f"did not write {name}, or not as it is now"):
            write("third")
        assert contents(out) == kept
        (out / name).unlink()
    stopped = emptied(out, "thing", ["old", "file"])
    stopped.__enter__()
    (out / "file").write_text("begun")
    assert not stopped.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
    write("fourth")


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "checkpoints").touch()
    with (
        pytest.raises(OSError, match="must be a folder that can be written"),
        emptied(tmp_path / "checkpoints" / "out", "demo", ["checkpoints"]),
    ):
        pass


def test_a_setting_that_cannot_be_is_refused_before_a_folder_is_touched():
    with pytest.raises(ValueError, match="max_steps must be more than 0; got 0"):
        DemoSettings(max_steps=0)
