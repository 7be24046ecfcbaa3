"""A metric's own state of moments: what is pooled, and batches without rows."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from embedgeo.functional.moments import PooledState
from embedgeo.metrics.base import GeometryMetric
from tests.data import gaussian, updated

DIM = 5


@dataclass(eq=False)
class Squares(PooledState):
    n: Tensor
    mean: Tensor
    m2: Tensor

    powers = (("mean", "m2"),)
    of_coordinates = "mean", "m2"


class Spread(GeometryMetric):
    """Variance of the first coordinate; of a batch without rows it makes the mean NaN."""

    def __init__(self, dim, **kwargs):
        super().__init__(dim, **kwargs)
        self.declare(Squares.empty(dim))

    def update_states(self, rows):
        x = rows.embeddings.double()
        mean = x.mean(0)
        self.extend(Squares(x.new_tensor(float(len(x))), mean, (x - mean).square().sum(0)))

    def compute(self):
        held = self.load(Squares)
        return {"spread": (held.m2 / held.n)[0]}


@pytest.mark.parametrize("ends", [(0, 20, 60), (20, 20, 60), (20, 60, 60), (1, 2, 60)], ids=str)
def test_squares_are_pooled_over_any_batches_also_empty_ones(ends):
    x = gaussian(60, DIM).exp()
    split, merged = Spread(DIM), Spread(DIM)
    for part in x.tensor_split(ends):
        split.update(part)
        merged.merge_state(updated(Spread(DIM), part))
    for metric in (split, merged):
        expected = x[:, 0].double().var(correction=0)
        torch.testing.assert_close(metric.compute()["spread"], expected, rtol=1e-9, atol=0)


@pytest.mark.parametrize(
    "attributes",
    [
        {"powers": ("mean", "m2")},
        {"powers": (("mean",),)},
        {"powers": (("mean", "m2", "m3"),)},
        {"powers": (("mean", "squares"),)},
        {"largest": "n"},
        {"not_pooled": "mean"},
        {"of_coordinates": ("m6",)},
    ],
    ids=str,
)
def test_names_that_cannot_be_pooled_are_refused_when_the_class_is_defined(attributes):
    fields = dict.fromkeys(("n", "mean", "m2", "m3"), Tensor)
    ((name, given),) = attributes.items()
    with pytest.raises(TypeError) as caught:
        type("Wrong", (PooledState,), {"__annotations__": fields, **attributes})
    assert f"{name} of Wrong must be a tuple of" in str(caught.value)
    assert str(caught.value).endswith(f"names of its fields; got {given!r}.")
