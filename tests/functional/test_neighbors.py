import math
import os
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest
import torch
from scipy.sparse.csgraph import connected_components
from scipy.spatial.distance import cdist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from embedgeo.functional import (
    merge_duplicates,
    nearest_distances,
    top_eigenvalue,
    two_nearest_distances,
    twonn_dimension,
)
from embedgeo.functional.lockstep import computed
from embedgeo.functional.neighbors import distinct_by_projections, distinct_rows, projections
from embedgeo.functional.precision import fastest_products, search_dtype
from tests import references
from tests.clouds import CLOUDS, manifold
from tests.data import gaussian, generator

CLOUD = pytest.mark.parametrize("x", CLOUDS.values(), ids=CLOUDS.keys())
DTYPE = pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
FIRST_PRODUCTS = pytest.mark.usefixtures("first_products")


class SlowProducts(TorchDispatchMode):
    """Takes a while for a product in one dtype."""

    def __init__(self, dtype):
        super().__init__()
        self.dtype = dtype

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket is torch.ops.aten.mm and args[0].dtype == self.dtype:
            time.sleep(0.1)
        return func(*args, **(kwargs or {}))


@contextmanager
def fast_in(dtype):
    """Makes products in the other dtype slow where it is measured which are fast."""
    fastest_products.cache_clear()
    with SlowProducts(torch.float32 if dtype == torch.bfloat16 else torch.bfloat16):
        assert fastest_products() == dtype
    yield
    fastest_products.cache_clear()


@pytest.fixture(params=["float32", "bfloat16"])
def first_products(request):
    """The first products are taken in what the processor is fast in: each is tried on any."""
    dtype = getattr(torch, request.param)
    with fast_in(dtype):
        yield dtype


def test_what_the_processor_is_fast_in_is_measured_once(first_products):
    with SlowProducts(first_products):
        assert search_dtype(torch.device("cpu")) == first_products


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


def assert_two(x):
    """The distances to two neighbours are those of brute force."""
    assert_exact(two_nearest_distances(x), x, 2)


def assert_nearest(x, k=128):
    """The distances to k neighbours are those of brute force."""
    assert_exact(nearest_distances(x, k), x, k)


def assert_exact(got, x, k):
    assert got.dtype == torch.float64
    expected = torch.from_numpy(references.nearest(x.double(), k))
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=0, equal_nan=True)


@CLOUD
@DTYPE
@FIRST_PRODUCTS
def test_two_distances_equal_brute_force(x, dtype):
    assert_two(x.to(dtype))


@CLOUD
@DTYPE
def test_distances_equal_brute_force(x, dtype):
    assert_nearest(x.to(dtype))


@pytest.mark.parametrize(
    "x", [rogue(), near_copies(), 1e4 + near_copies()], ids=["rogue", "copies", "copies far off"]
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16], ids=str)
def test_distances_equal_brute_force_for_what_models_have(x, dtype):
    assert_nearest(x.to(dtype), 17)
    assert_two(x.to(dtype))


