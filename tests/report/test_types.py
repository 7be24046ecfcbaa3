"""The paper's pictures of single token types, and the tables of them."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from embedgeo import plot
from embedgeo.cli import main
from embedgeo.drawing import style
from embedgeo.report.runs import Run, make_run, read_runs
from embedgeo.results.folder import SweepFolder
from embedgeo.studies import token_types
from embedgeo.studies.token_types import Types, types_of
from tests.report.page import Page
from tests.report.synthetic import make_sweep

NAMES = {0: " once", 1: "once", 2: " winked", 3: "a\n", 4: " <b>"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep with tables of token types of which the texts are known, at its last step."""
    path = make_sweep(tmp_path_factory.mktemp("types"), (0, 1), 3, metrics=("n", "M"), tokens=True)
    sweep, random = SweepFolder(path), np.random.default_rng(0)
    types = sweep.read_tables("step1")["tokens"]
    types["token"] = types["token_id"].map(lambda i: NAMES.get(i, f" word{i}"))
    distances = types.assign(distance=(types["token_id"] - 25.0) ** 2 + 1)
    shown = types[types["token_id"].isin([0, 2, 30, 300])]
    shown = shown.loc[shown.index.repeat(shown["n"].clip(upper=50))]
    places = 60 * pd.factorize(shown["token_id"])[0]
    shown = shown.assign(pc1=random.normal(places, 5), pc2=random.normal(0, 5, len(shown)))
    tables = {"tokens": types, "distances": distances, "occurrences": shown}
    about = {"text_lengths": '{"3": 5, "10": 2}', **sweep.facts("step1")}
    sweep.write("step1", sweep.read("step1"), tables, about)
    return path


@pytest.fixture(scope="module")
def run(folder: Path) -> Run:
    (run,) = read_runs([folder])
    return run


@pytest.fixture
def types(run: Run) -> Types:
    return types_of(run)


@pytest.fixture(autouse=True)
def in_style() -> Iterator[None]:
    with style():
        yield


def at(types: Types, layer: str = "block.01") -> pd.DataFrame:
    return types.table[types.table["layer"] == layer]


def is_pale(colour: np.ndarray) -> bool:
    return bool(np.ptp(colour[:3]) < 0.05 and colour[:3].min() > 0.7)


def texts(ax: object) -> list[str]:
    return [text.get_text() for text in ax.texts]


def test_occurrences_are_drawn_around_the_zero_vector(run: Run) -> None:
    (picture,) = token_types.occurrences(run)
    picture.figure.canvas.draw()
    table = run.read("occurrences", 1)
    for ax, layer in zip(picture.figure.axes, ("block.01", "block.02"), strict=False):
        assert layer in (ax.get_title("left"), ax.get_title())
        shown = table[table["layer"] == layer]
        points, rings = ax.collections
        np.testing.assert_allclose(points.get_offsets(), shown[["pc1", "pc2"]])
        np.testing.assert_allclose(points.get_array(), shown["n"])
        means = shown.groupby("token_id")[["pc1", "pc2"]].mean()
        np.testing.assert_allclose(rings.get_offsets(), means)
        assert ax.lines[0].get_xydata().tolist() == [[0, 0]]
        assert {*texts(ax)} == {"once", "winked", "word30", "word300"}


def test_raw_values_are_drawn_against_log_frequency_with_the_line_of_those_regressed(
    types: Types,
) -> None:
    panels = token_types.raw_against_frequency(types).figure.axes[:3]
    regressed = at(types)[at(types)["n"].between(10, 100_000)]
    for ax, key in zip(panels, "QMV", strict=True):
        expected = np.column_stack((np.log10(at(types)["n"]), at(types)[key]))
        np.testing.assert_allclose(ax.collections[0].get_offsets(), expected)
        slope, start = np.polyfit(np.log10(regressed["n"]), regressed[key], 1)
        x, y = ax.lines[0].get_data()
        np.testing.assert_allclose(y, start + slope * x, rtol=1e-9)


