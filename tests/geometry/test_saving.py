"""What is measured by hand is saved as a sweep's folder: whole, never a mixture, by rank 0, for the
same report.
"""

import copy
import json

import numpy as np
import pandas as pd
import pytest
import torch

import embedgeo
from embedgeo import (
    Anisotropy,
    EmbeddingMoments,
    IntrinsicDimension,
    OutlierCoordinates,
    TokenMoments,
    observe,
)
from embedgeo.report import write_report
from embedgeo.report.runs import read_runs
from embedgeo.results.folder import SweepFolder
from embedgeo.results.parquet import SCHEMA, TABLES, read_table
from embedgeo.sweep import SweepSettings, sweep
from tests.docs.blocks import blocks
from tests.files import contents
from tests.models import gpt2, gpt_neox, token_batch
from tests.ranks import WORLD_SIZE, on_two_ranks


def metrics(dim):
    return [
        TokenMoments(dim),
        Anisotropy(dim, spectrum=True),
        IntrinsicDimension(dim, batch_size=20),
    ]


def measured(build=gpt_neox, seed=0, batches=(0, 1, 2), **options):
    torch.manual_seed(seed)
    model = build().eval()
    with observe(model, **{"metrics": metrics, **options}) as geometry, torch.no_grad():
        for batch in batches:
            model(**token_batch(seed=batch, padding="right"))
    return geometry


def test_the_folder_is_that_of_a_sweep(tmp_path):
    geometry = measured(jackknife=2)
    geometry.save(tmp_path, model="lab/tiny", step=8, token_tables=True)
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
    num_parameters = str(sum(parameter.numel() for parameter in geometry.model.parameters()))
    facts = {
        "model_class": "GPTNeoXForCausalLM",
        "num_parameters": num_parameters,
        "architecture": "pre-ln",
    }
    assert folder.facts("lab--tiny--step8") == facts
    assert json.loads((tmp_path / "manifest.json").read_text())["architecture"] == "pre-ln"
    table = read_table(tmp_path / "tokens" / "lab--tiny--step8.parquet")
    texts = table.pop("token")
    assert texts.tolist() == table["token_id"].astype(str).tolist()  # nobody knows the texts
    pd.testing.assert_frame_equal(table, geometry.token_tables().assign(num_tokens=1.0))
    spectra = read_table(tmp_path / "spectra" / "lab--tiny--step8.parquet")
    assert spectra.drop_duplicates("layer")["layer"].tolist() == [
        layer.name for layer in geometry.layers
    ]
    of_records = records.set_index(["layer", "metric"])["value"]
    for layer, at in spectra.groupby("layer"):
        assert at["eigenvalue"].sum() == pytest.approx(of_records[layer, "V"], rel=1e-6)
        assert at["eigenvalue"].max() / at["eigenvalue"].sum() == pytest.approx(
            of_records[layer, "anisotropy"]
        )
        assert set(at["n"]) == {of_records[layer, "n"]}
    assert (
        tmp_path / "tensorboard" / "tiny" / "events.out.tfevents.000000000008.lab--tiny--step8"
    ).exists()
    assert len(pd.read_csv(tmp_path / "metrics.csv")) == len(records)
    asked = json.loads((tmp_path / "manifest.json").read_text())["asked"]
    assert (asked["layers"], asked["rows"], asked["jackknife"]) == ("blocks", "tokens", 2)


@pytest.mark.slow
def test_there_are_spectra_where_the_metrics_have_them(tmp_path):
    measured(metrics=None).save(tmp_path / "default", model="a", step=1)
    assert not (tmp_path / "default" / "spectra").exists()
    assert measured(metrics=None).layer_tables() == {}
    geometry = measured()
    geometry.save(tmp_path / "with", model="a", step=1)
    (tmp_path / "with" / "spectra" / "a--step1.parquet").unlink()  # as an earlier version left it
    folder = SweepFolder(tmp_path / "with")
    assert folder.read_tables("a--step1") == {}
    with pytest.raises(ValueError, match=r"spectra/a--step1.parquet must be a Parquet file"):
        folder.read_tables("a--step1", ["spectra"])
    assert read_runs([tmp_path / "with"])[0].steps == [1]
    measured(seed=1).save(tmp_path / "with", model="a", step=2)
    assert folder.tables("spectra").keys() == {"a--step2"}


