"""`plot` of the metrics, as users of torchmetrics call it."""

import math
import pickle
from itertools import pairwise

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from matplotlib.axes import Axes

from embedgeo.metrics import Anisotropy, IntrinsicDimension, TokenMoments
from tests.data import metrics, token_rows, updated

DIM, N = 4, 120


@pytest.fixture(autouse=True)
def _close():
    yield
    plt.close("all")


def points(ax):
    """The numbers drawn, by name: in a row each."""
    names = [label.get_text() for label in ax.get_yticklabels()]
    widths = [bar.get_width() for bar in ax.patches]
    return dict(zip(names, widths, strict=True)), [text.get_text() for text in ax.texts]


@pytest.mark.parametrize("kind", ["TokenMoments", "Anisotropy with all parts", "AfterProcessing"])
def test_each_value_has_a_row_and_its_number(kind):
    metric = updated(metrics(DIM)[kind], *token_rows(N, DIM))
    figure, ax = metric.plot()
    figure.canvas.draw()
    values = {key: value.item() for key, value in metric.compute().items()}
    drawn, numbers = points(ax)
    assert plt.gcf() is figure
    np.testing.assert_equal(drawn, values)
    assert numbers == [
        "–" if math.isnan(value) else f"{value:.4g}".replace("-", "−") for value in values.values()
    ]
    boxes = [text.get_window_extent() for text in ax.texts]
    assert all(box.x1 <= figure.bbox.x1 for box in boxes)
    assert all(above.y0 >= below.y1 - 1 for above, below in pairwise(boxes))


def test_several_values_have_a_panel_for_each_key():
    metric = Anisotropy(DIM)
    values = [metric(token_rows(N, DIM, seed=seed)[0]) for seed in range(3)]
    figure, axes = metric.plot(values)
    figure.canvas.draw()
    drawn = {ax.lines[0].get_label(): ax.lines[0].get_ydata() for ax in axes.flat if ax.lines}
    np.testing.assert_equal(
        drawn, {key: [each[key].item() for each in values] for key in values[0]}
    )


def test_given_axes_have_the_main_values():
    metric = updated(TokenMoments(DIM), *token_rows(N, DIM))
    figure, (one, several, other) = plt.subplots(1, 3)
    assert metric.plot(ax=one) == (figure, one)
    main = {"V_W_over_V_unbiased", "M_over_Q", "mean_cosine", "norm_cv", "top_dim_share"}
    assert points(one)[0].keys() == main
    assert metric.plot([metric.compute()] * 2, ax=several) == (figure, several)
    assert {text.get_text() for text in several.get_legend().get_texts()} == main
    metric.plot({"V": torch.tensor(1.0)}, ax=other)
    assert points(other)[0] == {"V": 1.0}


def test_one_key():
    metric = updated(IntrinsicDimension(DIM), *token_rows(N, DIM))
    value = metric["intrinsic_dimension"]
    figure, ax = value.plot()
    assert (ax.lines[0].get_label(), ax.lines[0].get_ydata()) == (
        "intrinsic_dimension",
        [value.compute()],
    )
    assert isinstance(ax, Axes)
    figure, ax = plt.subplots()
    assert value.plot([torch.tensor(1.0), torch.tensor(3.0)], ax=ax) == (figure, ax)
    assert ax.lines[0].get_ydata().tolist() == [1, 3]
    of_all = metric.compute()
    assert [line.get_ydata()[0] for line in value.plot(of_all)[1].lines] == [value.compute()]
    assert value.plot([of_all, of_all])[1].lines[0].get_ydata().tolist() == [value.compute()] * 2
    assert repr(value) == "IntrinsicDimension()['intrinsic_dimension']"
    assert pickle.loads(pickle.dumps(value)).compute() == value.compute()
    assert (value * 2).compute() == 2 * value.compute()
