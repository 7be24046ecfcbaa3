"""The curves of a metric: a line a layer, coloured by depth, `embed` on a scale of its own."""

import numpy as np
import pandas as pd
import pytest
from matplotlib.collections import LineCollection, QuadMesh

from embedgeo.drawing import style
from embedgeo.report.figures import curves
from embedgeo.report.runs import make_run
from tests.records import layer_records

BLOCKS = [f"block.{i:02d}" for i in range(6)]
STEPS = [0, 1, 2, 4, 8, 16, 32, 64]


def drawn(values, steps=STEPS):
    """The figure of some layers, given each one's value at the first step; all double."""
    records = []
    for k, step in enumerate(steps):
        for record in layer_records(step, layers=values, metrics=["Q"]):
            records.append(record | {"value": values[record["layer"]] * (1 + k)})
    with style():
        figure = curves(make_run("", pd.DataFrame(records)), "Q").figure
        figure.canvas.draw()
    return figure


def panels(figure):
    """The axes that have lines of layers, from the top: the values of each line."""
    found = []
    for ax in figure.axes:
        for drawn in ax.collections:
            if isinstance(drawn, LineCollection) and drawn.get_segments():
                lines = [np.reshape(each, (-1, 2))[:, 1] for each in drawn.get_segments()]
                found.append((ax, lines))
    return found


def texts(figure):
    return [text.get_text() for ax in figure.axes for text in ax.texts]


def test_embed_has_a_scale_of_its_own_and_the_blocks_fill_the_height():
    blocks = {layer: 0.02 + 0.002 * i for i, layer in enumerate(BLOCKS)}
    figure = drawn({"embed": 40.0, **blocks, "final_norm": 0.03})
    (main, lines), (strip, below) = panels(figure)
    assert len(lines) == 7
    assert [line[0] for line in below] == [40]
    low, high = main.get_ylim()
    assert np.ptp(np.concatenate(lines)) > 0.85 * (high - low)
    assert texts(figure) == ["embed"]
    np.testing.assert_allclose(main.get_xlim(), strip.get_xlim())
    assert "log" in strip.get_xlabel()
    squeezed = drawn({"embed": 0.0, "block.00": 0.02, "block.01": 0.04, "final_norm": 9.0})
    assert texts(squeezed) == ["embed", "norm"]


def test_lines_are_coloured_by_depth_and_each_has_its_place_in_the_key():
    figure = drawn(dict.fromkeys(BLOCKS, 0.1))
    (collection,) = [c for c in figure.axes[0].collections if isinstance(c, LineCollection)]
    colours = collection.get_colors()[:, :3]
    lightness = colours @ [0.2126, 0.7152, 0.0722]
    assert (np.diff(lightness) > 0.05).all()  # deeper is brighter, and no two are alike
    (key,) = [mesh for ax in figure.axes for mesh in ax.collections if isinstance(mesh, QuadMesh)]
    np.testing.assert_allclose(key.to_rgba(key.axes.get_yticks())[:, :3], colours)
    assert [label.get_text() for label in key.axes.get_yticklabels()] == list("012345")


def test_means_of_the_last_blocks_and_both_sides_of_a_model_are_named():
    means = [f"mean(last{count})" for count in (1, 2, 3, 4)]
    figure = drawn({"embed": 1.0, "block.00": 2.0, "block.01": 3.0, **dict.fromkeys(means, 2.5)})
    assert [text.get_text() for text in figure.axes[0].get_legend().get_texts()] == means
    names = ("embed", *BLOCKS, "final_norm")
    layers = [f"{side}.{name}" for side in ("encoder", "decoder") for name in names]
    figure = drawn({layer: 1.0 + i for i, layer in enumerate(layers)})
    assert texts(figure) == ["enc embed", "dec embed"]
    assert len(panels(figure)[0][1]) == 14


@pytest.mark.parametrize("value", [0.0, -3.0, np.nan])
def test_anything_can_be_drawn(value):
    for layers in (["embed"], ["embed", "block.00", "final_norm"], ["a.mlp", "x" * 40]):
        assert panels(drawn(dict.fromkeys(layers, value), STEPS if value else [5]))
