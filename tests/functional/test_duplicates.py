import pytest
import torch
from scipy.sparse.csgraph import connected_components
from scipy.spatial.distance import cdist

from embedgeo.functional import merge_duplicates, twonn_dimension
from tests.data import gaussian, generator


def test_zeros_of_either_sign_are_one_row():
    assert len(merge_duplicates(torch.tensor([[0.0, 1.0], [-0.0, 1.0]]))) == 1


def test_duplicates_are_found_in_any_layout():
    x = gaussian(67, 64)
    x[-1] = x[0]
    for laid_out in (x, x.T.contiguous().T, torch.cat((x, x), dim=1)[:, :64]):
        assert len(merge_duplicates(laid_out)) == 66


def test_duplicates_whose_sums_are_not_finite_are_merged():
    row = torch.zeros(64, dtype=torch.float64)
    row[::8], row[1::8] = torch.finfo(torch.float64).max, torch.finfo(torch.float64).min
    assert len(merge_duplicates(torch.stack((row, row, -row, torch.ones_like(row))))) == 3


def test_different_rows_with_equal_sums_are_kept():
    x = torch.tensor([[1.0, 2.0], [2.0, 1.0], [1.0, 2.0], [0.0, 3.0]])
    assert sorted(merge_duplicates(x).tolist()) == [[0.0, 3.0], [1.0, 2.0], [2.0, 1.0]]


def scale(x):
    """The median distance from the mean."""
    return torch.linalg.vector_norm(x - x.mean(0), dim=1).median()


def with_near_copies(n, dim, copies, *, noise=3e-7, seed=0):
    """Rows on a curved surface of some 8 dimensions, and copies of the first ones with relative noise."""
    x = torch.tanh(gaussian(n, 8, seed=seed) @ gaussian(8, dim, seed=seed + 1)) + 2
    few = x[: max(1, copies // 3)]
    return x, torch.cat((x, few[torch.arange(copies) % len(few)] * (1 + noise * gaussian(copies, dim, seed=seed + 2))))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("copies", [30, 6000])
def test_copies_but_for_rounding_do_not_change_the_dimension(copies, dtype):
    """2 % of the rows are such copies, as of a prompt that many texts share; or 80 %."""
    clean, x = (rows.to(dtype) for rows in with_near_copies(1500, 64, copies))
    estimate = twonn_dimension(x)
    assert estimate.num_points == 1500
    assert estimate.dimension == pytest.approx(twonn_dimension(clean).dimension, rel=1e-5)
    assert twonn_dimension(x[:1530], duplicate_tolerance=0).dimension < 0.99 * estimate.dimension


def sets_of_near_rows(x, tolerance):
    """By all pairs: the number of sets, and the set of each row."""
    distances = cdist(x.double().numpy(), x.double().numpy())
    return connected_components(distances <= tolerance * float(scale(x.double())), directed=False)


@pytest.mark.parametrize("tolerance", [1e-5, 0.02, 0.1, 0.5])
@pytest.mark.parametrize(("n", "dim"), [(40, 1), (300, 2), (300, 3), (200, 30)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_one_row_is_left_of_each_set_of_rows_that_chains_of_near_pairs_join(n, dim, tolerance, dtype):
    _, x = with_near_copies(n, dim, n // 4, noise=tolerance / 3 / dim**0.5)
    x = x.to(dtype).unique(dim=0)
    num_sets, members = sets_of_near_rows(x, tolerance)
    left = merge_duplicates(x, tolerance)
    assert len(left) == num_sets < len(x)
    assert sorted(members[(cdist(left, x) == 0).argmax(1)]) == list(range(num_sets))


@pytest.mark.parametrize("length", [2, 3, 17, 100])
def test_a_chain_of_near_rows_is_one_row(length):
    x = gaussian(200, 5)
    chain = x[0] + 0.9e-5 * scale(x) * torch.arange(length)[:, None] * torch.eye(5, dtype=torch.float64)[0]
    assert len(merge_duplicates(torch.cat((chain, x[1:])))) == 200


def test_rows_a_little_nearer_than_the_tolerance_are_one_and_others_are_not():
    x = torch.cat((gaussian(100, 3), torch.zeros(2, 3, dtype=torch.float64)))
    x[-1, 0] = 1e-3
    limit = 1e-3 / float(scale(x))
    assert len(merge_duplicates(x, limit * (1 + 1e-9))) == 101
    assert len(merge_duplicates(x, limit * (1 - 1e-9))) == 102


def test_neither_order_nor_origin_nor_unit_matters():
    _, x = with_near_copies(300, 10, 100)
    left = merge_duplicates(x)
    assert len(left) == 300
    shuffled = merge_duplicates(x[torch.randperm(400, generator=generator())])
    assert shuffled.unique(dim=0).equal(left.unique(dim=0))
    for other in (x + 50 * gaussian(1, 10), x * 1e-12, x * 1e12):
        assert len(merge_duplicates(other)) == 300


def test_a_row_of_huge_norm_hides_no_distance():
    x = torch.cat((gaussian(400, 3), torch.full((1, 3), 1e4, dtype=torch.float64)))
    assert len(merge_duplicates(x)) == 401


def test_a_tolerance_of_zero_merges_exact_copies_only():
    clean, x = with_near_copies(100, 10, 50)
    assert len(merge_duplicates(torch.cat((x, clean)), 0)) == 150
    assert merge_duplicates(clean) is clean
