"""What this machine can do at best: a read of memory, and a product."""

import os
import platform
import time
from collections.abc import Callable
from functools import cache

import lightning
import torch

import embedgeo


def describe_machine() -> dict[str, str]:
    return {
        "embedgeo": embedgeo.__version__,
        "torch": torch.__version__,
        "lightning": lightning.__version__,
        "processor": platform.processor() or platform.machine(),
        "processors": str(os.cpu_count()),
        "threads": str(torch.get_num_threads()),
    }


@cache
def bytes_a_second(size: int = 2**28) -> float:
    """Of a read of memory that is in no cache."""
    x = torch.zeros(size // 4)
    return size / shortest(x.sum)


@cache
def products_a_second(dtype: torch.dtype, n: int = 2048, d: int = 1024) -> float:
    """Multiplications, each with its addition, of a product of two matrices."""
    x = torch.randn(n, d).to(dtype)
    return n * n * d / shortest(lambda: x @ x.T)


def floors(n: int, d: int, products: int) -> dict[str, float]:
    """Seconds of one read of n rows of width d in float32, and of so many multiplications, if there
    are any.
    """
    read = {"one read of the rows": n * d * 4 / bytes_a_second()}
    if not products:
        return read
    return read | {
        "one product in float32": products / products_a_second(torch.float32),
        "one product in bfloat16": products / products_a_second(torch.bfloat16),
    }


def shortest(run: Callable[[], object], rounds: int = 7) -> float:
    seconds = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:])
