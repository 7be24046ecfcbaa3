"""Sweeps over a Hub: what is measured, copied, fetched and kept."""

import json
import os
import socket
from pathlib import Path

import pytest
from huggingface_hub import constants, scan_cache_dir, snapshot_download

from embedgeo.report.runs import read_runs
from embedgeo.report.summary import flags
from embedgeo.results.folder import SweepFolder
from embedgeo.sweep import check
from embedgeo.text import Documents
from tests.files import contents
from tests.sweep.sweeping import sweep
from tests.sweep.tiny import (
    REPOSITORY,
    checkpoint_files,
    model,
    tokenize_sequences,
    tokenizer_files,
    tokenizer_of,
    write_files,
)


@pytest.fixture
def run(hub):
    """Steps 0, 1, 2, 10: branches and a tag; one in a .bin, one in several files; step 1 has the
    weights of step 0.
    """
    files = {
        "main": checkpoint_files(8),
        "step0": checkpoint_files(0, with_tokenizer=False),
        "step1": checkpoint_files(0, with_tokenizer=False),
        "step2": checkpoint_files(2, as_bin=True, with_tokenizer=False),
        "step10": checkpoint_files(10, shards=True, with_tokenizer=False),
    }
    return {
        name: hub.add(REPOSITORY, name, each, kind="tags" if name == "step2" else "branches")
        for name, each in files.items()
    }


def losses(folder):
    return {
        name: folder.read(name).set_index("metric").loc["loss", "value"] for name in folder.done()
    }


def hidden(folder):
    return list(Path(folder).rglob(".*"))


@pytest.mark.slow
def test_every_revision_is_measured_once_and_a_second_run_does_nothing(run, hub, options, printed):
    assert sweep(REPOSITORY, **options) == 0
    folder = SweepFolder(options["out"])
    ids = tokenize_sequences(
        [*Documents([str(options["text"])])],
        tokenizer_of(tokenizer_files()),
        seq_len=16,
        num_tokens=64,
    )
    same_as = {"step0": 0, "step1": 0, "step2": 2, "step10": 10}
    expected = {name: model(step)(ids, labels=ids).loss.item() for name, step in same_as.items()}
    assert losses(folder) == pytest.approx(expected, rel=1e-6)
    for name in same_as:
        records = folder.read(name)
        about = records[["step", "revision", "commit"]].drop_duplicates()
        assert about.to_numpy().tolist() == [[int(name[4:]), name, run[name]]]
        copied = records["duplicate_of"].dropna().unique().tolist()
        assert copied == (["step0"] if name == "step1" else [])
    # step1 is copied, step10 is in parts
    assert [len(hub.downloads(name)) for name in ("model.safetensors", "pytorch_model.bin")] == [
        1
    ] * 2
    assert not any(method == "POST" for method, _, _ in hub.requests)
    assert not Path(constants.HF_HUB_CACHE).exists()
    assert hidden(options["out"]) == []
    said = printed()
    assert "4 of 4 checkpoints done" in said
    assert "step1 has the weights of step0" in said
    before = contents(folder.path)
    hub.requests.clear()
    hub.repositories[REPOSITORY]["branches"]["step10"] = moved = "1a2b" * 10
    hub.commits[moved] = checkpoint_files(3)
    assert sweep(REPOSITORY, **options) == 0
    line = (
        f"moved: step10 was measured at commit {run['step10'][:12]}; its revision is 1a2b1a2b1a2b"
    )
    assert line in printed()
    assert not any(what.endswith((".safetensors", ".bin")) for _, what, _ in hub.requests)
    assert contents(folder.path) == before


@pytest.mark.usefixtures("reader")
def test_a_sweep_that_evicts_only_reads_the_users_cache_and_mends_nothing_in_it(run, hub, options):
    snapshot_download(REPOSITORY, revision=run["step2"])
    snapshot_download(REPOSITORY, revision=run["step10"], allow_patterns=["config.json"])
    weights = Path(snapshot_download(REPOSITORY, revision=run["step0"]), "model.safetensors")
    weights.resolve().write_bytes(b"x" * weights.stat().st_size)
    before = contents(Path(constants.HF_HUB_CACHE))
    hub.requests.clear()
    assert sweep(REPOSITORY, **options) == 0
    assert contents(Path(constants.HF_HUB_CACHE)) == before
    assert run["step2"] not in hub.downloads(".bin")
    assert {run["step0"], run["step10"]} <= set(hub.downloads())
    assert hidden(options["out"]) == []


