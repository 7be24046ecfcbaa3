"""The report of final models: no steps, compared over depth; words and batches."""

import re

import pytest

from embedgeo.cli import main
from embedgeo.report.runs import read_runs
from tests.report.page import Page, report
from tests.report.synthetic import make_models, make_sweep
from tests.unpainted import unpainted

THREE = {"lab/bert-s": 2, "lab/bert-l": 4, "co/gpt": 2}


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    metrics = ("n", "Q", "Q_t_cv")
    folder = make_models(tmp_path_factory.mktemp("models") / "three", THREE, metrics=metrics)
    with unpainted():
        assert main(["report", str(folder)]) == 0
    return Page(folder / "report" / "index.html")


def test_final_models_have_no_steps_and_are_compared_over_depth(three):
    alts = " ".join(image["alt"] or "" for image in three.all("img"))
    assert not re.search(r"\bsteps?\b", three.text + alts, re.IGNORECASE)
    assert not [name for name in three.figures if re.search("dynamics|heatmap|loss", name)]
    assert {"Q-compared-profiles", "Q_t_cv-compared-profiles"} <= three.figures
    found = three.numbers("Q-compared-profiles")
    assert found.groupby("run")["depth"].agg(list).to_dict() == {
        "bert-l": [0, 0.25, 0.5, 0.75, 1],
        "bert-s": [0, 0.5, 1],
        "gpt": [0, 0.5, 1],
    }
    for path in (three.folder / "figures").glob("*.[sc][vs][gv]"):
        assert not re.search(r"\bstep\b", path.read_text()), path


def test_a_final_model_is_no_point_of_a_run(tmp_path):
    folder = make_sweep(tmp_path / "mix", (4, 8, 64), 2, metrics=("n", "M"))
    make_models(folder, {"one/bert": 2, "two/bert": 3, "two/gpt": 1}, metrics=("n", "M"))
    steps = {run.label: run.steps if run.has_steps else None for run in read_runs([folder])}
    finals = dict.fromkeys(["one/bert", "two/bert", "gpt"])  # whole names where short ones agree
    assert steps == {**finals, "mix: step": [4, 8, 64]}
    page = report(folder)
    assert not [name for name in page.figures if "compared-dynamics" in name]  # of one run
    assert page.numbers("M-compared-profiles")["run"].nunique() == 4
    assert "step 64" in page.text
    assert "step 0" not in page.text
