"""How variance is spread: eigenvalue spectra."""

from dataclasses import replace

import numpy as np
import pytest

from embedgeo.drawing import style
from embedgeo.report import variance
from tests.report.synthetic import layer_names, spectrum_table

LAYERS, LAST = layer_names(3), 4000


@pytest.fixture(autouse=True)
def in_style():
    with style():
        yield


def test_the_last_step_is_drawn_by_layer_over_the_mean_beside_random_rows_and_their_edge(
    run,
):
    (figure,) = variance.spectra_figures(run)
    numbers = figure.numbers
    assert list(numbers) == [*LAYERS, "Gaussian rows"]
    assert (numbers.index[0], numbers.index[-1]) == (1, 64)
    for layer, of_layer in spectrum_table(LAST, LAYERS, 64, 65_536).groupby("layer"):
        expected = of_layer.set_index("index")["eigenvalue"] / of_layer["eigenvalue"].mean()
        np.testing.assert_allclose(numbers[layer], expected[numbers.index], rtol=1e-12)
    low, high = ((1 + sign * np.sqrt(64 / 65_535)) ** 2 for sign in (-1, 1))
    ends = numbers["Gaussian rows"].iloc[[-1, 0]].tolist()
    assert ends == pytest.approx([low, high], rel=0.01)  # Marchenko & Pastur 1967
    ax = figure.figure.axes[0]
    (line,) = (line for line in ax.lines if "edge" in str(line.get_label()))
    assert np.unique(line.get_ydata()) == pytest.approx(high)
    assert (ax.get_xscale(), ax.get_yscale()) == ("log", "log")


def drawn(run, table):
    """The numbers that are drawn of another table of spectra, None if there is no figure."""
    figures = [*variance.spectra_figures(replace(run, tables={"spectra": {8: table}}))]
    return figures[0].numbers if figures else None


def test_what_is_zero_infinite_or_unknown_is_not_drawn(run):
    table = spectrum_table(8, ["embed", "block.00", "block.01", "mean(last2)"], 64, 40)
    table.loc[(table["layer"] == "block.00") & (table["index"] > 39), "eigenvalue"] = 0.0
    table.loc[table["layer"] == "embed", "eigenvalue"] = np.nan
    found = drawn(run, table)
    assert list(found) == ["block.00", "block.01", "Gaussian rows"]
    assert found.loc[40:, ["block.00", "Gaussian rows"]].isna().all(axis=None)
    for value in (np.nan, np.inf, 1.7e308):
        assert drawn(run, table.assign(eigenvalue=value)) is None
    for n, dim in ((2, 64), (0, 3), (50, 1)):  # random rows have no spectrum
        found = drawn(run, spectrum_table(8, ["embed", "block.00"], dim, n))
        assert found["Gaussian rows"].isna().all()


def test_without_such_tables_there_are_no_such_figures(run):
    bare = replace(run, tables={})
    assert [*variance.spectra_figures(bare)] == []
