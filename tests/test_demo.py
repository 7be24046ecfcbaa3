import math
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForCausalLM, AutoTokenizer

import embedgeo
from embedgeo.cli import main
from embedgeo.demo.command import compare, show
from embedgeo.formatting import shell_command
from embedgeo.metrics.processing import is_processed
from embedgeo.text import builtin_corpus, cut_sequences, split_held_out

pytestmark = pytest.mark.slow

SEQ_LEN = 64
STEPS = [0, 1, 2, 3, 4, 5]
TINY = {
    "max_steps": 5,
    "every_n_steps": 3,
    "num_layers": 2,
    "hidden_size": 32,
    "vocab_size": 512,
    "seq_len": SEQ_LEN,
    "batch_size": 2,
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A tiny demo run by the console script with a configuration file: its folder and what it
    printed.
    """
    folder = tmp_path_factory.mktemp("demo")
    (folder / "tiny.yaml").write_text("".join(f"{key}: {value}\n" for key, value in TINY.items()))
    script = Path(sys.executable).with_name("embedgeo")
    done = subprocess.run(
        [script, "demo", "--config", folder / "tiny.yaml", "--out", folder / "out"],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "100"},
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    happened = done.stderr.splitlines()  # what the report opens with, and nothing else
    assert "M / Q rose from" in done.stderr
    assert all(
        re.match(r"[\w /]+ (rose|fell) from [\d.]+ ± [\d.]+ at step", line) for line in happened
    ), happened
    return folder / "out", done.stdout


@pytest.fixture(scope="module")
def out(finished: tuple[Path, str]) -> Path:
    return finished[0]


@pytest.fixture(scope="module")
def records(out: Path) -> pd.DataFrame:
    return pd.read_parquet(out / "history.parquet")


def test_says_what_happened_where_it_lies_and_what_to_open(finished: tuple[Path, str]) -> None:
    out, printed = finished
    for name in ("checkpoints", "history.parquet", "probe.txt"):
        assert str(out / name) in printed
    assert f"{shell_command('tensorboard', '--logdir', out / 'tensorboard')}\n" in printed
    for word in ("embed", "block.00", "block.01", "final_norm", "M_over_Q", "anisotropy", "5/5"):
        assert word in printed


def test_saves_a_checkpoint_at_exactly_the_measured_steps(out: Path, records: pd.DataFrame) -> None:
    assert sorted(records["step"].unique()) == STEPS
    assert {folder.name for folder in (out / "checkpoints").iterdir()} == {
        f"step{step}" for step in STEPS
    }
    assert records["weights_sha256"].nunique() == len(STEPS)


def test_records_have_the_columns_of_a_sweep(records: pd.DataFrame) -> None:
    columns = (
        "model revision step commit series weights_sha256 duplicate_of layer layer_index width "
        "metric value"
    )
    assert list(records) == [*columns.split(), "stderr"]
    assert (records["revision"] == "step" + records["step"].astype(str)).all()


def test_what_is_measured_was_not_trained_on() -> None:
    train, held_out = split_held_out(builtin_corpus())
    assert not set(train.split("\n\n")) & set(held_out.split("\n\n"))


@pytest.mark.parametrize("step", STEPS)
def test_a_checkpoint_gives_the_online_numbers_again(
    out: Path, records: pd.DataFrame, step: int
) -> None:
    folder = out / "checkpoints" / f"step{step}"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    probe = cut_sequences(
        [tokenizer((out / "probe.txt").read_text(encoding="utf-8"))["input_ids"]], SEQ_LEN
    )
    with torch.no_grad(), embedgeo.observe(model) as geometry:
        for batch in probe.split(8):
            model(input_ids=batch)
    online = records[records["step"] == step].set_index(["layer", "metric"])["value"]
    offline = geometry.to_frame().set_index(["layer", "metric"])["value"]
    assert sorted(online.index) == sorted(offline.index)
    for key, value in offline.items():
        expected = pytest.approx(value, rel=1e-6, abs=1e-12, nan_ok=True)
        assert online[key] == expected, key


def test_the_sweep_gives_the_monitors_numbers_again_and_says_so(
    finished: tuple[Path, str], records: pd.DataFrame
) -> None:
    out, printed = finished
    offline = pd.read_csv(out / "sweep" / "metrics.csv")
    both = records.merge(
        offline, on=["step", "layer", "metric"], suffixes=("", "_again"), validate="one_to_one"
    )
    more = offline[(offline["layer"] != "model") & ~offline["metric"].map(is_processed)]
    assert len(both) == len(records) == len(more)
    np.testing.assert_allclose(both["value_again"], both["value"], rtol=1e-6, atol=1e-12)
    assert both["weights_sha256"].equals(both["weights_sha256_again"])
    assert f"The sweep gives the monitor's {len(records):,} numbers again" in " ".join(
        printed.split()
    )
    for tables in ("tokens", "projections"):
        assert {path.stem for path in (out / "sweep" / tables).iterdir()} == {
            f"step{step}" for step in STEPS
        }
    figures = {path.name for path in (out / "sweep" / "report" / "figures").iterdir()}
    assert {"tokens-projection.png", "after-processing.png"} <= figures


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
    out: Path, records: pd.DataFrame
) -> None:
    events = EventAccumulator(str(out / "tensorboard" / "training"), size_guidance={"scalars": 0})
    events.Reload()
    tags = {
        f"geometry.{metric}/{layer}"
        for metric, layer in zip(records["metric"], records["layer"], strict=True)
    }
    tags |= {
        f"geometry.{metric}/mean"
        for metric in records.loc[records["layer"].str.startswith("block"), "metric"]
    }
    assert set(events.Tags()["scalars"]) == tags | {"loss", "epoch"}
    online = records.set_index(["step", "layer", "metric"])["value"]
    for scalar in events.Scalars("geometry.M_over_Q/block.01"):
        assert math.isclose(scalar.value, online[scalar.step, "block.01", "M_over_Q"], rel_tol=1e-6)
    for tag in tags:
        assert [scalar.step for scalar in events.Scalars(tag)] == STEPS
    assert "custom_scalars__config__" in events.Tags()["tensors"]


@pytest.mark.usefixtures("unpainted")
def test_a_second_run_replaces_the_first_with_the_same_numbers(
    out: Path,
    records: pd.DataFrame,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # it has tests of its own
    monkeypatch.setattr("embedgeo.demo.command.write_report", lambda folders: None)
    (out / "checkpoints" / "step999").mkdir()
    (out / "mine.txt").write_text("not the demo's")
    assert main(["demo", "--config", str(out / "demo.yaml"), "--out", str(out)]) == 0
    assert capsys.readouterr().err == ""
    assert {folder.name for folder in (out / "checkpoints").iterdir()} == {
        f"step{step}" for step in STEPS
    }
    assert len(list((out / "tensorboard" / "training").glob("events*"))) == 1
    assert (out / "mine.txt").exists()
    again = pd.read_parquet(out / "history.parquet")
    pd.testing.assert_frame_equal(again, records, check_exact=True)
