"""The figures of the report: what is drawn, and that it can be read."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from embedgeo.drawing import style
from embedgeo.glossary import known_terms
from embedgeo.report import comparison, figures
from embedgeo.report.runs import read_runs
from tests.report.synthetic import PYTHIA_STEPS, layer_names, make_sweep

DRAWN = {key: term for key, term in known_terms().items() if term.is_drawn}
LONGEST = max(DRAWN, key=lambda metric: len(DRAWN[metric].name))
SOME = ("n", "Q", "M", "V", "V_W_unbiased", "V_B_unbiased", "intrinsic_dimension", LONGEST)


@pytest.fixture(autouse=True)
def in_style():
    with style():
        yield


@pytest.fixture(scope="session")
def large(tmp_path_factory):
    """154 steps, 33 layers."""
    folder = tmp_path_factory.mktemp("large")
    options = {"metrics": SOME, "losses": {512: 12.0}}
    (run,) = read_runs([make_sweep(folder, PYTHIA_STEPS, 31, **options)])
    return run


@pytest.fixture(scope="session")
def two_sided(tmp_path_factory):
    """An encoder and a decoder of 14 layers each."""
    folder = tmp_path_factory.mktemp("t5")
    options = {"num_blocks": 12, "metrics": SOME, "sides": ("encoder.", "decoder.")}
    (run,) = read_runs([make_sweep(folder, **options)])
    return run


def by_layer(run):
    """The figures in which every layer has its place."""
    for draw in (figures.dynamics, figures.profile, figures.heatmap):
        yield draw(run, LONGEST)
    yield from figures.composition(run)
    yield comparison.compare_profiles([run, run], "V")


def of_long_runs(run):
    yield from by_layer(run)
    yield from figures.loss_figures(run)
    yield comparison.compare_dynamics([run, run], "V")


def assert_readable(data):
    """No text leaves the picture, labels of ticks do not overlap, and logarithmic axes say so."""
    figure = data.figure
    figure.canvas.draw()
    texts = [*figure.texts, *(text for box in figure.legends for text in box.get_texts())]
    for ax in figure.axes:
        texts += [*ax.texts, ax.title, ax.xaxis.label, ax.yaxis.label]
        for axis, low, high in ((ax.xaxis, "x0", "x1"), (ax.yaxis, "y0", "y1")):
            least, most = sorted(axis.get_view_interval())
            ticks = zip(axis.get_ticklocs(), axis.get_ticklabels(), strict=False)
            labels = [each for place, each in ticks if least <= place <= most]
            labels = [each for each in labels if each.get_visible() and each.get_text()]
            texts += labels
            boxes = [label.get_window_extent() for label in labels]
            boxes.sort(key=lambda box, low=low: getattr(box, low))
            assert all(getattr(b, low) >= getattr(a, high) for a, b in pairwise(boxes)), data.name
            label = axis.label.get_text().replace("\N{NO-BREAK SPACE}", " ")
            assert axis.get_scale() == "linear" or "log scale" in label, data.name
        label = ax.yaxis.label.get_window_extent()
        assert not any(label.overlaps(box.get_window_extent()) for box in figure.legends), data.name
    for text in texts:
        if text.get_visible() and text.get_text():
            box = text.get_window_extent()
            inside = figure.bbox.padded(1)
            corners = ((box.x0, box.y0), (box.x1, box.y1))
            assert all(inside.contains(*corner) for corner in corners), (data.name, text)


@pytest.mark.slow
def test_nothing_overlaps_or_leaves_the_picture(large, two_sided):
    for data in (*of_long_runs(large), *by_layer(two_sided)):
        assert_readable(data)


def test_the_axis_spans_the_blocks_and_names_layers_far_beyond(run):
    values = run.values.copy()
    for layer, value in zip(layer_names(3), (90.0, 0.2, 0.3, 0.4, -3.0), strict=True):
        values.loc[(slice(None), layer), "a~b c"] = value
    far = replace(run, values=values)
    for draw in (figures.dynamics, figures.profile):
        ax = draw(far, "a~b c").figure.axes[0]
        low, high = ax.get_ylim()
        assert (-0.3 < low < 0.2, 0.4 < high < 0.6) == (True, True), draw
        assert "beyond: embed 90, norm −3" in [line.get_label() for line in ax.lines]


def test_the_error_of_a_mean_over_blocks_is_unknown_where_that_of_a_block_is(run):
    errors = run.errors.copy()
    errors.loc[(8, "block.01"), "M_over_Q"] = np.nan
    errors.loc[(64, "embed"), "M_over_Q"] = np.nan
    found = replace(run, errors=errors).mean_errors("M_over_Q")["mean over blocks"]
    assert found.index[found.isna()].tolist() == [8]
