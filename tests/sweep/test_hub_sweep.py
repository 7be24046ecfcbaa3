import errno
import json
import os
import shutil
from contextlib import suppress
from itertools import count
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from huggingface_hub import constants, scan_cache_dir, snapshot_download
from huggingface_hub.utils import _shared_blobs
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import embedgeo
from embedgeo.checkpoints import hub as hub_source
from embedgeo.checkpoints import list_checkpoints
from embedgeo.checkpoints.downloads import Downloads
from embedgeo.results.folder import SCHEMA, SweepFolder
from embedgeo.sweep import check
from embedgeo.text import read_documents, tokenize_sequences
from tests.sweep.conftest import REPOSITORY
from tests.sweep.sweeping import sweep
from tests.sweep.tiny import checkpoint_files, model, tokenizer_files, write_files


@pytest.fixture
def run(hub):
    """Steps 0, 1, 2, 8: branches and a tag; one in a .bin, one in several files; step 1 has the weights of step 0."""
    commits = {
        "main": hub.add(REPOSITORY, "main", checkpoint_files(8)),
        "step0": hub.add(REPOSITORY, "step0", checkpoint_files(0, with_tokenizer=False)),
        "step1": hub.add(REPOSITORY, "step1", checkpoint_files(0, with_tokenizer=False)),
        "step2": hub.add(REPOSITORY, "step2", checkpoint_files(2, as_bin=True, with_tokenizer=False), kind="tags"),
        "step10": hub.add(REPOSITORY, "step10", checkpoint_files(10, shards=True, with_tokenizer=False)),
    }
    return commits


def observed(step, token_ids, batch_size=2):
    """By hand, what a sweep has to give."""
    from tests.sweep.tiny import model

    with torch.no_grad(), embedgeo.observe(model(step)) as geometry:
        losses = [model(step)(ids, labels=ids).loss * ids[:, 1:].numel() for ids in token_ids.split(batch_size)]
    return geometry.compute(), float(sum(losses) / token_ids[:, 1:].numel())


def test_a_sweep_measures_every_revision(run, hub, options, tmp_path, capsys):
    assert sweep(REPOSITORY, **options) == 0
    out = Path(options["out"])
    assert sorted(p.stem for p in (out / "checkpoints").iterdir()) == ["step0", "step1", "step10", "step2"]
    tokenizer = embedgeo.checkpoints.loading.load_tokenizer(write_files(tmp_path / "tokenizer", tokenizer_files()))
    ids = tokenize_sequences(read_documents([options["text"]]), tokenizer, seq_len=16, num_tokens=64)
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
    weights = {name: len(hub.downloads(name)) for name in ("model.safetensors", "pytorch_model.bin")}
    assert weights == {"model.safetensors": 1, "pytorch_model.bin": 1}  # step1 is copied, step10 is in parts
    assert not any(method == "POST" for method, _, _ in hub.requests)
    said = capsys.readouterr().out
    assert "4 of 4 checkpoints done" in said
    assert "step1 has the weights of step0" in said


