"""Memory for large tensors."""

import numpy as np
import torch
from torch import Tensor

_ALIGNMENT = 64


def uninitialized(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """`torch.empty`, on the CPU in numpy's memory: of large arrays it asks Linux for huge pages, and torch does not.

    Touching a token table of 75 MB for the first time took 20 to 150 ms in pages of 4 KiB, and 3 to 13 ms in huge ones;
    filling it with what it is for takes less than 100.
    """
    if device.type != "cpu":
        return torch.empty(shape, dtype=dtype, device=device)
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    memory = np.empty(num_bytes + _ALIGNMENT, dtype=np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return torch.from_numpy(memory[start : start + num_bytes]).view(dtype).view(shape)
