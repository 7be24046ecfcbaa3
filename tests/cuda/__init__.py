"""On a GPU the numbers are the CPU's, and training is untouched; where there is none, on a
pretended one.

What needs kernels, streams or memory of a real one is skipped there.
"""

import os
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from tests.pretended import COMPILER, Count, pretended

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU with CUDA")

# for deterministic algorithms; read at the first product
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

GPU = torch.device("cuda", 0)


@contextmanager
def a_gpu() -> Iterator[Count | None]:
    """Context with a GPU, or what is asked of a pretended one; a test is skipped where there is
    neither.
    """
    if torch.cuda.is_available():
        yield None
    elif COMPILER is None:
        pytest.skip("needs a GPU with CUDA, or g++ to pretend one")
    else:
        with pretended() as count:
            yield count


@contextmanager
def deterministic() -> Iterator[None]:
    """Context in which the same work on the GPU gives the same bits, and what cannot is refused."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


@contextmanager
def waits(pretended_gpu: Count | None = None) -> Iterator[Counter[str]]:
    """Context that counts, by file and line, the operations for whose results the CPU waits for the
    GPU.
    """
    lines: Counter[str] = Counter()
    if pretended_gpu is not None:
        pretended_gpu.clear()
        yield lines
        lines.update(pretended_gpu.waits)
        return
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield lines
        finally:
            torch.cuda.set_sync_debug_mode("default")
    lines.update(
        f"{w.filename}:{w.lineno}"
        for w in caught
        if "synchronizing CUDA operation" in str(w.message)
    )
