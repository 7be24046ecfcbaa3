import json
import math

import numpy as np
import pytest
import torch
from scipy.optimize import brentq

from embedgeo.functional import gride_dimensions, twonn_dimension
from tests import dadapy_values, references
from tests.data import gaussian, generator

DADAPY = json.loads(dadapy_values.FILE.read_text())["values"]
CLOUDS = dadapy_values.clouds()
SCALES = (1, 2, 4, 8, 16, 32, 64)


def naive_gride(x, scale):
    """Root of the derivative of the log likelihood, and -1 over the root of its second one, by finite differences."""
    distances = references.nearest(x, 2 * scale)
    log_mu = np.log(distances[:, -1] / distances[:, scale - 1])

    def slope(d, log_mu=log_mu):
        mu_d = np.exp(d * log_mu)
        of_each = (scale - 1) * log_mu * mu_d / (mu_d - 1) - (2 * scale - 1) * log_mu
        return (len(log_mu) - 1) / d + of_each.sum()

    d = brentq(slope, 0.01, 500, xtol=1e-12, rtol=1e-12)
    curvature = (slope(d * (1 + 1e-5)) - slope(d * (1 - 1e-5))) / (2e-5 * d) - 1 / d**2
    return d, 1 / math.sqrt(-curvature)


@pytest.mark.parametrize("name", DADAPY)
def test_values_and_errors_are_those_of_dadapy(name):
    x = torch.from_numpy(CLOUDS[name])
    got = gride_dimensions(x, SCALES, duplicate_tolerance=0)
    expected = DADAPY[name]
    found = len(expected["gride"])
    assert found >= 5
    torch.testing.assert_close(got.dimensions[:found], torch.tensor(expected["gride"]).double(), rtol=1e-6, atol=0)
    torch.testing.assert_close(got.errors[:found], torch.tensor(expected["errors"]).double(), rtol=1e-6, atol=0)
    assert got.dimensions[found:].isnan().all()


@pytest.mark.parametrize("name", DADAPY)
def test_twonn_by_either_method_is_that_of_dadapy(name):
    x = torch.from_numpy(CLOUDS[name])
    for method, algorithm, rtol in (("fit", "base", 1e-5), ("mle", "ml", 1e-6)):  # curve_fit is no exact one
        got = twonn_dimension(x, method=method, duplicate_tolerance=0).dimension
        assert got == pytest.approx(DADAPY[name]["twonn"][algorithm], rel=rtol)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_values_are_those_of_a_naive_search_for_the_maximum(dtype):
    x = gaussian(300, 8).to(dtype)
    got = gride_dimensions(x, (1, 3, 10))
    for i, scale in enumerate((1, 3, 10)):
        dimension, error = naive_gride(x.double(), scale)
        assert float(got.dimensions[i]) == pytest.approx(dimension, rel=1e-6)
        assert float(got.errors[i]) == pytest.approx(error, rel=1e-5)


@pytest.mark.parametrize("dim", [5, 12])
def test_the_dimension_of_a_manifold_is_found_at_each_scale(dim):
    x = torch.from_numpy(dadapy_values.spheres(4096, dim, seed=0)).float()
    got = gride_dimensions(x, (1, 2, 4, 8, 16))
    assert bool(((got.dimensions - dim).abs() <= 3 * got.errors).all()), got
    assert bool((got.errors < 0.05 * dim / torch.tensor([1, 2, 4, 8, 16]).sqrt()).all())


def test_the_scale_of_noise_is_told_from_that_of_the_manifold():
    """A circle, thickened by noise in ten directions: TwoNN sees the noise, and more of it the more rows there are."""
    angle = 2 * math.pi * torch.rand(2000, 1, generator=generator(), dtype=torch.float64)
    circle = torch.cat((angle.cos(), angle.sin(), torch.zeros(2000, 8)), dim=1)
    x = circle + 0.003 * gaussian(2000, 10, seed=1)
    dimensions = gride_dimensions(x, (1, 4, 16, 64)).dimensions
    assert bool((dimensions.diff() < 0).all())
    assert dimensions[0] > 3
    assert dimensions[-1] == pytest.approx(1, abs=0.2)
    assert twonn_dimension(x[:500]).dimension < twonn_dimension(x).dimension


def test_scales_for_which_there_are_too_few_rows_are_undefined():
    got = gride_dimensions(gaussian(9, 3), (1, 2, 4, 5))
    assert got.dimensions.isnan().tolist() == got.errors.isnan().tolist() == [False, False, False, True]


@pytest.mark.parametrize(
    "x",
    [torch.zeros(0, 4), torch.ones(1, 4), torch.ones(50, 4), torch.eye(40), gaussian(2, 3), 1e200 * gaussian(40, 3)],
    ids=["none", "one", "equal", "simplex", "two", "overflow"],
)
def test_rows_without_ratios_have_no_dimension(x):
    got = gride_dimensions(x, (1, 4))
    assert got.dimensions.isnan().all()
    assert got.errors.isnan().all()


def test_rows_on_a_grid_have_a_finite_dimension_where_some_ratios_are_1():
    grid = torch.cartesian_prod(torch.arange(20.0), torch.arange(20.0))
    assert gride_dimensions(grid, (2, 8)).dimensions.isfinite().all()


def test_copies_are_merged():
    x = gaussian(400, 4)
    copies = torch.cat((x, x[:200], x[:100] * (1 + 1e-9)))
    torch.testing.assert_close(gride_dimensions(copies).dimensions, gride_dimensions(x).dimensions, rtol=1e-6, atol=0)


def test_points_of_a_group_are_left_out_and_their_neighbours_are_not():
    x, groups = gaussian(200, 3), torch.arange(200) % 4
    got = gride_dimensions(x, (1, 4), groups=groups, num_groups=4)
    assert got.left_out.shape == (4, 2)
    alone = gride_dimensions(x, (1, 4), groups=(groups == 2).long(), num_groups=2)
    torch.testing.assert_close(got.left_out[2], alone.left_out[1], rtol=1e-12, atol=0)
    twonn = twonn_dimension(x, method="mle", groups=groups, num_groups=4)
    torch.testing.assert_close(got.left_out[:, 0], twonn.left_out, rtol=1e-9, atol=0)
