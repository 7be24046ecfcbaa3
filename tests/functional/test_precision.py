import pytest
import torch

from embedgeo.functional.precision import matmul_precision


def settings_now():
    backends = torch.backends, torch.backends.mkldnn.matmul, torch.backends.cuda.matmul
    return [torch.get_float32_matmul_precision(), *(backend.fp32_precision for backend in backends)]


@pytest.mark.parametrize("setting", ["highest", "high", "medium"])
def test_settings_are_put_back_also_after_an_exception(setting):
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(setting)
    try:
        expected = settings_now()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            with pytest.raises(ZeroDivisionError), matmul_precision(torch.device("cpu")):
                _ = 1 / torch.is_autocast_enabled("cpu")  # which is set aside
            assert torch.is_autocast_enabled("cpu")
        assert settings_now() == expected
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("own", ["none", "tf32"])
def test_an_inherited_setting_is_inherited_afterwards_and_an_own_one_is_kept(device, own):
    name = "cuda" if device == "cuda" else "mkldnn"
    matmul = getattr(torch.backends, name).matmul
    try:
        torch.backends.fp32_precision, matmul.fp32_precision = "tf32", own
        with matmul_precision(torch.device(device)):
            assert matmul.fp32_precision == "ieee"
        assert matmul.fp32_precision == torch.backends.fp32_precision == "tf32"
        torch.backends.fp32_precision = "ieee"
        assert matmul.fp32_precision == ("ieee" if own == "none" else own)
    finally:
        torch.backends.fp32_precision = matmul.fp32_precision = "none"
