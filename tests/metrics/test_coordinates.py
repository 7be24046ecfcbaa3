"""Outlier coordinates and massive activations, against loops over rows and scipy's kurtosis."""

import numpy as np
import pytest
import torch

from embedgeo.metrics import OutlierCoordinates
from tests import references
from tests.data import assert_values, gaussian, updated

DIM = 6


def batch(dim=DIM, *, mean=0.0):
    """Skewed rows with a large coordinate, and massive entries at some first positions and at a few
    others.
    """
    x = mean + gaussian(12 * 9, dim).exp().view(12, 9, dim)
    x[..., 1] *= -30
    x[:6, 0, 2] = 900 + 1e5 * x[:6, 0, 2].abs()
    x[1, 3, 4], x[2, 5, 0], x[3, 0, 3] = 4e4, -2e5, 250.0
    return x


@pytest.mark.parametrize("dim", [1, 2, 6])
@pytest.mark.parametrize(
    ("dtype", "mean"),
    [
        (torch.float64, 1000.0),
        (torch.float32, 0.0),
        (torch.bfloat16, 1000.0),
        (torch.float16, 0.0),
    ],
    ids=str,
)
def test_values_equal_the_naive_ones(dtype, dim, mean):
    x = batch(dim=max(dim, 5), mean=mean)[..., :dim].to(dtype)
    if dtype == torch.float16:
        x = x.clamp(-6e4, 6e4)
    expected = references.outliers(x.double().view(-1, dim), (torch.arange(9) == 0).repeat(12))
    values = updated(OutlierCoordinates(dim), x, None, [slice(0, 5), slice(5, 12)]).compute()
    assert values.keys() == expected.keys()
    assert_values(values, expected, rtol=1e-9)


def test_the_first_row_is_the_first_that_counts():
    x = batch()
    x[..., 5] = 0.1  # it does not vary, and has no kurtosis
    mask = torch.ones(12, 9, dtype=torch.bool)
    mask[:4, :2], mask[5] = False, False
    x[6, 0, 0] = torch.nan
    counted = mask & x.isfinite().all(-1)
    is_first = counted & (counted.cumsum(1) == 1)
    metric = OutlierCoordinates(DIM)
    metric.update(x, mask=mask)
    assert_values(metric.compute(), references.outliers(x[counted], is_first[counted]), rtol=1e-9)


@pytest.mark.parametrize(("mean", "is_merged"), [(0.0, False), (1000.0, False), (1000.0, True)])
def test_shares_of_coordinates_equal_the_naive_ones(mean, is_merged):
    x = batch(mean=mean).view(-1, DIM)
    x[7] = 0
    metric = updated(OutlierCoordinates(DIM), x[:40])
    other = updated(OutlierCoordinates(DIM) if is_merged else metric, x[40:])
    if is_merged:
        metric.merge_state(other)
    table = metric.coordinates()
    for name, column in references.coordinate_shares(x).items():
        assert table[name].dtype == torch.float64
        np.testing.assert_allclose(table[name], column, rtol=1e-9)


def test_the_largest_coordinates_are_those_of_each_share():
    x = batch(dim=40).view(-1, 40)
    metric = updated(OutlierCoordinates(40), x)
    largest, table = metric.largest_coordinates(3), metric.coordinates()
    wanted = {
        int(i) for share in ("M", "V", "cosine") for i in table[f"share_of_{share}"].argsort()[-3:]
    }
    assert largest["coordinate"].tolist() == sorted(wanted)
    assert largest["kurtosis"].equal(table["kurtosis"][largest["coordinate"]])
