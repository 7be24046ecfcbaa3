"""What a checkpoint leaves behind in memory."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from embedgeo.sweep import memory
from embedgeo.sweep.measure import measure
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
from embedgeo.sweep.memory import large_blocks_mapped

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

def freed():
    passing, held = zip(*((bytearray(8 << 20), bytearray(100_000)) for _ in range(12)))
    before = resident()
    del passing
    return before - resident()

bytearray(30 << 20)  # from now on glibc has blocks of up to this size next to each other
with large_blocks_mapped():
    print(freed())
print(freed())
"""


def freed_within_and_after(**environment):
    done = subprocess.run(
        [sys.executable, "-c", IN_TURNS],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )
    return map(int, done.stdout.split())


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc, and glibc")
def test_a_large_block_goes_back_to_the_system_when_it_is_freed_whatever_is_held_beside_it():
    """While a sweep measures: afterwards memory is faster that need not be mapped."""
    within, after = freed_within_and_after()
    assert within > 90e6
    assert after < 30e6


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc, and glibc")
@pytest.mark.parametrize(
    ("name", "value"),
    [("MALLOC_MMAP_THRESHOLD_", "33554432"), ("GLIBC_TUNABLES", "glibc.malloc.mmap_threshold=33554432")],
)
def test_options_of_the_environment_are_kept(name, value):
    within, after = freed_within_and_after(**{name: value})
    assert max(within, after) < 30e6


def test_it_is_only_so_while_a_checkpoint_is_measured(monkeypatch):
    """Also where that fails."""
    thresholds = []
    monkeypatch.setattr(memory, "_set_thresholds", lambda *both: thresholds.append(both))
    with pytest.raises(AttributeError):
        measure(None, None, None, None, None)
    assert thresholds == [(memory._MAPPED_BYTES, memory._FREE_BYTES), memory._USUAL_BYTES]