def test_metrics_csv_and_tensorboard_follow_from_the_parquet_files(run, options):
    sweep(REPOSITORY, **options)
    out = Path(options["out"])
    table = pd.read_csv(out / "metrics.csv")
    parts = [pd.read_parquet(out / "checkpoints" / f"step{step}.parquet") for step in (0, 1, 2, 10)]
    pd.testing.assert_frame_equal(table, pd.concat(parts, ignore_index=True), check_dtype=False, rtol=0, atol=0)
    events = EventAccumulator(str(out / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    tags = events.Tags()["scalars"]
    assert {"geometry.Q/embed", "geometry.anisotropy/block.00", "geometry.Q/mean", "geometry.loss/model"} <= set(tags)
    for tag in tags:
        assert [event.step for event in events.Scalars(tag)] == [0, 1, 2, 10]
    at_blocks = table[(table["metric"] == "Q") & table["layer"].str.startswith("block.") & (table["step"] == 10)]
    assert events.Scalars("geometry.Q/mean")[-1].value == pytest.approx(at_blocks["value"].mean())
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["asked"]["model"] == [REPOSITORY]
    assert len(manifest["text"]["sha256"]) == 64
    assert manifest["versions"]["torch"] == torch.__version__


def test_token_tables_are_those_of_the_checkpoints_and_copied_with_duplicates(run, options, tmp_path):
    sweep(REPOSITORY, **options, token_tables=True)
    out = Path(options["out"])
    assert sorted(p.stem for p in (out / "tokens").iterdir()) == ["step0", "step1", "step10", "step2"]
    tokenizer = embedgeo.checkpoints.loading.load_tokenizer(write_files(tmp_path / "tokenizer", tokenizer_files()))
    ids = tokenize_sequences(read_documents([options["text"]]), tokenizer, seq_len=16, num_tokens=64)
    for step, same_as in {0: 0, 1: 0, 10: 10}.items():
        table = pd.read_parquet(out / "tokens" / f"step{step}.parquet")
        assert list(table.columns) == ["layer", "layer_index", "token_id", "n", "Q", "M", "V"]
        assert list(table["layer"].unique()) == ["embed", "block.00", "block.01", "final_norm"]
        hidden = model(same_as)(ids, output_hidden_states=True).hidden_states[1].detach().double()
        block = table[table["layer"] == "block.00"]
        assert set(block["layer_index"]) == {1}
        assert block["token_id"].tolist() == ids.unique().tolist()
        for row in block.itertuples():
            x = hidden[ids == row.token_id]
            want = [len(x), x.square().sum(1).mean(), x.mean(0).square().sum(), x.var(0, correction=0).sum()]
            np.testing.assert_allclose([row.n, row.Q, row.M, row.V], want, rtol=1e-5, atol=1e-9)
        plane = pd.read_parquet(out / "projections" / f"step{step}.parquet")
        assert list(plane.columns) == ["layer", "layer_index", "token_id", "n", "pc1", "pc2", "token"]
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
    first, second = (pd.read_parquet(out / "projections" / f"step{step}.parquet") for step in (0, 1))
    pd.testing.assert_frame_equal(first, second)


def test_what_was_downloaded_is_evicted_and_what_was_there_stays(run, options):
    snapshot_download(REPOSITORY, revision=run["step2"])
    snapshot_download(REPOSITORY, revision=run["step10"], allow_patterns=["config.json"])
    sweep(REPOSITORY, **options)
    cached = {
        r.commit_hash: {f.file_name for f in r.files}
        for repo in scan_cache_dir(constants.HF_HUB_CACHE).repos
        for r in repo.revisions
    }
    assert set(cached) == {run["step2"], run["step10"]}
    assert "pytorch_model.bin" in cached[run["step2"]]
    assert cached[run["step10"]] == {"config.json"}
    assert not (Path(options["out"]) / ".downloads").exists()


def test_nothing_is_left_in_a_cache_that_was_empty(run, options):
    sweep(REPOSITORY, **options)
    left = [p for p in Path(constants.HF_HUB_CACHE).rglob("*") if p.is_file() and ".locks" not in p.parts]
    assert [p.name for p in left if p.name != "CACHEDIR.TAG"] == []


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_what_a_killed_download_has_left_is_evicted(run, options, tmp_path, name):
    contents = list_checkpoints(REPOSITORY)[0].contents()
    downloads = Downloads(tmp_path / "notes")
    downloads.note("step0", REPOSITORY, run["step0"], contents)
    digest = next(file.digest for file in (*contents.weights, *contents.others) if file.name == name)
    left = Path(constants.HF_HUB_CACHE, "models--lab--tiny", "blobs", f"{digest.removeprefix('git:')}.1a2b.incomplete")
    left.parent.mkdir(parents=True)
    left.write_text("half")
    left.with_name("tmp_53dc41f1").touch()  # the client's, too
    downloads.evict("step0")
    assert not left.parent.exists()
    assert not (tmp_path / "notes").exists()


def test_killed_at_any_moment_an_eviction_leaves_nothing_to_the_next(run, tmp_path, monkeypatch):
    contents = list_checkpoints(REPOSITORY)[0].contents()
    downloads = Downloads(tmp_path / "notes")
    for moment in count():
        downloads.note("step0", REPOSITORY, run["step0"], contents)
        hub_source.fetch(REPOSITORY, run["step0"], contents)
        left = [*range(moment)]

        def before(remove, left=left):
            def killed(*args, **kwargs):
                if not left:
                    raise KeyboardInterrupt
                left.pop()
                return remove(*args, **kwargs)

            return killed

        with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
            for module, name in ((os, "unlink"), (os, "remove"), (shutil, "rmtree")):
                patch.setattr(module, name, before(getattr(module, name)))
            downloads.evict("step0")
            break
        assert downloads.noted() == ["step0"]
        assert downloads.evict("step0")
        assert cached() == downloads.noted() == []
    assert moment > 2 * len(contents.names)  # each file's entry in the snapshot and its blob, and the note


@pytest.mark.parametrize("name", ["config.json", "original/config.json"])
def test_a_blob_that_another_commit_uses_stays(run, hub, tmp_path, name):
    first = list_checkpoints(REPOSITORY)[0]
    other = hub.add(REPOSITORY, "other", {name: checkpoint_files(0)["config.json"]})
    snapshot_download(REPOSITORY, revision=other)
    before = cached()
    downloads = Downloads(tmp_path / "notes")
    downloads.note("step0", REPOSITORY, first.commit, first.contents())
    hub_source.fetch(REPOSITORY, first.commit, first.contents())
    assert len(cached()) > len(before)
    assert downloads.evict("step0")
    assert cached() == before
    assert not scan_cache_dir(constants.HF_HUB_CACHE).warnings


@pytest.mark.parametrize("lost", ["nothing", "entries", "entries and contents"])
def test_a_blob_that_the_client_shares_between_repositories_is_evicted(run, tmp_path, lost):
    contents = list_checkpoints(REPOSITORY)[0].contents()
    downloads, cache = Downloads(tmp_path / "notes"), Path(constants.HF_HUB_CACHE)
    downloads.note("step0", REPOSITORY, run["step0"], contents)
    snapshot = hub_source.fetch(REPOSITORY, run["step0"], contents)
    blob, shared = (snapshot / "model.safetensors").resolve(), cache / "blobs" / "ab" / ("ab" * 32)
    xet = {"xet_hash": shared.name, "cache_dir": cache, "expected_size": blob.stat().st_size}
    assert _shared_blobs.publish_blob_to_shared_store(blob_path=blob, **xet, replace_existing=False)
    assert blob.is_symlink()
    for name in contents.names if "entries" in lost else ():
        (snapshot / name).unlink()
    if "contents" in lost:
        shared.unlink()
    assert downloads.evict("step0")
    assert not any(map(os.path.lexists, (*cached(), blob, shared)))


def test_a_cache_that_the_client_cannot_read_keeps_the_note(run, tmp_path):
    contents = list_checkpoints(REPOSITORY)[0].contents()
    downloads = Downloads(tmp_path / "notes")
    downloads.note("step0", REPOSITORY, run["step0"], contents)
    broken = hub_source.fetch(REPOSITORY, run["step0"], contents).parent / "broken"
    broken.write_text("a file where the client expects folders")
    with pytest.raises(OSError, match=f"must be readable.*{broken}"):
        downloads.evict("step0")
    assert downloads.noted() == ["step0"]
    broken.unlink()
    assert downloads.evict("step0")
    assert cached() == []


@pytest.mark.parametrize("when", ["before", "after"])
def test_what_another_sweep_evicts_during_a_download_is_downloaded_again(run, options, monkeypatch, when):
    evicted = []

    def interrupted(*args, **kwargs):
        if "model.safetensors" not in kwargs["allow_patterns"] or len(evicted) == 2:
            return snapshot_download(*args, **kwargs)
        if when == "before":  # its folder, still empty, is removed between two steps of the client
            evicted.append("snapshots/1a2b")
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), evicted[-1])
        folder = snapshot_download(*args, **kwargs)  # finds a blob of which the other saw no use when it looked
        evicted.append(Path(folder, "model.safetensors").resolve())
        evicted[-1].unlink()
        return folder

    monkeypatch.setattr(hub_source, "snapshot_download", interrupted)
    assert sweep(REPOSITORY, **options, steps="0") == 0
    assert len(evicted) == 2