@pytest.mark.usefixtures("reader")
def test_a_configuration_that_was_edited_in_the_users_cache_is_not_that_of_the_commit(
    run, hub, options
):
    cached = Path(snapshot_download(REPOSITORY, revision=run["step0"]), "config.json").resolve()
    cached.write_bytes(cached.read_bytes().replace(b"{", b'{"layer_norm_eps": 1,', 1))
    hub.requests.clear()
    assert sweep(REPOSITORY, **options, steps="0") == 0
    assert run["step0"] in hub.downloads()


@pytest.mark.usefixtures("reader")
def test_the_downloads_of_a_killed_sweep_are_removed_by_the_next(run, options):
    here, elsewhere = (
        Path(options["out"], f".embedgeo-{host}-999999999-downloads", "step0", "blobs")
        for host in (socket.gethostname(), "another")
    )
    for folder in (here, elsewhere):
        write_files(folder, {"1a2b.incomplete": b"half"})
    assert sweep(REPOSITORY, **options) == 0
    assert (here.exists(), elsewhere.exists()) == (False, True)
    os.utime(elsewhere.parents[1], (0, 0))  # a day later
    assert sweep(REPOSITORY, **options) == 0
    assert hidden(options["out"]) == []


@pytest.mark.usefixtures("reader")
def test_evict_false_keeps_everything(run, options):
    sweep(REPOSITORY, **options, evict=False, steps="0,2")
    (repo,) = scan_cache_dir(constants.HF_HUB_CACHE).repos
    assert {r.commit_hash for r in repo.revisions} == {run["step0"], run["step2"]}


def test_a_plan_and_a_check_download_nothing(run, hub, options, printed):
    assert sweep(REPOSITORY, **options, dry_run=True) == 0
    said = printed()
    assert "duplicate of step0" in said
    assert "4 checkpoints" in said
    assert not options["out"].exists()
    assert check(REPOSITORY) == 1
    assert "same weights: step0, step1" in printed()
    assert check(REPOSITORY, steps="0,2,10") == 0
    assert not any(method in ("GET", "HEAD") and "." in what for method, what, _ in hub.requests)


@pytest.mark.usefixtures("reader")
def test_a_file_that_two_checkpoints_share_is_pointed_out(hub, options, printed):
    whole, other = checkpoint_files(1, shards=True), checkpoint_files(2, shards=True)
    name = next(name for name in whole if name.startswith("model-00001"))
    hub.add(REPOSITORY, "step1", whole)
    hub.add(REPOSITORY, "step2", {**other, name: whole[name]})
    assert check(REPOSITORY) == 1
    assert f"same file {name}: step1, step2" in printed()
    for _ in range(2):  # then from what the folder says
        assert sweep(REPOSITORY, **options) == 0
        assert f"shared: step1, step2 have the same {name}" in printed()
    (run,) = read_runs([options["out"]])
    (flag,) = [flag for flag in flags(run) if flag.title == "Shared weight files"]
    assert flag.details == [f"{name}: step1, step2"]


def test_the_same_weights_under_another_tokenizer_are_measured(hub, options):
    files = checkpoint_files(0)
    other = json.loads(files["tokenizer.json"])
    other["model"]["merges"] = other["model"]["merges"][:5]
    changes = {
        "a": {},
        "b": {},
        "c": {"tokenizer.json": json.dumps(other).encode()},
    }
    for name, changed in changes.items():
        hub.add(f"lab/{name}", "main", {**files, **changed})
    assert sweep([f"lab/{name}" for name in changes], **options) == 0
    folder = SweepFolder(options["out"])
    first, *others = (folder.read(f"lab--{name}--main") for name in changes)
    assert [each["duplicate_of"].notna().all() for each in others] == [True, False]
    assert [each["value"].equals(first["value"]) for each in others] == [True, False]
