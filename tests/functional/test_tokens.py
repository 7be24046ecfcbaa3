import pytest
import torch
from hypothesis import given, settings

from embedgeo.functional import token_table, type_regressions, type_values, variance_split
from tests import references
from tests.data import assert_values, gaussian, token_rows, zipf_ids
from tests.strategies import splits


def assert_table(table, x, ids, *, rtol):
    expected = references.token_loop(x, ids)
    assert table.token_ids.tolist() == list(expected)
    types = table.without_rounding()
    for i, (n, mean, variance) in enumerate(expected.values()):
        assert types.n[i] == n
        torch.testing.assert_close(types.mean[i], torch.from_numpy(mean), rtol=rtol, atol=rtol)
        assert types.m2[i].item() == pytest.approx(n * variance, rel=rtol, abs=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mean", [0.0, 1000.0])
def test_table_equals_the_loop(dtype, mean):
    x, ids = token_rows(400, 8, mean=mean)
    x = x.to(dtype)
    assert_table(token_table(x, ids), x.double(), ids, rtol=1e-9 if dtype == torch.float64 else 1e-6)


def test_token_types_are_merged_over_chunks():
    """Of 40 types of that width, at most 8 are merged at a time."""
    x, ids = token_rows(300, 1 << 14, mean=1000.0)
    assert_table(token_table(x[:120], ids[:120]).merge(token_table(x[120:], ids[120:])), x, ids, rtol=1e-9)


def test_types_are_centred_over_chunks():
    """Of that width, 16 rows are centred at a time, or a type of more."""
    x, ids = token_rows(300, 1 << 14, mean=1000.0)
    assert_table(token_table(x, ids), x, ids, rtol=1e-9)


@settings(max_examples=20)
@given(parts=splits(200))
def test_tables_of_parts_merge_to_that_of_the_whole(parts):
    x, ids = token_rows(200, 4, mean=1000.0)
    table = token_table(x[:0], ids[:0])
    for part in parts:
        table = table.merge(token_table(x[part], ids[part]))
    assert_table(table, x, ids, rtol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_identical_rows_per_token_have_no_variance_within(dtype):
    x, ids = token_rows(60, 8, mean=3.0)
    ids = zipf_ids(5000)
    table = token_table(x.to(dtype)[ids], ids)
    assert table.m2.tolist() == [0.0] * len(table.token_ids)
    assert variance_split(table)["V_W"] == 0


@pytest.mark.parametrize("mean", [0.0, 0.2, 10.0])
def test_many_float32_rows_of_few_types_keep_their_digits(mean):
    x, ids = token_rows(300_000, 2, mean=mean)
    x, ids = x.float(), ids // 1000 % 5
    types = token_table(x, ids).without_rounding()
    expected = references.token_values(x, ids, regression_count_range=(1, 10**6))
    split, lines = variance_split(types), type_regressions(type_values(types))
    assert_values(split, {key: expected[key] for key in split}, rtol=1e-6)
    assert_values(lines, {key: expected[key] for key in lines}, rtol=1e-4)


def mean_and_m2(x):
    x = x.double()
    return x.mean(0), (x - x.mean(0)).square().sum().item()


SKEWED = {
    "less variance than the rounding of the mean": gaussian(6000, 16) * 1e-7 + 1e8 * torch.eye(16)[0],
    "a first row far from the others": torch.cat((torch.full((1, 4), 1e4), 5 + gaussian(6000, 4))),
    "a last row far from the others": torch.cat((5 + gaussian(6000, 4), torch.full((1, 4), 1e4))),
    "one large coordinate": torch.cat((1e4 * gaussian(500, 1).sign(), gaussian(500, 4095, seed=1)), dim=1),
    "terms of many sizes": gaussian(1024, 64).exp().square(),
    "squares that a float32 sum loses": torch.cat(
        (gaussian(40, 1).sign(), gaussian(40, 1).sign().expand(-1, 126) * (0.99 * 2**-24) ** 0.5), dim=1
    ),
    "terms that a float32 sum loses": torch.tensor([0, 1.0] + 511 * [0, 5e-8]).reshape(-1, 1).expand(-1, 8),
}


@pytest.mark.parametrize("rows", SKEWED.values(), ids=SKEWED.keys())
def test_float32_rows_of_one_type_keep_their_digits(rows):
    x = rows.float()
    mean, m2 = mean_and_m2(x)
    table = token_table(x, torch.zeros(len(x), dtype=torch.int64))
    assert table.m2.item() == pytest.approx(m2, rel=1e-6)
    torch.testing.assert_close(table.mean[0], mean, rtol=1e-6, atol=1e-6 * rows.std().item())


@pytest.mark.parametrize("scale", [1e-20, 1e-22, 1e-30, 1e20])
def test_a_type_of_another_scale_keeps_its_digits(scale):
    x, ids = gaussian(200, 16).float(), torch.arange(200) % 2
    x[ids == 1] *= scale
    expected = [mean_and_m2(x[ids == i])[1] for i in (0, 1)]
    assert token_table(x, ids).m2.tolist() == pytest.approx(expected, rel=1e-6, abs=0)


@pytest.mark.parametrize("scale", [1e25, 1e-22, 1e-30])
def test_the_scale_of_float32_rows_does_not_matter(scale):
    x, ids = token_rows(200, 8)
    x = (x * scale).float()
    split = variance_split(token_table(x, ids))
    expected = references.token_values(x.double() / scale, ids)
    assert split["V_W_over_V"].item() == pytest.approx(expected["V_W_over_V"], rel=1e-6)
    assert split["V_W"].item() == pytest.approx(expected["V_W"] * scale**2, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_differences_may_be_larger_than_the_dtype_holds(dtype):
    x, ids = (3e38 * gaussian(50, 4).sign()).to(dtype), torch.arange(50) % 7
    split = variance_split(token_table(x, ids))
    expected = references.token_values(x.double(), ids, regression_count_range=(1, 50))
    assert_values(split, {key: expected[key] for key in split}, rtol=1e-9)


def test_selecting_types_keeps_their_moments():
    x, ids = token_rows(100, 3)
    table = token_table(x, ids)
    some = table.select(table.n > 5)
    kept = torch.isin(ids, some.token_ids)
    assert_table(some, x[kept], ids[kept], rtol=1e-9)