@pytest.mark.parametrize("n", [255, 256, 257, 271, 272, 273, 511, 512, 513, 529, 700])
@pytest.mark.parametrize("cloud", ["manifold", "clusters", "duplicates"])
@FIRST_PRODUCTS
def test_any_number_of_rows_fits_strips_and_groups(n, cloud):
    x = CLOUDS[cloud].float()
    assert_two(torch.cat([x + 0.01 * i for i in range(-(-n // len(x)))])[:n])


@pytest.mark.slow
@pytest.mark.parametrize("n", [4500, 9001])
@FIRST_PRODUCTS
def test_two_distances_of_more_rows_than_a_block_has_room_for(n):
    x = torch.cat((gaussian(n - 100, 3), gaussian(100, 3, seed=1) / 100))
    assert_two(x.float())


def test_distances_of_more_rows_than_a_block_has_room_for():
    x = torch.cat((gaussian(2900, 3), gaussian(100, 3, seed=1) / 100))
    assert_nearest(x, 9)
    assert_nearest(x[:2500].float(), 9)


@pytest.mark.parametrize("n", [0, 1, 2, 3, 5, 9, 24, 25, 26, 27])
@pytest.mark.parametrize("scale", [1.0, 1e25, 1e-22, 1e-40])
@DTYPE
def test_few_rows(n, scale, dtype):
    x = (scale * gaussian(n, 4)).to(dtype)
    assert two_nearest_distances(x).isnan().sum().item() == {0: 0, 1: 2, 2: 2}.get(n, 0)
    assert_two(x)


@pytest.mark.parametrize("n", [0, 1, 2, 3, 9, 17])
@pytest.mark.parametrize("k", [1, 2, 16, 128])
def test_neighbours_that_are_not_there_are_undefined(n, k):
    x = gaussian(n, 3)
    assert nearest_distances(x, k).isfinite().sum() == n * min(k, max(0, n - 1))
    assert_nearest(x, k)


@DTYPE
@FIRST_PRODUCTS
def test_a_nearest_row_whose_squared_distance_vanishes_in_float32(dtype):
    x = gaussian(40, 40)
    x[:2], x[1, 3] = 0, 1e-25
    assert_two(x.to(dtype))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("num_rows", [40, 400])
@FIRST_PRODUCTS
def test_a_nearer_row_among_many_almost_as_near_is_found(dtype, num_rows):
    """Rounded to bfloat16, the rows around each centre are equally far: the candidates are a
    lottery.
    """
    x = 100 * gaussian(8, 64).repeat_interleave(num_rows, 0) + 1e-2 * gaussian(
        8 * num_rows, 64, seed=1
    )
    assert_two(x.to(dtype))


class Settings(TorchDispatchMode):
    """Records the settings of the process under which operations run."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        backends = torch.backends.mkldnn.matmul, torch.backends.cuda.matmul
        precisions = [backend.fp32_precision for backend in backends]
        self.seen.add((*precisions, torch.get_num_threads()))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("cloud", ["gaussian", "clusters", "outlier"])
@FIRST_PRODUCTS
def test_no_setting_of_the_process_is_changed(cloud):
    """Other threads train meanwhile."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16), Settings() as settings:
            twonn_dimension(CLOUDS[cloud].float())
            nearest_distances(CLOUDS[cloud].float(), 5)
            top_eigenvalue(torch.diag(torch.arange(1.0, 201.0, dtype=torch.float64)))
    finally:
        torch.set_float32_matmul_precision(before)
    assert len(settings.seen) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "x",
    [gaussian(600, 768).float(), manifold(3000, 64).float(), rogue().half()],
    ids=["gaussian", "manifold", "rogue"],
)
def test_distances_do_not_depend_on_what_the_processor_is_fast_in(x):
    """The first products only tell which distances are taken from differences."""
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        with fast_in(dtype):
            found.append(two_nearest_distances(x))
    assert found[0].equal(found[1])


@pytest.mark.parametrize("precision", ["medium", "highest"])
@FIRST_PRODUCTS
def test_distances_do_not_depend_on_the_process_settings(precision):
    x = 10 + gaussian(300, 64).float()
    two, five = two_nearest_distances(x), nearest_distances(x, 5)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert two_nearest_distances(x).equal(two)
            assert nearest_distances(x, 5).equal(five)
    finally:
        torch.set_float32_matmul_precision(before)


@FIRST_PRODUCTS
def test_each_pair_of_rows_is_multiplied_about_once():
    x = manifold(2048, 32)
    with FlopCounterMode(display=False) as counter:
        two_nearest_distances(x)
    assert counter.get_total_flops() < 0.8 * 2 * 2048**2 * 32


class ProductDtypes(TorchDispatchMode):
    """Records in what matrices are multiplied."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket is torch.ops.aten.mm:
            self.seen.add(args[0].dtype)
        return func(*args, **(kwargs or {}))


def crowded(n=1000, dim=64, num_near=30):
    """Some rows much nearer to each other than products in float32 tell: occurrences of a frequent
    token, say.
    """
    x = gaussian(n, dim)
    x[:num_near] = x[0] + 1e-4 * x[:num_near]
    return x


@pytest.mark.slow
@pytest.mark.parametrize(
    "x",
    [CLOUDS["shell"], crowded(), gaussian(1024, 768)],
    ids=["few unsettled rows", "few crowded rows", "almost equally far"],
)
def test_of_few_doubtful_rows_no_product_is_taken_again(x, first_products):
    """Of 1024 in 768 dimensions, one in ten has more than eight that bfloat16 cannot tell from the
    nearest.
    """
    x = x.float()
    n, dim = x.shape
    with FlopCounterMode(display=False) as counter, ProductDtypes() as products:
        distances = two_nearest_distances(x)
    assert_exact(distances, x, 2)
    assert products.seen == {first_products}
    assert counter.get_total_flops() < 1.1 * 2 * n**2 * (dim + 6)  # two norms, each in three parts


def test_near_rows_cost_no_second_product_of_all_pairs():
    x = manifold()
    x[1] = x[0] + 1e-6 * gaussian(1, x.shape[1], seed=3)
    with FlopCounterMode(display=False) as counter:
        nearest_distances(x, 20)
    assert counter.get_total_flops() < 2.2 * len(x) ** 2 * x.shape[1]
    assert_nearest(x, 20)


@pytest.mark.parametrize("dim", [255, 768])
def test_float32_squares_that_all_round_down(dim):
    """One of 1, and the others so small that they are lost one by one, but are something
    together.
    """
    x = gaussian(60, dim)
    x[:2] = 0
    x[0], x[0, 0], x[1, 0] = math.sqrt(0.99 * 2**-24), 1, -0.99 * 2**-24
    assert_two(x.float())


@FIRST_PRODUCTS
def test_squares_that_are_flushed_to_zero():
    """What bfloat16 loses of the nearest row is far below the row, and its square below float32."""
    entry, digit = 1.5 * 2**-51, 2**-58
    lower = torch.tensor([6] + [2] * 12)[:, None] > torch.arange(256)
    sign = torch.cat([gaussian(1, 256, seed=seed).sign() for seed in range(1, 14)])
    rows = torch.cat((sign * (entry - digit * lower), torch.full((1, 256), entry - 1.08e-19)))
    x = torch.cat((torch.zeros(1, 256), rows, -rows))
    assert torch.set_flush_denormal(True)
    try:
        assert_two(x.float())
    finally:
        torch.set_flush_denormal(False)


def test_float16():
    assert_two(manifold().half())


def test_rows_without_coordinates_are_at_distance_0():
    assert two_nearest_distances(torch.zeros(30, 0)).eq(0).all()
    assert nearest_distances(torch.zeros(30, 0), 4).eq(0).all()


class LargestTensor(TorchDispatchMode):
    """Records how many bytes the largest new storage has that an operation gives."""

    def __init__(self):
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self.nbytes = max(self.nbytes, leaf.untyped_storage().nbytes())
        return out


@pytest.mark.slow
@pytest.mark.parametrize(
    "cloud", ["gaussian", "clusters", "duplicates", "more at the same distance than are kept"]
)
@FIRST_PRODUCTS
def test_memory_is_bounded_by_the_rows_and_a_block(cloud):
    """All distances of 6,000 rows take 288 MB in float64, or 72 in bfloat16; a block takes 8."""
    x = CLOUDS[cloud][:, :16].float()
    x = torch.cat([x + 1e6 * i for i in range(math.ceil(6000 / len(x)))])
    for distances in (lambda: two_nearest_distances(x), lambda: nearest_distances(x, 16)):
        with LargestTensor() as largest:
            distances()
        assert largest.nbytes < 36e6


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux, where ru_maxrss is in KiB")
@pytest.mark.parametrize("instructions", ["AVX2", "ALL"])
def test_a_process_does_not_grow_by_all_distances(instructions):
    """Those of 8192 rows to each other would take 134 MB in bfloat16, and 268 in float32."""
    program = """
import resource, torch
from embedgeo.functional import two_nearest_distances
torch.set_num_threads(1)
x = torch.randn(8192, 8)
two_nearest_distances(x[:512])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
two_nearest_distances(x)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": instructions}
    command = [sys.executable, "-c", program]
    grown = subprocess.run(
        command, check=True, capture_output=True, text=True, env=environment
    ).stdout
    assert int(grown) * 1024 < 80e6


def test_rows_are_left_as_they_were():
    x = 1000 + gaussian(100, 8).float()
    before = x.clone()
    two_nearest_distances(x)
    nearest_distances(x, 3)
    assert x.equal(before)


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
    """Rows on a curved surface of some 8 dimensions, and copies of the first ones with relative
    noise.
    """
    x = torch.tanh(gaussian(n, 8, seed=seed) @ gaussian(8, dim, seed=seed + 1)) + 2
    few = x[: max(1, copies // 3)]
    return x, torch.cat(
        (
            x,
            few[torch.arange(copies) % len(few)]
            * (1 + noise * gaussian(copies, dim, seed=seed + 2)),
        )
    )


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
def test_one_row_is_left_of_each_set_of_rows_that_chains_of_near_pairs_join(
    n, dim, tolerance, dtype
):
    _, x = with_near_copies(n, dim, n // 4, noise=tolerance / 3 / dim**0.5)
    x = x.to(dtype).unique(dim=0)
    num_sets, members = sets_of_near_rows(x, tolerance)
    left = merge_duplicates(x, tolerance)
    assert len(left) == num_sets < len(x)
    assert sorted(members[(cdist(left, x) == 0).argmax(1)]) == list(range(num_sets))


@pytest.mark.parametrize("length", [2, 3, 17, 100])
def test_a_chain_of_near_rows_is_one_row(length):
    x = gaussian(200, 5)
    chain = (
        x[0]
        + 0.9e-5 * scale(x) * torch.arange(length)[:, None] * torch.eye(5, dtype=torch.float64)[0]
    )
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


def test_projections_alone_find_the_rows_that_sorting_them_finds():
    """On a device rows are not sorted: copies, chains of near rows, and chains between copies are
    found by these.
    """
    x = gaussian(200, 5)
    chain = (
        x[0] + 0.6e-5 * scale(x) * torch.arange(9)[:, None] * torch.eye(5, dtype=torch.float64)[0]
    )
    x = torch.cat(
        (
            x[1:],
            *[chain[i : i + 1].expand(40, 5) for i in range(9)],
            x[:50].expand(3, 50, 5).flatten(0, 1),
        )
    )
    x = x[torch.randperm(len(x), generator=generator())]
    _, place = computed(distinct_by_projections(x, computed(projections(x)), 1e-5))
    _, expected = distinct_rows(x, 1e-5)
    assert int(place.max()) == 199
    assert len((place * 1000 + expected).unique()) == 200


def test_a_row_of_huge_norm_hides_no_distance():
    x = torch.cat((gaussian(400, 3), torch.full((1, 3), 1e4, dtype=torch.float64)))
    assert len(merge_duplicates(x)) == 401


def test_a_tolerance_of_zero_merges_exact_copies_only():
    clean, x = with_near_copies(100, 10, 50)
    assert len(merge_duplicates(torch.cat((x, clean)), 0)) == 150
    assert merge_duplicates(clean) is clean


def allowed_distances(x, k, apart=None, together=None):
    """The k smallest distances to rows that may be neighbours, from all distances; NaN where there
    are none.
    """
    distances = torch.cdist(x.double(), x.double(), compute_mode="donot_use_mm_for_euclid_dist")
    distances.fill_diagonal_(math.inf)
    if apart is not None:
        distances[apart[:, None] == apart] = math.inf
    if together is not None:
        distances[together[:, None] != together] = math.inf
    found = torch.full((len(x), max(k, len(x))), math.inf, dtype=torch.float64)
    found[:, : len(x)] = distances
    nearest = found.topk(k, largest=False).values
    return nearest.masked_fill(nearest.isinf(), math.nan)


LABELS = {
    "many": lambda n: torch.randint(0, n + 1, (n,), generator=generator(1)) * 10**12 - 5,
    "some": lambda n: torch.randint(0, 40, (n,), generator=generator(2)),
    "one that most rows have": lambda n: (
        torch.randint(0, 5, (n,), generator=generator(3)).clamp(min=3) - 3
    ),
    "two": lambda n: torch.arange(n) % 2,
    "one": lambda n: torch.zeros(n, dtype=torch.int64),
    "all but one and two": lambda n: (
        (torch.arange(n) < 1).long() + 2 * (torch.arange(n) > n - 3).long()
    ),
}


@FIRST_PRODUCTS
@pytest.mark.parametrize("labels", LABELS.values(), ids=LABELS.keys())
@pytest.mark.parametrize("n", [1, 2, 20, 600, pytest.param(4500, marks=pytest.mark.slow)])
@pytest.mark.parametrize("alike", [False, True], ids=["apart", "alike"])
def test_neighbours_of_other_labels(n, labels, alike):
    x, apart = gaussian(n, 12), labels(n)
    if alike:  # rows of a label are nearer to each other than to any other
        x = 0.1 * x + 50 * gaussian(n, 12, seed=1)[apart.unique(return_inverse=True)[1]]
    x = x.float()
    torch.testing.assert_close(
        two_nearest_distances(x, apart),
        allowed_distances(x, 2, apart),
        rtol=1e-6,
        atol=0,
        equal_nan=True,
    )
    for k in (2, 9):
        got, expected = nearest_distances(x, k, apart), allowed_distances(x, k, apart)
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=0, equal_nan=True)


@pytest.mark.parametrize("labels", LABELS.values(), ids=LABELS.keys())
@pytest.mark.parametrize("n", [0, 1, 2, 20, 900])
@pytest.mark.parametrize("k", [2, 9])
def test_neighbours_of_the_same_label(n, labels, k):
    x, together = 100 + gaussian(n, 12).float(), labels(n)
    for apart in (None, torch.arange(n) % 7):
        got, expected = (
            nearest_distances(x, k, apart, together),
            allowed_distances(x, k, apart, together),
        )
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=0, equal_nan=True)


@FIRST_PRODUCTS
@pytest.mark.parametrize("labels", LABELS.values(), ids=LABELS.keys())
@pytest.mark.parametrize("n", [0, 1, 2, 20, 900, pytest.param(4500, marks=pytest.mark.slow)])
def test_two_neighbours_of_the_same_label(n, labels):
    x, together = 100 + gaussian(n, 12).float(), labels(n)
    for apart in (None, torch.arange(n) % 7):
        got, expected = (
            two_nearest_distances(x, apart, together),
            allowed_distances(x, 2, apart, together),
        )
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=0, equal_nan=True)
