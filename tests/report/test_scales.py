import numpy as np
import pandas as pd
import pytest
import torch

from embedgeo.drawing import style
from embedgeo.functional import gride_dimensions
from embedgeo.report import figures, write_report
from embedgeo.report.runs import read_runs
from tests.data import gaussian
from tests.report.synthetic import AT_SCALES, METRICS, make_sweep

SCALES = [1, 2, 4, 8, 16, 32, 64]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = make_sweep(tmp_path_factory.mktemp("sweep"), metrics=(*METRICS, *AT_SCALES))
    (run,) = read_runs([folder], {})
    return run


def test_layers_are_drawn_against_scale_with_their_errors_and_the_baseline(run):
    with style():
        data = figures.scales_by_layer(run)
    numbers, last = data.numbers, run.values.loc[run.steps[-1]]
    assert numbers.index.tolist() == SCALES
    for scale in SCALES:
        for layer in run.depth:
            assert numbers.loc[scale, layer] == last.loc[layer, f"intrinsic_dimension_at_{scale}"]
            error = last.loc[layer, f"intrinsic_dimension_at_{scale}_error"]
            assert numbers.loc[scale, f"stderr of {layer}"] == error
    expected = gride_dimensions(gaussian(4096, 64, dtype=torch.float32)).dimensions
    np.testing.assert_allclose(numbers["Gaussian rows"], expected, rtol=0.05)
    assert data.text.startswith("Mean over blocks: ")
    assert "standard error" in data.text
    (ax, *_) = data.figure.axes
    assert [tick.get_text() for tick in ax.get_xticklabels()] == [str(scale) for scale in SCALES]


def test_standard_errors_of_a_jackknife_come_before_those_of_maximum_likelihood(tmp_path):
    folder = make_sweep(tmp_path, (0, 10), metrics=(*METRICS, *AT_SCALES), stderr=0.25)
    (run,) = read_runs([folder], {})
    with style():
        numbers = figures.scales_by_layer(run).numbers
    np.testing.assert_allclose(numbers["stderr of block.01"], 0.25 * numbers["block.01"])


def test_steps_are_drawn_against_scale_as_means_over_blocks(run):
    with style():
        data = figures.scales_by_step(run)
    blocks = [layer for layer in run.layers if layer.startswith("block")]
    at = run.values.loc[64].loc[blocks, "intrinsic_dimension_at_8"]
    assert data.numbers.index.tolist() == run.steps
    assert data.numbers.loc[64, 8] == pytest.approx(at.mean())


def test_the_report_has_a_section_of_them_and_no_figure_of_each(tmp_path):
    folder = make_sweep(tmp_path / "sweep", (0, 10), 2, metrics=("n", "n_points", *AT_SCALES))
    page = write_report([folder]).read_text()
    assert page.count("Intrinsic dimension over scales") >= 1
    drawn = {path.stem for path in (folder / "report" / "figures").glob("*.png")}
    assert {"intrinsic-dimension-scales", "intrinsic-dimension-scales-by-step"} <= drawn
    assert not any("intrinsic_dimension_at" in name for name in drawn)
    records = pd.read_csv(folder / "report" / "metrics.csv")
    assert set(AT_SCALES) <= set(records["metric"])


def test_runs_of_one_scale_or_none_have_no_such_figure(tmp_path):
    for i, metrics in enumerate((METRICS, (*METRICS, AT_SCALES[2]))):
        (run,) = read_runs([make_sweep(tmp_path / str(i), metrics=metrics)], {})
        assert figures.measured_scales(run) == {}
