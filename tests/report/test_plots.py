"""The numbers of a page's figures, from which its script draws them again."""

import json
import re

import numpy as np
import pandas as pd
import pytest

from embedgeo.drawing import FigureData, new_figure, style
from embedgeo.report.page import FigureWriter
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


def test_repeated_names_have_numbers(tmp_path):
    writer = FigureWriter(tmp_path / "figures")
    with style():
        made = [
            FigureData(name, new_figure("")[0], pd.DataFrame({"x": [1.0]}), "", "")
            for name in ("layer", "layer-2", "layer", "Layer")
        ]
        names = [writer.add(data).name for data in made]
    assert names == ["layer", "layer-2", "layer-3", "Layer-4"]
    assert {path.stem for path in (tmp_path / "figures").iterdir()} == {*names}
