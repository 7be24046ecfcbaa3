"""A metric's own state of moments: the powers that are pooled, and batches without rows."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from embedgeo.functional.moments import PooledState
from embedgeo.metrics.base import GeometryMetric
from tests.data import gaussian, updated

DIM = 5


@dataclass(eq=False)
class ThirdMoments(PooledState):
    n: Tensor
    mean: Tensor
    m2: Tensor
    m3: Tensor

    powers = (("mean", "m2", "m3"),)
    of_coordinates = "mean", "m2", "m3"


class Skewness(GeometryMetric):
    """Skewness of the first coordinate; of a batch without rows it makes the mean NaN."""

    def __init__(self, dim, **kwargs):
        super().__init__(dim, **kwargs)
        self.declare(ThirdMoments.empty(dim))

    def update_states(self, rows):
        x = rows.embeddings.double()
        centred = x - x.mean(0)
        powers = (centred.pow(k).sum(0) for k in (2, 3))
        self.extend(ThirdMoments(x.new_tensor(float(len(x))), x.mean(0), *powers))

    def compute(self):
        held = self.load(ThirdMoments)
        skewness = held.m3 / held.n / (held.m2 / held.n) ** 1.5
        return {"skewness": skewness[0]}


@pytest.mark.parametrize("ends", [(0, 20, 60), (20, 20, 60), (20, 60, 60), (1, 2, 60)], ids=str)
def test_third_powers_are_pooled_over_any_batches_also_empty_ones(ends):
    x = gaussian(60, DIM).exp()
    split, merged = Skewness(DIM), Skewness(DIM)
    for part in x.tensor_split(ends):
        split.update(part)
        merged.merge_state(updated(Skewness(DIM), part))
    centred = x[:, 0] - x[:, 0].mean()
    expected = centred.pow(3).mean() / centred.square().mean() ** 1.5
    for metric in (split, merged):
        torch.testing.assert_close(metric.compute()["skewness"], expected, rtol=1e-9, atol=0)


@pytest.mark.parametrize(
    "attributes",
    [
        {"powers": ("mean", "m2")},
        {"powers": (("mean",),)},
        {"powers": (("mean", "m2", "m3", "m4", "m5"),)},
        {"powers": (("mean", "squares"),)},
        {"largest": "n"},
        {"not_pooled": "mean"},
        {"of_coordinates": ("m6",)},
    ],
    ids=str,
)
def test_names_that_cannot_be_pooled_are_refused_when_the_class_is_defined(attributes):
    fields = dict.fromkeys(("n", "mean", "m2", "m3", "m4", "m5"), Tensor)
    ((name, given),) = attributes.items()
    with pytest.raises(TypeError) as caught:
        type("Wrong", (PooledState,), {"__annotations__": fields, **attributes})
    assert f"{name} of Wrong must be a tuple of" in str(caught.value)
    assert str(caught.value).endswith(f"names of its fields; got {given!r}.")


def test_third_powers_need_squares_per_coordinate():
    x = gaussian(4, DIM)
    squares = x.square().sum()
    state = ThirdMoments(torch.tensor(4.0), x.mean(0), squares, x.pow(3).sum(0))
    with pytest.raises(ValueError, match=r"need squares of the shape of the mean.* got shape \(\)"):
        state.merge(state)