def test_the_largest_coordinates_are_saved_where_they_were_measured(tmp_path):
    geometry = measured(metrics=lambda dim: [*metrics(dim), OutlierCoordinates(dim)])
    geometry.save(tmp_path, model="lab/tiny", step=8)
    table = read_table(tmp_path / "coordinates" / "lab--tiny--step8.parquet")
    pd.testing.assert_frame_equal(table, geometry.layer_tables()["coordinates"])
    assert list(table) == TABLES["coordinates"].names
    assert list(table["layer"].unique()) == [layer.name for layer in geometry.layers]
    values = geometry.compute()
    for layer, of_layer in table.groupby("layer"):
        assert of_layer["coordinate"].is_monotonic_increasing
        assert of_layer["share_of_V"].max() == pytest.approx(values[layer]["top_dim_share"])
        assert of_layer["max_abs"].max() <= values[layer]["max_abs"]
    measured().save(tmp_path / "without", model="lab/tiny", step=8)
    assert not (tmp_path / "without" / "coordinates").exists()
    assert "coordinates" not in measured().layer_tables()


@pytest.mark.slow
def test_deviations_of_the_groups_of_the_jackknife_are_saved_and_give_the_errors_of_changes(
    tmp_path,
):
    models = [measured(jackknife=4, seed=seed, batches=range(4)) for seed in (0, 1)]
    for step, geometry in enumerate(models):
        geometry.save(tmp_path, model="lab/tiny", step=step)
    tables = [
        read_table(tmp_path / "jackknife" / f"lab--tiny--step{step}.parquet") for step in (0, 1)
    ]
    assert list(tables[0]) == TABLES["jackknife"].names
    (run,) = read_runs([tmp_path])
    for metric in ("M_over_Q", "V_W_over_V_unbiased", "anisotropy", "intrinsic_dimension"):
        of_steps = run.deviations[metric]
        errors = np.sqrt(np.square(of_steps).sum(axis=1))
        known = run.errors[metric].reindex(errors.index)
        assert errors.to_numpy() == pytest.approx(known.to_numpy(), rel=1e-9, nan_ok=True)
        (of_blocks,) = run.deviations_of_blocks(metric, run.steps).values()
        assert of_blocks.shape == (2, 4, len(run.all_blocks))
        assert of_blocks[1, :, 0] == pytest.approx(of_steps.loc[1, run.all_blocks[0]].to_numpy())
    with observe(models[0].model, metrics=metrics, jackknife=4) as geometry, torch.no_grad():
        models[0].model(**token_batch(seed=0, padding="right"))
        geometry.records()
        assert "jackknife" in geometry.layer_tables()
        models[0].model(**token_batch(seed=1, padding="right"))
        assert "jackknife" not in geometry.layer_tables()  # of other rows
    measured().save(tmp_path / "without", model="a", step=1)
    assert not (tmp_path / "without" / "jackknife").exists()
    assert read_runs([tmp_path / "without"])[0].deviations == {}


def test_a_model_without_a_step_is_main(tmp_path):
    measured().save(tmp_path, model="..tiny")
    folder = SweepFolder(tmp_path)
    (name,) = folder.done()
    assert name == "%2E.tiny"
    assert folder.facts(name)["has_step"] == "false"
    assert folder.read(name)[["revision", "step"]].drop_duplicates().values.tolist() == [
        ["main", 0]
    ]


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


def test_the_longest_name_is_written_and_read(tmp_path):
    measured().save(tmp_path, model="m" * 192, step=8, save_samples=True, token_tables=True)
    assert (
        set(embedgeo.load_results(tmp_path)["model"])
        == {embedgeo.load_sample(tmp_path).model}
        == {"m" * 192}
    )


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


@pytest.mark.filterwarnings("ignore:save replaces")
def test_where_replacing_ends_in_the_middle_new_samples_are_not_left_beside_old_records(
    tmp_path, monkeypatch
):
    measured().save(tmp_path, model="a", save_samples=True)
    again = measured(seed=1)
    with monkeypatch.context() as patched:
        patched.setattr("embedgeo.results.folder.write_parquet", full)
        with pytest.raises(OSError, match="full"):
            again.save(tmp_path, model="a", save_samples=True)
    assert SweepFolder(tmp_path).done() == set()
    again.save(tmp_path, model="a", save_samples=True)
    assert SweepFolder(tmp_path).done() == {"a"}


def full(*args):
    raise OSError("the disk is full")


@pytest.mark.slow
def test_the_report_draws_a_saved_folder(tmp_path, unpainted):
    for step in (0, 10):
        # each figure takes a second
        few = {"layers": "block.01", "metrics": lambda dim: [TokenMoments(dim)]}
        measured(seed=step, **few).save(tmp_path, model="lab/tiny", step=step, token_tables=True)
    page = write_report([tmp_path]).read_text()
    assert "lab--tiny" in page or tmp_path.name in page
    assert len(pd.read_csv(tmp_path / "report" / "metrics.csv")) > 0


