"""What a checkpoint leaves behind in memory."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from embedgeo.sweep.memory import release_memory


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


IN_TURNS = """
from pathlib import Path
from embedgeo.sweep.memory import map_large_blocks

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

bytearray(30 << 20)  # from now on glibc has blocks of up to this size next to each other
map_large_blocks()
passing, held = zip(*((bytearray(8 << 20), bytearray(100_000)) for _ in range(12)))
before = resident()
del passing
print(before - resident())
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc, and glibc")
def test_a_large_block_goes_back_to_the_system_when_it_is_freed_whatever_is_held_beside_it():
    done = subprocess.run([sys.executable, "-c", IN_TURNS], check=True, stdout=subprocess.PIPE, text=True)
    assert int(done.stdout) > 90e6
