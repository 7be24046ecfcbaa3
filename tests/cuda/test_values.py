"""Values of several layers, computed side by side on a GPU."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from embedgeo import full_metrics
from embedgeo.functional import row_scatter, spectrum_values
from embedgeo.functional.lockstep import computed
from embedgeo.functional.neighbors import Search, nearest_of_searches
from embedgeo.functional.rows import row_ids
from embedgeo.geometry.computing import layer_values
from embedgeo.metrics.layer import LayerMetrics
from tests.clouds import CLOUDS
from tests.cuda import GPU
from tests.data import assert_values, gaussian, texts


def spectra():
    """Rows whose spectra are flat, steep, of low rank, of two nearly equal values, of none, tiny,
    and not finite.
    """
    flat = gaussian(400, 200, seed=1).double()
    steep = flat * torch.arange(1, 201) ** -1.0
    twins = flat - flat.mean(0)
    twins = torch.linalg.qr(twins)[0] * torch.tensor([1.0, 1 - 1e-7] + [0.5] * 198)
    return {
        "flat": flat,
        "steep, far from the origin": steep + 1000,
        "of rank 3": flat[:, :3] @ gaussian(3, 200, seed=2).double(),
        "with twins": twins,
        "constant": torch.ones(7, 200, dtype=torch.float64),
        "of one row": flat[:1],
        "of none": flat[:0],
        "tiny": flat * 1e-120,
        "huge": flat * 1e120,
        "too large to be squared": flat * 1e200,
        "wider": gaussian(300, 250, seed=3).double() * torch.arange(1, 251) ** -0.5,
        "with constant coordinates": flat * (torch.arange(200) % 3 > 0),
    }


@pytest.mark.parametrize("name", spectra())
def test_spectra_are_those_on_the_cpu(name):
    x = spectra()[name]
    found = spectrum_values(row_scatter(x.to(GPU)))
    values = {key: value.cpu() for key, value in found.items()}
    assert_values(values, spectrum_values(row_scatter(x)), rtol=1e-9, atol=1e-12)


def searches(x, labels, sequences):
    """All rows, some of them, rows apart by one label and together by another; three neighbours of
    each.
    """
    some = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))[: 2 * len(x) // 3]
    every = torch.arange(len(x))
    return [
        Search(x, every, 3),
        Search(x, some, 3),
        Search(x, some.sort().values, 3, apart=sequences),
        Search(x, every, 3, apart=sequences, together=labels),
    ]


def by_brute_force(search):
    """Distances from differences in float64, shape (m, k); NaN where there is no such neighbour."""
    x = search.x.double().cpu()[search.rows]
    distances = torch.cdist(x, x, compute_mode="donot_use_mm_for_euclid_dist").fill_diagonal_(
        torch.inf
    )
    for label, is_apart in zip(search.labels(), (True, False), strict=True):
        if label is not None:
            distances[(label[:, None] == label) == is_apart] = torch.inf
    nearest = torch.full((len(x), search.k), torch.nan, dtype=torch.float64)
    found = distances.topk(min(search.k, len(x)), largest=False).values
    nearest[:, : found.shape[1]] = found.where(found.isfinite(), torch.nan)
    return nearest


@pytest.mark.slow
@pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        *(pytest.param(dtype, marks=pytest.mark.slow) for dtype in (torch.float64, torch.bfloat16)),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "names", [[name] for name in CLOUDS] + [[*CLOUDS]], ids=lambda names: names[0]
)
def test_neighbours_of_layers_are_those_of_brute_force(names, dtype):
    asked = list[Search]()
    for seed, name in enumerate(names):
        x = CLOUDS[name].to(dtype)
        labels, sequences = torch.randint(
            40, (2, len(x)), generator=torch.Generator().manual_seed(seed)
        )
        asked += [search._replace(x=x.to(GPU)) for search in searches(x, labels, sequences // 4)]
    for search, nearest in zip(asked, computed(nearest_of_searches(asked)), strict=True):
        expected = by_brute_force(search)
        torch.testing.assert_close(nearest.distances, expected, rtol=1e-6, atol=0, equal_nan=True)
        rows = search.x.double().cpu()[search.rows]
        apart = torch.linalg.vector_norm(rows[:, None] - rows[nearest.places], dim=2)
        is_known = expected.isfinite()
        torch.testing.assert_close(apart[is_known], expected[is_known], rtol=1e-6, atol=0)


@pytest.mark.parametrize("num_rows", [0, 1, 2, 3, 5])
def test_neighbours_of_few_rows(num_rows):
    x = gaussian(num_rows, 4)
    (nearest,) = computed(nearest_of_searches([Search(x.to(GPU), torch.arange(num_rows), 4)]))
    assert nearest.distances.shape == nearest.places.shape == (num_rows, 4)
    torch.testing.assert_close(
        nearest.distances, by_brute_force(Search(x, torch.arange(num_rows), 4)), equal_nan=True
    )


def layers_of(device, jackknife=0):
    """Layers with the same rows but for some that are NaN, one with fewer token types, and one of
    none.
    """
    x, ids, sequences = texts(900, 12, mean=3.0)
    found = []
    for name in ("whole", "again", "some not finite", "none finite", "of few types"):
        rows = x * (1 + len(found))
        if name == "some not finite":
            rows[::7] = torch.nan
        if name == "none finite":
            rows[:] = torch.inf
        types = ids % 5 if name == "of few types" else ids
        layer = LayerMetrics(full_metrics, 12, device=device, jackknife=jackknife)
        layer.update(rows.to(device), row_ids(rows, types, None, sequences))
        found.append(layer)
    return found


@pytest.mark.parametrize("jackknife", [0, pytest.param(3, marks=pytest.mark.slow)])
def test_layers_side_by_side_have_the_values_of_each_alone_on_the_cpu(jackknife):
    together = layer_values(layers_of(GPU, jackknife))
    for values, alone in zip(together, layers_of(torch.device("cpu"), jackknife), strict=True):
        (expected,) = layer_values([alone])
        assert values.keys() == expected.keys()
        for key, pair in values.items():
            assert pair == pytest.approx(expected[key], rel=1e-5, abs=1e-9, nan_ok=True), key


@pytest.mark.parametrize("precision", ["high", "highest"])
def test_neighbors_do_not_depend_on_tf32_and_leave_its_setting_alone(precision):
    """Other threads train meanwhile."""
    x = 10 + gaussian(300, 64).float()
    expected = computed(nearest_of_searches([Search(x, torch.arange(300), 4)]))
    backends = torch.backends.mkldnn.matmul, torch.backends.cuda.matmul
    torch.set_float32_matmul_precision(precision)
    before = [backend.fp32_precision for backend in backends]
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16), Products() as seen:
            found = computed(nearest_of_searches([Search(x.to(GPU), torch.arange(300), 4)]))
    finally:
        torch.set_float32_matmul_precision("highest")
    assert seen.settings == {tuple(before)}
    assert seen.dtypes == {torch.float64 if precision == "high" else torch.float32}
    torch.testing.assert_close(found[0].distances, expected[0].distances, rtol=1e-6, atol=0)


class Products(TorchDispatchMode):
    """Records dtypes of batched products, and the settings of the process under which operations
    run.
    """

    def __init__(self):
        super().__init__()
        self.dtypes, self.settings = set(), set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        backends = torch.backends.mkldnn.matmul, torch.backends.cuda.matmul
        self.settings.add(tuple(backend.fp32_precision for backend in backends))
        if func.overloadpacket is torch.ops.aten.baddbmm:
            self.dtypes.add(args[1].dtype)
        return func(*args, **(kwargs or {}))
