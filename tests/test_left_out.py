import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import left_out

ROOT = Path(__file__).parents[1]


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
    reasons = ["Skipped: needs a GPU with CUDA", "Skipped: needs a browser", "Skipped: needs a GPU with CUDA"]
    assert left_out("", [], reasons) == ["2 tests: needs a GPU with CUDA", "1 test: needs a browser"]


@pytest.mark.slow
def test_the_terminal_says_what_was_left_out_at_the_end(tmp_path):
    """With workers, too, which skip the tests while another process writes to the terminal."""
    (tmp_path / "conftest.py").write_text("from tests.conftest import pytest_terminal_summary")
    skipped = "import pytest\n@pytest.mark.skip(reason='needs a GPU')\ndef test_a(): pass\ndef test_b(): pass\n"
    (tmp_path / "test_some.py").write_text(skipped)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "pytest", "-n", "1", "-m", "not slow", tmp_path]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    said = done.stdout.partition(" left out ")[2].splitlines()[1:3]
    assert said == ["the slow tests: make test-slow", "1 test: needs a GPU"], done.stdout
