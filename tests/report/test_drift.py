"""Figures of the same rows over time and depth."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from embedgeo.drawing import style
from embedgeo.report.runs import Run, read_runs
from embedgeo.results.folder import cka_file
from embedgeo.studies import similarity
from tests.report.synthetic import cka, layer_names, make_sweep

STEPS, LAYERS = [0, 1, 8, 64], layer_names(3)


def drawn(run: Run) -> dict:
    with style():
        return {data.name: data for data in similarity.cka_figures(run)}


def test_steps_are_compared_at_layers_and_layers_at_steps(run: Run) -> None:
    found = drawn(run)
    assert list(found) == ["cka-steps-embed", "cka-steps-block.02", "cka-layers-8"]
    steps, layers = found["cka-steps-block.02"].numbers, found["cka-layers-8"].numbers
    assert list(steps.index) == list(steps.columns) == STEPS
    assert list(layers.index) == list(layers.columns) == LAYERS
    for step in STEPS:
        expected = [cka((step, "embed"), (other, "embed")) for other in STEPS]
        assert steps.loc[step].tolist() == expected
    for layer in LAYERS:
        assert layers.loc[layer].tolist() == [cka((8, layer), (8, other)) for other in LAYERS]
    assert "Least alike: step 0 and step 64, 0.1933; side by side" in found["cka-steps-embed"].text
    assert "Least alike: embed and final_norm, 0.2" in found["cka-layers-8"].text


def test_cells_are_square_colours_span_0_to_1_and_what_is_undefined_is_said(run: Run) -> None:
    for data in drawn(run).values():
        ax = data.figure.axes[0]
        data.figure.canvas.draw()
        (image,) = ax.images
        assert image.get_clim() == (0, 1)
        box = ax.get_window_extent()
        assert box.width == pytest.approx(box.height, rel=0.01)
        labels = [label.get_window_extent() for label in ax.get_xticklabels()]
        assert all(left.x1 < right.x0 for left, right in pairwise(labels))
    pairs = similarity.compared(run)
    undefined = replace(run, tables={"cka": {8: pairs.assign(cka=np.nan)}})
    assert {data.text for data in drawn(undefined).values()} == {"Undefined everywhere."}
    assert not drawn(replace(run, tables={}))


def test_a_damaged_table_is_named(tmp_path: Path) -> None:
    make_sweep(tmp_path, (0, 8), 1, metrics=("n", "Q"))
    cka_file(tmp_path).write_bytes(b"nothing")
    message = r"cka\.parquet must be a Parquet file.*embedgeo drift writes it again"
    with pytest.raises(ValueError, match=message):
        read_runs([tmp_path])
