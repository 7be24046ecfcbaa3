import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from embedgeo.cli import COMMANDS, main
from embedgeo.sweep import SweepSettings


def only_line(text: str) -> str:
    (line,) = text.splitlines()
    return line


def test_help_lists_the_commands_and_the_console_script_is_installed() -> None:
    script = Path(sys.executable).with_name("embedgeo")
    done = subprocess.run([script, "--help"], capture_output=True, text=True, timeout=600, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "demo" in done.stdout


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


@pytest.mark.parametrize("arguments", [["--help"], *([name, "--help"] for name in COMMANDS), ["demo", "--nosuch"]])
def test_help_and_wrong_options_are_answered_without_importing_anything_heavy(arguments: list[str]) -> None:
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
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=600, check=True
    )
    imported = set(done.stdout.rpartition("imported:")[2].split())
    assert "jsonargparse" in imported
    assert not imported & {"torch", "transformers", "lightning", "pandas", "pyarrow", "numpy", "matplotlib"}


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
    seen: list[SweepSettings] = []
    monkeypatch.setitem(COMMANDS, "sweep", (seen.append, SweepSettings))
    assert main(["sweep", "--model", "m", *given]) == 0
    assert (seen[0].text, seen[0].models) == (expected, ["m"])


@pytest.mark.parametrize("option", ["--num-tokens", "--num_tokens", "--num-tok"])
def test_hyphens_underscores_and_the_beginning_of_an_option_are_the_same(
    option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[SweepSettings] = []
    monkeypatch.setitem(COMMANDS, "sweep", (seen.append, SweepSettings))
    assert main(["sweep", "--model", "m", option, "7"]) == 0
    assert seen[0].num_tokens == 7


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], "demo"),
        (["nosuch"], "nosuch"),
        (["demo", "--nosuch", "3"], "--nosuch"),
        (["demo", "--max_steps", "0"], "max_steps"),
        (["demo", "--max-steps", "many"], "max_steps"),
        (["demo", "--config", "nosuch.yaml"], "nosuch.yaml"),
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


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_out_gives_one_line_and_status_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
