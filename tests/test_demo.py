import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from embedgeo.cli import main
from embedgeo.demo.run import compare, make_empty
from embedgeo.formatting import shell_command
from embedgeo.text import builtin_corpus, split_held_out
from tests.files import contents
from tests.shared_runs import DEMO_STEPS, Demo

pytestmark = pytest.mark.slow

NAMES = {f"step{step}" for step in DEMO_STEPS}


@pytest.fixture
def records(demo: Demo) -> pd.DataFrame:
    """Those of layers."""
    return pd.read_parquet(demo.out / "history.parquet").query("layer_index >= 0")


def names(folder: Path) -> set[str]:
    return {path.stem for path in folder.iterdir()}


def test_says_what_happened_where_it_lies_and_what_to_open(demo: Demo) -> None:
    for name in ("checkpoints", "history.parquet", "probe.txt"):
        assert str(demo.out / name) in demo.printed
    assert f"{shell_command('tensorboard', '--logdir', demo.out / 'tensorboard')}\n" in demo.printed
    assert "5/5" in demo.printed


def test_records_are_of_the_checkpoints(demo: Demo, records: pd.DataFrame) -> None:
    assert sorted(records["step"].unique()) == DEMO_STEPS
    assert names(demo.out / "checkpoints") == NAMES


def test_what_is_measured_was_not_trained_on() -> None:
    train, held_out = split_held_out(builtin_corpus())
    assert not set(train.split("\n\n")) & set(held_out.split("\n\n"))


def test_the_sweep_gives_the_monitors_numbers_again_and_says_so(
    demo: Demo, records: pd.DataFrame
) -> None:
    swept = demo.out / "sweep"
    offline = pd.read_csv(swept / "metrics.csv")
    both = records.merge(
        offline, on=["step", "layer", "metric"], suffixes=("", "_again"), validate="one_to_one"
    )
    assert len(both) == len(records)
    np.testing.assert_allclose(both["value_again"], both["value"], rtol=1e-6, atol=1e-12)
    printed = " ".join(demo.printed.split())
    assert f"The sweep gives the monitor's {len(records):,} numbers again" in printed
    assert names(swept / "tokens") == NAMES
    figures = names(swept / "report" / "figures")
    assert {"tokens-V-against-M", "mean_cosine_centered-dynamics"} <= figures


def test_numbers_that_differ_are_owned_up_to(records: pd.DataFrame) -> None:
    other = records.assign(value=records["value"].where(records.index != records.index[7], 1e3))
    history = records.to_dict("records")
    for offline in (other, records.drop(index=records.index[7])):
        assert f"only {len(records) - 1:,} of" in compare(history, offline)


@pytest.mark.usefixtures("unpainted")
def test_a_second_run_replaces_the_first_and_begins_with_the_same_numbers(
    demo: Demo, records: pd.DataFrame, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    shutil.copytree(demo.out, out)
    (out / "mine.txt").write_text("not the demo's")
    given = ["--config", str(out / "demo.yaml"), "--out", str(out), "--max-steps", "1"]
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


def test_only_an_earlier_result_is_emptied(tmp_path: Path) -> None:
    out = tmp_path / "a" / "b"
    for is_earlier in (False, True):
        make_empty(out / "mark", "new", "thing", remove=["old", "file"])
        assert (out / "mark").read_text() == "new"
        assert {*contents(out)} == {"mark", *(["mine"] if is_earlier else [])}
        for name in ("old/x/y", "file", "mine"):
            (out / name).parent.mkdir(parents=True, exist_ok=True)
            (out / name).touch()
    (out / "mark").unlink()
    before = {*contents(out)}
    with pytest.raises(FileExistsError, match=r"or an earlier thing; .* holds something else"):
        make_empty(out / "mark", "new", "thing", remove=["old"])
    assert {*contents(out)} == before
    with pytest.raises(OSError, match="must be a folder that can be written"):
        make_empty(out / "mine" / "mark", "new", "thing", remove=["old"])
