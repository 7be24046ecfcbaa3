import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import embedgeo
from embedgeo.cli import COMMANDS, main
from embedgeo.demo import DemoSettings
from embedgeo.sweep import SweepSettings


def only_line(text: str) -> str:
    (line,) = text.splitlines()
    return line


def test_help_lists_the_commands_and_the_console_script_is_installed() -> None:
    script = Path(sys.executable).with_name("embedgeo")
    done = subprocess.run(
        [script, "--help"], capture_output=True, text=True, timeout=600, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "demo" in done.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_no_marks_of_code_and_names_options_as_they_are_written(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "`" not in text
    if command in ("sweep", "ablate", "reproduce"):
        assert "a sequence of --seq-len tokens" in text
        assert "A model is named as in --model." in text
        named = {field.name for field in dataclasses.fields(SweepSettings) if "_" in field.name}
        assert not named & set(re.findall(r"(?<![\w.])\w+", text))


@pytest.mark.slow
@pytest.mark.skipif(
    "OpenMP" not in torch.__config__.parallel_info(), reason="needs a torch with threads of OpenMP"
)
@pytest.mark.parametrize(
    ("chosen", "policy"), [({}, "PASSIVE"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE")]
)
def test_threads_of_a_command_sleep_while_they_wait_unless_told_otherwise(
    tmp_path: Path, chosen: dict[str, str], policy: str
) -> None:
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))
    }
    # as torch's library of threads has found it
    environment |= {"OMP_DISPLAY_ENV": "TRUE", **chosen}
    command = [Path(sys.executable).with_name("embedgeo"), "doctor", tmp_path]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert f"OMP_WAIT_POLICY = '{policy}'" in done.stderr.replace("[host] ", "")


def test_help_of_a_command_explains_every_option_and_says_what_happens_to_the_folder(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["demo", "--help"])
    assert stopped.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for option in ("--config", "--out", "--max-steps", "--seq-len", "--seed"):
        assert option in text
    assert "An earlier demo in it is replaced; a folder with anything else is refused." in text


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["--version"],
        *([name, "--help"] for name in COMMANDS),
        ["demo", "--nosuch"],
        ["sweep", "--modle", "x"],
        ["sweep", "--model", "x", "--batch-size", "0"],
        ["sweep", "--model", "x", "--count-range", "9,1"],
    ],
)
def test_help_and_wrong_options_are_answered_without_importing_anything_heavy(
    arguments: list[str],
) -> None:
    imported, _ = imported_by(arguments)
    assert "jsonargparse" in imported
    assert not imported & {
        "torch",
        "transformers",
        "lightning",
        "pandas",
        "pyarrow",
        "numpy",
        "matplotlib",
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["sweep", "--model", "./nowhere"],
            "model must be a local path that exists or a repository on the Hub",
        ),
        (["sweep", "--model", "/no/where"], "got '/no/where'"),
        (["sweep", "--model", "~/nowhere/at/all"], "got '~/nowhere/at/all'"),
        (["check", "--model", "../nowhere"], "got '../nowhere'"),
        (
            ["sweep", "--model", "lab/x", "--tokenizer", "nowhere/tok/tokenizer.json"],
            "tokenizer must be a local path",
        ),
        (
            ["sweep", "--model", "lab/x", "--text", "nowhere.txt"],
            "text must be files that exist; got 'nowhere.txt'",
        ),
        (
            ["sweep", "--model", "lab/x", "--text", "hf://models/x"],
            "A dataset is hf://datasets/NAME",
        ),
        (
            ["sweep", "--model", "lab/x", "--unit", "line", "--sample", "0"],
            "sample must be a share above 0",
        ),
        (["sweep", "--model", "lab/x", "--shard", "3/2"], "shard must be i/n"),
    ],
)
def test_a_value_that_cannot_be_is_refused_without_importing_anything_heavy(
    arguments: list[str], said: str
) -> None:
    imported, error = imported_by(arguments)
    assert said in only_line(error)
    assert not imported & {"torch", "transformers", "lightning", "matplotlib"}


