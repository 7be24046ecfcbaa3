"""What goes wrong with a checkpoint: mended where that is possible, else recorded while the sweep
goes on.
"""

import errno
import json
import os
import pickle
import re
import signal
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch
from huggingface_hub import constants

from embedgeo.checkpoints.sources import Checkpoint
from embedgeo.cli import main
from embedgeo.results.folder import SweepFolder
from tests.files import Payload
from tests.sweep.reader import Reader
from tests.sweep.sweeping import command, sweep
from tests.sweep.tiny import (
    REPOSITORY,
    bin_file,
    changed,
    checkpoint_files,
    tokenizer_files,
    write_files,
)

WEIGHTS = "model.safetensors"


@pytest.fixture
def commits(hub):
    """Steps 0 to 2, all well; the tokenizer is in the first."""
    return [
        hub.add(REPOSITORY, f"step{s}", checkpoint_files(s, with_tokenizer=s == 0))
        for s in range(3)
    ]


def done(options):
    return sorted(path.stem for path in (options["out"] / "checkpoints").glob("*.parquet"))


def reasons(options):
    return {path.stem: path.read_text() for path in (options["out"] / "failed").glob("*.txt")}


@pytest.mark.slow
@pytest.mark.usefixtures("reader")
@pytest.mark.filterwarnings("ignore:.*unclosed")
def test_faults_that_pass_are_mended(hub, options, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 1)
    faults = [(500, 500, 500), ("cut",), ("stall",), ("wrong",)]
    for step, of_weights in enumerate(faults):
        commit = hub.add(
            REPOSITORY, f"step{step}", checkpoint_files(step, with_tokenizer=step == 0)
        )
        hub.fail(WEIGHTS, commit, *of_weights)
        hub.fail("tree", commit, 500, 503)
        if step == 0:  # the same in all: fetched once
            hub.fail("config.json", commit, 503, 429)
    assert sweep(REPOSITORY, **options) == 0
    assert done(options) == [f"step{step}" for step in range(len(faults))]
    assert not (options["out"] / "failed").exists()
    assert set(map(tuple, hub.faults.values())) == {()}


FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
STRIKES = {  # by step: where, what happens there, words of the reason
    1: ("tree", (404,) * 9, "404"),
    2: (WEIGHTS, (404,) * 9, "404"),
    3: (WEIGHTS, (401,) * 9, "401"),
    4: (WEIGHTS, (500,) * 30, "run the same command again"),  # which may pass by itself
    5: (WEIGHTS, ("wrong",) * 9, "hash that the Hub lists"),
    6: ((Checkpoint, "fetch"), FULL, "No space left"),
    7: ((Reader, "measure"), torch.OutOfMemoryError("out of memory"), "OutOfMemoryError: out of"),
    8: ((SweepFolder, "write"), FULL, "No space left"),
}


@pytest.mark.usefixtures("reader")
def test_a_fault_that_stays_fails_the_checkpoint_alone_and_is_tried_again(
    hub, options, monkeypatch, printed
):
    commits = [hub.add(REPOSITORY, f"step{step}", checkpoint_files(step)) for step in range(9)]
    # a duplicate of a checkpoint that fails is measured itself
    hub.add(REPOSITORY, "step10", checkpoint_files(2))

    def strike(owner, method, name, error):
        call = getattr(owner, method)

        def struck(*args):
            if name in [getattr(each, "name", each) for each in args[:2]]:
                raise error
            return call(*args)

        patched.setattr(owner, method, struck)

    with monkeypatch.context() as patched:
        for step, (where, fault, _) in STRIKES.items():
            if isinstance(where, str):
                hub.fail(where, commits[step], *fault)
            else:
                strike(*where, f"step{step}", fault)
        assert sweep(REPOSITORY, **options) == 3
    assert done(options) == ["step0", "step10"]
    for step, (_, _, reason) in STRIKES.items():
        assert reason in reasons(options)[f"step{step}"]
    said = printed()
    assert "2 of 10 checkpoints done" in said
    assert "failed: step1: " in said
    hub.faults.clear()
    hub.requests.clear()
    assert sweep(REPOSITORY, **options) == 0
    assert len(done(options)) == 10
    # step 2 is copied from its duplicate or read itself
    assert set(hub.downloads()) | {commits[2]} == {commits[step] for step in STRIKES}
    assert not (options["out"] / "failed").exists()


def broken(step=1, **changes):
    files = checkpoint_files(step, with_tokenizer=False)
    return {name: data for name, data in {**files, **changes}.items() if data is not None}


