"""`embedgeo drift`: what saved rows say of the same tokens at other checkpoints and layers."""

import math
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch

from embedgeo import load_results
from embedgeo.cli import main
from embedgeo.formatting import shell_command
from embedgeo.results.folder import SweepFolder, cka_file, drift_file
from embedgeo.results.parquet import to_frame
from embedgeo.results.records import Record
from embedgeo.results.samples import LayerSample
from embedgeo.studies.representations import debiased_cka, drift_values, linearity_values
from tests.data import gaussian, generator

N, DIM = 60, 4
LAYERS = ("embed", "block.00", "block.01")
DRIFT = ("cka", "procrustes", "neighbor_overlap")


def rows_at(step, layer):
    return (
        gaussian(N, DIM, seed=1)
        + 0.1 * step * gaussian(N, DIM, seed=2 + layer)
        + layer * gaussian(N, DIM, seed=9)
    )


def write(folder, step, *, layers=LAYERS, numbers=None, name=None, has_step=True, **more):
    """A checkpoint whose samples are of these row numbers, each layer and step in the same
    order.
    """
    numbers = torch.arange(N) if numbers is None else numbers
    records = [
        Record(layer=layer, layer_index=i, width=DIM, metric="Q", value=1.0 + step, stderr=math.nan)
        for i, layer in enumerate(layers)
    ]
    sample = {
        layer: LayerSample(N, rows=rows_at(step, i)[numbers].float(), row_numbers=numbers.clone())
        for i, layer in enumerate(layers)
    }
    about = {"model": "lab/tiny", "revision": name or f"step{step}", "step": step, "series": "step"}
    about |= {"commit": "", "weights_sha256": str(step), "duplicate_of": None} | more
    facts = {} if has_step else {"has_step": "false"}
    SweepFolder(folder).write(
        name or f"step{step}", to_frame(records, **about), sample=sample, facts=facts
    )


@pytest.fixture
def folder(tmp_path):
    SweepFolder(tmp_path).open({"model": ["lab/tiny"]}, {})
    for step in (0, 1, 4):
        write(tmp_path, step)
    return tmp_path


def drift(folder, *options):
    return main(["drift", str(folder), *options])


def records(folder, step):
    return load_results(folder).set_index(["step", "layer", "metric"])["value"].loc[step]


def test_the_command_says_what_it_has_found_and_where(folder):
    command = [sys.executable, "-m", "embedgeo.cli", "drift", str(folder), "--rows", "50"]
    for num_new in (3, 0):
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        *lines, count, report = done.stdout.splitlines()
        assert len(lines) == num_new
        if num_new:
            found = records(folder, 4).unstack("metric").loc[["block.00", "block.01"]].mean()
            assert lines[2].startswith(
                f"step4, cka_to_previous {found['cka_to_previous']:.4g}, cka_to"
            )
        assert count == f"{num_new} of 3 checkpoints compared now: {folder / 'drift'}"
        assert report == shell_command("embedgeo", "report", str(folder))
        assert done.stderr == ""


def test_a_checkpoint_is_compared_with_the_one_before_and_the_first_and_a_layer_with_that_below(
    folder,
):
    assert drift(folder, "--rows", "50") == 0
    expected = {}
    for i, layer in enumerate(LAYERS):
        here, below = (rows_at(4, at)[:50].float() for at in (i, i - 1))
        others = {"previous": rows_at(1, i)[:50].float(), "first": rows_at(0, i)[:50].float()}
        if i:
            others["below"] = below
            expected |= {(layer, key): v for key, v in linearity_values(below, here).items()}
        for other, there in others.items():
            for key, value in drift_values(there, here).items():
                expected[layer, f"{key}_to_{other}"] = value
    found = records(folder, 4)
    found = found.drop("mean", level="layer").drop("Q", level="metric")
    assert found.to_dict() == pytest.approx(
        {key: float(v) for key, v in expected.items()}, rel=1e-9
    )
    first = records(folder, 0)
    assert set(first.index.get_level_values("metric")) == {
        "Q", "linearity", "linearity_without_residual", *(f"{key}_to_below" for key in DRIFT)
    }  # fmt: skip
    written = pd.read_csv(folder / "metrics.csv")
    assert len(written) == 9 + 2 * 3 * 6 + 3 * 2 * 5
    assert set(written.columns) == set(SweepFolder(folder).read("step0").columns)


