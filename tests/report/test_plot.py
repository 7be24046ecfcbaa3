"""`embedgeo.plot`: the report's drawings, whatever holds the results, in figures or axes."""

import io
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text

from embedgeo import Anisotropy, EmbeddingMoments, TokenMoments, load_results, observe, plot
from embedgeo.drawing import style
from embedgeo.report import figures, tokens, variance
from embedgeo.report.runs import read_runs
from tests.models import gpt_neox, token_batch
from tests.report.synthetic import AT_SCALES, METRICS, make_models, make_sweep, write_cka

METRIC = "M_over_Q"
DRAWN = {  # what the report draws of a run, and how it is asked for here
    "dynamics": (lambda run: figures.dynamics(run, METRIC), partial(plot.dynamics, metric=METRIC)),
    "profile": (lambda run: figures.profile(run, METRIC), partial(plot.profile, metric=METRIC)),
    "heatmap": (lambda run: figures.heatmap(run, METRIC), partial(plot.heatmap, metric=METRIC)),
    "by layer": (partial(figures.composition, by="layer"), plot.composition),
    "by step": (partial(figures.composition, by="step"), partial(plot.composition, by="step")),
}

ON_REQUEST = {
    "spectra": (variance.spectra_by_layer, plot.spectrum),
    "spectra at a layer": (
        lambda run: variance.spectra_by_step(run, ["block.01"]),
        partial(plot.spectrum, layer="block.01"),
    ),
    "scales": (figures.scales_by_layer, plot.scales),
    "scales by step": (figures.scales_by_step, partial(plot.scales, by="step")),
    "layers": (lambda run: figures.cka_of_layers(run, 8), plot.similarity),
    "layers at a step": (
        lambda run: figures.cka_of_layers(run, 8),
        partial(plot.similarity, step=8),
    ),
    "steps at a layer": (
        lambda run: figures.cka_of_steps(run, "embed"),
        partial(plot.similarity, layer="embed"),
    ),
}


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_sweep(tmp_path_factory.mktemp("plot") / "sweep", tokens=True, stderr=0.05)


@pytest.fixture(scope="module")
def geometry():
    """What a small model has shown of forty token types."""
    model = gpt_neox()
    ids = (torch.rand(8, 60, generator=torch.Generator().manual_seed(0)) * 40).long()
    with torch.no_grad(), observe(model, metrics=lambda dim: [TokenMoments(dim)]) as seen:
        model(input_ids=ids)
    return seen


@pytest.fixture
def ax() -> Iterator[Axes]:
    figure, ax = plt.subplots()
    yield ax
    plt.close(figure)


def shown(figure: Figure) -> list[object]:
    """The data, the colours and the words of a figure."""
    found: list[object] = []
    for ax in figure.axes:
        found += [(line.get_label(), line.get_color(), line.get_xydata()) for line in ax.lines]
        for drawn in ax.collections:
            found += [path.vertices for path in drawn.get_paths()] + [
                drawn.get_facecolor(),
                drawn.get_offsets(),
            ]
            found += (
                []
                if drawn.get_array() is None
                else [drawn.get_array(), drawn.norm.vmin, drawn.norm.vmax]
            )
        found += [
            patch.get_path().transformed(patch.get_patch_transform()).vertices
            for patch in ax.patches
        ]
        found += [ax.get_xlabel(), ax.get_ylabel(), ax.get_xlim(), ax.get_ylim(), ax.get_yscale()]
    return found


def words(figure: Figure) -> list[str]:
    titles = [
        title
        for ax in figure.axes
        for title in (ax.get_title("left"), *(text.get_text() for text in ax.texts))
    ]
    return [*titles, *(text.get_text() for text in figure.texts)]


def assert_same(one: Figure, other: Figure) -> None:
    for a, b in zip(shown(one), shown(other), strict=True):
        np.testing.assert_equal(a, b)


def history(sweep: Path) -> list[dict]:
    columns = ["step", "layer", "layer_index", "width", "metric", "value", "stderr"]
    return load_results(sweep)[columns].to_dict("records")


