import gc
import json
import os
import socket
import time
import weakref
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from huggingface_hub import constants, scan_cache_dir, snapshot_download
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import embedgeo
from embedgeo.checkpoints import loading
from embedgeo.geometry import Geometry
from embedgeo.results.folder import SweepFolder
from embedgeo.results.parquet import SCHEMA, TABLES
from embedgeo.sweep import check
from embedgeo.text import read_documents
from tests import references
from tests.sweep.sweeping import sweep
from tests.sweep.tiny import (
    REPOSITORY,
    checkpoint_files,
    model,
    tokenize_sequences,
    tokenizer_files,
    write_files,
)


@pytest.fixture
def run(hub):
    """Steps 0, 1, 2, 8: branches and a tag; one in a .bin, one in several files; step 1 has the
    weights of step 0.
    """
    commits = {
        "main": hub.add(REPOSITORY, "main", checkpoint_files(8)),
        "step0": hub.add(REPOSITORY, "step0", checkpoint_files(0, with_tokenizer=False)),
        "step1": hub.add(REPOSITORY, "step1", checkpoint_files(0, with_tokenizer=False)),
        "step2": hub.add(
            REPOSITORY, "step2", checkpoint_files(2, as_bin=True, with_tokenizer=False), kind="tags"
        ),
        "step10": hub.add(
            REPOSITORY, "step10", checkpoint_files(10, shards=True, with_tokenizer=False)
        ),
    }
    return commits


def observed(step, token_ids, batch_size=2):
    """By hand, what a sweep has to give."""
    from tests.sweep.tiny import model

    with torch.no_grad(), embedgeo.observe(model(step)) as geometry:
        losses = [
            model(step)(ids, labels=ids).loss * ids[:, 1:].numel()
            for ids in token_ids.split(batch_size)
        ]
    return geometry.compute(), float(sum(losses) / token_ids[:, 1:].numel())


@pytest.mark.slow
def test_a_sweep_measures_every_revision(run, hub, options, tmp_path, capsys):
    assert sweep(REPOSITORY, **options) == 0
    out = Path(options["out"])
    assert sorted(p.stem for p in (out / "checkpoints").iterdir()) == [
        "step0",
        "step1",
        "step10",
        "step2",
    ]
    tokenizer = embedgeo.checkpoints.loading.load_tokenizer(
        write_files(tmp_path / "tokenizer", tokenizer_files())
    )
    ids = tokenize_sequences(
        read_documents([options["text"]]), tokenizer, seq_len=16, num_tokens=64
    )
    for step, same_as in {0: 0, 1: 0, 2: 2, 10: 10}.items():
        records = pd.read_parquet(out / "checkpoints" / f"step{step}.parquet")
        assert list(records.columns) == SCHEMA.names
        assert set(records["step"]) == {step}
        assert set(records["revision"]) == {f"step{step}"}
        assert set(records["commit"]) == {run[f"step{step}"]}
        assert list(records["duplicate_of"].dropna().unique()) == (["step0"] if step == 1 else [])
        values, loss = observed(same_as, ids)
        got = {(r.layer, r.metric): r.value for r in records.itertuples()}
        assert got.pop(("model", "loss")) == pytest.approx(loss, rel=1e-6)
        want = {(layer, key): value for layer, at in values.items() for key, value in at.items()}
        assert got.keys() == want.keys()
        np.testing.assert_allclose([got[k] for k in want], list(want.values()), rtol=1e-9)
    weights = {
        name: len(hub.downloads(name)) for name in ("model.safetensors", "pytorch_model.bin")
    }
    # step1 is copied, step10 is in parts
    assert weights == {"model.safetensors": 1, "pytorch_model.bin": 1}
    assert not any(method == "POST" for method, _, _ in hub.requests)
    said = capsys.readouterr().out
    assert "4 of 4 checkpoints done" in said
    assert "step1 has the weights of step0" in said


