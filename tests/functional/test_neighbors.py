"""Neighbours, copies and labels, against brute force in float64."""

import math

import pytest
import torch
from scipy.sparse.csgraph import connected_components
from scipy.spatial.distance import cdist

from embedgeo.functional import merge_duplicates, two_nearest_distances
from embedgeo.functional.neighbors import Neighbors
from tests.clouds import CLOUDS
from tests.data import gaussian, generator, wide_dtypes


def rogue():
    """Two coordinates, and some rows, are a hundred times the others."""
    x = gaussian(700, 64)
    x[:, :2] *= 100
    x[5:9] *= 100
    return x


def near_copies():
    """Each row twice, at 1e-7 of its norm from itself."""
    x = gaussian(350, 32).repeat(2, 1)
    return x + 1e-7 * gaussian(700, 32, seed=1)


def centres(n, num_rows):
    """Rounded to bfloat16, the rows around each centre are equally far from each other."""
    x = 100 * gaussian(n, 64).repeat_interleave(num_rows, 0)
    return x + 1e-2 * gaussian(n * num_rows, 64, seed=1)


def crowded():
    """Some rows much nearer to each other than rounded products tell: occurrences of a frequent
    token, say.
    """
    x = gaussian(1000, 64)
    x[:30] = x[0] + 1e-4 * x[:30]
    return x


def rounded_down(dim):
    """A difference with one square of 1, and others that float32 loses beside it one by one."""
    x = gaussian(600, dim)
    x[:2] = 0
    x[0], x[0, 0], x[1, 0] = math.sqrt(0.99 * 2**-24), 1, -0.99 * 2**-24
    return x


def vanishing():
    """The square of the smallest distance is below the numbers of float32."""
    x = gaussian(600, 40)
    x[:2], x[1, 3] = 0, 1e-25
    return x


def thrice(x):
    """More rows than all distances are computed of, at places where the others are or are not."""
    step = x.abs().median()
    return torch.cat((x, x + 0.01 * step, 1.001 * x + step))


ROWS = {
    **CLOUDS,
    **{f"{name}, thrice": thrice(x) for name, x in CLOUDS.items() if len(x) < 400},
    "rogue": rogue(),
    "near copies": near_copies(),
    "centres": centres(8, 100),
    "many centres": centres(40, 20),
    "crowded": crowded(),
    "rounded down": rounded_down(255),
    "vanishing": vanishing(),
}
LABELS = {
    "many": lambda n: torch.randint(0, n + 1, (n,), generator=generator(1)) * 10**12 - 5,
    "some": lambda n: torch.randint(0, 40, (n,), generator=generator(2)),
    "one that most rows have": lambda n: (
        torch.randint(0, 5, (n,), generator=generator(3)).clamp(min=3) - 3
    ),
    "one": lambda n: torch.zeros(n, dtype=torch.int64),
    # of 700 rows one group of products has all those that another row may have as neighbours
    "one and a few of one group": lambda n: (torch.arange(n) % 45 == 0).long(),
    "all but one and two": lambda n: (
        (torch.arange(n) < 1).long() + 2 * (torch.arange(n) > n - 3).long()
    ),
}


def all_distances(x, apart=None, together=None):
    """From differences in float64; infinite where rows may not be neighbours."""
    x = x.double()
    distances = torch.cdist(x, x, compute_mode="donot_use_mm_for_euclid_dist")
    distances.fill_diagonal_(math.inf)
    if apart is not None:
        distances[apart[:, None] == apart] = math.inf
    if together is not None:
        distances[together[:, None] != together] = math.inf
    return distances


def smallest(distances):
    """The two smallest of each row, NaN where there are fewer."""
    found = torch.full((len(distances), 2), math.nan, dtype=torch.float64)
    nearest = distances.topk(min(2, len(distances)), largest=False).values
    found[:, : nearest.shape[1]] = nearest.masked_fill(nearest.isinf(), math.nan)
    return found


def assert_nearest(x, apart=None, together=None):
    """The two nearest distances are those of brute force."""
    expected = smallest(all_distances(x, apart, together))
    got = two_nearest_distances(x)
    if apart is not None or together is not None:
        neighbors = Neighbors(x)
        got = neighbors.nearest(neighbors.every, apart, together).distances
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=0, equal_nan=True)


@pytest.mark.parametrize("x", ROWS.values(), ids=ROWS.keys())
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_distances_equal_brute_force(x, dtype):
    assert_nearest(x.to(dtype))


@pytest.mark.parametrize("n", [0, 1, 2, 3, 9, 511, 512, 513, 527, 528, 529])
@pytest.mark.parametrize("scale", [1.0, 1e25, 1e-22, 1e-40])
def test_any_number_of_rows(n, scale):
    for dtype in (torch.float64, torch.float32):
        assert_nearest((scale * gaussian(n, 4)).to(dtype))


