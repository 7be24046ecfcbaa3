"""Ablation over checkpoints: a sweep like any other."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import embedgeo
from embedgeo.cli import main
from embedgeo.report.figures import ablation_figures
from embedgeo.report.runs import read_folder
from embedgeo.studies.ablation import replacements
from tests.sweep.sweeping import ablate, sweep
from tests.sweep.tiny import (
    TEXT,
    local_run,
    model,
    tokenize_sequences,
    tokenizer_files,
    tokenizer_of,
    write_files,
)


def changes(out):
    records = pd.read_csv(f"{out}/metrics.csv")
    return records[records["metric"].str.startswith("loss_change_")]


@pytest.mark.slow
def test_a_sweep_with_ablation_has_the_values_of_the_function(tmp_path, options):
    run = local_run(tmp_path / "run", (8,))
    arguments = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    assert main(["ablate", "--model", str(run), *arguments]) == 0
    found = changes(options["out"])
    assert set(found["metric"]) == {
        "loss_change_identity",
        *(
            f"loss_change_{name}{suffix}"
            for name in replacements()
            for suffix in ("", "_after_first")
        ),
    }
    assert (found[found["metric"] == "loss_change_identity"]["value"] == 0).all()
    ids = tokenize_sequences(
        ["\n".join(TEXT)], tokenizer_of(tokenizer_files()), seq_len=16, num_tokens=64
    )
    for record in embedgeo.ablation(model(8), [ids], verbose=False):
        if record["layer"] != "model":
            own = found[(found["step"] == 8) & (found["layer"] == record["layer"])]
            own = own[own["metric"] == record["metric"]]
            assert own["value"].item() == pytest.approx(record["value"], abs=1e-6)
            assert own["stderr"].item() == pytest.approx(record["stderr"], abs=1e-6)
            assert own["layer_index"].item() == record["layer_index"]


def test_the_number_of_passes_is_said_and_the_share_of_unseen_types(tmp_path, options, capsys):
    run = local_run(tmp_path / "run", (0,))
    assert ablate(str(run), **options) == 0
    printed = capsys.readouterr().out
    assert "178 forward passes (2 batches, 1 + 22 × 4 layers)" in printed
    assert "unseen_type_share" in printed


def test_the_numbers_of_directions_are_chosen_for_both_and_drawn(tmp_path, options, capsys):
    run = local_run(tmp_path / "run", (0,))
    chosen = {"removed_directions": (5, 2), "layers": "block.00"}
    assert ablate(str(run), **options, after_processing=True, **chosen) == 0
    assert "38 forward passes (2 batches, 1 + 18 × 1 layers)" in capsys.readouterr().out
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
        (
            {"removed_directions": (0,)},
            r"numbers, 1 or more, as 1,3,10; got \(0,\)",
        ),
        ({"removed_directions": (3, 3), "after_processing": True}, "top must be distinct numbers"),
    ],
)
def test_wrong_numbers_of_directions_are_refused_before_anything_is_measured(
    tmp_path, options, asked, message
):
    run = local_run(tmp_path / "run", (0,))
    with pytest.raises(ValueError, match=message):
        sweep(str(run), **options, **asked)


@pytest.mark.slow
def test_shards_and_a_sweep_that_goes_on_end_with_the_same_values(tmp_path, options):
    run = local_run(tmp_path / "run", (0, 1, 2))
    whole = {**options, "out": str(tmp_path / "whole")}
    assert ablate(str(run), **whole) == 0
    for shard in ("0/2", "1/2"):
        assert ablate(str(run), **options, shard=shard) == 0
    (tmp_path / "out" / "checkpoints" / "step1.parquet").unlink()
    assert ablate(str(run), **options) == 0
    pd.testing.assert_frame_equal(changes(options["out"]), changes(whole["out"]))


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
    assert ablate(run, **one) == 0
    arguments = [f"--{name.replace('_', '-')}={value}" for name, value in two.items()]
    ddp = ["--trainer.devices=2", "--trainer.strategy=ddp", "--trainer.accelerator=cpu"]
    command = [sys.executable, "-m", "embedgeo.cli", "ablate", "--model", run, *arguments, *ddp]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr
    a, b = (changes(out["out"]) for out in (one, two))
    np.testing.assert_allclose(a["value"], b["value"], rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(a["stderr"], b["stderr"], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_a_sweep_has_the_logit_lens_of_the_function_and_draws_it_over_depth(tmp_path, options):
    run = local_run(tmp_path / "run", (8,))
    asked = {**options, "layers": ["block.01", "final_norm", "block.00"]}
    assert sweep(str(run), **asked, logit_lens=True) == 0
    records = pd.read_csv(f"{options['out']}/metrics.csv")
    found = records[records["metric"] == "logit_lens_loss"].set_index("layer")
    ids = tokenize_sequences(
        ["\n".join(TEXT)], tokenizer_of(tokenizer_files()), seq_len=16, num_tokens=64
    )
    expected = {each["layer"]: each for each in embedgeo.logit_lens(model(8), [ids])}
    assert set(found.index) == {"block.00", "block.01"}
    for layer, own in found.iterrows():
        assert own["value"] == pytest.approx(expected[layer]["value"], abs=1e-6)
        assert own["stderr"] == pytest.approx(expected[layer]["stderr"], abs=1e-6)
        others = records[(records["layer"] == layer) & (records["metric"] == "Q")]
        assert own["layer_index"] == others["layer_index"].item()
    loss = records[(records["layer"] == "model") & (records["metric"] == "loss")]["value"].item()
    assert found.loc["block.01", "value"] == pytest.approx(loss, abs=1e-6)
    assert main(["report", options["out"]]) == 0
    drawn = pd.read_csv(
        f"{options['out']}/report/figures/logit_lens_loss-profile.csv"
    ).select_dtypes("number")
    assert all(np.isclose(drawn, value, rtol=1e-5).any() for value in found["value"])
