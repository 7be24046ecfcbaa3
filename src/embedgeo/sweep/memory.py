"""Memory that a checkpoint leaves behind."""

import ctypes
import sys
from contextlib import suppress


def release_memory() -> None:
    """Give freed memory back to the system, where the C library is glibc, which keeps what lies between what is held.

    A table of token types that grows from batch to batch leaves such holes, as do the weights of a checkpoint: of a
    70-million-weight model some 200 MB, which the next checkpoint then has on top of its own.
    """
    if sys.platform.startswith("linux"):
        with suppress(OSError, AttributeError):  # another C library
            ctypes.CDLL(None).malloc_trim(0)
