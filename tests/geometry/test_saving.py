"""What is measured by hand is saved as a sweep's folder: whole, never a mixture, by rank 0, for the
same report.
"""

import copy
import json
from functools import partial

import numpy as np
import pandas as pd
import pytest
import torch

import embedgeo
from embedgeo import Anisotropy, EmbeddingMoments, IntrinsicDimension, TokenMoments
from embedgeo.report.runs import read_runs
from embedgeo.results.folder import SweepFolder
from embedgeo.results.parquet import SCHEMA
from embedgeo.sweep import SweepSettings, sweep
from tests.files import contents
from tests.models import gpt2, gpt_neox, token_batch
from tests.ranks import WORLD_SIZE, on_two_ranks
from tests.training.runs import observed_on


def metrics(dim, seed=0):
    return [
        TokenMoments(dim),
        Anisotropy(dim, spectrum=True),
        IntrinsicDimension(dim, batch_size=20, seed=seed),
    ]


def measured(build=gpt_neox, seed=0, batches=(0, 1, 2), **options):
    torch.manual_seed(seed)
    given = (token_batch(seed=batch, padding="right") for batch in batches)
    return observed_on(build().eval(), given, **{"metrics": metrics, **options})


def test_the_folder_is_that_of_a_sweep(tmp_path):
    geometry = measured(jackknife=2)
    geometry.save(tmp_path, model="lab/tiny", step=8)
    folder = SweepFolder(tmp_path)
    assert folder.done() == {"lab--tiny--step8"}
    records = folder.read("lab--tiny--step8")
    assert list(records) == SCHEMA.names
    pd.testing.assert_frame_equal(
        records[["layer", "layer_index", "width", "metric", "value", "stderr"]],
        pd.DataFrame(geometry.records()),
    )
    about = records[["model", "revision", "step", "commit", "series", "weights_sha256"]]
    assert about.drop_duplicates().values.tolist() == [["lab/tiny", "step8", 8, "", "lab/tiny", ""]]
    assert records["duplicate_of"].isna().all()
    assert folder.facts("lab--tiny--step8") == {
        "model_class": "GPTNeoXForCausalLM",
        "tables": "jackknife",
        "name": "lab--tiny--step8",
        "num_parameters": str(sum(weight.numel() for weight in geometry.model.parameters())),
    }
    assert (
        tmp_path / "tensorboard" / "tiny" / "events.out.tfevents.000000000008.lab--tiny--step8"
    ).exists()
    assert len(pd.read_csv(tmp_path / "metrics.csv")) == len(records)
    asked = json.loads((tmp_path / "manifest.json").read_text())["asked"]
    assert (asked["layers"], asked["rows"], asked["jackknife"]) == ("blocks", "tokens", 2)
    origin = geometry.origin() | geometry.origin_of_metrics()
    assert {key: str(asked[key]) for key in origin if key in asked}.items() <= origin.items()


def test_the_error_of_a_mean_over_blocks_is_of_the_same_rows_everywhere(tmp_path):
    geometry = measured(jackknife=4, skip_massive=True)
    geometry.save(tmp_path, model="a", step=0)
    table = geometry.layer_tables()["jackknife"]
    of_blocks = table[table["layer"].str.startswith("block")].groupby(["metric", "group"])
    of_means = of_blocks["deviation"].mean().unstack("group")
    expected = np.sqrt(of_means.pow(2).sum(axis=1, skipna=False)).dropna()
    assert {"Q", "anisotropy", "intrinsic_dimension"} <= {*expected.index}
    probe = [token_batch(seed=batch, padding="right") for batch in (0, 1, 2)]
    options = {"metrics": metrics, "jackknife": 4, "skip_massive": True, "probe": probe}
    with embedgeo.StepMonitor(geometry.model, **options) as monitor, monitor.step(0):
        pass
    for records in (embedgeo.load_results(tmp_path), pd.DataFrame([*monitor.history])):
        found = records[records["layer"] == "mean"].set_index("metric")["stderr"]
        assert found[expected.index].to_dict() == pytest.approx(expected.to_dict(), rel=1e-12)
    (run,) = read_runs([tmp_path])
    assert run.mean_errors("Q").loc[0].tolist() == pytest.approx([expected["Q"]], rel=1e-12)


