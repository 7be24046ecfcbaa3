"""`embedgeo.plot`: the figures of what is measured on request."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.axes import Axes

from embedgeo import Anisotropy, load_results, observe, plot
from embedgeo.drawing import style
from embedgeo.report import figures, spectra
from embedgeo.report.runs import read_runs
from tests.models import gpt_neox, token_batch
from tests.report.synthetic import AT_SCALES, METRICS, make_sweep
from tests.report.test_drift import STEPS, write_cka
from tests.report.test_plot import (
    assert_same,
    words,
)

DRAWN = {  # what the report draws of a run, and how it is asked for here
    "spectra": (spectra.spectra_by_layer, plot.spectrum),
    "spectra at a layer": (
        lambda run: spectra.spectra_by_step(run, ["block.01"]),
        partial(plot.spectrum, layer="block.01"),
    ),
    "scales": (figures.scales_by_layer, plot.scales),
    "scales by step": (figures.scales_by_step, partial(plot.scales, by="step")),
    "layers": (lambda run: figures.cka_of_layers(run, 8), plot.similarity),
    "layers at a step": (lambda run: figures.cka_of_layers(run, 8), partial(plot.similarity, step=8)),
    "steps at a layer": (lambda run: figures.cka_of_steps(run, "embed"), partial(plot.similarity, layer="embed")),
}


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_sweep(
        tmp_path_factory.mktemp("plot") / "sweep", STEPS, metrics=(*METRICS, *AT_SCALES), spectra=1, dim=16
    )
    write_cka(folder)
    return folder


@pytest.mark.parametrize("kind", DRAWN)
def test_figures_are_those_of_the_report_also_in_given_axes(sweep: Path, kind: str, ax: Axes) -> None:
    of_report, draw = DRAWN[kind]
    (run,) = read_runs([sweep])
    with style():
        expected = of_report(run).figure
    found = draw(sweep)
    assert_same(found, expected)
    assert words(found) == words(expected)
    assert draw(sweep, ax=ax) is ax.figure
    assert ax.get_title("left") == words(expected)[-2]
    assert len(ax.figure.axes) == len(expected.axes)
    for here, there in zip(ax.lines, expected.axes[0].lines, strict=True):
        np.testing.assert_equal(here.get_xydata(), there.get_xydata())
    ax.figure.canvas.draw()


def test_scales_are_also_drawn_of_a_table(sweep: Path) -> None:
    assert_same(plot.scales(load_results(sweep)), plot.scales(sweep))


def test_a_geometry_has_its_spectra() -> None:
    model = gpt_neox()
    with torch.no_grad(), observe(model, "block.0*", lambda dim: [Anisotropy(dim, spectrum=True)]) as geometry:
        model(**token_batch())
    table = geometry.layer_tables()["spectra"]
    lines = plot.spectrum(geometry).axes[0].lines
    for line, (_, of_layer) in zip(lines, table.groupby("layer", sort=False), strict=False):
        eigenvalues = of_layer["eigenvalue"].to_numpy()
        np.testing.assert_allclose(line.get_ydata(), eigenvalues / eigenvalues.mean())
    assert plot.spectrum(geometry, "block.01").axes[0].lines[0].get_ydata().tolist() == lines[1].get_ydata().tolist()


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (lambda sweep: plot.spectrum(load_results(sweep)), r"spectrum needs all eigenvalues.*--spectrum true"),
        (lambda sweep: plot.spectrum(sweep, "x"), r"layer must be one of embed, block\.00.*; got 'x'"),
        (lambda sweep: plot.scales(sweep, "token"), r"by must be one of layer, step; got 'token'"),
        (
            lambda sweep: plot.scales(load_results(sweep).query("metric == 'Q'")),
            r"scales needs the .*--extra scales.*there are Q\.",
        ),
        (lambda sweep: plot.similarity(load_results(sweep)), r"similarity needs rows .*embedgeo drift"),
        (lambda sweep: plot.similarity(sweep, "block.01"), r"layer must be one of embed, block\.02; got 'block\.01'"),
        (lambda sweep: plot.similarity(sweep, step=64), r"step must be one of 8; got 64"),
        (lambda sweep: plot.similarity(sweep, "embed", step=8), r"of one layer or of one step; got layer='embed' and"),
    ],
)
def test_errors_say_the_rule_and_what_came(sweep: Path, draw: Callable, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        draw(sweep)
