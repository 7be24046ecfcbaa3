"""The numbers of a page's figures, from which its script draws them again."""

import json
import re

import numpy as np
import pandas as pd
import pytest

from embedgeo.report import write_report
from tests.report.synthetic import make_sweep


def numbers(page):
    """The JSON of a page."""
    return json.loads(
        re.search(r'<script type="application/json" id="plots">(.*?)</script>', page)[1]
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plots")
    make_sweep(folder / "a", metrics=("n", "M", "Q", "anisotropy"))
    return write_report([folder / "a"], folder / "out").parent


def table(found, lines, name="values"):
    place = lines[name]
    if isinstance(place, int):
        return np.array(found["shared"][place], dtype=float)
    return np.array(found["shared"][int(place.removesuffix("T"))], dtype=float).T


@pytest.mark.parametrize(
    ("name", "kind", "index"), [("M-dynamics", "layer", "step"), ("M-profile", "step", "layer")]
)
def test_they_are_those_of_the_csv_to_four_digits(folder, name, kind, index):
    found = numbers((folder / "index.html").read_text())
    expected = pd.read_csv(folder / "figures" / f"{name}.csv", index_col=index)
    (lines,) = [
        each for each in found["figures"][name]["panels"][0]["lines"] if each["kind"] == kind
    ]
    values = dict(zip(found["shared"][lines["names"]], table(found, lines), strict=True))
    assert len(values) > 2
    assert list(expected.index) == found["shared"][lines["at"]]
    for column, of_line in values.items():
        of_csv = expected[column.removeprefix("step ").replace(",", "")]
        np.testing.assert_allclose(of_line, of_csv, rtol=5e-4)


def test_what_figures_share_is_there_once(folder):
    shared = numbers((folder / "index.html").read_text())["shared"]
    texts = [json.dumps(each) for each in shared]
    assert len(texts) == len({*texts})
    figures = numbers((folder / "index.html").read_text())["figures"]
    over_steps = [panels for name, panels in figures.items() if name.endswith("-dynamics")]
    assert (
        len({panel["lines"][0]["at"] for figure in over_steps for panel in figure["panels"]}) == 1
    )


@pytest.mark.slow
def test_a_name_cannot_end_the_script(tmp_path):
    names = "<!--<script>", "b"
    for name in names:
        make_sweep(tmp_path / name, (0, 8), 2, metrics=("n", "Q"))
    page = write_report([tmp_path / name for name in names], tmp_path / "out").read_text()
    assert "<!--<script>" not in page
    said = json.dumps(numbers(page))
    assert "<!--<script>" in said
    assert page.count("</script>") == page.count("<script")
