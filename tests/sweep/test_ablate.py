"""Ablation over checkpoints: a sweep like any other."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from embedgeo.cli import main
from embedgeo.report.runs import read_folder
from embedgeo.studies.ablation_figures import ablation_figures
from tests.sweep.sweeping import ablate, sweep
from tests.sweep.tiny import local_run, model, tokenizer_files, write_files


def changes(out):
    records = pd.read_csv(f"{out}/metrics.csv")
    return records[records["metric"].str.startswith("loss_change_")]


def test_the_numbers_of_directions_are_chosen_for_both_and_drawn(tmp_path, options, capsys):
    run = local_run(tmp_path / "run", (0,))
    chosen = {"removed_directions": (5, 2), "layers": "block.00"}
    assert ablate(str(run), **options, after_processing=True, **chosen) == 0
    printed = capsys.readouterr().out
    assert "38 forward passes (2 batches, 1 + 18 × 1 layers)" in printed
    metrics = set(pd.read_csv(f"{options['out']}/metrics.csv")["metric"])
    numbers = {
        int(found[1])
        for found in map(re.compile(r".*_(?:top|without_)(\d+)_.*").fullmatch, metrics)
        if found
    }
    assert numbers == {2, 5}
    (data,) = ablation_figures(read_folder(Path(options["out"]))[0])
    names = [line.get_label() for line in data.figure.legends[0].get_lines()]
    assert "no top 2 directions" in names
    assert "no top 5 coordinates" in names


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"removed_directions": (1,)}, "which is not asked for"),
        ({"removed_directions": (0,)}, r"numbers, 1 or more, as 1,3,10; got \(0,\)"),
        ({"removed_directions": (3, 3), "after_processing": True}, "top must be distinct numbers"),
    ],
)
def test_wrong_numbers_of_directions_are_refused_before_anything_is_measured(
    tmp_path, options, asked, message
):
    run = local_run(tmp_path / "run", (0,))
    with pytest.raises(ValueError, match=message):
        sweep(str(run), **options, **asked)


def test_the_change_of_the_loss_is_printed(tmp_path, options):
    run = local_run(tmp_path / "run", (0, 8))
    asked = [f"--{key.replace('_', '-')}={value}" for key, value in options.items()]
    command = [sys.executable, "-m", "embedgeo.cli", "ablate", "--model", str(run), *asked]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    (head,) = [line for line in done.stdout.splitlines() if "means over blocks" in line]
    (row,) = [line for line in done.stdout.splitlines() if line.startswith("    2/2")]
    found = changes(options["out"]).query(
        "step == 8 and layer != 'embed' and layer != 'final_norm'"
    )
    for metric, heading in (
        ("without_offset", "Δ no offset"),
        ("without_context", "Δ no context"),
        ("as_noise", "Δ Gaussian rows"),
    ):
        mean = found[found["metric"] == f"loss_change_{metric}"]["value"].mean()
        end = head.index(heading) + len(heading)
        assert row[:end].split()[-1] == f"{mean:.4g}"


def test_an_encoder_has_the_masks_of_its_loss(tmp_path, options):
    run = local_run(tmp_path / "run", (0,), kind="bert")
    assert ablate(str(run), **options) == 0
    found = changes(options["out"])
    assert len(found)
    assert found["value"].notna().all()


def test_a_model_without_a_head_fails_with_the_reason(tmp_path, options, capsys):
    folder = tmp_path / "run" / "step0"
    model(0).gpt_neox.save_pretrained(folder)
    write_files(folder, tokenizer_files())
    assert ablate(str(tmp_path / "run"), **options) == 3
    assert "language model head" in capsys.readouterr().out


@pytest.mark.slow
def test_two_ranks_give_what_one_gives(tmp_path, options):
    run = str(local_run(tmp_path / "run", (8,)))
    one, two = (
        {**options, "batch_size": 1, "out": str(tmp_path / name)} for name in ("one", "two")
    )
    given = [[f"--{name.replace('_', '-')}={each[name]}" for name in each] for each in (one, two)]
    assert main(["ablate", "--model", run, *given[0]]) == 0
    ddp = ["--trainer.devices=2", "--trainer.strategy=ddp", "--trainer.accelerator=cpu"]
    command = [sys.executable, "-m", "embedgeo.cli", "ablate", "--model", run, *given[1], *ddp]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert ended.returncode == 0, ended.stderr
    a, b = (changes(out["out"]) for out in (one, two))
    np.testing.assert_allclose(a["value"], b["value"], rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(a["stderr"], b["stderr"], rtol=1e-5, atol=1e-6)
