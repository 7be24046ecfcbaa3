import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import left_out

ROOT = Path(__file__).parents[1]
SOME = """
import pathlib
import pytest

@pytest.mark.skip(reason="needs a GPU")
def test_a():
    pass

def test_b():
    pathlib.Path("checkpoints").mkdir()

def test_c():
    raise RuntimeError("torch.compile is not supported on Python 3.14+")
"""


def test_targets_that_run_the_rest_are_named():
    ignored = ["/here/tests/integrations"]
    for marked, rest in (("not slow", "make test-slow"), ("slow", "make test")):
        said = [line.rpartition(": ")[2] for line in left_out(marked, ignored, [])]
        assert said == [rest, "make integrations"]
    assert left_out("", [], []) == []


def test_a_reason_is_a_line_whatever_it_holds_for():
    reasons = [
        "Skipped: needs a GPU with CUDA",
        "Skipped: needs a browser",
        "Skipped: needs a GPU with CUDA",
    ]
    assert left_out("", [], reasons) == [
        "2 tests: needs a GPU with CUDA",
        "1 test: needs a browser",
    ]


@pytest.mark.slow
def test_the_terminal_says_at_the_end_what_was_left_out_and_what_was_left_behind_which_fails(
    tmp_path,
):
    """With workers, too, which skip the tests while another process writes to the terminal."""
    (tmp_path / "tests").mkdir()
    shutil.copy(ROOT / "tests" / "conftest.py", tmp_path / "tests")
    (tmp_path / "tests" / "test_some.py").write_text(SOME)
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")
    }
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "pytest", "-n", "1", "-m", "not slow", tmp_path]
    options = {"cwd": tmp_path, "env": environment, "capture_output": True, "text": True}
    done = subprocess.run(command, check=False, **options)
    assert done.returncode == 1, done.stdout
    assert done.stdout.partition(" left behind ")[2].splitlines()[1:2] == ["checkpoints"]
    said = done.stdout.partition(" left out ")[2].splitlines()[1:4]
    assert said[:2] == ["the slow tests: make test-slow", "1 test: needs a GPU"], done.stdout
    assert said[2].startswith("1 test: needs torch.compile: torch ")
