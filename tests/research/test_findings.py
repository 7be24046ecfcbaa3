"""The statistics of claims, and one run of the findings and the symptoms on tiny models."""

import re

import numpy as np
import pandas as pd
import pytest

from research import findings, symptoms
from research.findings import PAGE, Claim, bell, fall, kept, peak, rise, second_fall, span, tau


def tables_of(page):
    return dict(re.findall(r"<!-- table: (.+?) -->\n(.*?)<!-- end -->", page, re.DOTALL))


@pytest.mark.slow
def test_every_table_and_figure_of_the_page_is_made(tmp_path):
    findings.main("small", tmp_path, processes=1)
    page = (tmp_path / "findings.md").read_text()
    assert tables_of(page).keys() == tables_of(PAGE.read_text()).keys()
    files = {file.name: file.read_text() for file in (tmp_path / "findings").iterdir()}
    others = {"real-models.csv"}  # which `research.real_models` writes
    assert files.keys() == {file.name for file in PAGE.with_suffix("").iterdir()} - others
    assert not [name for name, text in files.items() if re.search(r"\b(nan|inf)\b", text)]
    figures = set(re.findall(r"images/(findings-[\w-]+\.png)", page))
    assert figures <= {file.name for file in (tmp_path / "images").iterdir()}


@pytest.mark.slow
def test_symptoms_have_a_row_for_each_fault_and_each_wrong_measurement(tmp_path):
    symptoms.main("small", tmp_path / "symptoms.csv", processes=1)
    found = pd.read_csv(tmp_path / "symptoms.csv")
    asked = pd.read_csv(PAGE.parent / "symptoms.csv")
    assert found["what"].equals(asked["what"])
    assert found["steps"].isna().equals(asked["steps"].isna())


@pytest.mark.parametrize(
    ("shape", "curve", "size"),
    [
        (peak, [1.0, 3.0, 2.0], 0.5),
        (fall, [4.0, 1.0, 3.0, 2.0], 0.75),
        (rise, [4.0, 1.0, 3.0, 2.0], 2.0),
        (second_fall, [4.0, 1.0, 3.0, 2.0], 1 / 3),
        (tau, [1.0, 2.0, 4.0], 1.0),
        (bell, [1.0, 2.0, 3.0, 2.0, 1.5], 1.0),
        (bell, [1.0, 4.0, 3.0, 3.0, 3.0, 3.0, 1.0, 1.0], -0.25),  # not half way
        (span, [1.0, 4.0, 3.0], 3.0),
        (kept, [1.0, 3.0, 2.0, 2.0, 2.0], 0.5),
    ],
)
def test_shapes_are_told_by_their_size(shape, curve, size):
    assert shape(np.array(curve)) == pytest.approx(size)


def test_a_verdict_needs_the_interval_over_seeds_on_one_side_of_the_limit():
    claim = Claim("", "grows", "M_over_Q", tau, "depth", 0.5)
    of_seeds = [0.9, 0.95, 1.0], [0.1, 0.15, 0.2], [0.2, 0.9, 1.0], [0.9]
    verdicts = [claim.verdict(np.array(values)) for values in of_seeds]
    assert verdicts == ["holds", "fails", "open", "open"]
