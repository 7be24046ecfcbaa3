"""`embedgeo.plot`: the report's drawings, whatever holds the results, in figures or axes."""

import io
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text

from embedgeo import Anisotropy, TokenMoments, load_results, observe, plot
from embedgeo.drawing import style
from embedgeo.report import figures
from embedgeo.report.runs import Run
from embedgeo.studies import scales, token_types, variance
from tests.models import gpt_neox
from tests.report.synthetic import make_models

METRIC = "M_over_Q"
IN_AXES = {  # what the report draws of a run, and how it is asked for here
    "dynamics": (
        lambda run: figures.dynamics(run, METRIC),
        partial(plot, kind="dynamics", metric=METRIC),
    ),
    "profile": (
        lambda run: figures.profile(run, METRIC),
        partial(plot, kind="profile", metric=METRIC),
    ),
    "heatmap": (
        lambda run: figures.heatmap(run, METRIC),
        partial(plot, kind="heatmap", metric=METRIC),
    ),
    "by layer": (partial(figures.composition, by="layer"), partial(plot, kind="composition")),
    "by step": (
        partial(figures.composition, by="step"),
        partial(plot, kind="composition", by="step"),
    ),
    "spectra": (
        lambda run: variance.spectra_by_layer(run, variance.read_spectra(run)),
        partial(plot, kind="spectrum"),
    ),
    "spectra at a layer": (
        lambda run: variance.spectra_by_step(variance.read_spectra(run), ["block.01"]),
        partial(plot, kind="spectrum", layer="block.01"),
    ),
    "scales": (scales.scales_by_layer, partial(plot, kind="scales")),
    "scales by step": (scales.scales_by_step, partial(plot, kind="scales", by="step")),
}


@pytest.fixture
def ax() -> Iterator[Axes]:
    figure, ax = plt.subplots()
    yield ax
    plt.close(figure)


def shown(ax: Axes) -> list[object]:
    """The data and the limits of axes."""
    found: list[object] = [line.get_xydata() for line in ax.lines]
    for drawn in ax.collections:
        found += [path.vertices for path in drawn.get_paths()]
        found += [drawn.get_offsets(), drawn.get_array()]
    for patch in ax.patches:
        found.append(patch.get_path().transformed(patch.get_patch_transform()).vertices)
    return [*found, ax.get_xlim(), ax.get_ylim(), ax.get_yscale()]


def words(figure: Figure) -> list[str]:
    return [figure.texts[0].get_text().strip(), *(text.get_text() for text in figure.artists)]


def require_same(one: Figure, other: Figure) -> None:
    for mine, theirs in zip(one.axes, other.axes, strict=True):
        for a, b in zip(shown(mine), shown(theirs), strict=True):
            np.testing.assert_equal(a, b)


@pytest.mark.parametrize("kind", IN_AXES)
def test_figures_are_those_of_the_report_also_in_given_axes(
    sweep: Path, run: Run, ax: Axes, kind: str
) -> None:
    of_report, draw = IN_AXES[kind]
    with style():
        expected = of_report(run).figure
    found = draw(sweep)
    require_same(found, expected)
    assert words(found) == words(expected)
    before = mpl.rcParams.copy()
    assert draw(sweep, ax=ax) is ax.figure
    assert mpl.rcParams == before
    assert len(ax.figure.axes) == len(expected.axes)  # of which the second is the colour bar
    assert ax.get_title("left").startswith(words(expected)[0])
    for mine, theirs in zip(ax.lines, expected.axes[0].lines, strict=True):
        np.testing.assert_equal(mine.get_xydata(), theirs.get_xydata())
    named = [text.get_text() for box in expected.legends for text in box.get_texts()]
    assert named == ([text.get_text() for text in ax.get_legend().get_texts()] if named else [])


def history(sweep: Path) -> list[dict]:
    columns = ["step", "layer", "layer_index", "width", "metric", "value", "stderr"]
    return load_results(sweep)[columns].to_dict("records")


def test_every_kind_of_results_gives_the_same_figure(sweep: Path) -> None:
    records = history(sweep)
    expected = plot(sweep, "dynamics", METRIC)
    assert "Gaussian rows" in [line.get_label() for line in expected.axes[0].lines]
    for results in (str(sweep), load_results(sweep), records, SimpleNamespace(history=records)):
        require_same(plot(results, "dynamics", METRIC), expected)


