"""Names of checkpoints: those of the entries in the folder, distinct, and short enough for a
file.
"""

import re

import pytest
import torch

from embedgeo.checkpoints.sources import list_checkpoints
from embedgeo.results.folder import SweepFolder
from embedgeo.sweep import check
from embedgeo.text import Documents
from tests.sweep.sweeping import sweep
from tests.sweep.tiny import REPOSITORY, bin_file, checkpoint_files, local_run, write_files

NOT_ON_THE_HUB = [
    *("../x", "lab/..", "%2e%2e/x", "lab/x%2f..", "lab/x/../../y", "lab//x", "x" * 300),
    *("lab/x..y", "lab/x--y", "~nobody-of-this-name/x", "lab/x\0", "lab/x\n", " lab/x"),
]
LOOK_ALIKES = ["\u0415leutherAI/x", "lab/\u0440ythia", "lab/\u2024\u2024"]


def test_what_cannot_be_the_name_of_a_repository_is_refused_before_the_hub_is_asked(
    hub, tmp_path, options, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    hub.add(REPOSITORY, "step1", checkpoint_files(1))
    for name in [*NOT_ON_THE_HUB, *LOOK_ALIKES]:
        why = "must be a local path that exists or a repo"
        for option in ("model", "tokenizer"):
            with pytest.raises(ValueError, match=f"^{option} {why}") as refused:
                sweep(**{"model": REPOSITORY, **options, option: name})
            assert len(str(refused.value)) < 400
        with pytest.raises(ValueError, match=r"^model must be a local path"):
            check(name)
        if not set(name) & set("\0\n"):
            with pytest.raises(ValueError, match="text must be a file or a dataset"):
                Documents([f"hf://datasets/{name}"])
    assert not hub.requests


@pytest.fixture
def linked(tmp_path):
    """Two links in a folder, whose targets are of one name."""
    (tmp_path / "run").mkdir()
    for step, where in ((10, "a"), (20, "b")):
        write_files(tmp_path / where / "hf", checkpoint_files(step))
        (tmp_path / "run" / f"step{step}").symlink_to(tmp_path / where / "hf")
    return tmp_path / "run"


@pytest.mark.usefixtures("reader")
def test_a_linked_checkpoint_has_the_name_of_the_link(linked, options, monkeypatch):
    assert sweep(linked, **options) == 0
    folder = SweepFolder(options["out"])
    assert folder.done() == {"step10", "step20"}
    assert set(folder.read("step20")["revision"]) == {"step20"}
    assert [(c.name, c.step) for c in list_checkpoints(str(linked / "step20"))] == [("step20", 20)]
    (linked / "latest").symlink_to(linked / "step20")
    (linked.parent / "step5").mkdir()
    write_files(linked.parent / "step5", checkpoint_files(5))
    (linked.parent / "step5" / "global_step5").mkdir()  # which DeepSpeed keeps its optimizer in
    monkeypatch.chdir(linked.parent / "step5")
    assert [c.name for c in list_checkpoints(".")] == ["step5"]
    (linked.parent / "best").symlink_to(linked.parent / "step5")
    # the link names no step
    assert [c.name for c in list_checkpoints(str(linked.parent / "best"))] == ["step5"]


def test_a_run_that_is_listed_one_by_one_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(local_run(tmp_path))  # where the shell makes a list of step*
    with pytest.warns(UserWarning, match="runs of one checkpoint each: .*step1.*step2"):
        list_checkpoints(["step1", "step2"])


def test_names_that_collide_are_refused_before_anything_is_measured(tmp_path, options):
    runs = [
        str(local_run(tmp_path / where / "run", steps=(step,)))
        for where, step in (("a", 1), ("b", 2))
    ]
    with pytest.raises(ValueError, match=r"folders must differ in their names.*a/run, .*b/run"):
        sweep(runs, **options)
    assert not options["out"].exists()


def test_what_is_like_a_checkpoint_and_not_taken_is_listed(hub, tmp_path, options):
    run = local_run(tmp_path / "run", steps=(1,))
    left_out = ["my step 5", "epoch3", "1000", "step_2_000", "2000-steps", "ep0-ba3000", "it7"]
    for name in ("logs", "stepwise", *left_out):
        (run / name).mkdir()
    files = ["3000.pt", "epoch4.pth", "step5.safetensors", "model.PT", "step-1,500.pt", "step9"]
    write_files(run, dict.fromkeys(["optimizer_step1.pt", "log.txt", *files], b""))
    write_files(run / "final", checkpoint_files(2))
    (run / "step40").symlink_to("gone")
    names = ", ".join(map(repr, sorted([*left_out, *files, "final", "step40"])))
    with pytest.warns(UserWarning, match=re.escape(f"run: left out {names}. A ch")) as warned:
        assert [c.name for c in list_checkpoints(str(run))] == ["step1"]
    assert len(warned) == 1
    of_tokens = ["100B", "240b_tokens", "train_00220B"]
    for name in ("step1", *of_tokens, "main", "v1.0", "gptq-4bit", "q4_k_m"):
        hub.add(REPOSITORY, name, checkpoint_files(1))
    names = ", ".join(map(repr, of_tokens))
    with pytest.warns(UserWarning, match=rf"lab/tiny: left out {names}\. A check"):
        assert [c.name for c in list_checkpoints(REPOSITORY)] == ["step1"]


def test_a_stored_step_is_that_of_a_last_file_and_of_a_number_that_may_be_an_epoch(tmp_path):
    files = {"step=2": (1, 0), "ckpt-1": (4, 0), "last": (4, 0), "last-v1": (4, 1)}
    files["ckpt-3"] = None, 0
    for name, (step, value) in files.items():
        stored = {"state_dict": {"weight": torch.full((3,), value)}, "global_step": step}
        write_files(tmp_path, {f"{name}.ckpt": bin_file(stored)})
    with (
        pytest.warns(UserWarning, match=r": left out 'last-v1\.ckpt'\. "),
        pytest.warns(
            UserWarning,
            match=r"in ckpt-1\.ckpt \(4\), ckpt-3\.ckpt \(none\), step=2\.ckpt \(1\)\. A",
        ),
    ):
        assert [c.step for c in list_checkpoints(str(tmp_path))] == [2, 3, 4]
