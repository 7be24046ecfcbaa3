"""The metrics on rows that are on a GPU."""

import pytest
import torch

from embedgeo import Anisotropy, EmbeddingMoments, TokenMoments, TokenOccurrences, default_metrics
from embedgeo.functional import two_nearest_distances
from embedgeo.functional.rows import row_ids
from embedgeo.geometry.computing import layer_values
from embedgeo.metrics.layer import LayerMetrics
from tests import references
from tests.clouds import CLOUDS
from tests.cuda import GPU, deterministic, needs_gpu, waits
from tests.data import KINDS, assert_values, floats, gaussian, metrics, texts, token_rows

OTHER_DTYPES = torch.float64, torch.bfloat16, torch.float16
DTYPES = pytest.mark.parametrize(
    "dtype",
    [torch.float32, *(pytest.param(dtype, marks=pytest.mark.slow) for dtype in OTHER_DTYPES)],
    ids=str,
)
KIND = pytest.mark.parametrize("kind", KINDS)
PARTS = [slice(0, 700), slice(700, 701), slice(701, 701), slice(701, 1500)]
WAITS_OF_AN_UPDATE, WAITS_OF_A_COMPUTE = 40, 120


def computed(kind, dtype, device, *, ids_on=None, mask_on=None):
    """Values of 1,500 rows in a few updates, of which some are masked and one is not finite."""
    x, ids, sequences = texts(1500, 24, mean=3.0)
    mask = torch.arange(1500) % 7 != 3
    x[50, 3] = torch.nan
    metric = metrics(24)[kind]
    for part in PARTS:
        metric.update(
            x[part].to(device, dtype),
            ids[part].to(ids_on or device),
            mask[part].to(mask_on or device),
            sequences[part].to(ids_on or device),
        )
    return metric, metric.compute()


@pytest.mark.slow
@DTYPES
@KIND
def test_values_are_those_of_the_cpu(kind, dtype):
    metric, values = computed(kind, dtype, GPU)
    _, expected = computed(kind, dtype, torch.device("cpu"))
    assert metric.device == GPU
    assert {value.dtype for value in values.values()} == {torch.float64}
    wide = {
        state.dtype
        for state in metric.metric_state.values()
        if state.is_floating_point() and state.ndim != 2
    }
    assert wide <= {torch.float64}
    twonn = {
        key: expected.pop(key) for key in list(expected) if key.startswith("intrinsic_dimension")
    }
    assert_values(values, expected, rtol=1e-9 if dtype == torch.float64 else 1e-6, atol=1e-12)
    assert_values(values, twonn, rtol=3e-6, atol=1e-9)


def test_occurrences_are_those_of_the_cpu():
    x, ids = token_rows(900, 24)
    x[::7] = torch.nan

    def plane(device):
        metric = TokenOccurrences(24, ids.bincount().topk(3).indices.tolist(), most=7)
        for part in PARTS:
            metric.update(x[part].to(device), ids[part].to(device))
        return {name: column.cpu() for name, column in metric.plane().items()}

    torch.testing.assert_close(plane(GPU), plane("cpu"))