def test_saving_changes_nothing(tmp_path):
    geometry, other = measured(batches=[0]), measured(batches=[0])
    before = copy.deepcopy(geometry.compute())
    geometry.save(tmp_path, model="a", save_samples=True, token_tables=True)
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
        ({"step": True}, "step must be .*; got True"),
        (
            {"model": "m" * 190, "step": 100_000},
            "model must be a name that fits .* got 202: m{20}…",
        ),
        ({"model": "名" * 23}, "model must be a name that fits .* got 207: 名{20}…"),
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
    with pytest.raises(ValueError, match="save_samples needs IntrinsicDimension or Anisotropy"):
        moments.save(tmp_path / "new", model="a", save_samples=True)
    with pytest.raises(ValueError, match="token_tables needs TokenMoments"):
        moments.save(tmp_path / "new", model="a", token_tables=True)
    assert not (tmp_path / "new").exists()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    measured(batches=[0]).save(folder, model="a")
    return folder


def with_another_seed(dim):
    return [
        TokenMoments(dim),
        Anisotropy(dim, spectrum=True),
        IntrinsicDimension(dim, batch_size=20, seed=1),
    ]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"layers": "block.0*"}, "layers was 'blocks', is 'block.0\\*'"),
        ({"layers": lambda model: "blocks"}, "layers was 'blocks', is '.*lambda"),
        ({"rows": "mean"}, "rows was 'tokens', is 'mean'"),
        ({"skip_first_positions": 1}, "skip_first_positions was 0, is 1"),
        ({"ignore_token_ids": [4]}, r"ignore_token_ids was \[\], is \[4\]"),
        ({"jackknife": 2}, "jackknife was 0, is 2"),
        ({"metrics": None}, "metrics was "),
        ({"metrics": with_another_seed}, "metrics was "),
    ],
)
def test_results_of_other_settings_are_refused(saved, options, named):
    before = contents(saved)
    with pytest.raises(ValueError, match=f"results of one setting; .*{named}"):
        measured(batches=[0], **options).save(saved, model="b")
    assert contents(saved) == before


def test_a_sweep_and_other_folders_are_refused(tmp_path):
    swept = SweepFolder(tmp_path / "swept")
    swept.open({"model": ["lab/tiny"], "rows": "tokens"}, {})
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mine").touch()
    before = contents(tmp_path)
    geometry = measured(batches=[0])
    with pytest.raises(
        ValueError, match=r"new or one that Geometry\.save made; .*swept is that of a sweep"
    ):
        geometry.save(tmp_path / "swept", model="a")
    with pytest.raises(ValueError, match="other must be a new folder"):
        geometry.save(tmp_path / "other", model="a")
    with pytest.raises(OSError, match="must be a folder that can be written"):
        geometry.save(tmp_path / "other" / "mine" / "in", model="a")
    assert contents(tmp_path) == before
    geometry.save(tmp_path / "saved", model="a")
    with pytest.raises(ValueError, match="a sweep folder holds results of one setting"):
        sweep(SweepSettings("anything", out=str(tmp_path / "saved")))


def saved_on_rank(rank, folder):
    geometry = measured(batches=range(rank, 5, WORLD_SIZE))
    geometry.save(folder / "both", model="a", step=3, save_samples=True, token_tables=True)
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
    for row, record in zip(records.itertuples(), alone.records(), strict=True):
        assert (row.layer, row.metric) == (record["layer"], record["metric"])
        if row.metric not in sampled:
            assert row.value == pytest.approx(record["value"], rel=1e-6, abs=1e-9, nan_ok=True)
    kept = embedgeo.load_sample(tmp_path / "out" / "both")
    whole = measured(batches=range(5), metrics=lambda dim: [IntrinsicDimension(dim)]).samples()
    for layer, sample in kept.layers.items():
        rows = whole[layer].rows[whole[layer].row_numbers.argsort()]  # all of them
        assert len(rows) == sample.n > 100
        assert len(sample.rows) == len(sample.row_numbers.unique()) == 20
        torch.testing.assert_close(sample.rows, rows[sample.row_numbers])
        assert sample.row_numbers.equal(kept.layers["embed"].row_numbers)


@pytest.mark.slow
def test_the_example_of_the_documentation_saves_what_it_says(tmp_path, monkeypatch, unpainted):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    names = {
        "torch": torch,
        "model": gpt_neox().eval(),
        "batches": [token_batch(8, 12, seed=i) for i in range(3)],
    }
    measured, saved = blocks("docs/how-to/by-hand.md", "python")[:2]
    exec(measured.code + saved.code, names)
    values = names["table"].set_index(["layer", "metric"])["value"]
    assert values["block.02", "anisotropy"] == pytest.approx(float(names["share"]), rel=1e-9)
    assert float(names["again"].compute()["n_points"]) == values["block.02", "n_points"]
    assert write_report([tmp_path / "runs" / "by-hand"]).exists()
