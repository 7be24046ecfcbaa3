"""What a measurement leaves as it was: random states, modes and buffers."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn


@contextmanager
def kept_random_states() -> Iterator[None]:
    """Restores the global random states of Python, NumPy and torch (CPU and, once CUDA is in use, GPUs) on exit."""
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002 (the state that user code draws from)
    gpus = range(torch.cuda.device_count() if torch.cuda.is_initialized() else 0)  # reading their states initialises it
    try:
        with torch.random.fork_rng(gpus, device_type="cuda"):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002


def present_modes(model: nn.Module) -> Callable[[], None]:
    """What puts each module back into the mode, train or eval, that it has now."""
    modes = [(module, module.training) for module in model.modules()]

    def put_back() -> None:
        for module, was_training in modes:
            module.training = was_training

    return put_back


@contextmanager
def kept_modes(model: nn.Module) -> Iterator[None]:
    """Puts each module back into train or eval mode on exit."""
    put_back = present_modes(model)
    try:
        yield
    finally:
        put_back()


@contextmanager
def kept_buffers(model: nn.Module) -> Iterator[None]:
    """Puts buffers and their values back on exit, as the running statistics that a pass in train mode updates."""
    buffers = [(m, name, b, b.clone()) for m in model.modules() for name, b in m.named_buffers(recurse=False)]
    try:
        yield
    finally:
        with torch.no_grad():
            for module, name, buffer, values in buffers:
                setattr(module, name, buffer.copy_(values))
