import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import left_out

ROOT = Path(__file__).parents[1]
SOME = """
import os
import pathlib
import pytest

@pytest.mark.skip(reason="needs a GPU")
def test_a():
    pass

def test_b():
    if os.environ["BEHIND"]:
        pathlib.Path(os.environ["BEHIND"]).mkdir()

def test_c():
    raise RuntimeError("torch.compile is not supported on Python 3.14+")
"""


@pytest.mark.parametrize(
    ("marked", "ignored", "said"),
    [
        ("not slow", ["/here/tests/integrations"], ["make test-slow", "make integrations"]),
        ("slow", ["/here/tests/integrations"], ["make test", "make integrations"]),
        ("", [], []),
    ],
)
def test_targets_that_run_the_rest_are_named(marked, ignored, said):
    assert [line.rpartition(": ")[2] for line in left_out(marked, ignored, [])] == said


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
    for behind in ([], ["checkpoints"]):
        run = {**environment, "BEHIND": "".join(behind)}
        done = subprocess.run(
            command, cwd=tmp_path, env=run, capture_output=True, text=True, check=False
        )
        assert done.returncode == len(behind), done.stdout
        assert done.stdout.partition(" left behind ")[2].splitlines()[1:2] == behind
        said = done.stdout.partition(" left out ")[2].splitlines()[1:4]
        assert said[:2] == ["the slow tests: make test-slow", "1 test: needs a GPU"], done.stdout
        assert said[2].startswith("1 test: needs torch.compile: torch ")
