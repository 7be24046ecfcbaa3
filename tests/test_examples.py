import math
import os
import re
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest

from embedgeo.cli import main
from examples.alarm import Alarm
from tests.files import ROOT, events_of


def run_example(name, *arguments):
    return subprocess.run(
        [sys.executable, ROOT / "examples" / name, *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=600,
        check=True,
    )


def test_examples_are_listed(printed):
    assert main(["examples"]) == 0
    listed = printed().partition("\n\n")[0].splitlines()
    assert sorted(listed) == sorted({path.stem for path in (ROOT / "examples").glob("[!.]*.*")})


def test_an_example_is_written_with_what_it_is_run_with_and_replaces_nothing(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    names = ["pretrain.py", "pretrain.yaml"]
    (tmp_path / names[1]).write_text("mine")
    assert main(["examples", "pretrain"]) == 2
    said = (
        "an example never replaces a file; there already: pretrain.yaml. Rename or remove that "
        "first."
    )
    assert capsys.readouterr().err == f"embedgeo: error: {said}\n"
    assert [path.name for path in tmp_path.iterdir()] == names[1:]
    (tmp_path / names[1]).unlink()
    assert main(["examples", "pretrain"]) == 0
    assert capsys.readouterr().out.splitlines() == [f"written: {name}" for name in names]
    for name in names:
        assert (tmp_path / name).read_bytes() == (ROOT / "examples" / name).read_bytes()


def test_an_unknown_example_is_answered_with_those_there_are(
    capsys,
):
    assert main(["examples", "plain_lop"]) == 2
    assert "must be one of accelerate_loop, " in (said := capsys.readouterr().err)
    assert said.endswith("got 'plain_lop'.\n")


@pytest.mark.slow
def test_pretrain_runs_with_the_monitor_that_its_configuration_adds(tmp_path):
    text = tmp_path / "my.txt"
    text.write_text(
        "\n\n".join(f"Paragraph {i} says that {i} is followed by {i + 1}." for i in range(400))
    )
    small = {
        "--data.files": f"[{text}]",
        "--data.vocab_size": 300,
        "--data.seq_len": 32,
        "--model.vocab_size": 300,
        "--model.hidden_size": 32,
        "--model.num_layers": 4,
        "--model.num_heads": 2,
        "--trainer.max_steps": 4,
        "--trainer.accelerator": "cpu",
        "--trainer.logger.save_dir": tmp_path,
    }
    done = run_example(
        "pretrain.py",
        "fit",
        "--config",
        ROOT / "examples" / "pretrain.yaml",
        *(x for kv in small.items() for x in kv),
    )
    said = [line for line in done.stderr.splitlines() if line.startswith("GeometryMonitor: ")]
    assert ["written to" in line for line in said] == [True] + [False] * (len(said) - 1)
    assert said[-1].endswith(f"report {tmp_path / 'pretrain' / 'version_0'}")
    events = events_of(tmp_path / "pretrain" / "version_0")
    layers = ("embed", "block.00", "block.03", "mean_last4")
    assert {f"geometry.anisotropy/{layer}" for layer in layers} <= set(events.Tags()["scalars"])
    assert [scalar.step for scalar in events.Scalars("geometry.anisotropy/embed")] == [0, 1, 2, 4]
    history = pd.read_parquet(tmp_path / "pretrain" / "version_0" / "history.parquet")
    assert sorted(history["step"].unique()) == [0, 1, 2, 4]


@pytest.mark.slow
def test_observe_prints_numbers_that_the_documentation_defines():
    printed = run_example("observe.py").stdout
    for word in ("embed", "block.03", "final_norm", "gpt_neox.layers.00.mlp", "mean(last4)"):
        assert word in printed
    columns = [line.split()[1:] for line in printed.splitlines() if line.startswith("metric ")]
    assert len(columns) == 2
    page = (ROOT / "docs" / "definitions.md").read_text()
    defined = set(re.findall(r"`(\w+)`", page))
    assert {name for names in columns for name in names} <= defined
    assert "Random weights should show:" in printed


@pytest.mark.slow
def test_the_alarm_warns_of_the_damage_and_of_nothing_before():
    warned = re.findall(
        r"UserWarning: step (\d+): (\w+) at ([\w.]+) is", run_example("alarm.py").stderr
    )
    assert {int(step) for step, *_ in warned} <= {61, 62, 63}
    assert {("anisotropy", "block.00"), ("anisotropy", "mean")} <= {
        (key, at) for _, key, at in warned
    }


def test_a_lost_number_alarms_once_and_a_resumed_alarm_goes_on():
    noise = np.random.default_rng(0).standard_normal(60).tolist()
    values = [*noise[:50], 30.0, 31.0, math.nan, math.nan]
    whole, first, second = (Alarm(lambda said: None, ["x"]) for _ in range(3))
    for step, value in enumerate(values):
        record = {"metric": "x", "layer": "mean", "value": value}
        whole(step, [record, record | {"layer": "embed"}])
        if step == 45:
            second.load_state_dict(first.state_dict())
        (first if step < 45 else second)(step, [record])
    assert [(each.step, each.layer) for each in whole.departures] == [(51, "mean"), (52, "mean")]
    assert str(second.departures) == str(whole.departures)