CODE = {"auto_map": {"AutoConfig": "mine.Config", "AutoModelForCausalLM": "mine.Model"}}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model_type": "mine", **CODE}, "auto_map names code .*; --trust-remote-code true runs"),
        ({"num_attention_heads": 3}, "transformers cannot take it .*hidden size is not divisible"),
    ],
)
def test_an_error_about_a_configuration_is_one_sentence_and_names_no_page(
    tmp_path, changes, reason, capsys
):
    files = checkpoint_files(1, with_tokenizer=False)
    folder = write_files(tmp_path, changed(files, **changes))
    assert main(["doctor", str(folder)]) == 2
    said = capsys.readouterr().err
    assert re.search(rf"error: config\.json: {reason}", said)
    assert not re.search("https?://|trust_remote_code|contains custom code", said)


@pytest.fixture
def handlers():
    """Those of signals, which a program changes for good."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("reader")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_program_at_once_and_a_further_run_goes_on(
    hub, commits, options, monkeypatch, capsys, handlers, number
):
    def stopped(*args):
        signal.raise_signal(number)

    def end(status):
        raise SystemExit(status)

    with monkeypatch.context() as patched:
        patched.setattr(Reader, "measure", stopped)
        patched.setattr(os, "_exit", end)
        patched.setattr(sys, "argv", ["embedgeo", *command(REPOSITORY, options)])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 130
    assert capsys.readouterr().err.splitlines()[-1].startswith("embedgeo: stopped")
    assert sweep(REPOSITORY, **options) == 0
    assert done(options) == ["step0", "step1", "step2"]
    assert list(options["out"].glob(".*")) == []


# ── one clear error, and nothing written
# ────────────────────────────────────────────────────────────────────────────


def assert_refused(match, *args, **options):
    with pytest.raises((ValueError, OSError), match=match) as caught:
        sweep(*args, **options)
    assert "\n" not in str(caught.value) or "Repository" in str(caught.value)
    return str(caught.value)


def test_arguments_that_cannot_be(hub, commits, options):
    for changes, match in (
        ({"steps": "5"}, "steps of which there is a checkpoint; got 5. The nearest are 2; "),
        ({"num_tokens": 10}, "num_tokens must fill"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"skip_first_positions": 16}, "must leave some of the 16 of seq_len; got 16"),
        ({"dtype": "int8"}, "dtype must be one of"),
        ({"layers": "*.nothing"}, "matches no layer"),
        ({"device": "tpu"}, "device must be one of cpu, cuda; got 'tpu'"),
        ({"revisions": "nothing-*"}, "none among the revisions"),
        ({"text": "/does/not/exist"}, "text must be files that exist"),
    ):
        assert_refused(match, REPOSITORY, **{**options, **changes})
    assert not options["out"].exists()


def test_a_folder_of_something_else_is_refused(hub, commits, options, tmp_path):
    before = sorted(tmp_path.rglob("*"))
    assert_refused("must be a new folder", REPOSITORY, **{**options, "out": tmp_path})
    assert sorted(tmp_path.rglob("*")) == before
    out = options["out"]
    out.mkdir()
    for manifest in ("{", "[1]", '{"asked": 1}', '{"name": "an app"}', "null"):
        (out / "manifest.json").write_text(manifest)
        assert_refused(r"manifest.json is none of a sweep's", REPOSITORY, **options)
        assert [path.name for path in out.iterdir()] == ["manifest.json"]


@pytest.mark.usefixtures("reader")
def test_a_disk_that_is_full_in_the_end_is_named(hub, commits, options, monkeypatch):
    def full(*args):
        raise FULL

    with monkeypatch.context() as patched:
        patched.setattr("embedgeo.results.folder.write_events", full)
        assert "events.out" in assert_refused("No space left", REPOSITORY, **options)
    assert done(options) == ["step0", "step1", "step2"]
    assert list(options["out"].glob(".*")) == []
    assert sweep(REPOSITORY, **options) == 0


def test_a_hub_that_does_not_answer_is_named(hub, options):
    hub.close()
    assert_refused(f"the Hub must answer at {hub.url}; got ", REPOSITORY, **options)


def test_a_repository_without_main_whose_revisions_name_no_step(hub, options):
    hub.add(REPOSITORY, "trunk", checkpoint_files(0))
    assert_refused(
        "a branch main, or branches or tags that name steps, .*; lab/tiny has none",
        REPOSITORY,
        **options,
    )


def test_no_tokenizer_anywhere(hub, tmp_path, options):
    hub.add(REPOSITORY, "step0", checkpoint_files(0, with_tokenizer=False))
    assert_refused(
        "none loads: main of lab/tiny .* tokenizer.json by --tokenizer", REPOSITORY, **options
    )
    write_files(tmp_path / "run" / "step1", checkpoint_files(1, with_tokenizer=False))
    line = "run has no files of one, nor have its checkpoints. Name a folder"
    for dry_run in (True, False):
        assert_refused(line, str(tmp_path / "run"), **options, dry_run=dry_run)


@pytest.mark.usefixtures("reader")
def test_two_tokenizers_in_a_run_are_named_and_one_is_chosen(tmp_path, options):
    run = tmp_path / "run"
    write_files(run / "step1", checkpoint_files(1))
    write_files(run / "step2", {**checkpoint_files(2), **tokenizer_files("bert")})
    assert_refused(
        r"those of step1 and step2 differ in .*tokenizer\.json.* by --tokenizer",
        str(run),
        **options,
    )
    assert sweep(run, **options, tokenizer=run / "step2") == 0


# ── checkpoints that mean harm
# ──────────────────────────────────────────────────────────────────────────────────────


def test_a_pickle_payload_is_not_executed(hub, options, tmp_path):
    payload = Payload(str(tmp_path / "executed"))
    beside = {"pytorch_model.bin": bin_file(payload)}
    safe = hub.add(REPOSITORY, "step0", {**checkpoint_files(0), **beside})
    for step, data in enumerate((bin_file(payload), pickle.dumps(payload)), 1):
        hub.add(REPOSITORY, f"step{step}", broken(**{WEIGHTS: None, "pytorch_model.bin": data}))
    assert sweep(REPOSITORY, **options) == 3
    assert not (tmp_path / "executed").exists()
    assert safe not in hub.downloads("pytorch_model.bin")
    assert done(options) == ["step0"]


def test_code_in_a_repository_is_not_executed(hub, options, tmp_path):
    target = tmp_path / "executed"
    code = f"import os\nos.mkdir({str(target)!r})\n".encode()
    config = {
        "model_type": "evil",
        "auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"},
    }
    hub.add(REPOSITORY, "step0", checkpoint_files(0))
    changes = {
        "config.json": json.dumps(config).encode(),
        "evil.py": code,
        "custom_generate/generate.py": code,
    }
    hub.add(REPOSITORY, "step1", broken(**changes))
    tokenizer = {
        "tokenizer_config.json": json.dumps(
            {"auto_map": {"AutoTokenizer": ["evil.T", "evil.T"]}}
        ).encode()
    }
    hub.add(REPOSITORY, "step2", broken(2, **tokenizer, **{"evil.py": code}))
    assert sweep(REPOSITORY, **options) == 3
    assert not target.exists()
    assert {"step0", "step1"} - set(done(options)) == {"step1"}
    assert not any(what.endswith(".py") for _, what, _ in hub.requests)


@pytest.mark.usefixtures("reader")
def test_names_that_lead_out_of_the_folder_are_not_fetched(hub, options, tmp_path):
    evil = {
        "../../../../escaped.json": b"{}",
        "/abs/model.safetensors": b"x",
        "sub/../../../tokenizer.json": b"{}",
    }
    hub.add(REPOSITORY, "step0", {**checkpoint_files(0), **evil})
    before = set(tmp_path.rglob("*"))
    assert sweep(REPOSITORY, **options) == 0
    inside = (options["out"], Path(constants.HF_HUB_CACHE))
    new = set(tmp_path.rglob("*")) - before
    assert all(any(path == root or root in path.parents for root in inside) for path in new)
    assert not any("escaped" in what or ".." in what for _, what, _ in hub.requests)


def test_an_index_that_names_a_file_outside_is_refused(hub, options, tmp_path):
    files = checkpoint_files(1, with_tokenizer=False, shards=True)
    index = json.loads(files["model.safetensors.index.json"])
    (tmp_path / "secret.safetensors").write_bytes(checkpoint_files(2)[WEIGHTS])
    index["weight_map"] = dict.fromkeys(index["weight_map"], "../../../../../secret.safetensors")
    hub.add(REPOSITORY, "step0", checkpoint_files(0))
    hub.add(
        REPOSITORY, "step1", {**files, "model.safetensors.index.json": json.dumps(index).encode()}
    )
    assert sweep(REPOSITORY, **options) == 3
    assert "must name the checkpoint's weight files" in reasons(options)["step1"]


@pytest.mark.usefixtures("reader")
def test_revision_names_stay_inside_the_folder(hub, options):
    hub.add(REPOSITORY, "../../step1", checkpoint_files(1))
    hub.add(REPOSITORY, "../../step2", checkpoint_files(2))
    assert sweep(REPOSITORY, **options) == 0
    assert done(options) == ["%2E.%2F..%2Fstep1", "%2E.%2F..%2Fstep2"]
    revisions = {*pd.read_csv(options["out"] / "metrics.csv")["revision"]}
    assert revisions == {"../../step1", "../../step2"}


def test_a_commit_that_is_none_is_refused(hub, options):
    hub.add(REPOSITORY, "step1", checkpoint_files(1))
    hub.repositories[REPOSITORY]["branches"]["step1"] = "../../x"
    assert_refused("must stand for a commit", REPOSITORY, **options)
