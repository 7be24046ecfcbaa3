import pytest
import torch

from embedgeo.functional.memory import uninitialized


@pytest.mark.parametrize("shape", [(3,), (0, 5), (5, 0), (7, 3), (2000, 600)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_it_is_an_ordinary_tensor(shape, dtype):
    x = uninitialized(*shape, dtype=dtype, device=torch.device("cpu"))
    assert (x.shape, x.dtype, x.is_contiguous(), x.data_ptr() % 64) == (shape, dtype, True, 0)
    x.fill_(2)
    assert x.clone().sum() == torch.full(shape, 2.0, dtype=dtype).sum()


def test_other_devices_have_their_own():
    assert uninitialized(2, 3, dtype=torch.float16, device=torch.device("meta")).shape == (2, 3)
