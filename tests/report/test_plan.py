"""Which figures a report has, by the numbers of its runs and metrics."""

from collections import Counter
from types import SimpleNamespace

import pytest

from embedgeo.drawing import style
from embedgeo.glossary import headlines
from embedgeo.report.page import PageFigure
from embedgeo.report.plan import page_plan
from embedgeo.report.runs import read_runs
from tests.report.synthetic import make_sweep

HEADLINES = [*headlines()]
KINDS = ["dynamics", "profile", "heatmap"]


@pytest.mark.slow
@pytest.mark.parametrize(("num_runs", "of_headlines"), [(1, KINDS), (5, KINDS[:1])])
def test_of_many_metrics_runs_have_few_figures_each(tmp_path, num_runs, of_headlines):
    others = [f"own_{i}" for i in range(41 - len(HEADLINES))]
    metrics = *HEADLINES, *others
    folders = [
        make_sweep(tmp_path / f"run{i}", (0, 8), 1, metrics=metrics) for i in range(num_runs)
    ]
    drawn = Counter()

    def add(data, label=""):
        drawn[data.name] += 1
        return PageFigure(data.name, "", 1, 1, "", "")

    with style():
        for _, draw in page_plan(read_runs(folders), SimpleNamespace(add=add), []):
            draw()
    for metric in metrics:
        kinds = of_headlines if metric in HEADLINES else KINDS[: num_runs == 1]
        assert [drawn[f"{metric}-{kind}"] for kind in KINDS] == [
            num_runs * (kind in kinds) for kind in KINDS
        ]
        together = drawn[f"{metric}-compared-dynamics"], drawn[f"{metric}-compared-profiles"]
        assert together == (num_runs > 1, num_runs > 1 and metric in HEADLINES)
