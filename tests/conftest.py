import os
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from tests.shared_runs import demo, made_once, swept  # noqa: F401 (fixtures)

# The same examples every time in the ordinary run; `--hypothesis-profile=fuzz` draws new and many
# more ones for the tests that do not fix their number.
settings.register_profile("default", deadline=None, derandomize=True, max_examples=100)
settings.register_profile("fuzz", deadline=None, max_examples=2000, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))

torch.set_num_threads(1)

ROOT = Path(__file__).parents[1]
BEFORE = {path.name for path in ROOT.iterdir()}
OF_MAKE = {"build", "dist", "runs", "site"}
"""What other targets write into the repository's folder, perhaps at the same time."""


def pytest_collection_finish(session):
    """Have the pretended GPU, if a test needs it, before the first backward pass, at which autograd
    counts devices.
    """
    from tests.pretended import COMPILER, load_guard

    modules = [vars(getattr(item, "module", pytest)) for item in session.items]
    is_needed = any("pretended" in names for names in modules)
    if is_needed and COMPILER is not None and not torch.cuda.is_available():
        load_guard()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call():
    """Skip a test that compiles where torch refuses to, as 2.9 does on Python 3.14."""
    try:
        return (yield)
    except RuntimeError as refused:
        if str(refused).startswith("torch.compile is not supported"):
            pytest.skip(f"needs torch.compile: torch {torch.__version__} refuses it on this Python")
        raise


def pytest_sessionfinish(session):
    """Fail if tests have left something behind."""
    if left_behind() and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def left_behind():
    """What tests have written into the repository's folder, where it might be committed; caches
    have dots.
    """
    return sorted(path.name for path in ROOT.glob("[!.]*") if path.name not in BEFORE | OF_MAKE)


def left_out(marked, ignored, reasons):
    """Lines on what a run left out: by its marker and folders, and by the reasons of tests that
    were skipped.
    """
    lines = []
    if marked == "not slow":
        lines.append("the slow tests: make test-slow")
    if marked == "slow":
        lines.append("the tests that are not slow: make test")
    if any(Path(path).name == "integrations" for path in ignored):
        lines.append("examples, and tests with other packages: make integrations")
    counts = Counter(reason.removeprefix("Skipped: ") for reason in reasons)
    return lines + [
        f"{count} {'test' if count == 1 else 'tests'}: {reason}" for reason, count in counts.items()
    ]


def pytest_terminal_summary(terminalreporter, config):
    """Say at the end what was left out, a line a cause, and what was left behind."""
    if names := left_behind():
        terminalreporter.section("left behind in the repository's folder")
        terminalreporter.write_line(", ".join(names))
    reasons = [str(report.longrepr[2]) for report in terminalreporter.stats.get("skipped", [])]
    if lines := left_out(config.option.markexpr, config.option.ignore or (), reasons):
        terminalreporter.section("left out")
        for line in lines:
            terminalreporter.write_line(line)


@pytest.fixture(name="unpainted")
def _unpainted():
    """Figures are made, but not painted."""
    from tests.unpainted import unpainted

    with unpainted():
        yield


@pytest.fixture(scope="session")
def results(tmp_path_factory):
    """The sweep that the documentation reads."""
    from tests.docs.blocks import sweep_folder

    return sweep_folder(tmp_path_factory.mktemp("docs") / "sweep")


@pytest.fixture
def printed(capsys):
    """Gives what has been printed since it was last called."""
    return lambda: capsys.readouterr().out
