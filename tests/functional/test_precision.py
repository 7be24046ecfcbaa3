from types import SimpleNamespace

import pytest
import torch

from embedgeo.functional.precision import (
    accumulator_dtype,
    in_range,
    matmul_precision,
)


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
        with matmul_precision(torch.device("cpu")):
            assert torch.get_float32_matmul_precision() == "highest"
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
