import pytest
import torch

from embedgeo.functional import coefficient_of_variation, least_squares, token_table, type_regressions, type_values
from tests import references
from tests.data import all_nan, assert_values, floats, gaussian


def test_least_squares_equals_the_naive_line():
    x, y = 1000 + gaussian(2, 50)
    slope, r2 = least_squares(x, x + y)
    expected = dict(zip(("slope", "r2"), references.line(x.numpy(), (x + y).numpy()), strict=True))
    assert_values({"slope": slope, "r2": r2}, expected, rtol=1e-9)


@pytest.mark.parametrize("num_types", [0, 1])
def test_regressions_need_two_types(num_types):
    values = type_values(token_table(torch.ones(num_types, 2), torch.arange(num_types)))
    regressions = floats(type_regressions(values))
    assert regressions.pop("token_types_regressed") == num_types
    assert str(regressions.pop("Q_t_cv")) == ("0.0" if num_types else "nan")
    assert all_nan(regressions)


def test_a_regression_on_values_that_are_all_equal_is_undefined():
    x, ids = gaussian(400, 4), torch.arange(40).repeat_interleave(10)
    for number, count in ((3, 6), (3, 8), (40, 7), (40, 10)):  # rounding makes the mean of equal logarithms another one
        kept = (ids < number) & (torch.arange(400) % 10 < count)
        values = floats(type_regressions(type_values(token_table(x[kept], ids[kept]))))
        assert all_nan({key: value for key, value in values.items() if "freq" in key})
        assert values["V_on_M_slope"] != 0


def test_coefficient_of_variation():
    assert coefficient_of_variation(torch.tensor([1.0, 3.0])) == 0.5
    assert coefficient_of_variation(torch.zeros(0)).isnan()