def test_a_geometry_is_drawn_by_its_layers(ax: Axes) -> None:
    ids = (torch.rand(8, 60, generator=torch.Generator().manual_seed(0)) * 40).long()
    model = gpt_neox()

    def metrics(dim: int) -> list:
        return [TokenMoments(dim), Anisotropy(dim, spectrum=True)]

    with torch.no_grad(), observe(model, metrics=metrics) as geometry:
        model(input_ids=ids)
    values = [at[METRIC] for at in geometry.compute().values()]
    for results in (geometry, geometry.to_frame()):
        line = plot(results, "profile", METRIC).axes[0].lines[0]
        assert line.get_label() == "measured"
        np.testing.assert_allclose(line.get_ydata(), values)
    eigenvalues = geometry.layer_tables()["spectra"].query("layer == 'block.01'")["eigenvalue"]
    (line, *_) = plot(geometry, "spectrum", layer="block.01").axes[0].lines
    np.testing.assert_allclose(line.get_ydata(), eigenvalues / eigenvalues.mean())
    table = geometry.token_tables()
    require_same(plot(table, "tokens"), plot(geometry, "tokens"))
    assert plot(table, "tokens", layer="block.01", ax=ax) is ax.figure
    assert "block.01" in ax.get_title("left")


def test_token_types_are_those_of_the_report(sweep: Path, run: Run, ax: Axes) -> None:
    with style():
        require_same(
            plot(sweep, "tokens"),
            token_types.mean_against_variance(token_types.types_of(run)).figure,
        )
    plot(sweep, "tokens", ax=ax)
    last = run.read("tokens", 4000).query("layer == 'block.02' and n >= 10")
    np.testing.assert_allclose(ax.collections[0].get_offsets(), last[["M", "V"]])
    assert ax.get_title("left").startswith("V against M at block.02, step 4,000\n")
    # the axes are those of the types in the range: others have no room of their own
    low, high = np.array([ax.get_xlim(), ax.get_ylim()]).T
    spans = last[["M", "V"]].max() - last[["M", "V"]].min()
    assert ((low <= last[["M", "V"]].min()) & (high >= last[["M", "V"]].max())).all()
    assert (high - low < 1.5 * spans).all()
    rare = pd.DataFrame({"token_id": [1, 2], "n": [9, 3], "Q": 1.0, "M": 0.5, "V": 0.5})
    (text,) = plot(rare, "tokens").axes[0].texts
    assert text.get_text() == "no type occurs so often"


def test_figures_keep_their_look_whatever_the_session_and_pyplot_does_not_know_them(
    sweep: Path,
) -> None:
    expected = plot(sweep, "profile", METRIC)._repr_png_()
    assert expected.startswith(b"\x89PNG")
    with plt.style.context("dark_background"), mpl.rc_context({"figure.figsize": [20, 20]}):
        assert plot(sweep, "profile", METRIC)._repr_png_() == expected
    assert not plt.get_fignums()


PAPER = {
    "font.family": "serif",
    "font.size": 8,
    "axes.titlesize": 9,
    "axes.labelsize": 8.5,
    "legend.fontsize": 6,
    "xtick.labelsize": 6.5,
}


def drawn_texts(figure: Figure) -> list[Text]:
    figure.canvas.draw()
    return [text for text in figure.findobj(Text) if text.get_visible() and text.get_text().strip()]


def test_texts_have_the_font_and_the_size_of_the_session(sweep: Path) -> None:
    with mpl.rc_context(PAPER):
        figure, axes = plt.subplots(2, 2, figsize=(9, 8), layout="constrained")
        for ax, kind in zip(axes.flat, ("dynamics", "profile", "heatmap", "by layer"), strict=True):
            IN_AXES[kind][1](sweep, ax=ax)
        own = plot(sweep, "spectrum", layer="block.01")
        texts = [*drawn_texts(figure), *drawn_texts(own)]
    plt.close(figure)
    assert {tuple(text.get_fontfamily()) for text in texts} == {("serif",)}
    for ax in (*axes.flat, own.axes[0]):
        assert {label.get_fontsize() for label in (ax.xaxis.label, ax.yaxis.label)} == {8.5}
        assert {label.get_fontsize() for label in ax.get_xticklabels()} <= {6.5}
    legend = axes[0, 0].get_legend()
    assert {text.get_fontsize() for text in legend.get_texts()} == {6}


def test_a_title_is_replaced_or_left_out_and_names_are_drawn_as_they_are(
    sweep: Path, ax: Axes
) -> None:
    plain, other, without = (
        words(plot(sweep, "dynamics", METRIC, title=title)) for title in (None, "Offset", "")
    )
    assert (other[0], without[0]) == ("Offset", "")
    assert plain[-1] == other[-1] == without[-1]
    odd = "a $\\bad{"
    rows = [
        {"step": step, "layer": layer, "metric": odd, "value": -1.0 - step}
        for step in range(4)
        for layer in ("$x{", "$y{")
    ]
    plot(rows, "dynamics", odd, ax=ax)
    ax.figure.canvas.draw()
    assert ax.get_title("left").startswith(f"{odd} against step\n")
    assert "−2" in [label.get_text() for label in ax.get_yticklabels()]
    plot(rows, "heatmap", odd).canvas.draw()


