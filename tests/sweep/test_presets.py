"""The presets: parsed by the command line and planned against a Hub that has each suite's names."""

import json
import os
import re
import subprocess

import pytest

from embedgeo.cli import ABOUT, COMMANDS, main
from embedgeo.options import make_parser
from tests.files import ROOT
from tests.sweep.tiny import checkpoint_files, local_run

LOG = [0, *(2**k for k in range(10)), *range(1000, 144000, 1000)]
PRESETS = {
    "pythia": ("EleutherAI/pythia-70m", [f"step{s}" for s in LOG], "branches", 20),
    "bloom": (
        "bigscience/bloom-560m-intermediate",
        [f"global_step{s}" for s in (1000, 10000, *range(100000, 700000, 100000))],
        "tags",
        8,
    ),
    "olmo2-1b": (
        "allenai/OLMo-2-0425-1B",
        [f"stage1-step{s}-tokens{-(-s * 2 // 1000)}B" for s in range(0, 200000, 10000)]
        + ["stage2-ingredient1-step1000-tokens3B"],
        "branches",
        7,
    ),
    "smollm2": (
        "HuggingFaceTB/SmolLM2-135M-intermediate-checkpoints",
        [f"step-{s}" for s in range(160000, 2000001, 160000)],
        "branches",
        5,
    ),
    "gpt2-stanford-crfm": (
        "stanford-crfm/alias-gpt2-small-x21",
        [
            f"checkpoint-{s}"
            for s in (0, *range(10, 100, 10), *range(100, 2000, 50), *range(2000, 400001, 1000))
        ],
        "branches",
        17,
    ),
}


PAPERS = {"yamagiwa2025": 6, "razzhigaev2024": 5, "li2025": 32}
"""Presets of several models, on a dataset: how many checkpoints they take."""


def parsed(*arguments):
    return make_parser(ABOUT, COMMANDS).parse_args(arguments)["sweep"].as_dict()


def test_a_preset_is_its_file_and_options_after_it_take_the_place_of_its_own():
    by_name = parsed("sweep", "--preset", "bloom")
    assert by_name == parsed("sweep", "--config", str(ROOT / "configs/bloom.yaml"))
    assert by_name["tokenizer"] == "bigscience/bloom-560m"
    model = "bigscience/bloom-3b-intermediate"
    changed = parsed("sweep", "--preset", "bloom", "--model", model, "--steps", "log")
    assert {name for name in by_name if changed[name] != by_name[name]} == {"model", "steps"}


def test_help_lists_the_presets(printed):
    with pytest.raises(SystemExit):
        main(["sweep", "--help"])
    assert {*PRESETS, *PAPERS} <= {*re.findall(r"[\w-]+", printed())}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["--preset", "pytia"],
            "got 'pytia'. (embedgeo sweep --help lists the options)\n",
        ),
        (
            ["--steps", "4", "--preset", "pythia"],
            "comes first, and options after it; got --steps before pythia",
        ),
    ],
)
def test_a_preset_that_is_not_there_or_not_first_is_refused_in_a_line(arguments, said, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["sweep", *arguments])
    assert stopped.value.code == 2
    assert said in (error := capsys.readouterr().err)
    assert error.count("\n") == 1


def test_presets_are_planned(hub, tmp_path, monkeypatch, printed):
    monkeypatch.chdir(tmp_path)
    for name, (repository, revisions, kind, at_least) in PRESETS.items():
        hub.add(repository, "main", checkpoint_files(0))
        for revision in revisions:
            files = checkpoint_files(0 if revision in ("step0", "step1") else 1)
            hub.add(repository, revision, files, kind=kind)
        assert main(["sweep", "--preset", name, "--dry-run"]) == 0
        *rows, total = (said := printed()).splitlines()
        assert total.startswith(f"{len(rows)} checkpoint")
        assert {row.split()[1] for row in rows} <= set(revisions)
        assert len(rows) >= at_least
        steps = [int(row.split()[0]) for row in rows]
        assert steps == sorted(steps)
        if name == "pythia":
            assert steps[:11] == LOG[:11]
            assert "duplicate of step0" in said
    assert list(tmp_path.glob("runs")) == []


def test_the_array_example_sweeps_into_the_folder_that_is_named(tmp_path, options):
    model = local_run(tmp_path / "run", steps=(1, 2))
    asked = {**options, "model": model, "text": [options["text"]]}
    (tmp_path / "config.yaml").write_text(json.dumps(asked, default=str))
    command = tmp_path / "bin" / "embedgeo"  # in its place: what it is called with
    command.parent.mkdir()
    command.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    command.chmod(0o755)
    environment = {
        "PATH": f"{command.parent}:{os.environ['PATH']}",
        "CONFIG": str(tmp_path / "config.yaml"),
        "OUT": str(tmp_path / "shared"),
    }
    script = ["bash", str(ROOT / "examples" / "sweep.slurm"), "--device", "cpu"]
    said = subprocess.run(script, env=environment, capture_output=True, text=True, check=True)
    assert main(said.stdout.splitlines()) == 0
    assert len(list((tmp_path / "shared" / "checkpoints").iterdir())) == 2


def test_the_job_scripts_are_shell_and_their_preset_is_there():
    for script in (ROOT / "examples").glob("*.slurm"):
        assert re.search(r"PRESET:-(\w+)\}", script.read_text())[1] in PRESETS
        subprocess.run(["bash", "-n", str(script)], check=True)
