from pathlib import Path

import pytest

from embedgeo.report.runs import Run, read_runs
from tests.report.page import Page, report
from tests.report.synthetic import everything, make_sweep


@pytest.fixture(scope="session")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep of all that is drawn, with standard errors and a fault of each kind."""
    return everything(tmp_path_factory.mktemp("report") / "mine")


@pytest.fixture(scope="session")
def run(sweep: Path) -> Run:
    (found,) = read_runs([sweep])
    return found


@pytest.fixture(scope="session")
def page(sweep: Path) -> Page:
    return report(sweep)


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small sweep without faults and errors, which no test changes."""
    folder = tmp_path_factory.mktemp("plain") / "plain"
    return make_sweep(folder, (0, 8), 2, metrics=("n", "Q", "M"))
