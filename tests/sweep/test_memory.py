"""What a checkpoint leaves behind in memory."""

import sys
from pathlib import Path

import pytest
import torch

from embedgeo.sweep.measure import release_memory


def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc, and glibc")
def test_memory_between_what_is_held_goes_back_to_the_system():
    before = resident()
    held = [torch.ones(12_000) for _ in range(4000)]  # 48 kB each: below what glibc maps on its own
    held = held[::2]
    with_holes = resident()
    release_memory()
    assert with_holes - before > 100e6
    assert resident() < with_holes - 50e6
    assert len(held) == 2000
