import math
from types import SimpleNamespace

import pytest
import torch

from embedgeo.functional.precision import (
    accumulator_dtype,
    fast_row_norms,
    in_range,
    matmul_precision,
    product_dtype,
    row_norms,
)
from tests.data import gaussian


def settings_now():
    backends = torch.backends, torch.backends.mkldnn.matmul, torch.backends.cuda.matmul
    return [torch.get_float32_matmul_precision(), *(backend.fp32_precision for backend in backends)]


@pytest.fixture(params=["highest", "high", "medium"])
def process_setting(request):
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(request.param)
    yield settings_now()
    torch.set_float32_matmul_precision(before)


def test_settings_are_put_back(process_setting):
    with matmul_precision(torch.device("cpu")):
        assert torch.backends.mkldnn.matmul.fp32_precision == "ieee"
    assert settings_now() == process_setting


def test_settings_are_put_back_after_an_exception(process_setting):
    with pytest.raises(ZeroDivisionError), matmul_precision(torch.device("cpu")):
        _ = 1 / 0
    assert settings_now() == process_setting


@pytest.fixture
def before_2_9(monkeypatch):
    """A torch whose backends have no precision of their own."""
    monkeypatch.setattr(torch.backends, "mkldnn", SimpleNamespace())


@pytest.mark.usefixtures("before_2_9")
@pytest.mark.parametrize("precision", ["highest", "medium"])
def test_a_torch_with_one_setting_for_all_backends_has_it_put_back(precision):
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        exact = torch.float32 if precision == "highest" else torch.float64
        assert product_dtype(torch.ones(1)) == exact
        with matmul_precision(torch.device("cpu")):
            assert torch.get_float32_matmul_precision() == "highest"
            assert product_dtype(torch.ones(1)) == torch.float32
        assert torch.get_float32_matmul_precision() == precision
    finally:
        torch.set_float32_matmul_precision(before)


def test_autocast_is_set_aside_and_put_back():
    a = torch.randn(8, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with matmul_precision(torch.device("cpu")):
            assert (a @ a).dtype == torch.float32
        assert (a @ a).dtype == torch.bfloat16


def test_sums_are_kept_in_float64_where_the_device_has_it():
    assert accumulator_dtype(torch.device("cpu")) == torch.float64
    assert accumulator_dtype(torch.device("cuda")) == torch.float64
    assert accumulator_dtype(torch.device("mps")) == torch.float32


@pytest.mark.parametrize(
    ("squares", "fits"),
    [([1.0, 0.0], True), ([torch.inf], False), ([1e-40], False), ([torch.nan, 1.0], False)],
)
def test_squares_that_overflow_or_underflow_are_noticed(squares, fits):
    assert in_range(torch.tensor(squares)) is fits


@pytest.mark.parametrize("dim", [1, 100, 768, 8192])
@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e15])
def test_fast_norms_are_right_to_a_millionth(dim, scale):
    x = gaussian(50, dim)
    # one coordinate is large, and the squares of the others are rounded away one by one
    x[25:, 1:] *= 2e-4
    rows = x.float() * scale
    assert torch.allclose(fast_row_norms(rows), row_norms(rows.double()), rtol=1e-6, atol=0)
    assert fast_row_norms(x).equal(row_norms(x))


def test_fast_norms_that_leave_the_range_of_float32_are_infinite_or_zero():
    assert fast_row_norms(torch.full((1, 256), 1e30)).item() == math.inf
    assert fast_row_norms(torch.full((1, 256), 1e-30)).item() == 0
