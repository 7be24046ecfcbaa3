"""Clocks that wait for the GPU, and what the CPU waits for; see `benchmarks.gpu`."""

import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")


def sync() -> None:
    if GPU:
        torch.cuda.synchronize()


def seconds(run: Callable[[], object]) -> float:
    sync()
    start = time.perf_counter()
    run()
    sync()
    return time.perf_counter() - start


def rounds(sides: dict[str, Callable[[], object]], num_rounds: int) -> dict[str, list[float]]:
    """Seconds of sides that take turns, after a round that does not count."""
    times = [{name: seconds(side) for name, side in sides.items()} for _ in range(num_rounds + 1)]
    return {name: [each[name] for each in times[1:]] for name in sides}


def median_ms(run: Callable[[], object], num_rounds: int) -> float:
    return 1e3 * float(np.median(rounds({"": run}, num_rounds)[""]))


def spread(values: Any) -> dict[str, float]:
    return {
        "median": float(np.median(values)),
        "low": float(np.min(values)),
        "high": float(np.max(values)),
    }


def peak_mb(run: Callable[[], object]) -> float | None:
    """Most memory that a run takes beyond what is held before it."""
    if not GPU:
        return None
    sync()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    sync()
    return (torch.cuda.max_memory_allocated() - before) / 1e6


@contextmanager
def waits() -> Iterator[Counter[str]]:
    """Counts, by file and line, the operations whose results the CPU waits for."""
    lines: Counter[str] = Counter()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if GPU:
            torch.cuda.set_sync_debug_mode("warn")
        try:
            yield lines
        finally:
            if GPU:
                torch.cuda.set_sync_debug_mode("default")
    places = (
        f"{Path(w.filename).name}:{w.lineno}"
        for w in caught
        if "synchronizing CUDA" in str(w.message)
    )
    lines.update(places)
