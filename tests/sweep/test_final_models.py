"""Models that are no checkpoint of a step: swept alone, several together, and beside training
runs.
"""

import re
import warnings

import pandas as pd
import pytest

from embedgeo.checkpoints.sources import list_checkpoints
from embedgeo.report.runs import read_runs
from embedgeo.results.folder import SweepFolder
from embedgeo.results.records import model_record
from embedgeo.sweep import check
from tests.report.synthetic import make_sweep
from tests.sweep.reader import Reader
from tests.sweep.sweeping import sweep
from tests.sweep.tiny import (
    REPOSITORY,
    bin_file,
    checkpoint_files,
    local_run,
    model,
    tokenizer_files,
    tokenizer_of,
    write_files,
)


def facts(model, *args, **options):
    found = list_checkpoints(str(model), *args, **options)
    return [(c.name, c.revision, c.step, c.position.series, c.has_step) for c in found]


# ── what is one checkpoint
# ──────────────────────────────────────────────────────────────────────────────────────────


def test_a_folder_saved_by_save_pretrained_is_a_final_model(tmp_path, options):
    run, made = tmp_path / "my-bert", model(0, "bert")
    made.save_pretrained(run)
    tokenizer = tokenizer_of(tokenizer_files("bert"))
    tokenizer.save_pretrained(run)
    assert sweep(run, **options) == 0
    folder = SweepFolder(options["out"])
    assert folder.done() == {"my-bert"}
    facts = folder.facts("my-bert")
    # tied ones count once
    num_parameters = sum(parameter.numel() for parameter in made.parameters())
    assert (facts["has_step"], facts["num_parameters"]) == ("false", str(num_parameters))
    assert "group" not in facts
    records = folder.read("my-bert")
    about = records[["step", "revision", "series"]].drop_duplicates()
    assert about.to_numpy().tolist() == [[0, "my-bert", ""]]


@pytest.mark.usefixtures("reader")
def test_a_repository_without_steps_is_its_main(hub, options, printed):
    commit = hub.add(REPOSITORY, "main", checkpoint_files(0))
    hub.add(REPOSITORY, "v1.0", checkpoint_files(1), kind="tags")
    assert facts(REPOSITORY) == [("main", "main", 0, "", False)]
    assert facts(REPOSITORY, "v1.0") == [("v1.0", "v1.0", 0, "", False)]
    for steps in ("all", "final", "log", "0", [0]):
        assert sweep(REPOSITORY, **options, steps=steps, dry_run=True) == 0
        row, total = printed().splitlines()
        assert row.split()[:3] == ["final", "main", commit[:12]]
        assert total.startswith("1 checkpoint")
    assert sweep(REPOSITORY, **options) == 0
    assert "moved" not in printed()
    assert set(SweepFolder(options["out"]).read("main")["commit"]) == {commit}
    assert check(REPOSITORY) == 0
    assert "0 of them with the weights of an earlier one" in printed()


@pytest.mark.usefixtures("reader")
def test_a_repository_with_steps_is_final_only_where_that_is_asked_for(hub, options):
    for revision, step in (("main", 8), ("step0", 0), ("step8", 8)):
        hub.add(REPOSITORY, revision, checkpoint_files(step))
    assert [c.name for c in list_checkpoints(REPOSITORY)] == ["step0", "step8"]
    final = [("main", "main", 0, "", False)]
    assert facts(REPOSITORY, final=True) == final
    assert facts(REPOSITORY, "main") == final
    assert [c.name for c in list_checkpoints(REPOSITORY, "step*", final=True)] == ["step8"]
    assert sweep(REPOSITORY, **options, steps="final") == 0
    assert SweepFolder(options["out"]).done() == {"main"}


@pytest.mark.parametrize("place", ["", "checkpoints"])
def test_a_local_run_ends_in_its_last_step_or_in_the_model_beside_its_steps(tmp_path, place):
    run = write_files(tmp_path / "run", {})
    steps = local_run(run / place, steps=(2, 10))
    assert facts(run, final=True) == [("step10", "step10", 10, "step", True)]
    write_files(run, {"config.json": checkpoint_files(3)["config.json"]})
    assert [c.name for c in list_checkpoints(str(run), final=True)] == ["step10"]
    write_files(run, checkpoint_files(3))  # as transformers' Trainer leaves it
    final = [("run", "run", 0, "", False)]
    assert facts(run, final=True) == final
    with pytest.warns(UserWarning, match=r"/run: left out the model .* itself.* --steps final "):
        assert [c.step for c in list_checkpoints(str(run))] == [2, 10]
    assert facts(steps / "step2", final=True) == [("step2", "step2", 2, "step", True)]
    for path in (steps / "step2", steps / "step10"):
        path.rename(tmp_path / path.name)
    write_files(steps, {"notes.txt": b""})
    assert facts(run) == final