def test_metrics_csv_and_tensorboard_follow_from_the_parquet_files(run, options):
    sweep(REPOSITORY, **options)
    out = Path(options["out"])
    table = pd.read_csv(out / "metrics.csv")
    parts = [pd.read_parquet(out / "checkpoints" / f"step{step}.parquet") for step in (0, 1, 2, 10)]
    joined = pd.concat(parts, ignore_index=True)
    joined = joined.where(joined.notna(), np.nan)  # None in Parquet files
    # as far as pandas 2 reads
    pd.testing.assert_frame_equal(table, joined, check_dtype=False, rtol=1e-11, atol=0)
    # what TensorBoard calls the run
    assert [path.name for path in (out / "tensorboard").iterdir()] == ["tiny"]
    events = EventAccumulator(
        str(out / "tensorboard" / "tiny"), size_guidance={"scalars": 0}
    ).Reload()
    tags = events.Tags()["scalars"]
    assert {
        "geometry.Q/embed",
        "geometry.anisotropy/block.00",
        "geometry.Q/mean",
        "geometry.loss/model",
    } <= set(tags)
    for tag in tags:
        assert [event.step for event in events.Scalars(tag)] == [0, 1, 2, 10]
    at_blocks = table[
        (table["metric"] == "Q") & table["layer"].str.startswith("block.") & (table["step"] == 10)
    ]
    assert events.Scalars("geometry.Q/mean")[-1].value == pytest.approx(at_blocks["value"].mean())
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["asked"]["model"] == [REPOSITORY]
    assert len(manifest["text"]["sha256"]) == 64
    assert manifest["versions"]["torch"] == torch.__version__


def test_the_largest_coordinates_are_those_of_the_checkpoints_and_copied_with_duplicates(
    run, options, tmp_path
):
    assert sweep(REPOSITORY, **options, extra=["coordinates"], steps="0,1") == 0
    out = Path(options["out"])
    tokenizer = embedgeo.checkpoints.loading.load_tokenizer(
        write_files(tmp_path / "tokenizer", tokenizer_files())
    )
    ids = tokenize_sequences(
        read_documents([options["text"]]), tokenizer, seq_len=16, num_tokens=64
    )
    hidden = model(0)(ids, output_hidden_states=True).hidden_states[1].detach().double()
    expected = references.coordinate_shares(hidden.flatten(0, 1))
    for name in ("step0", "step1"):
        table = pd.read_parquet(out / "coordinates" / f"{name}.parquet")
        assert list(table) == TABLES["coordinates"].names
        assert list(table["layer"].unique()) == ["embed", "block.00", "block.01", "final_norm"]
        block = table[table["layer"] == "block.00"]
        assert block["coordinate"].tolist() == [*range(16)]  # all of them: they are few
        for share, column in expected.items():
            np.testing.assert_allclose(block[share], column, rtol=1e-4)
        records = SweepFolder(out).read(name).set_index(["layer", "metric"])["value"]
        assert records["block.00", "max_abs_first"] == pytest.approx(
            float(hidden[:, 0].abs().max()), rel=1e-5
        )
        assert records["block.00", "max_abs_rest"] == pytest.approx(
            float(hidden[:, 1:].abs().max()), rel=1e-5
        )


