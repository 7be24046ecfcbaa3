import pytest
import torch
from hypothesis import given, settings

from embedgeo.functional import Moments, merge_parts, moment_values, row_moments
from embedgeo.functional.moments import CHUNK_ELEMENTS, row_chunks, without_rounding
from tests import references
from tests.data import all_nan, assert_values, floats, gaussian
from tests.strategies import splits


@pytest.mark.parametrize("mean", [0.0, 1000.0])
@pytest.mark.parametrize("dim", [1, 3, 40])
def test_values_equal_the_naive_ones(mean, dim):
    x = mean + gaussian(150, dim)
    assert_values(moment_values(row_moments(x)), references.row_values(x), rtol=1e-9)


def test_rows_are_merged_over_chunks():
    x = 1000 + gaussian(300, CHUNK_ELEMENTS // 10)
    assert_values(moment_values(row_moments(x)), references.row_values(x), rtol=1e-9)


def test_rows_are_taken_many_more_at_a_time_where_launches_cost_more_than_a_cache_saves():
    on_cpu, elsewhere = (torch.empty(4096, 768, device=device) for device in ("cpu", "meta"))
    assert len(list(row_chunks(on_cpu))) == 13
    assert list(row_chunks(elsewhere)) == [slice(0, 16 * CHUNK_ELEMENTS // 768)]


@pytest.mark.slow
@settings(max_examples=30)
@given(splits(40))
def test_merging_parts_gives_the_moments_of_the_whole(parts):
    x = 1000 + gaussian(40, 3)
    whole = Moments.empty(3)
    for part in parts:
        whole = whole.merge(row_moments(x[part]))
    assert_values(moment_values(whole), references.row_values(x), rtol=1e-9)


def test_a_mean_that_moves_between_parts_counts_in_the_variance():
    x = torch.cat((gaussian(20, 3), 100 + gaussian(5, 3, seed=1)))
    parts = row_moments(x[:20]).merge(row_moments(x[20:]))
    assert_values(moment_values(parts), references.row_values(x), rtol=1e-12)


@pytest.mark.parametrize("summed", ["per coordinate", "over coordinates", "as a scatter matrix"])
def test_parts_are_merged_whatever_their_squares_are_summed_over(summed):
    x = torch.cat((gaussian(20, 3), 1000 + gaussian(5, 3, seed=1), gaussian(0, 3)))

    def part(rows):
        centred = rows - rows.mean(0) if len(rows) else rows
        scatter = centred.T @ centred
        m2 = {"per coordinate": scatter.diagonal(), "over coordinates": scatter.trace()}.get(
            summed, scatter
        )
        return torch.tensor(len(rows)).double(), rows.sum(0) / max(1, len(rows)), m2

    parts, whole = [part(x[:20]), part(x[20:]), part(x[:0])], part(x)
    for merged, expected in zip(merge_parts(parts), whole, strict=True):
        torch.testing.assert_close(merged, expected, rtol=1e-12, atol=1e-9)
    if summed != "as a scatter matrix":
        stacked = [torch.stack(column) for column in zip(*parts, strict=True)]
        for merged, expected in zip(merge_parts([stacked], lambda t: t.sum(0)), whole, strict=True):
            torch.testing.assert_close(merged, expected, rtol=1e-12, atol=1e-9)


def test_no_rows_have_no_values():
    values = floats(moment_values(row_moments(torch.zeros(0, 3))))
    assert values.pop("n") == 0
    assert all_nan(values)


def test_a_row_of_zeros_has_no_direction():
    x = torch.tensor([[3.0, 4.0], [0.0, 0.0], [0.6, 0.8], [-3.0, -4.0]])
    assert_values(
        moment_values(row_moments(x)), {"mean_cosine": -1 / 3, "norm_max": 5.0}, rtol=1e-6
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("value", [0.1, 0.0, 1234.567])
def test_equal_rows_do_not_vary(dtype, value):
    values = floats(moment_values(row_moments(torch.full((7, 3), value, dtype=dtype))))
    assert values["V"] == 0
    assert values["Q"] == values["M"]
    assert all_nan({key: values[key] for key in ("M_over_V", "top_dim_share")})


def test_rounding_is_told_from_a_small_variance():
    n, mean = torch.tensor(10.0).double(), torch.tensor(1.0).double()
    m2 = n * torch.tensor([1e-15, 1e-12]).double() ** 2
    assert without_rounding(m2, n, mean).tolist() == [0.0, m2[1].item()]
    assert without_rounding(m2 * torch.nan, n, mean).isnan().all()
