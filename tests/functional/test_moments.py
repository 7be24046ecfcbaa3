import pytest
import torch

from embedgeo.functional import moment_values, row_moments
from tests.data import all_nan, assert_values, floats


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
