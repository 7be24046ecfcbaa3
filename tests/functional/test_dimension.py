"""TwoNN, against scikit-dimension and loops."""

import math

import numpy as np
import pytest
import skdim.id
import torch

from embedgeo.functional import (
    RowLabels,
    estimated_dimension,
    labelled_dimensions,
    merge_duplicates,
    twonn_dimension,
)
from tests import references
from tests.data import gaussian, generator


def embedded():
    """Uniform rows of a linear subspace of three dimensions, rotated into forty."""
    axes = torch.linalg.qr(gaussian(40, 3, seed=1))[0]
    return torch.rand(300, 3, generator=generator(), dtype=torch.float64) @ axes.T


@pytest.mark.parametrize(
    ("n", "discard_fraction", "used"),
    [(40, 0.8, 8), (600, 0.8, 120), (600, 0.1, 540), (40, 1e-12, 39)],
)
def test_as_many_ratios_are_fitted_as_their_share_says(n, discard_fraction, used):
    x = gaussian(n, 6)
    got = twonn_dimension(x, discard_fraction=discard_fraction).dimension
    expected = references.twonn(np.sort(references.all_distances(x)), used)
    assert got == pytest.approx(expected, rel=1e-6)


def test_a_fit_of_fewer_than_two_ratios_is_undefined():
    assert math.isnan(twonn_dimension(gaussian(9, 3), discard_fraction=0.8).dimension)
    assert twonn_dimension(gaussian(11, 3), discard_fraction=0.8).dimension > 0


@pytest.mark.parametrize(
    "estimator", [skdim.id.lPCA(), skdim.id.CorrInt(), skdim.id.TwoNN(), skdim.id.MLE()]
)
def test_other_estimators_are_asked_as_they_are(estimator):
    x = embedded()
    estimate = estimated_dimension(torch.cat((x, x[:100])), estimator)
    expected = type(estimator)(**estimator.get_params()).fit(merge_duplicates(x).numpy()).dimension_
    assert (estimate.dimension, estimate.num_points) == (pytest.approx(expected), 300)


@pytest.mark.parametrize("rounding", [0, 1e-7])
def test_a_point_is_left_out_with_the_group_that_has_all_its_copies(rounding):
    x = gaussian(60, 3)
    rows = torch.cat((x, x[:20] * (1 + rounding), x[:10]))
    groups = torch.arange(90) % 3
    single = groups[:60].clone()
    single[:10] = 3  # their third copies are in another group than the first two
    orders = [torch.arange(90), torch.arange(90).flip(0), torch.randperm(90, generator=generator())]
    left_out = [
        labelled_dimensions(rows[i], RowLabels(), groups=groups[i], num_groups=3).every.left_out
        for i in orders
    ]
    expected = labelled_dimensions(x, RowLabels(), groups=single, num_groups=4).every.left_out[:3]
    for each in left_out:
        torch.testing.assert_close(each, expected, rtol=1e-5, atol=0)


GRID = torch.cartesian_prod(torch.arange(10.0), torch.arange(10.0))


@pytest.mark.parametrize(
    "x",
    [
        torch.zeros(0, 4),
        torch.ones(1, 4),
        torch.ones(50, 4),
        torch.eye(40),
        gaussian(2, 3),
        1e200 * gaussian(40, 3),
        GRID,
        torch.cat((GRID, torch.tensor([[50.3, 60.0], [51.0, 61.5]]))),
    ],
    ids=["none", "one", "equal", "simplex", "two", "overflow", "grid", "grid and two others"],
)
def test_rows_without_ratios_or_of_at_most_two_that_are_not_1_have_no_dimension(x):
    assert math.isnan(twonn_dimension(x).dimension)