def test_a_lightning_file_without_a_step_anywhere_is_final(tmp_path):
    write_files(tmp_path, {"best.ckpt": bin_file({"state_dict": {}})})
    assert facts(tmp_path / "best.ckpt") == [("best.ckpt", "best.ckpt", 0, "", False)]


# ── several models
# ──────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.usefixtures("reader")
def test_several_models_are_series_of_their_own(hub, tmp_path, options, printed):
    for author, step in (("lab", 0), ("other", 1)):
        hub.add(f"{author}/tiny", "main", checkpoint_files(step))
    hub.add("lab/run", "step2", checkpoint_files(2))
    write_files(tmp_path / "mine", checkpoint_files(3))
    local_run(tmp_path / "here", steps=(4, 8))
    here, mine = str(tmp_path / "here"), str(tmp_path / "mine")
    assert sweep(["lab/tiny", "other/tiny", mine, here, "lab/run"], **options) == 0
    assert "6 of 6 checkpoints done" in printed()
    folder = SweepFolder(options["out"])
    expected = {
        "lab--tiny--main": ("lab--tiny", "false"),
        "other--tiny--main": ("other--tiny", "false"),
        "mine": ("mine", "false"),
        "here--step4": ("here--step", ""),
        "here--step8": ("here--step", ""),
        "lab--run--step2": ("lab--run--step", ""),
    }
    assert expected == {
        name: (folder.read(name)["series"].iloc[0], folder.facts(name).get("has_step", ""))
        for name in expected
    }
    series = {series for series, _ in expected.values()}
    assert {path.name for path in folder.tensorboard.iterdir()} == series


def test_values_stand_below_the_names_of_their_own_columns(tmp_path, options, printed, monkeypatch):
    class LossReader(Reader):
        def measure(self, checkpoint, choose_next):
            measured = super().measure(checkpoint, choose_next)
            measured.records.extend([model_record("loss", 1.0)] * (checkpoint.name != "c"))
            return measured

    monkeypatch.setattr("embedgeo.sweep.run.Worker", LossReader)
    models = [write_files(tmp_path / n, checkpoint_files(i)) for i, n in enumerate("abcd")]
    assert sweep([*map(str, models)], **options) == 0
    shown = re.findall(r"loss|time|(?<=/4  ).", printed())
    assert shown == ["loss", "time", "a", "b", "time", "c", "loss", "time", "d"]


def test_log_spaced_steps_are_those_of_each_run(tmp_path, options, printed):
    runs = [
        str(local_run(tmp_path / "a", steps=(0, 1, 2, 7))),
        str(local_run(tmp_path / "b", steps=(3, 6, 12))),
    ]
    of_log = "a--step0 a--step1 a--step2 a--step7 b--step3 b--step6 b--step12"
    for steps, names, lacking in (
        ("log", of_log, []),
        ("0,6,7", "a--step0 a--step7 b--step6", [("a", "6"), ("b", "0, 7")]),
    ):
        with warnings.catch_warnings(record=True, action="always") as warned:
            assert sweep(runs, **options, steps=steps, dry_run=True) == 0
        said = [str(each.message).partition(", of which")[0] for each in warned]
        assert said == [f"{tmp_path / run}: left out step {missing}" for run, missing in lacking]
        rows = printed().splitlines()[:-1]
        assert [row.split()[1] for row in rows] == names.split()


def test_repositories_may_name_a_step_each(hub):
    steps = ["lab/bert-seed_0-step_20k", "lab/bert-seed_0-step_40k"]
    for name in steps:
        hub.add(name, "main", checkpoint_files(0))
    assert [c.step for c in list_checkpoints(steps)] == [20000, 40000]


def test_models_of_other_shapes_are_series_of_their_own_and_named_once(tmp_path):
    folder = SweepFolder(make_sweep(tmp_path / "out", (1, 2, 8, 32), 2, dim=16))
    for step in (1, 2, 8, 32):
        records = folder.read(f"step{step}").assign(series="step")
        if step == 32:
            records["width"] *= 2
        kind = "GPT2LMHeadModel" if step == 8 else "GPTNeoXForCausalLM"
        folder.write(f"step{step}", records, {}, {"model_class": kind})
    folder.rebuild()
    names = {
        "step GPTNeoXForCausalLM 16 wide, 2 deep": [1, 2],
        "step GPT2LMHeadModel 16 wide, 2 deep": [8],
        "step GPTNeoXForCausalLM 32 wide, 2 deep": [32],
    }
    table = pd.read_csv(folder.path / "metrics.csv")
    assert {s: sorted(set(at["step"])) for s, at in table.groupby("series")} == names
    assert {path.name for path in (folder.path / "tensorboard").iterdir()} == set(names)
    runs = read_runs([folder.path])
    assert {run.label: run.steps for run in runs} == {f"out: {name}": names[name] for name in names}
