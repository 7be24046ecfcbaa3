import itertools
import math
import subprocess
import sys

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from embedgeo.functional import neighbors, top_eigenvalue, two_nearest_distances, twonn_dimension
from tests import references
from tests.data import gaussian


def manifold(n=300, dim=768, intrinsic=12):
    return torch.tanh(gaussian(n, intrinsic) @ gaussian(intrinsic, dim, seed=1) / 4)


def clusters(n=320, dim=32):
    """Groups of eight rows at 1e-4 of the distance between groups."""
    return gaussian(n // 8, dim).repeat_interleave(8, 0) + 1e-4 * gaussian(n, dim, seed=1)


def circle(n=1500):
    """Neighbours nearer than bfloat16 can tell, and not so near that float32 could not."""
    angle = 6.28 * torch.rand(n, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return torch.stack((angle.cos(), angle.sin()), dim=1)


def outlier(n=300, dim=16):
    x = gaussian(n, dim)
    x[7] *= 1e4
    return x


def shell():
    """The origin is nearer to the last two rows than to the 384 others; all squared distances round to 260."""
    signs = torch.cartesian_prod(*(torch.tensor([-1.0, 1.0]),) * 4)
    rows = torch.tensor(list(itertools.permutations((16, 1.5, 1, 0.5))))
    nearer = torch.tensor([[16.0, 1, 1, 1]])
    return torch.cat((torch.zeros(1, 4), (signs[:, None] * rows).flatten(0, 1), nearer, -nearer)).double()


def duplicates(n=300, dim=16):
    return gaussian(n, dim)[torch.randint(0, 100, (n,), generator=torch.Generator().manual_seed(0))]


CLOUDS = {
    "gaussian": gaussian(500, 24),
    "one dimension": gaussian(300, 1),
    "manifold": manifold(),
    "mean 1000 x std": 1000 + gaussian(300, 48),
    "manifold at mean 1000 x std": 1000 + manifold(200),
    "clusters": clusters(),
    "tight clusters": 1000 + 1e-3 * clusters(),
    "huge": 1e25 * gaussian(300, 16),
    "squares that float32 holds, and some that it does not": 1e19 * gaussian(700, 2),
    "fine beside far off": torch.cat((5e-4 * gaussian(640, 1), 3000 + gaussian(60, 1, seed=1))),
    "tiny": 1e-22 * gaussian(300, 16),
    "tiny beside ordinary": torch.cat((1e-22 * gaussian(150, 16), gaussian(150, 16, seed=1))),
    "circle": circle(),
    "outlier": outlier(),
    "shell": shell(),
    "duplicates": duplicates(),
    "many copies of one row": torch.cat((gaussian(1, 8).expand(40, 8), gaussian(100, 8, seed=1))),
    "grid": torch.cartesian_prod(torch.arange(15.0), torch.arange(15.0)).double(),
    "all at the same distance": torch.eye(64).double(),
}
FIRST_PRODUCTS = pytest.mark.usefixtures("first_products")
CLOUD = pytest.mark.parametrize("x", CLOUDS.values(), ids=CLOUDS.keys())


@pytest.fixture(params=["float32", "bfloat16"])
def first_products(request, monkeypatch):
    """What the first products are taken in depends on the processor: each is tried on any."""
    dtype = getattr(torch, request.param)
    monkeypatch.setattr(neighbors, "fast_dtype", lambda device: dtype)
    return dtype


def assert_exact(x):
    got = two_nearest_distances(x)
    assert got.dtype == torch.float64
    torch.testing.assert_close(
        got, torch.from_numpy(references.two_nearest(x.double())), rtol=1e-6, atol=0, equal_nan=True
    )


@CLOUD
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@FIRST_PRODUCTS
def test_distances_equal_brute_force(x, dtype):
    assert_exact(x.to(dtype))


@pytest.mark.parametrize("block_rows", [1, 7, 64, 299, 300])
@pytest.mark.parametrize("cloud", ["gaussian", "clusters", "duplicates"])
def test_the_number_of_rows_need_not_be_a_multiple_of_the_block(block_rows, cloud, first_products, monkeypatch):
    x = CLOUDS[cloud][:300].float()
    monkeypatch.setattr(neighbors, "BLOCK_BYTES", block_rows * len(x) * first_products.itemsize)
    assert_exact(x)


@pytest.mark.parametrize("n", [0, 1, 2, 3, 5, 9, 24, 25, 26, 27])
@pytest.mark.parametrize("scale", [1.0, 1e25, 1e-22, 1e-40])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_few_rows(n, scale, dtype):
    x = (scale * gaussian(n, 4)).to(dtype)
    assert two_nearest_distances(x).isnan().sum().item() == {0: 0, 1: 2, 2: 2}.get(n, 0)
    assert_exact(x)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@FIRST_PRODUCTS
def test_a_nearest_row_whose_squared_distance_vanishes_in_float32(dtype):
    x = gaussian(40, 40)
    x[:2], x[1, 3] = 0, 1e-25
    assert_exact(x.to(dtype))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@FIRST_PRODUCTS
def test_a_nearer_row_among_many_almost_as_near_is_found(dtype):
    """Rounded to bfloat16, the rows around each centre are equally far: the candidates are a lottery."""
    x = 100 * gaussian(8, 64).repeat_interleave(40, 0) + 1e-2 * gaussian(320, 64, seed=1)
    assert_exact(x.to(dtype))


@pytest.mark.parametrize("side", [64, 240])
@pytest.mark.parametrize("cloud", ["gaussian", "clusters", "outlier", "duplicates", "shell"])
def test_blocks_on_and_off_the_diagonal_hold_all_pairs(cloud, side, first_products, monkeypatch):
    monkeypatch.setattr(neighbors, "BLOCK_BYTES", side**2 * first_products.itemsize)
    monkeypatch.setattr(neighbors, "_SQUARE", side // 4)
    assert_exact(CLOUDS[cloud].float())


@FIRST_PRODUCTS
def test_a_few_unsettled_rows_need_no_copy_in_float64(monkeypatch):
    taken, of = [], neighbors.Operand.of
    monkeypatch.setattr(
        neighbors.Operand,
        "of",
        lambda x, center, dtype, *, rounded: taken.append(rounded) or of(x, center, dtype, rounded=rounded),
    )
    assert_exact(CLOUDS["shell"].float())
    assert taken == [True]


@pytest.mark.parametrize("many", [4, 16, 64])
@pytest.mark.parametrize("cloud", ["gaussian", "manifold", "outlier", "tiny beside ordinary"])
def test_rows_that_many_others_may_be_nearest_to_are_settled_all_the_same(many, cloud, first_products, monkeypatch):
    monkeypatch.setattr(neighbors, "_MANY", many)
    monkeypatch.setattr(neighbors, "BLOCK_BYTES", 64**2 * first_products.itemsize)
    assert_exact(CLOUDS[cloud].float())


def test_one_search_finds_the_nearest_of_rows_that_are_almost_equally_far(monkeypatch):
    """Of 1024 in 768 dimensions, about one in ten has more than eight that bfloat16 cannot tell from the nearest."""
    searches, near = [], neighbors.Operand.near
    monkeypatch.setattr(neighbors.Operand, "near", lambda *args: searches.append(len(args[1])) or near(*args))
    assert_exact(gaussian(1024, 768).float())
    assert searches == [1024]


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
            top_eigenvalue(torch.diag(torch.arange(1.0, 65.0, dtype=torch.float64)))
    finally:
        torch.set_float32_matmul_precision(before)
    assert len(settings.seen) == 1


def test_each_pair_of_rows_is_multiplied_once(first_products, monkeypatch):
    x = manifold(512, 32)
    monkeypatch.setattr(neighbors, "BLOCK_BYTES", 128**2 * first_products.itemsize)
    monkeypatch.setattr(neighbors, "_SQUARE", 32)
    with FlopCounterMode(display=False) as counter:
        two_nearest_distances(x)
    assert counter.get_total_flops() < 0.8 * 2 * 512**2 * 32


@pytest.mark.parametrize("precision", ["medium", "highest"])
@FIRST_PRODUCTS
def test_distances_do_not_depend_on_the_process_settings(precision):
    x = 10 + gaussian(300, 64).float()
    expected = two_nearest_distances(x)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert two_nearest_distances(x).equal(expected)
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("dim", [255, 768])
def test_float32_squares_that_all_round_down(dim):
    """One of 1, and the others so small that they are lost one by one, but are something together."""
    x = gaussian(60, dim)
    x[:2] = 0
    x[0], x[0, 0], x[1, 0] = math.sqrt(0.99 * 2**-24), 1, -0.99 * 2**-24
    assert_exact(x.float())


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
        assert_exact(x.float())
    finally:
        torch.set_flush_denormal(False)


def test_float16():
    assert_exact(manifold().half())


def test_rows_without_coordinates_are_at_distance_0():
    assert two_nearest_distances(torch.zeros(30, 0)).eq(0).all()


class LargestTensor(TorchDispatchMode):
    """Records how many elements the largest new storage has that an operation gives."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self.elements = max(self.elements, leaf.untyped_storage().nbytes() // leaf.itemsize)
        return out


@pytest.mark.parametrize("cloud", ["gaussian", "clusters", "duplicates", "all at the same distance"])
@FIRST_PRODUCTS
def test_memory_is_bounded_by_the_rows_and_a_block(cloud, monkeypatch):
    x = CLOUDS[cloud].float()
    x = torch.cat([x + 1e6 * i for i in range(math.ceil(700 / len(x)))])
    n, dim = x.shape
    for module in (neighbors,):
        monkeypatch.setattr(module, "BLOCK_BYTES", 8 * n * torch.float64.itemsize)
    monkeypatch.setattr(neighbors, "CHUNK_ELEMENTS", 1024)
    monkeypatch.setattr(neighbors, "_MANY", 64)
    monkeypatch.setattr(neighbors, "_PAIRS", 64)
    with LargestTensor() as largest:
        two_nearest_distances(x)
    operand = (n + neighbors._GROUP) * (dim + 2 * neighbors._NORM_PARTS)
    assert largest.elements <= max(operand, neighbors._MANY * n)  # that, the pairs of each row or a block
    assert largest.elements < n**2 / 10


def test_few_crowded_rows_keep_all_their_pairs(monkeypatch):
    """Such as some occurrences of the most frequent token: differences to all rows take longer."""
    x = gaussian(1000, 64).float()
    x[:30] = x[0] + 1e-4 * x[:30]
    monkeypatch.setattr(neighbors, "fast_dtype", lambda device: torch.bfloat16)
    monkeypatch.setattr(neighbors, "_FEW", 30)
    monkeypatch.setattr(neighbors, "_compare_with_all", None)
    monkeypatch.setattr(neighbors, "_MANY", 25)
    assert_exact(x)


def test_a_process_does_not_grow_by_all_distances(first_products):
    """Those of 8192 rows to each other would take 134 MB in bfloat16."""
    program = f"""
import resource, torch
from embedgeo.functional import neighbors
neighbors.fast_dtype = lambda device: {first_products}
torch.set_num_threads(1)
x = torch.randn(8192, 8)
neighbors.two_nearest_distances(x[:512])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
neighbors.two_nearest_distances(x)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    grown = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout
    assert int(grown) * 1024 < 80e6


def test_rows_are_left_as_they_were():
    x = 1000 + gaussian(100, 8).float()
    before = x.clone()
    two_nearest_distances(x)
    assert x.equal(before)