def imported_by(arguments: list[str]) -> tuple[set[str], str]:
    """The packages that a command imports, and what it writes to stderr."""
    code = "\n".join(
        (
            "import sys",
            "from embedgeo.cli import main",
            "try: main(sys.argv[1:])",
            "except SystemExit: pass",
            "print('imported:', *sorted({name.partition('.')[0] for name in sys.modules}))",
        )
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    )
    return set(done.stdout.rpartition("imported:")[2].split()), done.stderr


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--version"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out == f"embedgeo {embedgeo.__version__}\n"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["--text", "a", "b"], ["a", "b"]),
        (["--text", "a", "--text", "b", "c"], ["a", "b", "c"]),
        (["--text=[a, b]"], ["a", "b"]),
        (["--text", "[ab]*"], ["[ab]*"]),
        (["--config", "x.yaml"], "c"),
        (["--config", "x.yaml", "--text", "a"], ["a"]),
        (["--tex", "a"], ["a"]),
    ],
)
def test_an_option_of_several_values_can_be_given_in_every_way(
    given: list[str], expected: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("x.yaml").write_text("text: c\n")
    settings = sweep_settings(monkeypatch, "--model", "m", *given)
    assert (settings.text, settings.models) == (expected, ["m"])


def sweep_settings(monkeypatch: pytest.MonkeyPatch, *given: str) -> SweepSettings:
    """What ``embedgeo sweep`` is run with."""
    seen: list[SweepSettings] = []
    monkeypatch.setitem(COMMANDS, "sweep", (seen.append, SweepSettings))
    assert main(["sweep", *given]) == 0
    return seen[0]


@pytest.mark.parametrize(
    "option", [f.name for f in dataclasses.fields(SweepSettings) if f.type is bool]
)
@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["--{}"], True),
        (["--{}", "--seq-len", "9"], True),
        (["--{}", "true"], True),
        (["--{}=false"], False),
        (["--{}", "no"], False),
        (["--no-{}"], False),
        (["--config", "x.yaml"], True),
    ],
)
def test_an_option_of_true_and_false_can_be_given_alone(
    option: str, given: list[str], expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("x.yaml").write_text(f"{option}: true\n")
    arguments = [each.format(option.replace("_", "-")) for each in given]
    assert getattr(sweep_settings(monkeypatch, "--model", "m", *arguments), option) is expected


@pytest.mark.parametrize(
    "given", [["a", "b"], ["a,b"], ["a, b"], ["a", "--layers", "b"], ["[a, b]"]]
)
def test_layers_can_be_given_in_every_way_and_are_recorded_alike(
    given: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = sweep_settings(monkeypatch, "--model", "m", "--layers", *given)
    assert settings.layer_patterns == settings.as_manifest("")["layers"] == ["a", "b"]


@pytest.mark.parametrize(
    "given", [["scales", "similarity"], ["scales,similarity"], ["[scales, similarity]"]]
)
@pytest.mark.parametrize("command", ["sweep", "vocabulary"])
def test_extra_metrics_can_be_given_in_every_way_and_are_recorded_alike(
    command: str, given: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    monkeypatch.setitem(COMMANDS, command, (seen.append, COMMANDS[command][1]))
    assert main([command, "--model", "m", "--extra", *given]) == 0
    asked = seen[0].as_manifest("") if command == "sweep" else seen[0].as_manifest()
    assert asked["extra"] == ["scales", "similarity"]


def test_a_comma_in_the_brackets_of_a_pattern_does_not_separate() -> None:
    assert SweepSettings("m", layers="layers.[0,1].mlp").layer_patterns == "layers.[0,1].mlp"
    assert SweepSettings("m", layers=["blocks"]).layer_patterns == "blocks"


def test_models_and_numbers_can_be_given_one_after_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert sweep_settings(monkeypatch, "--model", "a", "b").models == ["a", "b"]
    for given in (["0", "7"], ["0,7"], ["[0, 7]"]):
        assert sweep_settings(
            monkeypatch, "--model", "m", "--ignore-token-ids", *given
        ).ignore_token_ids == [0, 7]


@pytest.mark.parametrize("option", ["--num-tokens", "--num_tokens", "--num-tok"])
def test_hyphens_underscores_and_the_beginning_of_an_option_are_the_same(
    option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert sweep_settings(monkeypatch, "--model", "m", option, "7").num_tokens == 7


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], "demo"),
        (["nosuch"], "nosuch"),
        (["demo", "--nosuch", "3"], "--nosuch"),
        (["demo", "--max_steps", "0"], "argument --max-steps: "),
        (["demo", "--max-steps", "many"], "argument --max-steps: "),
        (["demo", "--config", "nosuch.yaml"], "nosuch.yaml"),
        (["sweep"], "required: --model (embedgeo sweep --help lists the options)"),
        (["report"], "required: DIR (embedgeo report --help lists the options)"),
        (["reproduce"], "required: PAPER (embedgeo reproduce --help lists the options)"),
        (
            ["sweep", "--model", "m", "--evict", "maybe"],
            "--evict: must be true or false; got 'maybe'",
        ),
        (
            ["sweep", "--model", "m", "--ignore-token-ids", "x"],
            "must be whole numbers, as 0 1 or 0,1; got 'x'",
        ),
        (["sweep", "--nosuch", "3"], "(embedgeo sweep --help lists the options)"),
        (["sweep", "--modle", "m"], "unrecognized arguments: --modle m. Did you mean --model?"),
        (
            ["sweep", "--model", "m", "--rows", "token"],
            "--rows: invalid choice: 'token' (choose from 'tokens', 'mean'",
        ),
        (
            ["sweep", "--model", "m", "--on", "raz"],
            "--on: invalid choice: 'raz' (choose from 'ray')",
        ),
        (
            ["doctor", "m", "--rows", "token"],
            "--rows: invalid choice: 'token' (choose from 'tokens', 'mean'",
        ),
        (
            ["vocabulary", "--model", "m", "--rows", "x"],
            "--rows: invalid choice: 'x' (choose from 'all', 'trained')",
        ),
    ],
)
def test_a_wrong_option_gives_one_line_and_status_2(
    arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    line = only_line(capsys.readouterr().err)
    assert line.startswith("embedgeo: error: ")
    assert named in line
    assert "typing" not in line


@pytest.mark.parametrize("command", ["sweep", "doctor"])
def test_the_options_that_a_command_prints_can_be_its_configuration(
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["--model", "m"] if command == "sweep" else ["m"]
    with pytest.raises(SystemExit):
        main([command, *arguments, "--print_config"])
    (tmp_path / "x.yaml").write_text(capsys.readouterr().out)
    seen: list[Any] = []
    monkeypatch.setitem(COMMANDS, command, (seen.append, COMMANDS[command][1]))
    assert main([command, "--config", str(tmp_path / "x.yaml")]) == main([command, *arguments]) == 0
    assert (seen[0].rows, seen[0].seq_len) == (seen[1].rows, seen[1].seq_len)


def test_a_model_that_cannot_be_built_gives_one_line_and_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", "--out", str(tmp_path / "out"), "--hidden-size", "33"]) == 2
    assert "hidden_size must be a multiple of 32" in only_line(capsys.readouterr().err)
    assert not (tmp_path / "out").exists()


def test_an_out_that_cannot_be_made_gives_one_line_and_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    out = tmp_path / "file" / "out"
    assert main(["demo", "--out", str(out)]) == 2
    assert str(out) in only_line(capsys.readouterr().err)


@pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() == 0, reason="needs a user who is not root"
)
def test_a_read_only_out_gives_one_line_and_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tmp_path.chmod(0o500)
    assert main(["demo", "--out", str(tmp_path)]) == 2
    assert str(tmp_path) in only_line(capsys.readouterr().err)


def test_a_full_disk_gives_one_line_and_status_2_before_training_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1_000_000))
    assert main(["demo", "--out", str(tmp_path)]) == 2
    captured = capsys.readouterr()
    assert "MB" in only_line(captured.err)
    assert str(tmp_path) in captured.err
    assert captured.out == ""


def test_a_folder_with_something_else_in_it_is_refused_and_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = tmp_path / "checkpoints" / "mine"
    mine.mkdir(parents=True)
    assert main(["demo", "--out", str(tmp_path)]) == 2
    assert "new or empty folder" in only_line(capsys.readouterr().err)
    assert mine.exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["report", "x"], "; no report was written, and an earlier one is as it was"),
        (["sweep", "--model", "x"], "; started again, it goes on where it was"),
        (["check", "--model", "x"], ""),
        (["demo"], ""),
    ],
)
def test_a_command_that_is_stopped_says_what_is_left(
    arguments: list[str],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def stopped(*_: object) -> int:
        raise KeyboardInterrupt  # at any moment, also while the command is imported

    settings = {"sweep": SweepSettings, "demo": DemoSettings}.get(arguments[0])
    if settings is None:
        monkeypatch.setattr(
            "embedgeo."
            + ("report.write_report" if arguments[0] == "report" else "sweep.run.run_check"),
            stopped,
        )
    else:
        monkeypatch.setitem(COMMANDS, arguments[0], (stopped, settings))
    assert main(arguments) == 130
    assert capsys.readouterr().err == f"embedgeo: stopped{words}\n"
