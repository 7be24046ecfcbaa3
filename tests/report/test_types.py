"""The paper's pictures of single token types, and the tables of them."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from embedgeo import plot
from embedgeo.cli import main
from embedgeo.drawing import style
from embedgeo.report import tokens
from embedgeo.report.runs import Run, make_run, read_runs
from embedgeo.results.folder import SweepFolder
from tests.report.synthetic import make_sweep

NAMES = {0: " once", 1: "once", 2: " winked", 3: "a\n", 4: " <b>"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep with tables of token types of which the texts are known, at its last step."""
    path = make_sweep(tmp_path_factory.mktemp("types"), (0, 1), 3, metrics=("n", "M"), tokens=True)
    sweep, random = SweepFolder(path), np.random.default_rng(0)
    tokens = sweep.read_tables("step1")["tokens"]
    tokens["token"] = tokens["token_id"].map(lambda i: NAMES.get(i, f" word{i}"))
    distances = tokens.assign(distance=(tokens["token_id"] - 25.0) ** 2 + 1)
    shown = tokens[tokens["token_id"].isin([0, 2, 30, 300])]
    shown = shown.loc[shown.index.repeat(shown["n"].clip(upper=50))]
    shown = shown.assign(
        pc1=random.normal(60 * pd.factorize(shown["token_id"])[0], 5),
        pc2=random.normal(0, 5, len(shown)),
    )
    tables = {"tokens": tokens, "distances": distances, "occurrences": shown}
    about = {"text_lengths": '{"3": 5, "10": 2}', **sweep.facts("step1")}
    sweep.write("step1", sweep.read("step1"), tables, about)
    return path


@pytest.fixture(scope="module")
def run(folder: Path) -> Run:
    (run,) = read_runs([folder])
    return run


@pytest.mark.slow
def test_a_plot_of_one_token_type_says_so(run: Run) -> None:
    table = run.tokens[1]
    alone = replace(run, tokens={1: table[table["token_id"] == 30]})
    for data in (tokens.mean_against_variance(alone), tokens.against_frequency(alone)):
        assert "one token type alone: no line" in {
            text.get_text() for text in data.figure.axes[0].texts
        }
    assert "over one token type;" in tokens.mean_against_variance(alone).text
    for data in (tokens.mean_against_variance(run), tokens.against_frequency(run)):
        assert not data.figure.axes[0].texts


def test_occurrences_are_drawn_around_the_zero_vector(run: Run) -> None:
    with style():
        picture = tokens.occurrences(run)
        picture.figure.canvas.draw()
    assert [ax.get_title("left") or ax.get_title() for ax in picture.figure.axes[:2]] == [
        "block.01",
        "block.02",
    ]
    table = run.occurrences[1]
    for ax, layer in zip(picture.figure.axes, ("block.01", "block.02"), strict=False):
        at = table[table["layer"] == layer]
        points, rings = ax.collections
        np.testing.assert_allclose(points.get_offsets(), at[["pc1", "pc2"]])
        np.testing.assert_allclose(points.get_array(), at["n"])
        np.testing.assert_allclose(
            rings.get_offsets(), at.groupby("token_id")[["pc1", "pc2"]].mean()
        )
        assert ax.lines[0].get_xydata().tolist() == [[0, 0]]
        assert {text.get_text() for text in ax.texts} == {"once", "winked", "word30", "word300"}
    assert picture.text.startswith("4 token types")


def test_raw_values_are_drawn_against_log_frequency_with_the_line_of_those_regressed(
    run: Run,
) -> None:
    with style():
        picture = tokens.raw_against_frequency(run)
    table = run.tokens[1]
    at = table[table["layer"] == "block.01"]
    regressed = at[at["n"].between(10, 100_000)]
    *panels, bar = picture.figure.axes
    assert bar.get_ylabel().startswith("occurrences n")
    for ax, key in zip(panels, "QMV", strict=True):
        np.testing.assert_allclose(
            ax.collections[0].get_offsets(), np.column_stack((np.log10(at["n"]), at[key]))
        )
        slope, start = np.polyfit(np.log10(regressed["n"]), regressed[key], 1)
        x, y = ax.lines[0].get_data()
        np.testing.assert_allclose(y, start + slope * x, rtol=1e-9)


