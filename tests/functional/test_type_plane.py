import numpy as np
import pytest
import torch

from embedgeo.functional import TokenTable, row_plane, token_table, type_plane
from tests.data import gaussian, token_rows


def by_svd(n, means):
    """Type means in the plane by the singular vectors of all rows' means, each row counted."""
    center = np.average(means, axis=0, weights=n)
    axes = np.linalg.svd(np.repeat(means - center, n.astype(int), axis=0))[2][:2]
    axes *= np.sign(axes[np.arange(2), np.abs(axes).argmax(1)])[:, None]
    return (means - center) @ axes.T, -center @ axes.T


@pytest.mark.parametrize("mean", [0.0, 1000.0])
def test_plane_is_that_of_the_singular_vectors_of_the_counted_means(mean):
    x, ids = token_rows(600, 8, mean=mean)
    types = token_table(x, ids)
    assert len(types.n.unique()) > 3
    points, origin = by_svd(types.n.numpy(), types.mean.numpy())
    got_points, got_origin = type_plane(types)
    np.testing.assert_allclose(got_points, points, rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(got_origin, origin, rtol=1e-6, atol=1e-9)
    turned = type_plane(types._replace(mean=types.mean.flip(1)))  # signs go with the coordinates, not with their order
    np.testing.assert_allclose(turned[0], points, rtol=1e-6, atol=1e-9)


def test_plane_of_next_to_nothing():
    one = TokenTable(torch.tensor([1]), torch.tensor([7.0]), torch.tensor([[3.0, 4.0]]), *torch.zeros(4, 1))
    points, origin = type_plane(one)
    assert points.tolist() == [[0.0, 0.0]]
    assert origin.norm().item() == pytest.approx(5)
    line = TokenTable(torch.tensor([1, 2]), torch.ones(2), torch.tensor([[1.0], [4.0]]), *torch.zeros(4, 2))
    assert type_plane(line)[0].tolist() == [[-1.5, 0.0], [1.5, 0.0]]
    points, origin = type_plane(token_table(gaussian(0, 3), torch.zeros(0, dtype=torch.int64)))
    assert points.shape == (0, 2)
    assert origin.isnan().all()


@pytest.mark.parametrize("mean", [0.0, 1000.0])
def test_rows_are_put_into_the_plane_of_their_singular_vectors_around_the_zero_vector(mean):
    x = token_rows(90, 8, mean=mean)[0]
    axes = np.linalg.svd((x - x.mean(0)).numpy())[2][:2]
    axes *= np.sign(axes[np.arange(2), np.abs(axes).argmax(1)])[:, None]
    got = row_plane(x)
    np.testing.assert_allclose(got, x.numpy() @ axes.T, rtol=1e-9, atol=1e-9)
    assert got.var(0).diff() < 0
    assert abs(torch.corrcoef(got.T)[0, 1]) < 1e-9
    zero = row_plane(torch.cat((x, torch.zeros(1, 8))).to(torch.float32))[-1]
    assert zero.tolist() == [0, 0]


def test_rows_of_next_to_nothing_in_a_plane():
    assert row_plane(gaussian(0, 3)).shape == (0, 2)
    assert row_plane(torch.tensor([[1.0], [4.0]])).tolist() == [[1.0, 0.0], [4.0, 0.0]]
    assert bool(row_plane(torch.full((5, 3), 2.0, dtype=torch.float16)).isfinite().all())
