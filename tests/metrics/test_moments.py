from copy import deepcopy

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


def test_variance_within_is_that_of_pairs_in_different_sequences_also_of_different_updates():
    x, ids = token_rows(100, 3)
    metric = EmbeddingMoments(3)
    parts = [slice(0, 1), slice(1, 40), slice(40, 40), slice(40, 100)]
    for part in parts:
        metric.update(x[None, part], ids[None, part])
    texts_of_rows = torch.tensor([0] + [1] * 39 + [2] * 60)
    expected = references.within_by_pairs(x, ids, texts_of_rows)
    of_one = updated(EmbeddingMoments(3), x[None], ids[None]).compute()
    assert all_nan({key: float(of_one[key]) for key in SPLIT - {"V_B_unbiased"}})
    assert_values(metric.compute(), references.unbiased_values(x, ids, within=expected), rtol=1e-9)


def test_of_many_texts_of_one_update_each_the_split_is_that_of_the_table_to_a_twentieth():
    """Also where metrics that saw half of them each are merged, in either order."""
    generator = torch.Generator().manual_seed(0)
    num_texts, length, dim, num_types = 64, 256, 16, 5000
    frequencies = 1 / torch.arange(1, num_types + 1)
    ids = torch.multinomial(
        frequencies, num_texts * length, replacement=True, generator=generator
    ).view(num_texts, length)
    means = torch.randn(num_types, dim, generator=generator)
    of_texts = torch.randn(num_texts, 1, dim, generator=generator)
    x = 0.6 * means[ids] + 0.4 * of_texts + torch.randn(*ids.shape, dim, generator=generator)
    halves = [EmbeddingMoments(dim), EmbeddingMoments(dim)]
    table = TokenMoments(dim)
    for number in range(num_texts):
        text = x[number, None], ids[number, None]
        halves[2 * number // num_texts].update(*text)
        table.update(*text)
    expected = float(table.compute()["V_W_over_V_unbiased"])
    for first, second in (halves, halves[::-1]):
        merged = deepcopy(first)
        merged.merge_state(second)
        found = float(merged.compute()["V_W_over_V_unbiased"])
        assert found == pytest.approx(expected, rel=0.05)


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