def cached():
    return [p for p in Path(constants.HF_HUB_CACHE).glob("models--*/*/*") if p.is_file() or any(p.iterdir())]


def test_what_another_sweep_uses_stops_nothing_and_is_evicted_when_that_is_done(run, options, monkeypatch, tmp_path):
    others = [Downloads(tmp_path / name) for name in ("a", "b")]  # as of two nodes, or of two sweeps
    for other in others:
        other.lease("step0", REPOSITORY, run["step0"])
    rebuild, before = SweepFolder.rebuild, []

    def when_all_is_done(self):
        rebuild(self)
        if len(self.done()) == 4 and not before:
            before.append({path.name for path in cached()})
            for other in others:
                other.release("step0")

    monkeypatch.setattr(SweepFolder, "rebuild", when_all_is_done)
    assert sweep(REPOSITORY, **options) == 0
    assert run["step0"] in before[0]
    assert cached() == []
    assert not (Path(options["out"]) / ".downloads").exists()


def test_a_lease_of_a_killed_sweep_keeps_nothing(run, tmp_path):
    downloads, contents = Downloads(tmp_path / "notes"), list_checkpoints(REPOSITORY)[0].contents()
    downloads.note("step0", REPOSITORY, run["step0"], contents)
    hub_source.fetch(REPOSITORY, run["step0"], contents)
    lock = hub_source.lock_file(f"{run['step0']}-1a2b")
    with lock:
        assert not downloads.evict("step0")
        assert downloads.noted() == ["step0"]
    Path(lock.lock_file).touch()
    assert downloads.evict("step0")
    assert cached() == []
    assert not Path(lock.lock_file).exists()