def test_the_similarity_of_steps_with_steps_and_of_layers_with_layers(folder):
    assert drift(folder, "--rows", "50") == 0
    table = (
        pd.read_parquet(cka_file(folder))
        .set_index(["step_a", "layer_a", "step_b", "layer_b"])
        .sort_index()
    )
    of_steps, of_layers = 3 * 6, 3 * 6
    assert len(table) == of_steps + of_layers
    assert set(table["n"]) == {50}
    for (step, layer, other_step, other_layer), value in table["cka"].items():
        x, y = (
            rows_at(at, LAYERS.index(name))[:50].float()
            for at, name in ((step, layer), (other_step, other_layer))
        )
        assert value == pytest.approx(float(debiased_cka(x, y)), abs=1e-9)
    assert (4, "block.00", 4, "block.01") in table.index
    assert (0, "block.00", 4, "block.00") in table.index
    assert (0, "block.00", 4, "block.01") not in table.index


def test_rows_are_matched_by_their_numbers(folder, capsys):
    order = torch.randperm(N, generator=generator(3))[:40]
    write(folder, 1, numbers=order)
    assert drift(folder) == 0
    found = records(folder, 4)["block.00"]
    kept = order.sort().values
    expected = drift_values(rows_at(1, 1)[kept].float(), rows_at(4, 1)[kept].float())
    for key, value in expected.items():
        assert found[f"{key}_to_previous"] == pytest.approx(float(value), rel=1e-9)
    assert "compared down to 40 rows instead of 1024" in capsys.readouterr().out


def test_what_is_there_is_not_computed_again_until_a_sample_changes(folder):
    assert drift(folder) == 0
    before = {path: path.stat().st_mtime_ns for path in (*folder.glob("drift/*"), cka_file(folder))}
    assert len(before) == 4
    assert drift(folder) == 0
    assert {path: path.stat().st_mtime_ns for path in before} == before
    write(folder, 4, numbers=torch.arange(30))
    write(folder, 9)
    assert drift(folder) == 0
    changed = {path.stem for path, time in before.items() if path.stat().st_mtime_ns != time}
    assert changed == {"step4", "cka"}
    assert drift_file(folder, "step9").exists()
    assert drift(folder, "--rows", "20") == 0
    assert all(path.stat().st_mtime_ns != time for path, time in before.items())


def test_stopped_at_any_file_it_goes_on_and_ends_with_the_same(folder, monkeypatch):
    assert drift(folder) == 0
    whole = {path: pd.read_parquet(path) for path in (*folder.glob("drift/*"), cka_file(folder))}
    for path in whole:
        path.unlink()
    replace = Path.replace

    def stopping(path, target):
        if len([*folder.glob("drift/[!.]*")]) == 2:
            raise KeyboardInterrupt
        replace(path, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", stopping)
        assert drift(folder) == 130
    assert len([*folder.glob("drift/*")]) == 2
    assert drift(folder) == 0
    for path, before in whole.items():
        pd.testing.assert_frame_equal(pd.read_parquet(path), before, rtol=1e-9)


def test_final_models_sides_and_means_are_not_mixed(folder):
    sides = (
        "encoder.embed",
        "encoder.block.00",
        "decoder.embed",
        "decoder.block.00",
        "mean(last4)",
    )
    write(folder, 0, layers=sides, name="final", has_step=False, model="lab/other", series="final")
    assert drift(folder) == 0
    final = SweepFolder(folder).runs()
    (found,) = (checkpoints["final"] for checkpoints in final.values() if "final" in checkpoints)
    assert set(found.loc[found["metric"] == "cka_to_below", "layer"]) == {
        "encoder.block.00",
        "decoder.block.00",
    }
    assert not found["metric"].str.contains("previous|first").any()
    table = pd.read_parquet(cka_file(folder))
    pairs = table[table["checkpoint_a"] == "final"]
    assert set(zip(pairs["layer_a"], pairs["layer_b"], strict=True)) == {
        (a, b)
        for side in (sides[:2], sides[2:4])
        for a, b in ((side[0], side[0]), side, (side[1], side[1]))
    }


def test_without_rows_in_common_nothing_is_defined(folder, capsys):
    write(folder, 1, numbers=torch.arange(30))
    write(folder, 4, numbers=torch.arange(30, N))
    assert drift(folder) == 0
    found = records(folder, 4)["embed"]
    assert math.isnan(found["cka_to_previous"])
    assert math.isfinite(found["cka_to_first"])
    assert "compared down to 0 rows" in capsys.readouterr().out
    table = pd.read_parquet(cka_file(folder))
    assert table.loc[table["step_a"] != table["step_b"], "cka"].isna().all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["nowhere"], "drift takes the folder of a sweep; nowhere is none"),
        (["."], "with saved samples; . has none. Sweep with --save-samples true"),
        ([".", "--rows", "3"], "rows must be at least 4, or no similarity is defined; got 3"),
    ],
)
def test_what_cannot_be_compared_is_refused(options, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["drift", *options]) == 2
    assert message in capsys.readouterr().err


def test_a_damaged_sample_is_named(folder, capsys):
    (folder / "samples" / "step1.safetensors").write_bytes(b"nothing")
    assert drift(folder) == 2
    assert "step1.safetensors" in capsys.readouterr().err