def test_types_outside_of_the_range_are_pale_and_others_coloured_by_frequency(types: Types) -> None:
    types = types._replace(table=types.table.assign(n=types.table["n"] // 20))
    inside = at(types)["n"].between(10, 100_000).to_numpy()
    assert 0 < inside.sum() < len(inside)
    raw = token_types.raw_against_frequency(types).figure.axes[0].collections[0].get_facecolors()
    assert [not is_pale(colour) for colour in raw] == inside.tolist()
    ordered = raw[inside][np.argsort(at(types)["n"].to_numpy()[inside])]
    assert ordered[0][:3].sum() < ordered[-1][:3].sum()  # from dark to bright
    picture = token_types.mean_against_variance(types, ["block.01"])
    coloured, others = picture.figure.axes[0].collections
    np.testing.assert_allclose(others.get_offsets(), at(types)[~inside][["M", "V"]])
    assert is_pale(others.get_facecolors()[0])
    np.testing.assert_allclose(coloured.get_array(), at(types)[inside]["n"])
    assert len(picture.numbers) == len(at(types))


def test_named_types_have_a_ring_and_their_name_where_v_is_drawn_against_m(types: Types) -> None:
    chosen = at(types).query("token_id in (3, 30, 40)").iloc[1:]
    names = [token.strip() for token in chosen["token"]]
    panel = token_types.mean_against_variance(types, ["block.01"], names=names).figure.axes[0]
    np.testing.assert_allclose(panel.collections[1].get_offsets(), chosen[["M", "V"]])
    assert sorted(texts(panel)) == sorted(names)
    drawn = plot(types.table, "tokens", layer="block.01", examples=names).axes[0]
    assert texts(drawn) == texts(panel)
    with pytest.raises(ValueError, match="'nowhere' is none"):
        plot(types.table, "tokens", examples=["nowhere"])


def test_histograms_count_all_types_of_a_layer(types: Types) -> None:
    shares = token_types.histograms(types).numbers["share"]
    assert shares.groupby(["value", "layer"]).sum().drop(
        "embed", level=1
    ).to_numpy() == pytest.approx(1)


def test_token_types_are_drawn_at_as_many_layers_as_asked_for(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for many, drawn in ((1, 1), (9, 4)):  # the final norm is none of them
        assert len(plot(folder, "tokens", layers=many).axes) == drawn + 1  # and the bar
    layers = [f"hidden.{i:02}" for i in range(13)]
    table = pd.DataFrame({"layer": layers})
    records = table.assign(
        step=0, layer_index=range(13), width=4, metric="n", value=1.0, stderr=np.nan
    )
    found = make_run("", records).layers_to_draw(table, 5)
    assert found == [layers[i] for i in (0, 3, 6, 9, 12)]  # the paper's
    assert main(["report", str(folder), "--layers", "0"]) == 2
    assert "layers must be at least 1" in capsys.readouterr().err


def test_types_that_vary_most_and_least_and_lie_nearest_the_mean_are_listed(types: Types) -> None:
    table = token_types.extremes(types, "block.01")
    ordered = at(types).query("n >= 10").sort_values("V")["token_id"].tolist()
    lists = table.numbers.reset_index().groupby("list")["token_id"].apply(list)
    assert lists["varies most"] == ordered[-10:][::-1]
    assert lists["varies least"] == ordered[:10]
    assert lists["nearest the mean"][0] == 25
    assert sorted(lists["nearest the mean"][1:5]) == [23, 24, 26, 27]
    assert table.cells["nearest the mean"].iloc[0] == "␣word25"


def examples(folder: Path) -> pd.DataFrame:
    return pd.read_csv(folder / "report" / "tables" / "tokens-examples.csv")


def test_examples_are_found_by_their_text(
    folder: Path, types: Types, capsys: pytest.CaptureFixture[str], unpainted: None
) -> None:
    found = token_types.examples(types, ["once", " winked"])
    assert found.cells["token"].tolist() == ["␣once", "once", "␣winked"]
    values = types.table.set_index(["token_id", "layer"])["V"][found.numbers.index]
    np.testing.assert_allclose(found.numbers["V"], values, rtol=1e-12)
    assert set(token_types.chosen_types(types, [])) == {0, 2, 30, 300}  # those of the figure
    assert main(["report", str(folder), "--examples", "once,<b>"]) == 0
    page = Page(folder / "report" / "index.html")
    assert "Examples, step 1" in page.text
    assert "<td>␣&lt;b&gt;</td>" in page.html
    assert {*examples(folder)["token"]} == {" once", "once", " <b>"}
    capsys.readouterr()
    assert main(["report", str(folder), "--examples", "once,nowhere"]) == 2
    said = capsys.readouterr().err
    assert "examples must be texts of token types that occur; 'nowhere' is none" in said


def test_examples_are_those_of_every_frequency_unless_named(
    plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], unpainted: None
) -> None:
    folder = make_sweep(tmp_path / "old", (0,), 1, metrics=("n", "M"), tokens=True)  # without texts
    assert main(["report", str(folder), "--examples", "true"]) == 0
    found = examples(folder)
    assert 15 <= found["token_id"].nunique() <= 40
    assert (found["token"] == found["token_id"]).all()
    assert main(["report", str(plain), "--examples", "true"]) == 2
    assert "Sweep with --token-tables true" in capsys.readouterr().err
