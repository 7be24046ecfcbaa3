import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from embedgeo.functional import nearest_distances, neighbors, two_nearest_distances
from tests import references
from tests.data import gaussian
from tests.functional.test_neighbors import CLOUDS, LargestTensor, Settings

CLOUD = pytest.mark.parametrize("x", CLOUDS.values(), ids=CLOUDS.keys())


def rogue(n=300, dim=64):
    """Two coordinates, and some rows, are a hundred times the others."""
    x = gaussian(n, dim)
    x[:, :2] *= 100
    x[5:9] *= 100
    return x


def near_copies(n=200, dim=32):
    """Each row twice, at 1e-7 of its norm from itself."""
    x = gaussian(n // 2, dim).repeat(2, 1)
    return x + 1e-7 * gaussian(n, dim, seed=1)


def assert_exact(x, k=128):
    got = nearest_distances(x, k)
    assert got.dtype == torch.float64
    expected = torch.from_numpy(references.nearest(x.double(), k))
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=0, equal_nan=True)


@CLOUD
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_distances_equal_brute_force(x, dtype):
    assert_exact(x.to(dtype))


@pytest.mark.parametrize("x", [rogue(), near_copies(), 1e4 + near_copies()], ids=["rogue", "copies", "copies far off"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16], ids=str)
def test_distances_equal_brute_force_for_what_models_have(x, dtype):
    assert_exact(x.to(dtype), 17)


@pytest.mark.parametrize("n", [0, 1, 2, 3, 9, 17])
@pytest.mark.parametrize("k", [1, 2, 16, 128])
def test_neighbours_that_are_not_there_are_undefined(n, k):
    x = gaussian(n, 3)
    assert nearest_distances(x, k).isfinite().sum() == n * min(k, max(0, n - 1))
    assert_exact(x, k)


def test_two_of_them_are_those_of_the_other_search():
    x = CLOUDS["manifold"].float()
    torch.testing.assert_close(nearest_distances(x, 2), two_nearest_distances(x), rtol=1e-6, atol=0)


def test_rows_without_coordinates_are_at_distance_0():
    assert nearest_distances(torch.zeros(30, 0), 4).eq(0).all()


@pytest.mark.parametrize("cloud", ["gaussian", "clusters", "outlier"])
def test_no_setting_of_the_process_matters_nor_is_changed(cloud):
    x = CLOUDS[cloud].float()
    expected = nearest_distances(x, 5)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16), Settings() as settings:
            assert nearest_distances(x, 5).equal(expected)
    finally:
        torch.set_float32_matmul_precision(before)
    assert len(settings.seen) == 1


@pytest.mark.parametrize("cloud", ["gaussian", "clusters", "all at the same distance"])
def test_memory_is_bounded_by_the_rows_and_a_block(cloud, monkeypatch):
    x = CLOUDS[cloud].float()
    x = torch.cat([x + 1e6 * i for i in range(-(-700 // len(x)))])
    monkeypatch.setattr(neighbors, "BLOCK_BYTES", 8 * len(x) * torch.float64.itemsize)
    with LargestTensor() as largest:
        nearest_distances(x, 16)
    assert largest.elements <= max((len(x) + 16) * (x.shape[1] + 6), 2 * 16 * len(x))


def test_rows_of_one_block_or_of_many_are_the_same(monkeypatch):
    x = CLOUDS["clusters"]
    expected = nearest_distances(x, 9)
    monkeypatch.setattr(neighbors, "BLOCK_BYTES", 7 * len(x) * torch.float64.itemsize)
    torch.testing.assert_close(nearest_distances(x, 9), expected, rtol=1e-9, atol=0)


def test_differences_are_taken_of_near_rows_alone(monkeypatch):
    """A product of all pairs, and of 300 rows the distances of two to the nearest ones."""
    x = CLOUDS["manifold"].clone()
    x[1] = x[0] + 1e-6 * gaussian(1, x.shape[1], seed=3)
    pairs, measured = [], neighbors.pair_distances
    monkeypatch.setattr(neighbors, "pair_distances", lambda *args: pairs.append(len(args[1])) or measured(*args))
    with FlopCounterMode(display=False) as counter:
        nearest_distances(x, 20)
    assert sum(pairs) == 2 * 20
    assert counter.get_total_flops() < 2.2 * len(x) ** 2 * x.shape[1]


def test_rows_are_left_as_they_were():
    x = 1000 + gaussian(100, 8).float()
    before = x.clone()
    nearest_distances(x, 3)
    assert x.equal(before)