@pytest.mark.slow
def test_steps_and_models_are_added_and_one_of_the_same_name_is_replaced(tmp_path):
    measured().save(tmp_path, model="a", step=0, save_samples=True)
    measured(seed=1).save(tmp_path, model="a", step=10, save_samples=True)
    measured(gpt2).save(tmp_path, model="b", step=0, save_samples=True)
    before = contents(tmp_path)
    again = measured(seed=2)
    with pytest.warns(
        UserWarning, match=r"save replaces a--step10, which .* has already\. To keep both"
    ) as caught:
        again.save(tmp_path, model="a", step=10, save_samples=True)
    assert [warning.filename for warning in caught] == [__file__]
    folder = SweepFolder(tmp_path)
    assert folder.done() == {"a--step0", "a--step10", "b--step0"}
    assert folder.read("a--step10")["value"].tolist() == pytest.approx(
        [record["value"] for record in again.records()], nan_ok=True
    )
    rows = embedgeo.load_sample(tmp_path, "a--step10").layers["block.01"].rows
    assert rows.equal(again.samples()["block.01"].rows)
    changed = {
        name.rpartition("/")[2]
        for name, data in contents(tmp_path).items()
        if data != before.get(name)
    }
    assert {name for name in changed if "tfevents" not in name} == {
        "a--step10.parquet",
        "a--step10.safetensors",
        "metrics.csv",
    }
    assert [(run.label.rpartition(" ")[2], run.steps) for run in read_runs([tmp_path])] == [
        ("a", [0, 10]),
        ("b", [0]),
    ]


def test_a_final_model_beside_steps_of_its_name_is_no_step_of_their_curve(tmp_path):
    for step in (0, 10, None):
        measured(seed=step or 2, batches=(0,)).save(tmp_path, model="lab/a", step=step)
    assert {path.name for path in (tmp_path / "tensorboard").iterdir()} == {"a", "a final"}
    table = embedgeo.load_results(tmp_path)[["run", "series", "revision"]].drop_duplicates()
    assert table.to_numpy().tolist() == [
        ["a", "lab/a", "step0"],
        ["a", "lab/a", "step10"],
        ["a final", "lab/a final", "main"],
    ]


@pytest.mark.parametrize(
    ("first", "second"), [(("a/b", 1), ("a--b", 1)), (("a--step5", None), ("a", 5))]
)
def test_another_checkpoint_of_the_same_file_name_is_refused(tmp_path, first, second):
    geometry = measured()
    geometry.save(tmp_path, model=first[0], step=first[1])
    before = contents(tmp_path)
    with pytest.raises(ValueError, match=f"one checkpoint of a name; .* of {first[0]}"):
        geometry.save(tmp_path, model=second[0], step=second[1])
    assert contents(tmp_path) == before


def test_saving_changes_nothing(tmp_path):
    geometry, other = measured(batches=[0]), measured(batches=[0])
    before = copy.deepcopy(geometry.compute())
    geometry.save(tmp_path, model="a", save_samples=True)
    assert str(geometry.compute()) == str(before)
    for each in (geometry, other):
        with each.probe, torch.no_grad():
            each.model(**token_batch(seed=5))
    assert str(geometry.compute()) == str(other.compute())


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"model": 3}, "model must be a name.*got 3"),
        ({"model": ""}, "model must be a name.*got ''"),
        ({"step": -1}, "step must be .*; got -1"),
        ({"step": 1.5}, "step must be .*; got 1.5"),
    ],
)
def test_a_bad_name_or_step_is_refused_before_anything_is_written(tmp_path, asked, message):
    with pytest.raises(ValueError, match=message):
        measured(batches=[0]).save(tmp_path / "new", **{"model": "a", **asked})
    assert not (tmp_path / "new").exists()


