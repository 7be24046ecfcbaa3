import pytest

from embedgeo.report.runs import read_runs
from tests.report.page import Page, report
from tests.report.synthetic import everything, make_sweep


@pytest.fixture(scope="session")
def sweep(made_once):
    """A sweep of all that is drawn, with standard errors and a fault of each kind; its report."""
    return made_once("report", lambda folder: report(everything(folder / "mine"))) / "mine"


@pytest.fixture(scope="session")
def run(sweep):
    (found,) = read_runs([sweep])
    return found


@pytest.fixture(scope="session")
def page(sweep):
    return Page(sweep / "report" / "index.html")


@pytest.fixture(scope="session")
def plain(tmp_path_factory):
    """A small sweep without faults and errors, which no test changes."""
    folder = tmp_path_factory.mktemp("plain") / "plain"
    return make_sweep(folder, (0, 8), 2, metrics=("n", "Q", "M"))