def is_pale(colour: np.ndarray) -> bool:
    return bool(np.ptp(colour[:3]) < 0.05 and colour[:3].min() > 0.7)


def test_types_outside_of_the_range_are_pale_and_others_coloured_by_frequency(run: Run) -> None:
    table = run.tokens[1].assign(n=run.tokens[1]["n"] // 20)
    run = replace(run, tokens={1: table})
    at = table[table["layer"] == "block.01"]
    inside = at["n"].between(10, 100_000).to_numpy()
    assert 0 < inside.sum() < len(at)
    with style():
        raw = tokens.raw_against_frequency(run).figure.axes[0].collections[0].get_facecolors()
        assert [not is_pale(colour) for colour in raw] == inside.tolist()
        ordered = raw[inside][np.argsort(at["n"].to_numpy()[inside])]
        assert ordered[0][:3].sum() < ordered[-1][:3].sum()  # from dark to bright
        picture = tokens.mean_against_variance(run, ["block.01"])
        coloured, others = picture.figure.axes[0].collections
        np.testing.assert_allclose(others.get_offsets(), at[~inside][["M", "V"]])
        assert is_pale(others.get_facecolors()[0])
        np.testing.assert_allclose(coloured.get_array(), at[inside]["n"])
        assert len(picture.numbers) == len(at)


def test_named_types_have_a_ring_and_their_name_where_v_is_drawn_against_m(run: Run) -> None:
    table = run.tokens[1]
    at = table[table["layer"] == "block.01"].sort_values("n", ascending=False)
    chosen = at[at["token"].str.startswith(" word")].iloc[[3, 40]]
    names = [token.strip() for token in chosen["token"]]
    with style():
        panel = tokens.mean_against_variance(run, ["block.01"], names=names).figure.axes[0]
        figures = {each.name: each for each in tokens.token_figures(run, names)}
        plain = tokens.mean_against_variance(run, ["block.01"]).figure.axes[0]
    rings = panel.collections[-1]
    assert rings.get_facecolor().size == 0
    expected = table[(table["layer"] == "block.01") & table["token_id"].isin(chosen["token_id"])]
    np.testing.assert_allclose(rings.get_offsets(), expected[["M", "V"]])
    assert [text.get_text() for text in panel.texts] == names
    assert len(plain.texts) == 0
    assert sum(len(ax.texts) for ax in figures["tokens-V-against-M"].figure.axes) > 0
    with pytest.raises(ValueError, match="'nowhere' is none"):
        plot.tokens(table, examples=["nowhere"])
    assert [
        text.get_text()
        for text in plot.tokens(table, layer="block.01", examples=names).axes[0].texts
    ] == names


def test_models_have_one_scale_of_colours(run: Run) -> None:
    table = run.tokens[1]
    fewer = replace(run, tokens={1: table[table["n"] < 500]})
    with style():
        pictures = [
            tokens.mean_against_variance(each) for each in tokens.on_one_scale([run, fewer])
        ]
        limits = [picture.figure.axes[0].collections[0].norm.vmax for picture in pictures]
        alone = tokens.mean_against_variance(fewer).figure.axes[0].collections[0].norm.vmax
    assert limits[0] == limits[1] == table["n"].max() > alone


def test_histograms_mark_the_means(run: Run) -> None:
    with style():
        picture = tokens.histograms(run)
    table = run.tokens[1]
    layers = run.layers_in(table)
    for ax, key in zip(picture.figure.axes, "QMV", strict=False):
        marks = [line.get_xdata()[0] for line in ax.lines if line.get_marker() == "v"]
        means = table.groupby("layer")[key].mean()[layers]
        np.testing.assert_allclose(marks, np.log10(means[means > 0]))
    assert "; means: Q " in picture.text


@pytest.mark.parametrize(("many", "drawn"), [(1, 1), (3, 3), (9, 4)])
@pytest.mark.slow
def test_token_types_are_drawn_at_as_many_layers_as_asked_for(
    folder: Path, many: int, drawn: int
) -> None:
    with style():
        figure = plot.tokens(folder, layers=many)
    assert len(figure.axes) == drawn + 1  # and the bar; the final norm is none of them


def test_the_papers_layers_are_those_of_five() -> None:
    layers = [f"hidden.{i:02}" for i in range(13)]
    table = pd.DataFrame({"layer": layers})
    records = table.assign(
        step=0, layer_index=range(13), width=4, metric="n", value=1.0, stderr=np.nan
    )
    asked = replace(make_run("", records), num_drawn=5)
    assert tokens.some_layers(asked, table) == [layers[i] for i in (0, 3, 6, 9, 12)]


def test_a_report_of_no_layers_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(folder), "--layers", "0"]) == 2
    assert "layers must be at least 1" in capsys.readouterr().err
    with pytest.raises(ValueError, match="layers must be at least 1"):
        plot.tokens(folder, layers=0)