def test_what_holds_nothing_to_save_says_so(tmp_path):
    with pytest.warns(UserWarning, match="No forward pass reached"):
        empty = measured(batches=[])
    with pytest.raises(
        ValueError, match=r"something to save; no forward pass reached embed, block\.00"
    ):
        empty.save(tmp_path / "new", model="a")
    moments = measured(metrics=lambda dim: [EmbeddingMoments(dim)])
    sampled = measured(metrics=lambda dim: [Anisotropy(dim, sample_size=9)])
    for each in (moments, sampled):
        with pytest.raises(ValueError, match="save_samples needs IntrinsicDimension or Anisotropy"):
            each.save(tmp_path / "new", model="a", save_samples=True)
    assert not (tmp_path / "new").exists()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    measured(batches=[0]).save(folder, model="a")
    return folder


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"layers": lambda model: "blocks"}, "layers was 'blocks', is '.*lambda"),
        ({"rows": "mean"}, "rows was 'tokens', is 'mean'"),
        ({"ignore_token_ids": [4]}, r"ignore_token_ids was \[\], is \[4\]"),
        ({"jackknife": 2}, "jackknife was 0, is 2"),
        ({"build": lambda: gpt_neox().bfloat16()}, "dtype was 'float32', is 'bfloat16'"),
        ({"metrics": partial(metrics, seed=1)}, "IntrinsicDimension was "),
    ],
)
def test_results_of_other_settings_are_refused_and_named(saved, tmp_path, options, named):
    before, geometry = contents(saved), measured(batches=[0], **options)
    with pytest.raises(ValueError, match=f"results of one setting; .*{named}"):
        geometry.save(saved, model="b")
    assert contents(saved) == before
    geometry.save(tmp_path, model="b")
    _, other = read_runs([saved, tmp_path])
    assert bool(other.differences) is ("jackknife" not in options)


def test_a_sweep_and_other_folders_are_refused(tmp_path):
    swept = SweepFolder(tmp_path / "swept")
    swept.open({"model": ["lab/tiny"], "rows": "tokens"}, {})
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mine").touch()
    before = contents(tmp_path)
    geometry = measured(batches=[0])
    with pytest.raises(ValueError, match=r"swept, .*: .*by was None, is 'Geometry\.save'"):
        geometry.save(tmp_path / "swept", model="a")
    with pytest.raises(OSError, match="must be a folder that can be written"):
        geometry.save(tmp_path / "other" / "mine" / "in", model="a")
    assert contents(tmp_path) == before
    geometry.save(tmp_path / "saved", model="a")
    with pytest.raises(ValueError, match="a sweep folder holds results of one setting"):
        sweep(SweepSettings("anything", out=str(tmp_path / "saved")))


def saved_on_rank(rank, folder):
    geometry = measured(batches=range(rank, 5, WORLD_SIZE))
    geometry.save(folder / "both", model="a", step=3, save_samples=True)
    (folder / "file").touch()
    try:
        geometry.save(folder / "file", model="a")
    except Exception as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.slow
def test_two_ranks_save_what_one_process_saves(tmp_path):
    for name in ("ranks", "out"):
        (tmp_path / name).mkdir()
    said = on_two_ranks(saved_on_rank, tmp_path / "ranks", tmp_path / "out")
    assert "must be a folder that can be written" in said[0]
    assert said[1].startswith("RuntimeError: rank 0 could not write")
    alone = measured(batches=range(5))
    records = SweepFolder(tmp_path / "out" / "both").read("a--step3")
    sampled = ("intrinsic_dimension", "duplicate_fraction", "n_points")
    found, expected = (
        table.set_index(["layer", "metric"])["value"] for table in (records, alone.to_frame())
    )
    assert found.index.equals(expected.index)
    exact = ~found.index.isin(sampled, "metric")
    np.testing.assert_allclose(found[exact], expected[exact], rtol=1e-6, atol=1e-9)
    kept = embedgeo.load_sample(tmp_path / "out" / "both", "a--step3")
    whole = measured(batches=range(5), metrics=lambda dim: [IntrinsicDimension(dim)]).samples()
    for layer, sample in kept.layers.items():
        rows = whole[layer].rows[whole[layer].row_numbers.argsort()]  # all of them
        assert len(rows) == sample.n > 100
        assert len(sample.rows) == len(sample.row_numbers.unique()) == 20
        torch.testing.assert_close(sample.rows, rows[sample.row_numbers])
        assert sample.row_numbers.equal(kept.layers["embed"].row_numbers)
