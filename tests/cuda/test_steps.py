"""A loop of one's own on a GPU: the records are those of the CPU, the weights those of a run
without a monitor.
"""

import pytest

from embedgeo.metrics import full_metrics
from tests.cuda import GPU, a_gpu, deterministic
from tests.cuda.on_ranks import assert_same, records, records_with_nan, trained
from tests.ranks import on_two_ranks

OPTIONS = {"default metrics": {}}
ALL = {"metrics": full_metrics, "layers": ["block.00", "block.01"]}
SLOW = {
    "training batches": {"window": 1},
    "words": {"rows": "words"},
    "probe and drift": {"probed": True, "drift": True},
    "jackknife": {"jackknife": 2, "layers": ["block.00", "block.01"]},
    "all metrics": ALL,
    "all metrics, jackknife and drift": {**ALL, "probed": True, "jackknife": 2, "drift": True},
}


@pytest.fixture(scope="module")
def plain():
    with a_gpu(), deterministic():
        return trained(GPU)[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        *OPTIONS.values(),
        *(pytest.param(options, marks=pytest.mark.slow) for options in SLOW.values()),
    ],
    ids=[*OPTIONS, *SLOW],
)
def test_records_are_those_of_the_cpu_and_weights_those_without_a_monitor(options, plain):
    with deterministic():
        weights, found = trained(GPU, **options)
    assert_same(found, trained("cpu", **options)[1])
    assert all(a.equal(b) for a, b in zip(weights, plain, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["jackknife", "all metrics"])
def test_records_of_two_ranks_are_those_of_the_cpu(tmp_path, kind):
    for found, expected in on_two_ranks(records, tmp_path, SLOW[kind], seconds=200):
        assert found
        assert_same(found, expected)


@pytest.mark.slow
def test_rows_of_nan_are_left_out_on_two_ranks(tmp_path):
    for found, expected in on_two_ranks(records_with_nan, tmp_path, seconds=200):
        left_out = {
            (each["layer"], each["value"]) for each in expected if each["metric"] == "n_nonfinite"
        }
        assert {layer for layer, number in left_out if number} == {"block.01", "mean"}
        assert_same(found, expected)
