"""The tables and figures of docs/findings.md can be made, and its verdicts are those of the
numbers.
"""

import re
from pathlib import Path

import numpy as np
import pytest

from research import findings
from research.findings import (
    CLAIMS,
    PAGE,
    Claim,
    bell,
    fall,
    kept,
    peak,
    rise,
    second_fall,
    span,
    tau,
)
from research.findings_runs import SIZES, do_runs, tasks


def tables_of(page):
    return dict(re.findall(r"<!-- table: (.+?) -->\n(.*?)<!-- end -->", page, re.DOTALL))


@pytest.mark.slow
def test_every_table_and_figure_of_the_page_is_made(tmp_path):
    """Of the small runs, of which only those that are lost are done again."""
    folder = tmp_path / "runs"
    findings.main("small", folder)
    page = (folder / "findings.md").read_text()
    found = tables_of(page)
    assert found.keys() == tables_of(PAGE.read_text()).keys()
    files = {file.name: file.read_text() for file in (folder / "findings").iterdir()}
    others = {"real-models.csv"}  # which `benchmarks.real_models` writes
    assert files.keys() == {file.name for file in PAGE.with_suffix("").iterdir()} - others
    assert not [name for name, text in files.items() if re.search(r"\b(nan|inf)\b", text)]
    for name, table in found.items():
        rows = table.strip().splitlines()
        assert len({row.count(" | ") for row in (rows[0], *rows[2:])}) == 1, name
        assert "nan" not in table
        assert "inf" not in table
    verdicts = re.findall(r": (holds|fails|open) \|", found["claims"])
    assert len(verdicts) == sum(len(claim.kinds) for claim in CLAIMS if claim.paper)
    figures = re.findall(r"images/(findings-[\w-]+)\.png", page)
    names = {file.stem for file in (folder / "images").glob("findings-*.png")}
    assert names == {name + shade for name in figures for shade in ("", "-dark")}
    times = {file: file.stat().st_mtime_ns for file in folder.glob("*.parquet")}
    assert len(times) == 2 * len(tasks(SIZES["small"]))
    lost = folder / "post-LN-1.losses.parquet"
    before = lost.read_bytes()
    lost.unlink()
    do_runs("small", folder, 1)
    assert lost.read_bytes() == before
    again = {file for file, time in times.items() if file.stat().st_mtime_ns != time}
    assert again == {lost, folder / "post-LN-1.values.parquet"}
    with pytest.raises(ValueError, match="has others"):
        do_runs("full", folder, 1)


def test_pictures_of_the_page_are_there():
    pictures = re.findall(r"images/findings-[\w-]+\.png", PAGE.read_text())
    assert pictures
    assert all(Path(PAGE.parent, file).exists() for file in pictures)


def test_shapes_are_told_by_their_size():
    assert peak(np.array([1.0, 3.0, 2.0])) == pytest.approx(0.5)
    assert peak(np.array([1.0, 1.5, 2.0])) == pytest.approx(-0.25)
    curve = np.array([4.0, 1.0, 3.0, 2.0])
    shapes = [shape(curve) for shape in (fall, rise, second_fall)]
    assert shapes == pytest.approx([0.75, 2.0, 1 / 3])
    assert tau(np.array([1.0, 2.0, 4.0])) == 1
    assert bell(np.array([1.0, 2.0, 3.0, 2.0, 1.5])) == pytest.approx(1.0)
    # not half way
    assert bell(np.array([1.0, 4.0, 3.0, 3.0, 3.0, 3.0, 1.0, 1.0])) == pytest.approx(-0.25)
    assert span(np.array([1.0, 4.0, 3.0])) == 3
    assert kept(np.array([1.0, 2.0, 2.9, 3.0, 3.0])) == pytest.approx(0.95)
    assert kept(np.array([1.0, 3.0, 2.0, 2.0, 2.0])) == pytest.approx(0.5)  # falls back
    assert kept(np.array([1.0, 1.2, 1.5, 2.0, 3.0])) == pytest.approx(0.25)  # still grows
    assert kept(np.array([1.0, 1.05, 1.05, 1.05, 1.05])) == 0  # nothing that can be seen


@pytest.mark.parametrize(
    ("values", "verdict"),
    [
        ([0.9, 0.95, 1.0], "holds"),
        ([0.1, 0.15, 0.2], "fails"),
        ([0.2, 0.9, 1.0], "open"),
        ([0.9], "open"),
    ],
)
def test_a_verdict_needs_the_interval_over_seeds_on_one_side_of_the_limit(values, verdict):
    claim = Claim("", "grows", "M_over_Q", tau, "depth", 0.5)
    assert claim.verdict(np.array(values)) == verdict
