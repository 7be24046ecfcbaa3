"""Memory that a process keeps although nothing is in it."""

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_MAPPED_BYTES = 4 << 20
"""Blocks of this size and more are given back one by one: hidden states and tables of token types, no blocks of rows
that are worked on in the processor's cache."""

_FREE_BYTES = 32 << 20
"""The free end of the rest is given back where it is larger, and kept for the next block where it is not."""

_USUAL_BYTES = 32 << 20, 64 << 20
"""Both as glibc itself raises them, up to here, as large blocks are freed."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # as in malloc.h


@contextmanager
def large_blocks_mapped() -> Iterator[None]:
    """Have the C library map each large block on its own, where it is glibc: it is given back when it is freed.

    Otherwise glibc puts blocks of up to 32 MB one after the other. The states that metrics keep from batch to batch
    then lie between the hidden states of a forward pass, and what is freed between them does not fit those to come:
    with Pythia-70m's shape some 250 MB. It holds for the process and changes no number; as memory that has just been
    mapped is slower at first, what is trained in the same process afterwards has none of it. Such options in the
    environment are kept.
    """
    given = [f"{name}={value}" for name, value in os.environ.items() if name.startswith(("MALLOC_", "GLIBC_"))]
    is_ours = "threshold" not in "".join(given).lower()
    try:
        if is_ours:
            _set_thresholds(_MAPPED_BYTES, _FREE_BYTES)
        yield
    finally:
        if is_ours:
            _set_thresholds(*_USUAL_BYTES)


def _set_thresholds(mapped: int, free: int) -> None:
    _call_glibc("mallopt", _M_TRIM_THRESHOLD, free)
    _call_glibc("mallopt", _M_MMAP_THRESHOLD, mapped)


def release_memory() -> None:
    """Give back what has been freed between smaller blocks that are held, where the C library is glibc."""
    _call_glibc("malloc_trim", 0)


def _call_glibc(function: str, *arguments: int) -> None:
    """Call a function of the C library, or do nothing where it has none of this name."""
    if sys.platform.startswith("linux"):
        with suppress(OSError, AttributeError):
            getattr(ctypes.CDLL(None), function)(*arguments)
