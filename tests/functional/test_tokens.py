"""The table of token types, variances within and between them, regressions over them, and types to
show.
"""

import math

import pytest
import torch

from embedgeo.functional import (
    token_table,
    type_regressions,
    type_values,
    within_variance,
)
from tests import references
from tests.data import all_nan, floats, gaussian, texts, token_rows


def test_rows_may_be_wide():
    x, ids = token_rows(300, 1 << 14, mean=1000.0)
    table = token_table(x[:120], ids[:120]).merge(token_table(x[120:], ids[120:]))
    expected = references.token_loop(x, ids)
    assert table.token_ids.tolist() == list(expected)
    types = table.without_rounding()
    for i, (n, mean, variance) in enumerate(expected.values()):
        assert types.n[i] == n
        torch.testing.assert_close(types.mean[i], torch.from_numpy(mean), rtol=1e-9, atol=1e-9)
        assert types.m2[i].item() == pytest.approx(n * variance, rel=1e-9, abs=0)


SKEWED = {
    "less variance than the rounding of the mean": gaussian(6000, 16) * 1e-7
    + 1e8 * torch.eye(16)[0],
    "a first row far from the others": torch.cat((torch.full((1, 4), 1e4), 5 + gaussian(6000, 4))),
    "a last row far from the others": torch.cat((5 + gaussian(6000, 4), torch.full((1, 4), 1e4))),
    "one large coordinate": torch.cat(
        (1e4 * gaussian(500, 1).sign(), gaussian(500, 4095, seed=1)), dim=1
    ),
    "terms of many sizes": gaussian(1024, 64).exp().square(),
    "squares that a float32 sum loses": torch.cat(
        (gaussian(40, 1).sign(), gaussian(40, 1).sign().expand(-1, 126) * (0.99 * 2**-24) ** 0.5),
        dim=1,
    ),
    "terms that a float32 sum loses": torch.tensor([0, 1.0] + 511 * [0, 5e-8])
    .reshape(-1, 1)
    .expand(-1, 8),
}


@pytest.mark.parametrize("rows", SKEWED.values(), ids=SKEWED.keys())
def test_float32_rows_of_one_type_keep_their_digits(rows):
    x = rows.float()
    mean = x.double().mean(0)
    table = token_table(x, torch.zeros(len(x), dtype=torch.int64))
    assert table.m2.item() == pytest.approx(float((x - mean).square().sum()), rel=1e-6)
    torch.testing.assert_close(table.mean[0], mean, rtol=1e-6, atol=1e-6 * rows.std().item())


def of_table(x, ids, sequences=None):
    num_sequences = len(x) if sequences is None else len(sequences.unique())
    return within_variance(
        token_table(x, ids, sequences).without_rounding(), torch.tensor(num_sequences)
    ).item()


def test_where_no_type_is_in_two_or_three_sequences_all_with_pairs_are_pooled():
    x, ids = gaussian(30, 3), torch.tensor([1] * 14 + [2] * 14 + [3, 4])
    assert of_table(x, ids) == pytest.approx(references.within_by_pairs(x, ids), rel=1e-9)


def test_what_has_no_pairs_is_undefined():
    x, ids = gaussian(4, 3), torch.tensor([1, 1, 2, 2])
    assert math.isnan(of_table(x, ids, ids))
    assert math.isnan(of_table(x[:0], ids[:0]))
    assert math.isnan(of_table(x[::2], ids[::2]))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mean", [3.0, 1e6])
def test_identical_rows_per_token_have_a_variance_of_exactly_zero(dtype, mean):
    _, ids, sequences = texts(3000, 8)
    x = (mean + gaussian(60, 8)).to(dtype)[ids // 1000]
    table = token_table(x, ids, sequences)
    assert table.m2.count_nonzero() == table.sequence_m2.count_nonzero() == 0
    merged = token_table(x[:999], ids[:999], sequences[:999]).merge(table)
    assert within_variance(merged.without_rounding(), torch.tensor(40)) == 0


def test_a_regression_on_values_that_are_all_equal_is_undefined():
    x, ids = gaussian(400, 4), torch.arange(40).repeat_interleave(10)
    # rounding makes the mean of equal logarithms another one
    for number, count in ((3, 6), (3, 8), (40, 7), (40, 10)):
        kept = (ids < number) & (torch.arange(400) % 10 < count)
        values = floats(type_regressions(type_values(token_table(x[kept], ids[kept]))))
        assert all_nan({key: value for key, value in values.items() if "freq" in key})
        assert values["V_on_M_slope"] != 0