INPUTS: dict[str, Callable[[Path], object]] = {
    "folder": lambda sweep: sweep,
    "name of a folder": str,
    "table": load_results,
    "history": history,
    "monitor": lambda sweep: SimpleNamespace(history=history(sweep)),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", INPUTS)
def test_every_kind_of_results_gives_the_figures_of_the_report(sweep: Path, kind: str) -> None:
    (run,) = read_runs([sweep])
    results = INPUTS[kind](sweep)
    drawn = DRAWN if kind == "folder" else {name: DRAWN[name] for name in ("dynamics", "by layer")}
    for of_report, of_plot in drawn.values():
        with style():
            expected = of_report(run).figure
        found = of_plot(results)
        assert_same(found, expected)
        assert words(found) == words(expected)
    assert "Gaussian rows" in [
        line.get_label() for line in plot.dynamics(results, METRIC).axes[0].lines
    ]


def test_figures_look_the_same_where_a_setting_of_the_session_is_the_report_s(sweep: Path) -> None:
    expected = plot.profile(sweep, METRIC)._repr_png_()
    with mpl.rc_context(
        {"svg.hashsalt": "embedgeo", "axes.facecolor": "black", "figure.figsize": [20, 20]}
    ):
        assert plot.profile(sweep, METRIC)._repr_png_() == expected
    with style(), mock.patch.object(mpl, "rcdefaults", side_effect=AssertionError), style():
        pass  # it is set already, which takes no time


@pytest.mark.slow
@pytest.mark.parametrize("kind", DRAWN)
def test_in_given_axes_the_same_is_drawn_with_title_legend_and_bar(
    sweep: Path, kind: str, ax: Axes
) -> None:
    _, draw = DRAWN[kind]
    own = draw(sweep)
    before = mpl.rcParams.copy()
    given = draw(sweep, ax=ax)
    assert given is ax.figure
    assert plt.gcf() is given
    assert mpl.rcParams == before
    assert len(given.axes) == len(own.axes)  # of which the second is the colour bar
    mine, theirs = given.axes[0], own.axes[0]
    assert mine.get_title("left") == own.texts[0].get_text()
    assert " ".join(mine.texts[0].get_text().split()) == own.texts[1].get_text()
    for one, other in zip(mine.lines, theirs.lines, strict=True):
        np.testing.assert_equal(one.get_xydata(), other.get_xydata())
    for one, other in zip(mine.collections, theirs.collections, strict=True):
        np.testing.assert_equal(
            [p.vertices for p in one.get_paths()], [p.vertices for p in other.get_paths()]
        )
    assert (mine.get_xlim(), mine.get_ylim()) == (theirs.get_xlim(), theirs.get_ylim())
    named = [text.get_text() for box in own.legends for text in box.get_texts()]
    assert named == ([text.get_text() for text in mine.get_legend().get_texts()] if named else [])
    for bar, of_own in zip(given.axes[1:], own.axes[1:], strict=True):
        assert bar.get_ylabel() == of_own.get_ylabel()
        assert bar.get_ylim() == of_own.get_ylim()


def test_nothing_overlaps_in_given_axes(sweep: Path) -> None:
    figure, axes = plt.subplots(2, 2, figsize=(9, 8), layout="constrained")
    plot.dynamics(sweep, METRIC, ax=axes[0, 0])
    plot.heatmap(sweep, METRIC, ax=axes[0, 1])
    plot.composition(sweep, ax=axes[1, 0])
    plot.tokens(sweep, ax=axes[1, 1])
    figure.canvas.draw()
    renderer = figure.canvas.get_renderer()
    plt.close(figure)
    for ax in axes.flat:
        title, subtitle, legend = ax._left_title, ax.texts[0], ax.get_legend()
        boxes = [
            each.get_window_extent(renderer)
            for each in (title, subtitle, legend)
            if each is not None
        ]
        for above, below in zip(boxes, [*boxes[1:], ax.get_window_extent()], strict=True):
            assert above.y0 >= below.y1 - 1, ax.get_title("left")
        assert boxes[0].y1 <= figure.bbox.y1 + 1


PAPER = {
    "font.family": "serif",
    "font.size": 8,
    "axes.titlesize": 9,
    "axes.labelsize": 8.5,
    "legend.fontsize": 6,
    "xtick.labelsize": 6.5,
    "ytick.labelsize": 7,
}


def drawn_texts(figure: Figure) -> list[Text]:
    figure.canvas.draw()
    return [text for text in figure.findobj(Text) if text.get_visible() and text.get_text().strip()]


@pytest.mark.parametrize("kind", DRAWN)
def test_in_given_axes_every_text_has_the_font_and_the_size_of_the_session(
    sweep: Path, kind: str
) -> None:
    with mpl.rc_context(PAPER):
        figure, ax = plt.subplots(figsize=(3.25, 2.6), layout="constrained")
        DRAWN[kind][1](sweep, ax=ax)
        texts = drawn_texts(figure)
    plt.close(figure)
    assert {tuple(text.get_fontfamily()) for text in texts} == {("serif",)}
    assert ax._left_title.get_fontsize() == 9
    for each in figure.axes:
        assert {label.get_fontsize() for label in (each.xaxis.label, each.yaxis.label)} == {8.5}
        assert {label.get_fontsize() for label in each.get_xticklabels()} <= {6.5}
        assert {label.get_fontsize() for label in each.get_yticklabels()} == {7}
    assert ax.get_legend() is None or {
        text.get_fontsize() for text in ax.get_legend().get_texts()
    } == {6}
    # the subtitle and notes: a little less than font.size
    assert all(text.get_fontsize() < 8 for text in ax.texts)


def test_a_title_is_replaced_or_left_out(sweep: Path, ax: Axes) -> None:
    plain, other, without = (
        plot.dynamics(sweep, METRIC, title=title) for title in (None, "Offset", "")
    )
    assert words(other)[-2:] == ["Offset", words(plain)[-1]]
    assert words(without)[-2:] == ["", words(plain)[-1]]
    height = without.get_size_inches()[1]
    taller = [figure.axes[0].get_position().height * height for figure in (without, plain)]
    assert taller[0] - taller[1] == pytest.approx(0.2)
    plot.dynamics(sweep, METRIC, ax=ax, title="Offset")
    assert ax.get_title("left") == "Offset"
    assert plot.dynamics(sweep, METRIC).texts[0].get_text() == words(plain)[-2]


@pytest.mark.slow
def test_a_figure_for_a_column_has_its_width_and_small_texts_in_truetype(sweep: Path) -> None:
    figure = plot.dynamics(sweep, METRIC, compact=True)
    assert figure.get_size_inches().tolist() == pytest.approx([3.25, 2.5])
    sizes = {text.get_fontsize() for text in drawn_texts(figure)}
    assert max(sizes) < 8
    assert figure.axes[0].xaxis.label.get_fontsize() == 7
    bounds = figure.get_tightbbox().extents
    assert bounds.min() >= 0
    assert (bounds[2:] <= figure.get_size_inches()).all()
    for name, wanted in (("pdf", b"/FontFile2"), ("ps", b"/FontType 42")):
        file = io.BytesIO()
        figure.savefig(file, format=name)
        assert wanted in file.getvalue()
        assert b"/Type3" not in file.getvalue()
        assert b"/FontType 3" not in file.getvalue()
    assert mpl.rcParams["pdf.fonttype"] == 3


def test_a_new_figure_has_the_size_that_is_asked_for_and_the_fonts_of_the_session(
    rich: Path, sweep: Path
) -> None:
    figure = plot.tokens(sweep, figsize=(6.75, 2.2))
    assert figure.get_size_inches().tolist() == pytest.approx([6.75, 2.2])
    assert plot.tokens(sweep, compact=True).get_size_inches().tolist() == pytest.approx(
        [3.25 * 0.8 * 4, 2.5]
    )
    with mpl.rc_context(PAPER):
        figure = plot.spectrum(rich, "block.01")
        texts = drawn_texts(figure)
    assert {tuple(text.get_fontfamily()) for text in texts} == {("serif",)}
    assert figure.axes[0].xaxis.label.get_fontsize() == 8.5
    assert {label.get_fontsize() for label in figure.axes[0].get_xticklabels()} == {6.5}
    assert figure.get_size_inches().tolist() == pytest.approx([4.6, 3.5])
    assert figure.texts[0].get_fontsize() == pytest.approx(10.5 * 9 / 9.5)
    assert plot.spectrum(rich, "block.01").axes[0].xaxis.label.get_fontsize() == 9.5


def test_a_title_has_the_colour_of_the_session(sweep: Path, ax: Axes) -> None:
    assert plot.dynamics(sweep, METRIC).texts[0].get_color() == "black"
    with mpl.rc_context({"axes.titlecolor": "#c00000"}):
        figure = plot.dynamics(sweep, METRIC, title="Offset")
        plot.dynamics(sweep, METRIC, ax=ax, title="Offset")
    of_axes = [text for text in ax.findobj(Text) if text.get_text() == "Offset"]
    assert {text.get_color() for text in (figure.texts[0], *of_axes)} == {"#c00000"}


def test_numbers_below_zero_have_a_minus_sign() -> None:
    rows = [
        {"step": step, "layer": "block.00", "metric": "Q", "value": -1.0 - step}
        for step in range(4)
    ]
    labels = [label.get_text() for label in plot.dynamics(rows, "Q").axes[0].get_yticklabels()]
    assert "−2" in labels
    table = pd.DataFrame(
        {"token_id": range(3), "n": 20, "Q": 3.0, "M": [0.0, 1, 2], "V": [3.0, 2, 1]}
    )
    assert plot.tokens(table).axes[0].get_title("left") == "all rows: slope −1, R² 1"
    _, axes = EmbeddingMoments(1).plot({"Q": torch.tensor(-0.5)})
    assert [text.get_text() for text in axes.texts] == ["−0.5"]
    plt.close("all")


def test_figures_keep_their_look_whatever_the_session_and_pyplot_does_not_know_them(
    sweep: Path,
) -> None:
    def painted() -> np.ndarray:
        figure = plot.profile(sweep, METRIC)
        figure.canvas.draw()
        return np.asarray(figure.canvas.buffer_rgba())

    before = painted()
    with plt.style.context("dark_background"):
        np.testing.assert_array_equal(painted(), before)
    assert not plt.get_fignums()
    assert plot.profile(sweep, METRIC)._repr_png_().startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_geometry_is_drawn_by_its_layers(geometry, ax: Axes) -> None:
    values = geometry.compute()
    for results in (geometry, geometry.to_frame()):
        figure = plot.profile(results, "M_over_Q")
        line = figure.axes[0].lines[0]
        assert line.get_label() == "measured"
        np.testing.assert_allclose(line.get_ydata(), [at["M_over_Q"] for at in values.values()])
        assert plot.composition(results).axes[0].get_xlabel() == "layer (numbers are blocks)"
    labels = [line.get_label() for line in plot.profile(geometry, "V_on_M_slope").axes[0].lines]
    assert any(label.startswith("Gaussian rows") for label in labels)
    assert plot.tokens(geometry, ax=ax) is ax.figure
    assert plot.heatmap(geometry, "Q").axes


@pytest.mark.slow
def test_token_types_are_those_of_the_report(sweep: Path, geometry, ax: Axes) -> None:
    (run,) = read_runs([sweep])
    with style():
        assert_same(plot.tokens(sweep), tokens.mean_against_variance(run).figure)
    plot.tokens(sweep, ax=ax)
    last = run.tokens[4000].query("layer == 'block.02' and n >= 10")
    np.testing.assert_allclose(ax.collections[0].get_offsets(), last[["M", "V"]])
    assert ax.get_title("left") == "V against M at block.02, step 4,000"
    assert ax.get_legend().get_texts()[0].get_text().startswith("slope")
    table = geometry.token_tables()
    assert_same(plot.tokens(table), plot.tokens(geometry))
    (only,) = plot.tokens(table, layer="block.01").axes[:-1]
    assert only.get_title("left").startswith("block.01: slope")
    assert (
        len(
            plot.tokens(table.query("layer == 'embed'").drop(columns=["layer", "layer_index"])).axes
        )
        == 2
    )


def test_of_several_runs_one_is_chosen(tmp_path: Path) -> None:
    folder = make_models(tmp_path / "models", {"lab/one": 2, "lab/two": 3})
    for results in (folder, load_results(folder)):
        with pytest.raises(
            ValueError, match=r"results has 2: choose one by run=, of .*one, .*two\."
        ):
            plot.profile(results, METRIC)
        with pytest.raises(
            ValueError,
            match=r"model must be one of those in results: lab/one, lab/two; got 'three'",
        ):
            plot.profile(results, METRIC, model="three")
        for name in ("lab/two", "two"):
            (ax, *_) = plot.profile(results, METRIC, model=name).axes
            assert len(ax.lines[0].get_xdata()) == 5
            assert ax.lines[0].get_label() == "measured"
    assert plot.profile(folder, METRIC, run="one").axes
    with pytest.raises(ValueError, match=r"run must be one of those in results: one, two; got 'x'"):
        plot.profile(folder, METRIC, run="x")


def test_two_models_at_the_same_steps_are_two_runs() -> None:
    rows = [
        {"model": model, "step": step, "layer": "block.00", "metric": "Q", "value": step + i}
        for i, model in enumerate("ab")
        for step in (0, 5)
    ]
    with pytest.raises(ValueError, match=r"choose one by run=, of a, b\."):
        plot.dynamics(pd.DataFrame(rows), "Q")
    assert plot.dynamics(pd.DataFrame(rows), "Q", model="b").axes[0].lines[
        0
    ].get_ydata().tolist() == [1, 6]


@pytest.mark.parametrize(
    ("draw", "error", "message"),
    [
        (
            lambda sweep: plot.dynamics(sweep / "none", METRIC),
            FileNotFoundError,
            "there is no folder",
        ),
        (
            lambda sweep: plot.dynamics(sweep / "tokens", METRIC),
            ValueError,
            "holds no measurements",
        ),
        (
            lambda sweep: plot.dynamics(3, METRIC),
            TypeError,
            "results must be a folder, a table.*; got int",
        ),
        (
            lambda sweep: plot.dynamics([3], METRIC),
            TypeError,
            "results must be a folder, a table.*; got list",
        ),
        (lambda sweep: plot.dynamics([], METRIC), ValueError, "nothing was measured yet"),
        (
            lambda sweep: plot.dynamics(sweep, "nonesuch"),
            ValueError,
            "metric must be .*M_over_Q.*; got 'nonesuch'",
        ),
        (
            lambda sweep: plot.dynamics(sweep, "anisotropi"),
            ValueError,
            r"got 'anisotropi'\. Did you mean anisotropy\?",
        ),
        (
            lambda sweep: plot.dynamics(sweep, "loss"),
            ValueError,
            "metric must be one that was measured at layers",
        ),
        (
            lambda sweep: plot.dynamics(pd.DataFrame({"layer": []}), "Q"),
            ValueError,
            "metric, value missing",
        ),
        (
            lambda sweep: plot.composition(sweep, by="token"),
            ValueError,
            'by must be "layer" or "step"; got \'token\'',
        ),
        (
            lambda sweep: plot.composition([r for r in history(sweep) if r["metric"] == "n"]),
            ValueError,
            "needs M and V",
        ),
        (
            lambda sweep: plot.tokens(history(sweep)),
            ValueError,
            "tokens needs a table of token types",
        ),
        (
            lambda sweep: plot.profile(sweep, METRIC, ax=[]),
            TypeError,
            "ax must be one of matplotlib's Axes; got list",
        ),
        (
            lambda sweep: plot.tokens(sweep, layer="x"),
            ValueError,
            "layer must be one of embed.*; got 'x'",
        ),
        (
            lambda sweep: plot.profile(sweep, METRIC, ax=Figure().subplots(), figsize=(3, 2)),
            ValueError,
            "figsize is of a new figure; the one of ax= has its size and its texts already",
        ),
        (
            lambda sweep: plot.composition(sweep, ax=Figure().subplots(), compact=True),
            ValueError,
            "compact is of a new figure",
        ),
        (
            lambda sweep: plot.profile(sweep, METRIC, title=3),
            TypeError,
            "title must be a string; got 3",
        ),
        *(
            (
                partial(plot.profile, metric=METRIC, figsize=wrong),
                ValueError,
                "figsize must be a width and a height above",
            )
            for wrong in ((0, 1), (1,), 3, "ab", (np.nan, 2), (-1, 3))
        ),
        (
            lambda sweep: plot.heatmap(sweep, METRIC, figsize=(0.5, 3)),
            ValueError,
            r"figsize must be larger than the margins with texts of this size, 1.84 × 1.26 inches; "
            r"got \(0.5, 3.0\)",
        ),
        (
            lambda sweep: plot.tokens(pd.DataFrame({"token_id": [1]})),
            ValueError,
            "n, Q, M, V missing",
        ),
    ],
)
def test_errors_say_the_rule_and_what_came(
    sweep: Path, draw: Callable, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        draw(sweep)


def test_an_axis_of_layers_says_what_its_numbers_are() -> None:
    names = {
        "layer (numbers are blocks)": ["embed", "block.00"],
        "layer": ["hidden.00", "hidden.01"],
        "layer (#0 is the first)": [
            f"{side}coder.block.{i}.layer.0.attention.q" for side in ("en", "de") for i in (0, 1)
        ],
    }
    for said, layers in names.items():
        rows = [{"layer": layer, "metric": "Q", "value": 1.0} for layer in layers]
        assert plot.profile(rows, "Q").axes[0].get_xlabel() == said


def test_too_few_occurrences_are_said_where_points_would_be() -> None:
    table = pd.DataFrame({"token_id": [1, 2], "n": [9, 3], "Q": 1.0, "M": 0.5, "V": 0.5})
    assert [text.get_text() for text in plot.tokens(table).axes[0].texts] == [
        "no type occurs so often"
    ]


def test_names_are_drawn_as_they_are(ax: Axes) -> None:
    rows = [
        {"step": s, "layer": layer, "metric": "a $\\bad{", "value": 1.0 + s}
        for s in (0, 1)
        for layer in ("$x{", "$y{")
    ]
    plot.dynamics(rows, "a $\\bad{", ax=ax)
    ax.figure.canvas.draw()
    figure = plot.heatmap(rows, "a $\\bad{")
    figure.canvas.draw()
    assert ax.get_title("left") == "a $\\bad{ against step"


@pytest.fixture(scope="module")
def rich(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_sweep(
        tmp_path_factory.mktemp("plot") / "sweep",
        (0, 1, 8, 64),
        metrics=(*METRICS, *AT_SCALES),
        spectra=1,
        dim=16,
    )
    write_cka(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("kind", ON_REQUEST)
def test_figures_are_those_of_the_report_also_in_given_axes(
    rich: Path, kind: str, ax: Axes
) -> None:
    of_report, draw = ON_REQUEST[kind]
    (run,) = read_runs([rich])
    with style():
        expected = of_report(run).figure
    found = draw(rich)
    assert_same(found, expected)
    assert words(found) == words(expected)
    assert draw(rich, ax=ax) is ax.figure
    assert ax.get_title("left") == words(expected)[-2]
    assert len(ax.figure.axes) == len(expected.axes)
    for here, there in zip(ax.lines, expected.axes[0].lines, strict=True):
        np.testing.assert_equal(here.get_xydata(), there.get_xydata())
    ax.figure.canvas.draw()


def test_scales_are_also_drawn_of_a_table(rich: Path) -> None:
    assert_same(plot.scales(load_results(rich)), plot.scales(rich))


def test_a_geometry_has_its_spectra() -> None:
    model = gpt_neox()
    with (
        torch.no_grad(),
        observe(model, "block.0*", lambda dim: [Anisotropy(dim, spectrum=True)]) as geometry,
    ):
        model(**token_batch())
    table = geometry.layer_tables()["spectra"]
    lines = plot.spectrum(geometry).axes[0].lines
    for line, (_, of_layer) in zip(lines, table.groupby("layer", sort=False), strict=False):
        eigenvalues = of_layer["eigenvalue"].to_numpy()
        np.testing.assert_allclose(line.get_ydata(), eigenvalues / eigenvalues.mean())
    assert (
        plot.spectrum(geometry, "block.01").axes[0].lines[0].get_ydata().tolist()
        == lines[1].get_ydata().tolist()
    )


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (
            lambda rich: plot.spectrum(load_results(rich)),
            r"spectrum needs all eigenvalues.*--spectrum true",
        ),
        (
            lambda rich: plot.spectrum(rich, "x"),
            r"layer must be one of embed, block\.00.*; got 'x'",
        ),
        (lambda rich: plot.scales(rich, "token"), r"by must be one of layer, step; got 'token'"),
        (
            lambda rich: plot.scales(load_results(rich).query("metric == 'Q'")),
            r"scales needs the .*--extra scales.*there are Q\.",
        ),
        (
            lambda rich: plot.similarity(load_results(rich)),
            r"similarity needs rows .*embedgeo drift",
        ),
        (
            lambda rich: plot.similarity(rich, "block.01"),
            r"layer must be one of embed, block\.02; got 'block\.01'",
        ),
        (lambda rich: plot.similarity(rich, step=64), r"step must be one of 8; got 64"),
        (
            lambda rich: plot.similarity(rich, "embed", step=8),
            r"of one layer or of one step; got layer='embed' and",
        ),
    ],
)
def test_errors_of_figures_on_request_say_the_rule_and_what_came(
    rich: Path, draw: Callable, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        draw(rich)