@pytest.mark.slow
def test_tables_are_those_of_the_checkpoints_and_copied_with_duplicates(run, options, tmp_path):
    sweep(REPOSITORY, **options, token_tables=True, spectrum=True)
    out = Path(options["out"])
    assert sorted(p.stem for p in (out / "tokens").iterdir()) == [
        "step0",
        "step1",
        "step10",
        "step2",
    ]
    tokenizer = embedgeo.checkpoints.loading.load_tokenizer(
        write_files(tmp_path / "tokenizer", tokenizer_files())
    )
    ids = tokenize_sequences(
        read_documents([options["text"]]), tokenizer, seq_len=16, num_tokens=64
    )
    for step, same_as in {0: 0, 1: 0, 10: 10}.items():
        table = pd.read_parquet(out / "tokens" / f"step{step}.parquet")
        assert list(table.columns) == [
            "layer",
            "layer_index",
            "token_id",
            "n",
            "Q",
            "M",
            "V",
            "num_tokens",
            "token",
        ]
        assert list(table["layer"].unique()) == ["embed", "block.00", "block.01", "final_norm"]
        hidden = model(same_as)(ids, output_hidden_states=True).hidden_states[1].detach().double()
        block = table[table["layer"] == "block.00"]
        assert set(block["layer_index"]) == {1}
        assert block["token_id"].tolist() == ids.unique().tolist()
        for row in block.itertuples():
            assert row.token == tokenizer.decode([row.token_id])
            x = hidden[ids == row.token_id]
            want = [
                len(x),
                x.square().sum(1).mean(),
                x.mean(0).square().sum(),
                x.var(0, correction=0).sum(),
            ]
            np.testing.assert_allclose([row.n, row.Q, row.M, row.V], want, rtol=1e-5, atol=1e-9)
        plane = pd.read_parquet(out / "projections" / f"step{step}.parquet")
        assert list(plane.columns) == [
            "layer",
            "layer_index",
            "token_id",
            "n",
            "pc1",
            "pc2",
            "token",
        ]
        at = plane[plane["layer"] == "block.00"].set_index("token_id")
        assert at.index[0] == -1
        assert pd.isna(at.loc[-1, "token"])
        assert sorted(at.index[1:]) == block["token_id"].tolist()  # all of them: they are few
        assert at["n"].iloc[1:].is_monotonic_decreasing
        for token_id, row in at.iloc[1:].iterrows():
            assert row["token"] == tokenizer.decode([token_id])
        means = np.stack([hidden[ids == token_id].mean(0) for token_id in at.index[1:]])
        center = hidden.flatten(0, 1).mean(0).numpy()
        axes = np.linalg.svd((means - center) * np.sqrt(at["n"].to_numpy()[1:, None]))[2][:2]
        want = np.vstack((-center, means - center)) @ axes.T
        got = at[["pc1", "pc2"]].to_numpy()
        np.testing.assert_allclose(np.abs(got), np.abs(want), rtol=1e-3, atol=1e-6)
        spectra = pd.read_parquet(out / "spectra" / f"step{step}.parquet")
        assert list(spectra.columns) == ["layer", "layer_index", "index", "eigenvalue", "n"]
        assert list(spectra["layer"].unique()) == ["embed", "block.00", "block.01", "final_norm"]
        at, rows = spectra[spectra["layer"] == "block.00"], hidden.flatten(0, 1).numpy()
        assert at["index"].tolist() == list(range(1, rows.shape[1] + 1))
        assert (at["layer_index"].unique().tolist(), at["n"].unique().tolist()) == (
            [1],
            [len(rows)],
        )
        want = np.linalg.svd(rows - rows.mean(0), compute_uv=False) ** 2 / len(rows)
        np.testing.assert_allclose(at["eigenvalue"], want, rtol=1e-4, atol=1e-9)
    for kind in ("projections", "spectra"):
        first, second = (pd.read_parquet(out / kind / f"step{step}.parquet") for step in (0, 1))
        pd.testing.assert_frame_equal(first, second)
    for path in (*(out / "spectra").iterdir(), out / "checkpoints" / "step1.parquet"):
        path.unlink()  # as of an earlier version, whose sweep was cut short
    sweep(REPOSITORY, **options, token_tables=True, spectrum=True)
    # measured, for there was nothing to copy
    assert [p.stem for p in (out / "spectra").iterdir()] == ["step1"]
    pd.testing.assert_frame_equal(pd.read_parquet(out / "spectra" / "step1.parquet"), second)


def everything(folder):
    """What is in a folder: paths, and of files what they hold and when they were written."""
    paths = sorted(Path(folder).rglob("*"))
    return {
        path: (path.read_bytes(), path.lstat().st_mtime_ns) for path in paths if path.is_file()
    }, paths


def hidden(folder):
    return list(Path(folder).rglob(".*"))


@pytest.mark.slow
def test_a_sweep_that_evicts_only_reads_the_users_cache(run, hub, options):
    snapshot_download(REPOSITORY, revision=run["step2"])
    snapshot_download(REPOSITORY, revision=run["step10"], allow_patterns=["config.json"])
    before = everything(constants.HF_HUB_CACHE)
    hub.requests.clear()
    assert sweep(REPOSITORY, **options) == 0
    assert everything(constants.HF_HUB_CACHE) == before
    assert run["step2"] not in hub.downloads(".bin")
    assert run["step10"] in hub.downloads()
    assert hidden(options["out"]) == []


def test_nothing_is_made_where_there_is_no_cache(run, options):
    assert sweep(REPOSITORY, **options) == 0
    assert not Path(constants.HF_HUB_CACHE).exists()
    assert hidden(options["out"]) == []


