import math
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from embedgeo.cli import main
from embedgeo.demo.command import compare, show
from embedgeo.formatting import shell_command
from embedgeo.metrics.processing import is_processed
from embedgeo.results.events import is_logged
from embedgeo.text import builtin_corpus, split_held_out
from tests.shared_runs import DEMO_STEPS, Demo

pytestmark = pytest.mark.slow

NAMES = {f"step{step}" for step in DEMO_STEPS}


@pytest.fixture
def records(demo: Demo) -> pd.DataFrame:
    return pd.read_parquet(demo.out / "history.parquet")


def names(folder: Path) -> set[str]:
    return {path.stem for path in folder.iterdir()}


def test_says_what_happened_where_it_lies_and_what_to_open(demo: Demo) -> None:
    for name in ("checkpoints", "history.parquet", "probe.txt"):
        assert str(demo.out / name) in demo.printed
    assert f"{shell_command('tensorboard', '--logdir', demo.out / 'tensorboard')}\n" in demo.printed
    for word in ("embed", "block.00", "block.01", "final_norm", "M_over_Q", "anisotropy", "5/5"):
        assert word in demo.printed


def test_records_are_of_the_checkpoints_and_have_the_columns_of_a_sweep(
    demo: Demo, records: pd.DataFrame
) -> None:
    assert sorted(records["step"].unique()) == DEMO_STEPS
    assert names(demo.out / "checkpoints") == NAMES
    assert records["weights_sha256"].nunique() == len(DEMO_STEPS)
    columns = (
        "model revision step commit series weights_sha256 duplicate_of layer layer_index width "
        "metric value stderr"
    )
    assert list(records) == columns.split()
    assert (records["revision"] == "step" + records["step"].astype(str)).all()


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
    more = offline[(offline["layer"] != "model") & ~offline["metric"].map(is_processed)]
    assert len(both) == len(records) == len(more)
    np.testing.assert_allclose(both["value_again"], both["value"], rtol=1e-6, atol=1e-12)
    assert both["weights_sha256"].equals(both["weights_sha256_again"])
    printed = " ".join(demo.printed.split())
    assert f"The sweep gives the monitor's {len(records):,} numbers again" in printed
    assert names(swept / "tokens") == names(swept / "projections") == NAMES
    assert {"tokens-projection", "after-processing"} <= names(swept / "report" / "figures")


def test_numbers_that_differ_are_owned_up_to(records: pd.DataFrame) -> None:
    other = records.assign(
        value=records["value"].where(records.index != 7, records["value"] * 1.01)
    )
    assert f"only {len(records) - 1:,} of" in compare(records, other)
    assert f"only {len(records) - 1:,} of" in compare(records, records.drop(index=7))


def test_a_run_that_broke_down_is_shown_too(
    records: pd.DataFrame, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = records["value"].where(records["metric"] != "M_over_Q")
    show(Console(width=100), tmp_path, records.assign(value=broken))
    assert "undefined" in capsys.readouterr().out


def test_tensorboard_holds_the_contracts_tags_at_the_measured_steps(
    demo: Demo, records: pd.DataFrame
) -> None:
    path = demo.out / "tensorboard" / "training"
    events = EventAccumulator(str(path), size_guidance={"scalars": 0}).Reload()
    logged = records[[is_logged(each, "headlines") for each in records.to_dict("records")]]
    tags = {
        f"geometry.{metric}/{layer}"
        for metric, layer in zip(logged["metric"], logged["layer"], strict=True)
    }
    assert {"geometry.Q/embed", "geometry.anisotropy/block.01"} <= tags
    of_blocks = logged.loc[logged["layer"].str.startswith("block"), "metric"]
    tags |= {f"geometry.{metric}/mean" for metric in of_blocks}
    assert set(events.Tags()["scalars"]) == tags | {"loss", "epoch"}
    online = records.set_index(["step", "layer", "metric"])["value"]
    for scalar in events.Scalars("geometry.M_over_Q/block.01"):
        assert math.isclose(scalar.value, online[scalar.step, "block.01", "M_over_Q"], rel_tol=1e-6)
    for tag in tags:
        assert [scalar.step for scalar in events.Scalars(tag)] == DEMO_STEPS
    assert "custom_scalars__config__" in events.Tags()["tensors"]


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
    again = pd.read_parquet(out / "history.parquet").query("step == 0")
    numbers = ["layer", "metric", "value", "stderr"]
    first = records.query("step == 0")
    pd.testing.assert_frame_equal(again[numbers], first[numbers], check_exact=True)