def test_lengths_and_frequencies_are_counted(run: Run) -> None:
    with style():
        counts = tokens.lengths_and_frequencies(run).numbers["count"]
    table = run.tokens[1]
    at = table[table["layer"] == "embed"]
    assert counts.loc["frequency"].sum() == counts.loc["letters"].sum() == len(at)
    assert counts.loc["length"].to_dict() == {
        float(i): {3: 5, 10: 2}.get(i, 0) for i in range(1, 11)
    }
    assert (counts.loc["letters", 1.0], counts.loc["letters", 4.0]) == (1, 2)


def test_types_that_vary_most_and_least_and_lie_nearest_the_mean_are_listed(run: Run) -> None:
    table = tokens.extremes(run, "block.01")
    at = run.tokens[1]
    at = at[(at["layer"] == "block.01") & (at["n"] >= 10)].sort_values("V")
    lists = table.numbers.reset_index().groupby("list")["token_id"].apply(list)
    assert lists["varies most"] == at["token_id"].tolist()[-10:][::-1]
    assert lists["varies least"] == at["token_id"].tolist()[:10]
    assert sorted(lists["nearest the mean"][1:5]) == [23, 24, 26, 27]
    assert lists["nearest the mean"][0] == 25
    assert list(table.cells.columns[6:]) == ["nearest the mean", "‖μ_t − μ‖²", "n"]
    assert table.cells["nearest the mean"].iloc[0] == "␣word25"


@pytest.mark.usefixtures("unpainted")
def test_examples_are_found_by_their_text(
    folder: Path, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    found = tokens.examples(run, ["once", " winked"])
    assert found is not None
    assert found.cells["token"].tolist() == ["␣once", "once", "␣winked"]
    table = run.tokens[1].set_index(["token_id", "layer"])
    pd.testing.assert_series_equal(
        found.numbers["V"].sort_index(),
        table.loc[found.numbers.index, "V"].sort_index(),
        rtol=1e-12,
    )
    assert set(tokens.chosen_types(run, [])) == {0, 2, 30, 300}  # those of the figure
    out = folder / "report"
    assert main(["report", str(folder), "--examples", "once,<b>"]) == 0
    page = (out / "index.html").read_text()
    assert "Examples, step 1" in page
    assert "<td>␣&lt;b&gt;</td>" in page
    assert set(pd.read_csv(out / "tables" / "tokens-examples.csv")["token"]) == {
        " once",
        "once",
        " <b>",
    }
    capsys.readouterr()
    assert main(["report", str(folder), "--examples", "once,nowhere"]) == 2
    assert (
        "examples must be texts of token types that occur; 'nowhere' is none"
        in capsys.readouterr().err
    )


@pytest.mark.usefixtures("unpainted")
def test_examples_are_those_of_every_frequency_unless_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_sweep(tmp_path / "old", (0,), 1, metrics=("n", "M"), tokens=True)  # without texts
    assert main(["report", str(folder), "--examples", "true"]) == 0
    found = pd.read_csv(folder / "report" / "tables" / "tokens-examples.csv")
    assert 15 <= found["token_id"].nunique() <= 40
    assert (found["token"] == found["token_id"]).all()
    assert not (folder / "report" / "figures" / "tokens-occurrences.csv").exists()
    none = make_sweep(tmp_path / "none", (0,), 1, metrics=("n", "M"))
    capsys.readouterr()
    assert main(["report", str(none), "--examples", "true"]) == 2
    assert "Sweep with --token-tables true" in capsys.readouterr().err
