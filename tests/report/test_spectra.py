"""Figures of eigenvalue spectra."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from embedgeo.drawing import style
from embedgeo.report import variance, write_report
from embedgeo.report.runs import Run, read_runs, spectrum_shares
from embedgeo.results.parquet import TABLES, write_parquet
from tests.report.synthetic import make_models, make_sweep, spectrum_table

STEPS = (0, *(2**k for k in range(13)), *range(5000, 50_000, 10_000))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_sweep(tmp_path_factory.mktemp("spectra"), STEPS, 2, metrics=("n",), spectra=1)


@pytest.fixture(scope="module")
def run(folder: Path) -> Run:
    (run,) = read_runs([folder])
    return run


def rewritten(folder: Path, table: pd.DataFrame) -> Run:
    """The run with another table of spectra, that of its last step alone."""
    for path in (folder / "spectra").glob("*"):
        path.unlink()
    write_parquet(folder / "spectra" / "step8.parquet", table, TABLES["spectra"])
    (run,) = read_runs([folder])
    return run


def test_the_last_step_is_drawn_by_layer_over_the_mean_beside_random_rows_and_their_edge(
    run: Run,
) -> None:
    with style():
        figure = variance.spectra_by_layer(run)
    numbers = figure.numbers
    assert list(numbers) == ["embed", "block.00", "block.01", "final_norm", "Gaussian rows"]
    assert (numbers.index[0], numbers.index[-1]) == (1, 64)
    table = spectrum_table(STEPS[-1], list(numbers)[:4], 64, 65_536)
    for layer, of_layer in table.groupby("layer"):
        expected = of_layer.set_index("index")["eigenvalue"] / of_layer["eigenvalue"].mean()
        np.testing.assert_allclose(numbers[layer], expected[numbers.index], rtol=1e-12)
    edge = (1 + np.sqrt(64 / 65_535)) ** 2  # Marchenko & Pastur 1967
    assert numbers["Gaussian rows"].iloc[0] == pytest.approx(edge, rel=0.01)
    assert numbers["Gaussian rows"].iloc[-1] == pytest.approx(
        (1 - np.sqrt(64 / 65_535)) ** 2, rel=0.01
    )
    (ax, *_) = figure.figure.axes
    (line,) = (line for line in ax.lines if "edge" in str(line.get_label()))
    assert np.unique(line.get_ydata()) == pytest.approx(edge)
    assert (ax.get_xscale(), ax.get_yscale()) == ("log", "log")
    assert "block.01" in figure.text


def test_some_steps_evenly_along_the_axis_are_drawn_at_some_layers(run: Run) -> None:
    assert len(run.spectra) == 9
    assert {0, STEPS[-1]} < run.spectra.keys()
    assert sum(step < 500 for step in run.spectra) == 5  # the axis is logarithmic
    with style():
        figure = variance.spectra_by_step(run)
    assert list(figure.numbers.columns) == sorted(run.spectra)
    assert figure.numbers.loc[("block.01", 1), 0] == pytest.approx(11 / (1 + 10 / 64))


def test_what_is_zero_or_unknown_is_not_drawn(tmp_path: Path) -> None:
    folder = make_sweep(tmp_path, (0, 8), 2, metrics=("n",), spectra=1)
    table = spectrum_table(8, ["embed", "block.00", "block.01", "mean(last2)"], 64, 40)
    table.loc[(table["layer"] == "block.00") & (table["index"] > 39), "eigenvalue"] = 0.0
    table.loc[table["layer"] == "embed", "eigenvalue"] = np.nan
    run = rewritten(folder, table)
    with style():
        (figure,) = variance.spectra_figures(run)
    assert list(figure.numbers) == ["block.00", "block.01", "Gaussian rows"]
    assert figure.numbers.loc[40:, "block.00"].isna().all()
    assert figure.numbers.loc[40:, "Gaussian rows"].isna().all()
    nothing = table.assign(eigenvalue=np.nan)
    assert rewritten(folder, nothing).spectra == {}


@pytest.mark.parametrize("eigenvalues", [(1.7e308, 1.7e308), (np.inf, -np.inf), (np.inf, 1.0)])
def test_eigenvalues_without_a_finite_mean_are_not_drawn(eigenvalues: tuple[float, float]) -> None:
    table = pd.DataFrame({"layer": "block.00", "index": [1, 2], "eigenvalue": eigenvalues, "n": 20})
    shares = spectrum_shares(table, ["block.00"])["share"]
    assert not (shares > 0).any()


@pytest.mark.parametrize(("n", "dim"), [(2, 64), (0, 3), (50, 1)])
def test_where_random_rows_have_no_spectrum_none_is_drawn(tmp_path: Path, n: int, dim: int) -> None:
    folder = make_sweep(tmp_path, (0, 8), 2, metrics=("n",))
    run = rewritten(folder, spectrum_table(8, ["embed", "block.00"], dim, n))
    with style():
        (figure,) = variance.spectra_figures(run)
    assert figure.numbers["Gaussian rows"].isna().all()
    assert "Gaussian" not in figure.text


def test_the_report_has_them_of_runs_and_of_final_models_that_have_any(
    folder: Path, tmp_path: Path
) -> None:
    page = write_report([folder], tmp_path / "run").read_text()
    assert all(text in page for text in ("Spectrum</h2>", "Marchenko-Pastur edge", "spectra-steps"))
    models = make_models(tmp_path / "models", {"a": 2, "b": 3}, metrics=("n",))
    table = spectrum_table(8, ["embed", "block.00", "block.01", "final_norm"], 64, 100)
    write_parquet(models / "spectra" / "a--main.parquet", table, TABLES["spectra"])
    with style():
        drawn = {
            run.label: [figure.name for figure in variance.spectra_figures(run)]
            for run in read_runs([models])
        }
    assert drawn == {"a": ["spectra"], "b": []}
