"""The numbers of a page's figures, from which its script draws them again."""

import json
import re

import numpy as np
import pandas as pd
import pytest

from embedgeo.report.page import FigureWriter, TableData
from tests.report.page import report
from tests.report.synthetic import make_sweep


def numbers(page):
    """The JSON of a page."""
    found = re.search(r'<script type="application/json" id="plots">(.*?)</script>', page.html)
    return json.loads(found[1])


@pytest.mark.parametrize(
    ("name", "kind", "index"), [("M-dynamics", "layer", "step"), ("M-profile", "step", "layer")]
)
def test_they_are_those_of_the_csv_to_four_digits_and_there_once(page, name, kind, index):
    found = numbers(page)
    texts = [json.dumps(each) for each in found["shared"]]
    assert len(texts) == len({*texts})
    expected = page.numbers(name, index)
    of_figure = found["figures"][name]["lines"]
    (lines,) = [each for each in of_figure if each["kind"] == kind]
    names, at = (found["shared"][lines[place]] for place in ("names", "at"))
    assert list(expected.index) == at
    values = dict(zip(names, np.array(found["shared"][lines["values"]], float), strict=True))
    assert len(values) > 2
    for column, of_line in values.items():
        of_csv = expected[column.removeprefix("step ").replace(",", "")]
        np.testing.assert_allclose(of_line, of_csv, rtol=5e-4)


def test_a_name_cannot_end_the_script(tmp_path):
    names = "<!--<script>", "b"
    folders = [make_sweep(tmp_path / name, (0, 8), 2, metrics=("n", "Q")) for name in names]
    page = report(*folders, out=tmp_path / "out")
    assert "<!--<script>" not in page.html
    assert "<!--<script>" in json.dumps(numbers(page))
    assert page.html.count("</script>") == page.html.count("<script")


def test_repeated_names_have_numbers_and_the_place_of_tables_is_always_there(tmp_path):
    writer = FigureWriter(tmp_path / "figures")
    table = pd.DataFrame({"=1+1": ["@x", "y"]})
    names = [
        writer.add(TableData(name, "", table, table, "")).name
        for name in ("layer", "layer-2", "layer", "Layer")
    ]
    assert names == ["layer", "layer-2", "layer-3", "Layer-4"]
    assert (tmp_path / "tables" / "layer.csv").read_text() == ",'=1+1\n0,'@x\n1,y\n"
    (tmp_path / "other").mkdir()
    FigureWriter(tmp_path / "other" / "figures")
    assert (tmp_path / "other" / "tables").is_dir()  # which takes the place of an earlier report's