@pytest.mark.slow
def test_a_figure_for_a_column_has_its_width_and_small_texts_in_truetype(sweep: Path) -> None:
    figure = plot(sweep, "dynamics", METRIC, compact=True)
    size = figure.get_size_inches()
    assert size.tolist() == pytest.approx([3.25, 2.5])
    assert max(text.get_fontsize() for text in drawn_texts(figure)) < 8
    bounds = figure.get_tightbbox().extents
    assert bounds.min() >= 0
    assert (bounds[2:] <= size).all()
    for name, wanted in (("pdf", b"/FontFile2"), ("ps", b"/FontType 42")):
        file = io.BytesIO()
        figure.savefig(file, format=name)
        assert wanted in file.getvalue()
        assert b"/Type3" not in file.getvalue()
    asked = plot(sweep, "tokens", figsize=(6.75, 2.2))
    assert asked.get_size_inches().tolist() == pytest.approx([6.75, 2.2])


def test_of_several_runs_one_is_chosen(tmp_path: Path) -> None:
    folder = make_models(tmp_path / "models", {"lab/one": 2, "lab/two": 3}, metrics=("M", "Q"))
    for results in (folder, load_results(folder)):
        with pytest.raises(ValueError, match=r"results has 2: choose one by run=, of .*one, .*two"):
            plot(results, "profile", "M")
        with pytest.raises(ValueError, match=r"run must be one of those in results: .* 'three'"):
            plot(results, "profile", "M", run="three")
        for name in ("lab/two", "two"):
            (ax, *_) = plot(results, "profile", "M", run=name).axes
            assert len(ax.lines[0].get_xdata()) == 5
    assert plot(folder, "profile", "M", run="one").axes
    with pytest.raises(
        ValueError, match=r"run must be one of those in results: one, .*two; got 'x'"
    ):
        plot(folder, "profile", "M", run="x")


def test_an_axis_of_layers_says_what_its_numbers_are() -> None:
    names = {
        "layer (numbers are blocks)": ["embed", "block.00"],
        "layer": ["hidden.00", "hidden.01"],
    }
    for said, layers in names.items():
        rows = [{"layer": layer, "metric": "Q", "value": 1.0} for layer in layers]
        assert plot(rows, "profile", "Q").axes[0].get_xlabel() == said


ERRORS = {
    "there is no folder": lambda sweep: plot(sweep / "none", "dynamics", METRIC),
    "holds no measurements": lambda sweep: plot(sweep / "tokens", "dynamics", METRIC),
    "results must be a folder, a table.*; got int": lambda _: plot(3, "dynamics", METRIC),
    "nothing was measured yet": lambda _: plot([], "dynamics", METRIC),
    "metric must be .*; got 'nonesuch'": lambda sweep: plot(sweep, "dynamics", "nonesuch"),
    r"'anisotropi'\. Did you mean anis": lambda sweep: plot(sweep, "dynamics", "anisotropi"),
    "one that was measured at layers": lambda sweep: plot(sweep, "dynamics", "loss"),
    "by must be one of layer, step; got 'token'": lambda sweep: plot(
        sweep, "composition", by="token"
    ),
    "needs M and V": lambda _: plot([{"layer": "a", "metric": "n", "value": 1.0}], "composition"),
    "tokens needs a table of token types": lambda sweep: plot(history(sweep), "tokens"),
    "n, Q, M, V missing": lambda _: plot(pd.DataFrame({"token_id": [1]}), "tokens"),
    "ax must be one of matplotlib's Axes": lambda sweep: plot(sweep, "profile", METRIC, ax=[]),
    "layer must be one of embed.*; got 'x'": lambda sweep: plot(sweep, "tokens", layer="x"),
    "figsize and compact are of a new figure": lambda sweep: plot(
        sweep, "composition", ax=Figure().subplots(), compact=True
    ),
    "spectrum needs all eigenvalues.*--spectrum true": lambda sweep: plot(
        history(sweep), "spectrum"
    ),
    "heatmap has no layer": lambda sweep: plot(sweep, "heatmap", METRIC, layer="embed"),
    r"kind must be one of dynamics, .*; got 'curve'": lambda sweep: plot(sweep, "curve"),
    "scales needs the .*--extra scales": lambda _: plot(
        [{"layer": "a", "metric": "Q", "value": 1.0}], "scales"
    ),
}


def test_errors_say_the_rule_and_what_came(sweep: Path) -> None:
    draw: Callable[[Path], object]
    for message, draw in ERRORS.items():
        with pytest.raises((ValueError, TypeError, FileNotFoundError), match=message):
            draw(sweep)
