import pytest
import torch

from embedgeo.metrics import EmbeddingMoments, TokenMoments
from tests import references
from tests.data import all_nan, assert_values, floats, texts, token_rows, updated

SPLIT = {"V_W_unbiased", "V_B_unbiased", "V_W_over_V_unbiased"}


@pytest.mark.parametrize("mean", [0.0, 1000.0])
@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.float32, torch.bfloat16, torch.float16],
    ids=["64", "32", "bf16", "fp16"],
)
def test_values_equal_the_naive_ones(mean, dtype):
    x, ids = token_rows(400, 6, mean=mean)
    if not mean:
        x[7] = 0  # it has no direction
    x = x.to(dtype)
    values = updated(EmbeddingMoments(6), x, ids).compute()
    x = x.double()
    expected = references.row_values(x) | references.unbiased_values(x, ids)
    assert values.keys() == expected.keys() | {"n_nonfinite"}
    assert_values(
        values, expected | {"n_nonfinite": 0.0}, rtol=1e-9 if dtype == torch.float64 else 1e-6
    )


def test_updates_of_one_sequence_leave_the_variance_within_undefined():
    x, ids = token_rows(100, 3)
    metric = EmbeddingMoments(3)
    for part in (slice(0, 50), slice(50, 100)):
        metric.update(x[None, part], ids[None, part])
    values = metric.compute()
    assert values["V_W_unbiased"].isnan()
    assert values["V_W_over_V_unbiased"].isnan()


def test_variance_within_is_estimated_within_updates_and_weighted_by_rows():
    x, ids = token_rows(100, 3)
    sequences = torch.arange(100) // 10
    metric = EmbeddingMoments(3)
    within = []
    for part in (slice(0, 1), slice(1, 40), slice(40, 40), slice(40, 100)):  # one row has no pair
        metric.update(x[part], ids[part], sequence_ids=sequences[part])
        within.append(
            references.within_by_pairs(x[part], ids[part], sequences[part])
            if part.stop > 1
            else 0.0
        )
    expected = (39 * within[1] + 60 * within[3]) / 99
    assert_values(metric.compute(), references.unbiased_values(x, ids, within=expected), rtol=1e-9)


def test_there_is_no_split_without_token_ids_and_with_those_of_some_rows_it_is_undefined():
    x, ids = token_rows(20, 3)
    assert not SPLIT & updated(EmbeddingMoments(3), x).compute().keys()
    metric = updated(updated(EmbeddingMoments(3), x, ids), x)
    with pytest.warns(UserWarning, match="token ids must come with all rows"):
        values = floats(metric.compute())
    assert all_nan({key: values[key] for key in SPLIT})
    assert values["n"] == 40


@pytest.mark.parametrize("kind", [EmbeddingMoments, TokenMoments])
def test_first_positions_have_their_share_of_the_variance(kind):
    x, ids, sequences = texts(200, 4, mean=10.0)
    metric = kind(4)
    metric.update(x, ids, sequence_ids=sequences)
    is_first = [sequence not in sequences[:i] for i, sequence in enumerate(sequences)]
    squares = (x - x.mean(0)).square().sum(1)
    share = float(squares[is_first].sum() / squares.sum())
    assert float(metric.compute()["first_positions_share"]) == pytest.approx(share, rel=1e-9)
