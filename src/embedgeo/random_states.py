"""The global random states, which training draws from."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def kept_random_states() -> Iterator[None]:
    """Restores the global random states of Python, NumPy and torch (CPU and, once CUDA is in use,
    GPUs) on exit.
    """
    python = random.getstate()
    numpy = np.random.get_state()  # noqa: NPY002 (the state that user code draws from)
    try:
        # reading their states initialises CUDA
        with torch.random.fork_rng(
            range(torch.cuda.device_count() if torch.cuda.is_initialized() else 0),
            device_type="cuda",
        ):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002