@pytest.mark.slow
def test_more_rows_than_a_block_has_room_for():  # above 8,192 products serve one row
    x = torch.cat((gaussian(8101, 3), gaussian(100, 3, seed=1) / 100))
    assert_nearest(x.float())


@pytest.mark.parametrize("labels", LABELS.values(), ids=LABELS.keys())
@pytest.mark.parametrize("n", [1, 20, 700])
@pytest.mark.parametrize("alike", [False, True], ids=["independent", "alike"])
def test_neighbours_by_label(n, labels, alike):
    x, label = 100 + gaussian(n, 12), labels(n)
    if alike:  # rows of a label are nearer to each other than to any other
        x = 0.1 * x + 50 * gaussian(n, 12, seed=1)[label.unique(return_inverse=True)[1]]
    others = torch.arange(n) % 7
    for apart, together in ((label, None), (None, label), (others, label), (label, others)):
        assert_nearest(x.float(), apart, together)


@pytest.mark.parametrize("n", [300, 800])
def test_places_are_those_of_the_neighbours_among_some_rows(n):
    x, labels = gaussian(n, 24).float(), torch.arange(n) % 20
    searched = Neighbors(x)
    for rows in (searched.every, torch.randperm(n, generator=generator())[: 2 * n // 3]):
        of_rows = x[rows]
        for wanted in (None, labels[rows]):
            nearest = searched.nearest(rows, together=None if wanted is None else labels)
            expected = all_distances(of_rows, together=wanted)
            places = expected.gather(1, nearest.places)
            torch.testing.assert_close(nearest.distances, places, rtol=1e-6, atol=0)
            torch.testing.assert_close(places, smallest(expected), rtol=1e-6, atol=0)


def scale(x):
    """The median distance from the mean."""
    return torch.linalg.vector_norm(x - x.mean(0), dim=1).median()


def with_near_copies(n, dim, copies, *, noise=3e-7):
    """Rows on a curved surface of some 8 dimensions, and copies of the first ones with relative
    noise.
    """
    x = torch.tanh(gaussian(n, 8) @ gaussian(8, dim, seed=1)) + 2
    few = x[: max(1, copies // 3)]
    return x, torch.cat(
        (
            x,
            few[torch.arange(copies) % len(few)] * (1 + noise * gaussian(copies, dim, seed=2)),
        )
    )


def sets_of_near_rows(x, tolerance):
    """By all pairs: the number of sets, and the set of each row."""
    distances = cdist(x.double().numpy(), x.double().numpy())
    return connected_components(distances <= tolerance * float(scale(x.double())), directed=False)


@pytest.mark.parametrize("tolerance", [1e-5, 0.02, 0.1, 0.5])
@pytest.mark.parametrize(("n", "dim"), [(40, 1), (300, 2), (300, 3), (200, 30)])
@wide_dtypes
def test_one_row_is_left_of_each_set_of_rows_that_chains_of_near_pairs_join(
    n, dim, tolerance, dtype
):
    _, x = with_near_copies(n, dim, n // 4, noise=tolerance / 3 / dim**0.5)
    x = x.to(dtype).unique(dim=0)
    num_sets, members = sets_of_near_rows(x, tolerance)
    left = merge_duplicates(x, tolerance)
    assert len(left) == num_sets < len(x)
    assert sorted(members[(cdist(left, x) == 0).argmax(1)]) == list(range(num_sets))


def test_rows_a_little_nearer_than_the_tolerance_are_one_and_others_are_not():
    x = torch.cat((gaussian(100, 3), torch.zeros(2, 3, dtype=torch.float64)))
    x[-1, 0] = 1e-3
    limit = 1e-3 / float(scale(x))
    assert len(merge_duplicates(x, limit * (1 + 1e-9))) == 101
    assert len(merge_duplicates(x, limit * (1 - 1e-9))) == 102


@pytest.mark.parametrize("n", [60, 200])
def test_chains_between_copies_of_rows_are_one_row(n):
    """Among few rows and among many, whose copies are found in another way."""
    x = gaussian(n, 5)
    step = 0.6e-5 * scale(x) * torch.eye(5, dtype=torch.float64)[0]
    chain = x[0] + step * torch.arange(9)[:, None]
    rows = torch.cat((x[1:], chain.repeat(n // 5, 1), x[:50].repeat(n // 50, 1)))
    rows = rows[torch.randperm(len(rows), generator=generator())]
    kept, place = Neighbors(rows).distinct()
    assert len(kept) == n
    assert place[kept].equal(torch.arange(n))
    assert kept.equal((place[:, None] == torch.arange(n)).int().argmax(0))  # the first copy of each
    assert sets_of_near_rows(rows, 1e-5)[0] == n
    assert float((rows - rows[kept][place]).abs().max()) < 1e-4 * float(scale(x))


def test_a_tolerance_of_zero_merges_exact_copies_only():
    clean, x = with_near_copies(100, 10, 50)
    assert len(merge_duplicates(torch.cat((x, clean)), 0)) == 150
    assert merge_duplicates(clean).equal(clean)
