import dataclasses
import json
import re
import subprocess
import sys
from functools import wraps
from pathlib import Path
from types import SimpleNamespace

import pytest

from embedgeo.cli import COMMANDS, main
from embedgeo.sweep import SweepSettings


def test_help_has_no_marks_of_code_and_names_options_as_they_are_written(
    printed,
):
    named = {field.name for field in dataclasses.fields(SweepSettings) if "_" in field.name}
    for command in COMMANDS:
        with pytest.raises(SystemExit) as stopped:
            main([command, "--help"])
        assert stopped.value.code == 0
        text = " ".join(printed().split())
        assert "`" not in text
        if command == "sweep":
            assert "a sequence of --seq-len tokens" in text
            assert not named & set(re.findall(r"(?<![\w.])\w+", text))
        if command == "demo":
            for option in ("--config", "--out", "--max-steps", "--seq-len", "--seed"):
                assert option in text
            assert "embedgeo-demo.json" in text


def test_help_and_wrong_options_are_answered_without_importing_anything_heavy():
    imported = imported_by(
        ["--help"],
        ["--version"],
        *([name, "--help"] for name in COMMANDS),
        ["demo", "--nosuch"],
        ["sweep", "--modle", "x"],
        ["sweep", "--model", "x", "--batch-size", "0"],
        ["sweep", "--model", "x", "--count-range", "9,1"],
    )
    assert "jsonargparse" in imported
    heavy = {"torch", "transformers", "lightning", "pandas", "pyarrow", "numpy", "matplotlib"}
    assert not imported & heavy


def imported_by(*commands):
    """The packages that commands import, one after the other."""
    code = "\n".join(
        (
            "import json, sys",
            "from embedgeo.cli import main",
            "for arguments in json.loads(sys.argv[1]):",
            "    try: main(arguments)",
            "    except SystemExit: pass",
            "print('imported:', *sorted({name.partition('.')[0] for name in sys.modules}))",
        )
    )
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(commands)],
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    )
    return set(done.stdout.rpartition("imported:")[2].split())


def test_an_option_of_several_values_can_be_given_in_every_way(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("x.yaml").write_text("text: c\n")
    for given, expected in (
        (["--text", "a", "b"], ["a", "b"]),
        (["--text", "a", "--text", "b", "c"], ["a", "b", "c"]),
        (["--text", "[ab]*"], ["[ab]*"]),
        (["--config", "x.yaml"], "c"),
        (["--config", "x.yaml", "--text", "a"], ["a"]),
        (["--tex", "a"], ["a"]),
    ):
        settings = sweep_settings(monkeypatch, "--model", "m", *given)
        assert (settings.text, settings.models) == (expected, ["m"])


def sweep_settings(monkeypatch, *given):
    """What ``embedgeo sweep`` is run with."""
    seen = []
    monkeypatch.setitem(COMMANDS, "sweep", (seen.append, SweepSettings))
    assert main(["sweep", *given]) == 0
    return seen[0]


def test_an_option_of_true_and_false_can_be_given_alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("x.yaml").write_text("token_tables: true\n")
    for given, expected in (
        ("--token-tables", True),
        ("--token-tables --seq-len 9", True),
        ("--token-tables true", True),
        ("--token-tables=false", False),
        ("--no-token-tables", False),
        ("--config x.yaml", True),
    ):
        settings = sweep_settings(monkeypatch, "--model", "m", *given.split())
        assert settings.token_tables is expected


def test_models_and_numbers_can_be_given_one_after_the_other(
    monkeypatch,
):
    assert sweep_settings(monkeypatch, "--model", "a", "b").models == ["a", "b"]
    for given in (["0", "7"], ["0,7"]):
        assert sweep_settings(
            monkeypatch, "--model", "m", "--ignore-token-ids", *given
        ).ignore_token_ids == [0, 7]
    asked = "--model", "m", "--ignore-token-ids", "special"
    assert sweep_settings(monkeypatch, *asked).as_manifest("")["ignore_token_ids"] == "special"


@pytest.mark.parametrize("command", ["sweep", "doctor"])
def test_the_options_that_a_command_prints_can_be_its_configuration(
    command,
    tmp_path,
    monkeypatch,
    printed,
):
    arguments = ["--model", "m"] if command == "sweep" else ["m"]
    with pytest.raises(SystemExit):
        main([command, *arguments, "--print_config"])
    (tmp_path / "x.yaml").write_text(printed())
    seen = []
    run, settings = COMMANDS[command]

    @wraps(run)
    def record(*given, **options):
        seen.append(given[0] if given else SimpleNamespace(**options))

    monkeypatch.setitem(COMMANDS, command, (record, record if settings is run else settings))
    assert main([command, "--config", str(tmp_path / "x.yaml")]) == main([command, *arguments]) == 0
    assert (seen[0].layers, seen[0].seq_len) == (seen[1].layers, seen[1].seq_len)
