"""Figures of the same rows over time and depth."""

import itertools
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from embedgeo.drawing import png, style
from embedgeo.glossary import DRIFT
from embedgeo.report import figures, write_report
from embedgeo.report.runs import read_runs
from embedgeo.results.folder import cka_file
from tests.report.synthetic import cka, layer_names, make_sweep, write_cka

STEPS = (0, 1, 8, 64)
LAYERS = layer_names(3)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    changes = {
        (step, layer, metric): 0.9 - 0.1 * i - 0.01 * j
        for i, step in enumerate(STEPS)
        for j, layer in enumerate(LAYERS)
        for metric in DRIFT
    }
    make_sweep(tmp_path, STEPS, metrics=("n", "Q", *DRIFT), changes=changes)
    write_cka(tmp_path)
    return tmp_path


def drawn(folder):
    (run,) = read_runs([folder])
    with style():
        return {data.name: data for data in figures.cka_figures(run)}


def test_steps_are_compared_at_layers_and_layers_at_steps(folder: Path) -> None:
    found = drawn(folder)
    assert list(found) == ["cka-steps-embed", "cka-steps-block.02", "cka-layers-8"]
    steps = found["cka-steps-block.02"].numbers
    assert list(steps.index) == list(steps.columns) == list(STEPS)
    layers = found["cka-layers-8"].numbers
    assert list(layers.index) == list(layers.columns) == LAYERS
    for i, step in enumerate(STEPS):
        assert steps.iloc[i].tolist() == [cka((step, "embed"), (other, "embed")) for other in STEPS]
    for i, layer in enumerate(LAYERS):
        assert layers.iloc[i].tolist() == [cka((8, layer), (8, other)) for other in LAYERS]
    assert "Least alike: step 0 and step 64, 0.1933; side by side" in found["cka-steps-embed"].text
    assert "Least alike: embed and final_norm, 0.2" in found["cka-layers-8"].text


def test_cells_are_square_and_colours_span_0_to_1(folder: Path) -> None:
    for data in drawn(folder).values():
        ax = data.figure.axes[0]
        with style():
            png(data.figure)  # places them
        (image,) = ax.images
        assert image.get_cmap().name == "cividis"
        assert image.get_clim() == (0, 1)
        box = ax.get_window_extent()
        assert box.width == pytest.approx(box.height, rel=0.01)
        labels = [label.get_window_extent() for label in ax.get_xticklabels()]
        assert all(left.x1 < right.x0 for left, right in itertools.pairwise(labels))


def test_what_is_undefined_is_grey_and_said(folder: Path) -> None:
    write_cka(folder, value=np.nan)
    assert {data.text for data in drawn(folder).values()} == {"Undefined everywhere."}


@pytest.mark.slow
def test_the_report_has_a_section_of_drift(folder: Path) -> None:
    page = write_report([folder]).read_text()
    assert page.count("The same rows over time and depth") >= 2
    figures = {path.stem for path in (folder / "report" / "figures").glob("*.png")}
    over_time = {key for key in DRIFT if key.endswith(("_previous", "_first"))}
    assert {f"{key}-dynamics" for key in over_time} | {
        f"{key}-heatmap" for key in DRIFT.keys() - over_time
    } == {name for name in figures if name.rpartition("-")[0] in DRIFT}
    assert {"cka-steps-embed", "cka-steps-block.02", "cka-layers-8"} <= figures
    values = pd.read_csv(folder / "report" / "metrics.csv")
    assert set(values.loc[values["metric"] == "cka_to_first", "gaussian"]) == {0.0}


def test_without_comparisons_nothing_is_drawn(tmp_path: Path) -> None:
    assert not drawn(make_sweep(tmp_path, STEPS, metrics=("n", "Q")))
    assert "The same rows over time" not in write_report([tmp_path]).read_text()


def test_of_a_single_step_the_layers_are_drawn(tmp_path: Path) -> None:
    changes = {(0, layer, "cka_to_below"): 0.1 * i for i, layer in enumerate(LAYERS)}
    make_sweep(tmp_path, (0,), metrics=("n", "cka_to_below"), changes=changes)
    (run,) = read_runs([tmp_path])
    with style():
        assert [data.name for data in figures.drift_figures(run, "cka_to_below")] == [
            "cka_to_below-profile"
        ]


def test_a_damaged_table_is_named(folder: Path) -> None:
    cka_file(folder).write_bytes(b"nothing")
    with pytest.raises(
        ValueError, match=r"cka\.parquet must be a Parquet file.*embedgeo drift writes it again"
    ):
        read_runs([folder])
