import pytest
import torch

from embedgeo.metrics import EmbeddingMoments
from tests import references
from tests.data import all_nan, assert_values, floats, token_rows, updated

SPLIT = {"V_W_unbiased", "V_B_unbiased", "V_W_over_V_unbiased"}


@pytest.mark.parametrize("mean", [0.0, 1000.0])
@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=["64", "32", "bf16", "fp16"]
)
def test_values_equal_the_naive_ones(mean, dtype):
    x, ids = token_rows(400, 6, mean=mean)
    x = x.to(dtype)
    values = updated(EmbeddingMoments(6), x, ids).compute()
    x = x.double()
    expected = references.row_values(x) | {key: references.token_values(x, ids)[key] for key in SPLIT}
    assert values.keys() == expected.keys() | {"n_nonfinite"}
    assert_values(values, expected | {"n_nonfinite": 0.0}, rtol=1e-9 if dtype == torch.float64 else 1e-6)


def test_variance_within_is_pooled_within_updates():
    x, ids = token_rows(100, 3)
    metric = updated(EmbeddingMoments(3), x, ids, [slice(0, 40), slice(40, 100)])
    squares, freedom = 0.0, 0
    for part in (slice(0, 40), slice(40, 100)):
        table = references.token_loop(x[part], ids[part]).values()
        squares += sum(n * variance for n, _, variance in table)
        freedom += sum(n - 1 for n, _, _ in table)
    v = references.row_values(x)["V"]
    assert_values(metric.compute(), references.unbiased_values(v, 100, squares, freedom), rtol=1e-9)


def test_without_token_ids_there_is_no_split():
    metric = updated(EmbeddingMoments(3), token_rows(10, 3)[0])
    assert not SPLIT & metric.compute().keys()


def test_the_split_is_undefined_where_only_some_rows_had_token_ids():
    x, ids = token_rows(20, 3)
    metric = updated(updated(EmbeddingMoments(3), x, ids), x)
    values = floats(metric.compute())
    assert all_nan({key: values[key] for key in SPLIT})
    assert values["n"] == 40
