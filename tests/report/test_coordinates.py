"""The largest coordinates are named and followed, and massive activations told apart, from what a
sweep has kept.
"""

import numpy as np
import pandas as pd
import pytest
from matplotlib.colors import to_hex

from embedgeo.drawing import RUNS, style
from embedgeo.report import write_report
from embedgeo.report.runs import read_runs
from embedgeo.report.variance import (
    coordinate_figures,
    followed_coordinates,
    largest_coordinates,
    massive_activations,
    massive_by_step,
)
from embedgeo.results.folder import SweepFolder
from embedgeo.results.parquet import TABLES, to_frame
from embedgeo.results.records import Record
from tests.report.synthetic import layer_names, make_sweep

STEPS, DIM = (0, 8, 512), 64
LAYERS = layer_names(3)
OUTLIERS = [41, 7, 0, 63]
KEYS = [
    f"{key}{suffix}"
    for key in ("max_abs", "massive_fraction", "kurtosis")
    for suffix in ("", "_first", "_rest")
]


def table(step, dim=DIM, most=16):
    """At the last step four coordinates hold nearly all of V, at the first one none does."""
    random, parts = np.random.default_rng(step), []
    for i, layer in enumerate(LAYERS):
        V = random.dirichlet(np.full(dim, 50.0))
        V[OUTLIERS] += np.array([8, 4, 2, 1]) * step / 512
        V, cosine = V / V.sum(), V[::-1] / V.sum()
        places = np.union1d(V.argsort()[-most:], cosine.argsort()[-most:])
        columns = {
            "mean": 0.5,
            "variance": V[places],
            "share_of_M": 1 / dim,
            "share_of_V": V[places],
        }
        columns |= {"share_of_cosine": cosine[places], "kurtosis": np.nan, "max_abs": 3.0}
        parts.append(
            pd.DataFrame({"layer": layer, "layer_index": i, "coordinate": places, **columns})
        )
    return pd.concat(parts, ignore_index=True)


def value(key, step, layer):
    at_first = 900.0 if key.endswith("_first") else 3.0
    return 1 + at_first * step / 512 * (1 + LAYERS.index(layer)) / (1e4 if "fraction" in key else 1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = make_sweep(tmp_path_factory.mktemp("sweep") / "a", STEPS, 3, dim=DIM)
    sweep = SweepFolder(path)
    for step in STEPS:
        records = sweep.read(f"step{step}")
        at = [
            {"layer": layer, "layer_index": i, "width": DIM, "stderr": np.nan}
            for i, layer in enumerate(LAYERS)
        ]
        more = [
            Record(**each, metric=key, value=value(key, step, each["layer"]))
            for each in at
            for key in KEYS
        ]
        about = records.iloc[0][
            ["model", "revision", "step", "commit", "series", "weights_sha256", "duplicate_of"]
        ]
        everything = pd.concat((records, to_frame(more, **about)), ignore_index=True)
        sweep.write(f"step{step}", everything, {"coordinates": table(step)})
    return path


@pytest.fixture
def run(folder):
    (found,) = read_runs([folder])
    with style():
        yield found


def test_the_ten_largest_of_every_layer_are_named(run):
    data = largest_coordinates(run)
    data = data._replace(numbers=data.numbers.sort_index())
    last = table(512)
    for share in ("share_of_V", "share_of_cosine"):
        for layer in LAYERS:
            named = data.numbers.xs((share, layer))
            expected = last[last["layer"] == layer].nlargest(10, share)
            assert named.index.tolist() == [*range(1, 11)]
            assert named["coordinate"].tolist() == expected["coordinate"].tolist()
            assert named["share"].tolist() == expected[share].tolist()
    assert data.numbers.xs(("share_of_V", "block.01"))["coordinate"].tolist()[:4] == OUTLIERS
    drawn = [text.get_text() for text in data.figure.axes[0].texts]
    assert len(drawn) == 10 * len(LAYERS)
    assert drawn.count("41") == len(LAYERS)
    assert "41 (5 of 5)" in data.text


def test_coordinates_are_followed_over_steps_in_one_colour(run):
    data = followed_coordinates(run)
    assert data.numbers.index.tolist() == list(STEPS)
    assert len(data.numbers["block.01"].columns) == 10
    for step in STEPS:
        known = table(step).set_index(["layer", "coordinate"])["share_of_V"]
        drawn = data.numbers.loc[step].dropna()
        assert drawn.tolist() == known[drawn.index].tolist()
    assert data.numbers.loc[0].isna().any()  # not among those that are kept
    for ax in data.figure.axes:
        colours = {
            line.get_ydata()[-1]: to_hex(line.get_color())
            for line in ax.lines
            if len(line.get_ydata())
        }
        assert [colours[share] for share in sorted(colours, reverse=True)[:4]] == list(RUNS[:4])
    assert "block.02: coordinate 41 from" in data.text


def test_massive_activations_of_first_positions_are_beside_the_rest(run):
    by_layer, by_step = massive_activations(run).numbers, massive_by_step(run).numbers
    assert by_layer.index.tolist() == LAYERS
    assert by_step.index.tolist() == list(STEPS)
    for key in by_layer:
        assert by_layer[key].tolist() == [value(key, 512, layer) for layer in LAYERS]
        assert by_step[key].tolist() == [value(key, step, "final_norm") for step in STEPS]
    assert {*by_layer} == {*by_step} == {key for key in KEYS if key.endswith(("_first", "_rest"))}


@pytest.mark.slow
def test_the_page_has_them(folder, unpainted):
    page = write_report([folder]).read_text()
    names = {path.stem for path in (folder / "report" / "figures").glob("*.png")}
    assert {
        "coordinates-largest",
        "coordinates-followed",
        "massive-activations",
        "max_abs-dynamics",
    } <= names
    assert not any(name.startswith(("max_abs_first", "massive_fraction_100x")) for name in names)
    assert "Outlier coordinates" in page


def test_without_coordinates_there_are_no_such_figures(tmp_path):
    (run,) = read_runs([make_sweep(tmp_path / "a", STEPS, 1)])
    assert list(coordinate_figures(run)) == []


def test_columns_are_those_of_the_table():
    assert list(table(0)) == TABLES["coordinates"].names
