"""`embedgeo.plot`: the report's drawings, whatever holds the results."""

from types import SimpleNamespace

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pytest

from embedgeo import load_results, plot
from embedgeo.drawing import style
from embedgeo.report import figures
from tests.report.synthetic import make_models

METRIC = "M_over_Q"


def shown(ax):
    """The data and the limits of axes."""
    found = [line.get_xydata() for line in ax.lines]
    for drawn in ax.collections:
        found += [path.vertices for path in drawn.get_paths()]
        found += [drawn.get_offsets(), drawn.get_array()]
    for patch in ax.patches:
        found.append(patch.get_path().transformed(patch.get_patch_transform()).vertices)
    return [*found, ax.get_xlim(), ax.get_ylim(), ax.get_yscale()]


def words(figure):
    return [figure.texts[0].get_text().strip(), *(text.get_text() for text in figure.artists)]


def require_same(one, other):
    for mine, theirs in zip(one.axes, other.axes, strict=True):
        for a, b in zip(shown(mine), shown(theirs), strict=True):
            np.testing.assert_equal(a, b)


@pytest.mark.parametrize("kind", ["dynamics", "profile", "heatmap"])
def test_figures_are_those_of_the_report(sweep, run, kind):
    with style():
        expected = getattr(figures, kind)(run, METRIC).figure
    mpl.get_backend()  # is chosen when it is asked for
    before = mpl.rcParams.copy()
    found = plot(sweep, kind, METRIC)
    assert mpl.rcParams == before
    require_same(found, expected)
    assert words(found) == words(expected)


def test_every_kind_of_results_gives_the_same_figure(sweep):
    columns = ["step", "layer", "layer_index", "width", "metric", "value", "stderr"]
    table = load_results(sweep).query("metric in ['n', 'Q', 'M', @METRIC]")
    records = table[columns].to_dict("records")
    expected = plot(sweep, "profile", METRIC)
    assert "Gaussian rows" in [line.get_label() for line in expected.axes[0].lines]
    for results in (str(sweep), table, records, SimpleNamespace(history=records)):
        require_same(plot(results, "profile", METRIC), expected)


def test_figures_keep_their_look_whatever_the_session_and_pyplot_does_not_know_them(
    sweep,
):
    before = plt.get_fignums()
    expected = plot(sweep, "profile", METRIC)._repr_png_()
    assert expected.startswith(b"\x89PNG")
    with plt.style.context("dark_background"), mpl.rc_context({"figure.figsize": [20, 20]}):
        assert plot(sweep, "profile", METRIC)._repr_png_() == expected
    assert plt.get_fignums() == before


def test_of_several_runs_one_is_chosen(tmp_path):
    folder = make_models(tmp_path / "models", {"lab/one": 2, "lab/two": 3}, metrics=("M", "Q"))
    table = load_results(folder)
    for results in (folder, table):
        with pytest.raises(ValueError, match=r"results has 2\. Give the rows of one: "):
            plot(results, "profile", "M")
    (ax, *_) = plot(table[table["run"] == "lab--two"], "profile", "M").axes
    assert len(ax.lines[0].get_xdata()) == 5
