"""Checkpoints in a loop: what is yielded, loaded, and removed again."""

from pathlib import Path

import pytest
import torch
from huggingface_hub import constants, snapshot_download

import embedgeo
from tests.files import contents
from tests.sweep.conftest import hub as hub  # noqa: PLC0414  # a fixture
from tests.sweep.tiny import (
    REPOSITORY,
    bin_file,
    checkpoint_files,
    local_run,
    model,
    write_files,
)

IDS = torch.arange(12).view(1, -1)


def logits(loaded):
    with torch.no_grad():
        return loaded(IDS).logits


def test_checkpoints_of_a_repository_are_loaded_and_those_downloaded_are_removed(hub):
    commits = [
        hub.add(REPOSITORY, f"step{step}", checkpoint_files(0 if step == 1 else step))
        for step in (0, 1, 2, 16)
    ]
    snapshot_download(REPOSITORY, revision=commits[0])
    before = contents(Path(constants.HF_HUB_CACHE))
    seen, folders = [], []
    for checkpoint in embedgeo.iter_checkpoints(REPOSITORY, steps="0,1,2", evict=True):
        assert not any(folder.exists() for folder in folders)
        assert torch.equal(logits(checkpoint.load()), logits(model(2 * (checkpoint.step == 2))))
        seen.append((checkpoint.name, checkpoint.commit, checkpoint.duplicate_of))
        folders += [checkpoint.cache]
        # step 0 is in the user's cache
        assert checkpoint.cache.exists() == (checkpoint.step > 0)
    assert seen == [
        ("step0", commits[0], None),
        ("step1", commits[1], "step0"),
        ("step2", commits[2], None),
    ]
    assert not any(folder.exists() for folder in folders)
    assert contents(Path(constants.HF_HUB_CACHE)) == before


def test_a_branch_that_moves_meanwhile_is_loaded_as_it_was(hub):
    hub.add(REPOSITORY, "step1", checkpoint_files(1))
    (checkpoint,) = embedgeo.iter_checkpoints(REPOSITORY)
    hub.repositories[REPOSITORY]["branches"]["step1"] = "1a2b" * 10
    hub.commits["1a2b" * 10] = checkpoint_files(3)
    assert torch.equal(logits(checkpoint.load()), logits(model(1)))


class Tiny(torch.nn.Linear):
    def __init__(self):
        super().__init__(3, 2)


def test_local_folders_and_files(tmp_path):
    local_run(tmp_path / "run", steps=(8, 1))
    steps = []
    for checkpoint in embedgeo.iter_checkpoints(str(tmp_path / "run"), evict=True):
        loaded = checkpoint.load(dtype=torch.bfloat16, device="cpu")
        assert (loaded.dtype, loaded.training) == (torch.bfloat16, False)
        assert len(checkpoint.weights_sha256) == 64
        steps.append(checkpoint.step)
    assert steps == [1, 8]
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["step1", "step8"]
    saved = Tiny()
    write_files(tmp_path / "states", {"step5.pt": bin_file(saved.state_dict())})
    with pytest.raises(ValueError, match=r"model_class must name .*step5\.pt"):
        embedgeo.iter_checkpoints(str(tmp_path / "states"))
    for model_class in (Tiny, f"{__name__}:Tiny"):
        (checkpoint,) = embedgeo.iter_checkpoints(str(tmp_path / "states"), model_class=model_class)
        assert torch.equal(checkpoint.load().weight, saved.weight)


def test_what_cannot_be_loaded_is_refused(tmp_path, hub):
    with pytest.raises(FileNotFoundError, match="lab/nothing must be a local path"):
        embedgeo.iter_checkpoints("lab/nothing")
    local_run(tmp_path, steps=(1,))
    with pytest.raises(ValueError, match="steps must name steps of which"):
        embedgeo.iter_checkpoints(str(tmp_path), steps=3)
    (tmp_path / "step1" / "config.json").unlink()
    (checkpoint,) = embedgeo.iter_checkpoints(str(tmp_path))
    with pytest.raises(ValueError, match=r"step1 cannot be read: .* must have a config\.json"):
        checkpoint.load()
    config = checkpoint_files(1)["config.json"].replace(
        b'"num_hidden_layers": 2', b'"num_hidden_layers": 3'
    )
    write_files(tmp_path / "step1", {**checkpoint_files(1), "config.json": config})
    (checkpoint,) = embedgeo.iter_checkpoints(str(tmp_path))
    with pytest.raises(ValueError, match="must hold all weights of the model; missing"):
        checkpoint.load()