@pytest.mark.slow
@pytest.mark.parametrize("harm", ["changed", "missing"])
def test_what_is_wrong_in_the_users_cache_is_downloaded_and_left_as_it_is(run, hub, options, harm):
    weights = Path(snapshot_download(REPOSITORY, revision=run["step0"]), "model.safetensors")
    if harm == "changed":
        weights.resolve().write_bytes(b"x" * weights.stat().st_size)
    else:
        weights.unlink()
    before = everything(constants.HF_HUB_CACHE)
    hub.requests.clear()
    assert sweep(REPOSITORY, **options, steps="0") == 0
    assert run["step0"] in hub.downloads()
    assert everything(constants.HF_HUB_CACHE) == before


@pytest.mark.slow
@pytest.mark.parametrize(("host", "is_removed"), [(socket.gethostname(), True), ("another", False)])
def test_the_downloads_of_a_killed_sweep_are_removed_by_the_next(run, options, host, is_removed):
    left = Path(
        options["out"], f".tmp-{host}-999999999-downloads", "step0", "blobs", "1a2b.incomplete"
    )
    write_files(left.parent, {left.name: b"half"})
    assert sweep(REPOSITORY, **options) == 0
    assert left.exists() != is_removed
    if left.exists():
        os.utime(left.parents[2], (0, 0))  # a day later
    assert sweep(REPOSITORY, **options) == 0
    assert hidden(options["out"]) == []


@pytest.mark.slow
def test_at_most_two_checkpoints_are_on_the_disk_at_a_time(hub, options, monkeypatch):
    for step in range(4):
        hub.add(REPOSITORY, f"step{step}", checkpoint_files(step))
    seen = []

    def counted(*args, **kwargs):
        seen.append(len(list(Path(options["out"]).glob(".tmp-*-downloads/*"))))
        return load(*args, **kwargs)

    load = loading.load_model
    monkeypatch.setattr(loading, "load_model", counted)
    assert sweep(REPOSITORY, **options) == 0
    assert len(seen) == 4
    assert max(seen) <= 2


@pytest.mark.slow
def test_the_weights_of_a_model_are_freed_before_the_next_is_loaded(run, hub, options, monkeypatch):
    hub.add(REPOSITORY, "step3", {**checkpoint_files(3), "config.json": b"{"})
    models, weights = [], []

    def loaded(*args, **kwargs):
        # the last one is being measured, without its weights
        assert all(model() is None for model in models[:-1])
        assert all(parameter() is None for parameter in weights)
        result = load(*args, **kwargs)
        models.append(weakref.ref(result.model))
        weights.extend(map(weakref.ref, result.model.parameters()))
        return result

    load = loading.load_model
    monkeypatch.setattr(loading, "load_model", loaded)
    gc.disable()
    try:
        assert sweep(REPOSITORY, **options) == 3
        assert [model() for model in models] == [None] * 3
    finally:
        gc.enable()


def test_evict_false_keeps_everything(run, options):
    sweep(REPOSITORY, **options, evict=False, steps="0,2")
    (repo,) = scan_cache_dir(constants.HF_HUB_CACHE).repos
    assert {r.commit_hash for r in repo.revisions} == {run["step0"], run["step2"]}


@pytest.mark.slow
def test_a_second_run_does_nothing(run, hub, options):
    sweep(REPOSITORY, **options)
    before = {p: p.read_bytes() for p in Path(options["out"]).rglob("*") if p.is_file()}
    hub.requests.clear()
    assert sweep(REPOSITORY, **options) == 0
    assert not any(what.endswith((".safetensors", ".bin")) for _, what, _ in hub.requests)
    assert before == {p: p.read_bytes() for p in Path(options["out"]).rglob("*") if p.is_file()}


@pytest.mark.slow
def test_a_revision_that_has_moved_keeps_its_result_and_is_named(run, hub, options, capsys):
    sweep(REPOSITORY, **options)
    assert "moved:" not in capsys.readouterr().out
    hub.repositories[REPOSITORY]["branches"]["step10"] = moved = "1a2b" * 10
    hub.commits[moved] = checkpoint_files(3)
    assert sweep(REPOSITORY, **options) == 0
    assert set(SweepFolder(options["out"]).read("step10")["commit"]) == {run["step10"]}
    line = (
        f"moved: step10 was measured at commit {run['step10'][:12]}; its revision is 1a2b1a2b1a2b "
        "now"
    )
    assert line in capsys.readouterr().out