def test_what_another_sweep_had_there_and_evicts_is_downloaded_as_this_ones_own(run, tmp_path):
    contents = list_checkpoints(REPOSITORY)[0].contents()
    first, killed, again = (Downloads(tmp_path / name) for name in ("first", "second", "second"))
    first.note("step0", REPOSITORY, run["step0"], contents)
    hub_source.fetch(REPOSITORY, run["step0"], contents)
    killed.note("step0", REPOSITORY, run["step0"], contents)
    first.evict("step0")
    again.note("step0", REPOSITORY, run["step0"], contents)
    hub_source.fetch(REPOSITORY, run["step0"], contents)
    assert len(cached()) > 1
    again.evict("step0")
    assert cached() == []


def test_what_another_machine_has_noted_in_the_same_folder_is_left_to_it(run, tmp_path):
    contents = list_checkpoints(REPOSITORY)[0].contents()
    downloads, cache = Downloads(tmp_path / "notes"), Path(constants.HF_HUB_CACHE)
    downloads.note("step0", REPOSITORY, run["step0"], contents)
    hub_source.fetch(REPOSITORY, run["step0"], contents)
    cache.rename(tmp_path / "elsewhere")  # another machine's cache is at the same path
    downloads.evict("step0")
    assert downloads.noted() == ["step0"]
    shutil.rmtree(cache)
    (tmp_path / "elsewhere").rename(cache)
    downloads.evict("step0")
    assert cached() == downloads.noted() == []


def test_evict_false_keeps_everything(run, options):
    sweep(REPOSITORY, **options, evict=False, steps="0,2")
    (repo,) = scan_cache_dir(constants.HF_HUB_CACHE).repos
    assert {r.commit_hash for r in repo.revisions} == {run["step0"], run["step2"]}


def test_a_second_run_does_nothing(run, hub, options):
    sweep(REPOSITORY, **options)
    before = {p: p.read_bytes() for p in Path(options["out"]).rglob("*") if p.is_file()}
    hub.requests.clear()
    assert sweep(REPOSITORY, **options) == 0
    assert not any(what.endswith((".safetensors", ".bin")) for _, what, _ in hub.requests)
    assert before == {p: p.read_bytes() for p in Path(options["out"]).rglob("*") if p.is_file()}


def test_a_revision_that_has_moved_keeps_its_result_and_is_named(run, hub, options, capsys):
    sweep(REPOSITORY, **options)
    assert "moved:" not in capsys.readouterr().out
    hub.repositories[REPOSITORY]["branches"]["step10"] = moved = "1a2b" * 10
    hub.commits[moved] = checkpoint_files(3)
    assert sweep(REPOSITORY, **options) == 0
    assert set(SweepFolder(options["out"]).read("step10")["commit"]) == {run["step10"]}
    line = f"moved: step10 was measured at commit {run['step10'][:12]}; its revision is 1a2b1a2b1a2b now"
    assert line in capsys.readouterr().out


def test_the_next_checkpoint_is_fetched_while_one_is_measured(run, hub, options, monkeypatch):
    from embedgeo.sweep.measure import Measurement

    seen = []
    end = Measurement.on_predict_epoch_end

    def wait_for_the_next(self):
        import time

        deadline = time.monotonic() + 60
        while run["step2"] not in hub.downloads(".bin") and time.monotonic() < deadline:
            time.sleep(0.01)
        seen.append(run["step2"] in hub.downloads(".bin"))
        end(self)

    monkeypatch.setattr(Measurement, "on_predict_epoch_end", wait_for_the_next)
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
    config["rope_parameters"] = {**config["rope_parameters"], "partial_rotary_factor": 0.5}
    hub.add(REPOSITORY, "step1", {**files, "config.json": json.dumps(config).encode()})
    assert sweep(REPOSITORY, **options) == 0
    first, second = (pd.read_parquet(Path(options["out"]) / "checkpoints" / f"step{s}.parquet") for s in (0, 1))
    assert second["duplicate_of"].iloc[0] == "step0"
    assert not first["value"].equals(second["value"])


def test_a_family_of_repositories(hub, options):
    for seed in (0, 1):
        for step in (0, 20):
            hub.add(f"lab/berts-seed_{seed}-step_{step}k", "main", checkpoint_files(step + seed, "bert"))
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