@pytest.mark.parametrize(
    ("ids_on", "mask_on"),
    [
        pytest.param(*each, marks=pytest.mark.slow)
        for each in (("cpu", "cpu"), ("cuda", "cpu"), ("cpu", "cuda"))
    ],
)
@KIND
def test_ids_and_mask_may_be_on_another_device(kind, ids_on, mask_on):
    _, values = computed(kind, torch.float32, GPU, ids_on=ids_on, mask_on=mask_on)
    _, expected = computed(kind, torch.float32, GPU)
    assert_values(values, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.slow
@KIND
def test_a_metric_follows_the_rows_from_device_to_device_and_merges_with_one_on_another(kind):
    x, ids = token_rows(900, 24)
    make = lambda: metrics(24)[kind]  # noqa: E731
    whole, moved, first, second = make(), make(), make(), make()
    for i, part in enumerate((slice(0, 400), slice(400, 900))):
        whole.update(x[part], ids[part])
        moved.update(x[part].to("cpu" if i else GPU), ids[part])
    assert moved.device == torch.device("cpu")
    expected = whole.compute()
    assert_values(moved.compute(), expected, rtol=1e-6, atol=1e-12)
    first.update(x[:400].to(GPU), ids[:400])
    second.update(x[400:], ids[400:])
    first.merge_state(second)
    assert first.device == GPU
    # the others depend on the order, or draw rows
    if kind in ("EmbeddingMoments", "TokenMoments", "Anisotropy"):
        assert_values(first.compute(), expected, rtol=1e-6, atol=1e-12)


@needs_gpu
@pytest.mark.parametrize("precision", ["high", "medium"])
@KIND
def test_tf32_changes_nothing_and_its_setting_stays(kind, precision):
    x, ids, sequences = texts(3000, 96, mean=10.0)

    def values(dtype):
        metric = metrics(96)[kind]
        metric.update(x.to(GPU, dtype), ids, sequence_ids=sequences)
        return floats(metric.compute())

    exact, expected = values(torch.float64), values(torch.float32)
    square = torch.randn(512, 512, device=GPU)
    torch.set_float32_matmul_precision(precision)
    try:
        rounded = square @ square
        with torch.autocast("cuda", dtype=torch.bfloat16):
            got = values(torch.float32)
        assert torch.get_float32_matmul_precision() == precision
        assert (square @ square).equal(rounded)
    finally:
        torch.set_float32_matmul_precision("highest")
    assert not (square @ square).equal(rounded)
    assert_values(got, expected, rtol=1e-9, atol=1e-12)
    assert_values(got, exact, rtol=1e-5, atol=1e-7)


@needs_gpu
@KIND
def test_deterministic_algorithms_are_taken_and_give_the_same_bits(kind):
    with deterministic():
        _, once = computed(kind, torch.float32, GPU)
        _, again = computed(kind, torch.float32, GPU)
    assert all(torch.equal(once[key].nan_to_num(), again[key].nan_to_num()) for key in once)


@pytest.mark.parametrize("x", CLOUDS.values(), ids=CLOUDS.keys())
@DTYPES
@pytest.mark.parametrize("precision", ["highest", pytest.param("medium", marks=needs_gpu)])
def test_nearest_distances_equal_brute_force(x, dtype, precision):
    x = x.to(dtype)
    if not x.isfinite().all():
        pytest.skip("this cloud is out of the range of this dtype")
    torch.set_float32_matmul_precision(precision)
    try:
        got = two_nearest_distances(x.to(GPU)).cpu()
    finally:
        torch.set_float32_matmul_precision("highest")
    torch.testing.assert_close(
        got, torch.from_numpy(references.nearest(x.double(), 2)), rtol=1e-6, atol=0
    )


@pytest.mark.slow
def test_nearest_distances_of_many_rows():
    x = gaussian(20_000, 64, dtype=torch.float32)
    got = two_nearest_distances(x.to(GPU)).cpu()
    some = torch.arange(0, 20_000, 400)
    exact = torch.cdist(x[some].double(), x.double(), compute_mode="donot_use_mm_for_euclid_dist")
    exact[torch.arange(len(some)), some] = torch.inf
    torch.testing.assert_close(got[some], exact.topk(2, largest=False).values, rtol=1e-6, atol=0)


@needs_gpu
@pytest.mark.parametrize("jackknife", [0, 4])
def test_the_cpu_rarely_waits_for_the_gpu(jackknife):
    layer = LayerMetrics(default_metrics, 64, device=GPU, jackknife=jackknife)
    x, ids, _ = texts(4096, 64)
    hidden, ids = x.to(GPU, torch.bfloat16).view(8, 512, 64), ids.to(GPU).view(8, 512)
    mask = torch.ones_like(ids, dtype=torch.bool)
    sequences = torch.arange(8, device=GPU)[:, None].expand(8, 512)
    for _ in range(2):
        layer.update(hidden, row_ids(hidden, ids, mask, sequences))
    groups = 1 + jackknife
    with waits() as lines:
        layer.update(hidden, row_ids(hidden, ids, mask, sequences))
    assert lines.total() <= WAITS_OF_AN_UPDATE * groups, lines.most_common()
    with waits() as lines:
        layer_values([layer])
    assert lines.total() <= WAITS_OF_A_COMPUTE * groups, lines.most_common()


@needs_gpu
def test_memory_is_given_back():
    x, ids, sequences = texts(4096, 256)
    x, ids, sequences = x.to(GPU, torch.bfloat16), ids.to(GPU), sequences.to(GPU)

    def measure():
        layer = LayerMetrics(default_metrics, 256, device=GPU)
        layer.update(x, row_ids(x, ids, None, sequences))
        layer_values([layer])
        layer.reset()

    measure()  # the libraries' own workspaces stay
    held = torch.cuda.memory_allocated()
    for _ in range(3):
        measure()
    assert torch.cuda.memory_allocated() - held < 1 << 20


@pytest.mark.parametrize("make", [EmbeddingMoments, TokenMoments, Anisotropy])
def test_states_stay_float64_through_casts(make):
    metric = make(8).to(GPU).half()
    x, ids = token_rows(100, 8)
    metric.update(x.to(GPU, torch.float16), ids.to(GPU))
    held = {state.dtype for state in metric.metric_state.values() if state.is_floating_point()}
    assert held == {torch.float64}