@pytest.mark.slow
def test_the_next_checkpoint_is_fetched_while_one_is_measured(run, hub, options, monkeypatch):
    seen = []

    def wait_for_the_next(*args):
        deadline = time.monotonic() + 60
        while run["step2"] not in hub.downloads(".bin") and time.monotonic() < deadline:
            time.sleep(0.01)
        seen.append(run["step2"] in hub.downloads(".bin"))
        return records(*args)

    records = Geometry.records
    monkeypatch.setattr(Geometry, "records", wait_for_the_next)
    sweep(REPOSITORY, **options)
    assert seen[0]


def test_dry_run_says_what_would_be_done_and_does_nothing(run, hub, options, capsys):
    assert sweep(REPOSITORY, **options, dry_run=True) == 0
    said = capsys.readouterr().out
    assert "duplicate of step0" in said
    assert "4 checkpoints" in said
    assert not Path(options["out"]).exists()
    assert not any(method in ("GET", "HEAD") and "." in what for method, what, _ in hub.requests)


def test_check_lists_duplicates_without_a_download(run, hub, capsys):
    assert check(REPOSITORY) == 1
    assert "same weights: step0, step1" in capsys.readouterr().out
    assert check(REPOSITORY, steps="0,2,10") == 0
    assert not any(what.endswith((".safetensors", ".bin")) for _, what, _ in hub.requests)


def test_check_finds_a_single_file_that_is_shared(hub, capsys):
    whole, other = checkpoint_files(1, shards=True), checkpoint_files(2, shards=True)
    name = next(name for name in whole if name.startswith("model-00001"))
    hub.add(REPOSITORY, "step1", whole)
    hub.add(REPOSITORY, "step2", {**other, name: whole[name]})
    assert check(REPOSITORY) == 1
    assert f"same file {name}: step1, step2" in capsys.readouterr().out


def test_the_same_weights_under_another_config_are_measured(hub, options):
    files = checkpoint_files(0)
    config = json.loads(files["config.json"])
    hub.add(REPOSITORY, "step0", files)
    config["hidden_act"] = "relu"
    hub.add(REPOSITORY, "step1", {**files, "config.json": json.dumps(config).encode()})
    assert sweep(REPOSITORY, **options) == 0
    first, second = (
        pd.read_parquet(Path(options["out"]) / "checkpoints" / f"step{s}.parquet") for s in (0, 1)
    )
    assert second["duplicate_of"].iloc[0] == "step0"
    assert not first["value"].equals(second["value"])


@pytest.mark.slow
def test_a_family_of_repositories(hub, options):
    for seed in (0, 1):
        for step in (0, 20):
            hub.add(
                f"lab/berts-seed_{seed}-step_{step}k", "main", checkpoint_files(step + seed, "bert")
            )
    assert sweep("lab/berts-seed_*", **options) == 0
    out = Path(options["out"])
    table = pd.read_csv(out / "metrics.csv")
    assert sorted(set(table["step"])) == [0, 20000]
    assert set(table["revision"]) == {"main"}
    assert len(list((out / "checkpoints").iterdir())) == 4
    runs = [p for p in (out / "tensorboard").iterdir() if p.is_dir()]
    assert len(runs) == 2
    for run in runs:
        events = EventAccumulator(str(run), size_guidance={"scalars": 0}).Reload()
        assert [event.step for event in events.Scalars("geometry.loss/model")] == [0, 20000]


def test_an_encoder_has_a_masked_token_loss(hub, options):
    hub.add(REPOSITORY, "step1", checkpoint_files(1, "bert"))
    assert sweep(REPOSITORY, **options) == 0
    records = pd.read_parquet(Path(options["out"]) / "checkpoints" / "step1.parquet")
    loss = records[records["metric"] == "loss"]["value"].iloc[0]
    assert 3 < loss < 9
    assert model(1, "bert").config.vocab_size == 300
    again = {**options, "out": options["out"] + "2", "batch_size": 1}
    sweep(REPOSITORY, **again)
    other = pd.read_parquet(Path(again["out"]) / "checkpoints" / "step1.parquet")
    assert other[other["metric"] == "loss"]["value"].iloc[0] == pytest.approx(loss, rel=1e-5)
