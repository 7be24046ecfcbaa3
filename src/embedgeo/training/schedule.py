"""The optimizer steps at which to measure."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from embedgeo.formatting import listed


def log_spaced_steps(last: int = 512) -> tuple[int, ...]:
    """0 and the powers of two up to ``last``: the early steps at which Pythia was saved.

    >>> log_spaced_steps(10)
    (0, 1, 2, 4, 8)
    """
    return (0, *(2**k for k in range(last.bit_length()) if 2**k <= last))


class Schedule:
    """The steps 0, n, 2n … and extra steps; at each of them a window begins, of steps that are measured together."""

    def __init__(self, every_n_steps: int, extra_steps: Sequence[int] = (), window: int = 1) -> None:
        if isinstance(extra_steps, str | int | float):
            raise TypeError(f"extra_steps must be a list of integers; got {extra_steps!r}.")
        extra: list[tuple[str, Any, int]] = [("extra_steps", step, 0) for step in extra_steps]
        for name, value, least in (("every_n_steps", every_n_steps, 1), ("window", window, 1), *extra):
            if isinstance(value, bool) or not hasattr(value, "__index__"):
                raise TypeError(f"{name} must be an integer, a number of optimizer steps; got {value!r}.")
            if value < least:
                raise ValueError(f"{name} must be at least {least}; got {value}.")
        self.every_n_steps = every_n_steps
        self.extra_steps = frozenset(extra_steps)
        self.window = window
        around = {step // every_n_steps * every_n_steps for step in extra_steps}
        regular = {0, every_n_steps, *around, *(step + every_n_steps for step in around)}
        gap = min(b - a for a, b in pairwise(sorted(regular | self.extra_steps)))
        if window > gap:
            raise ValueError(f"window must not reach into the next measured step, {gap} steps on; got {window}.")

    def __str__(self) -> str:
        extra = sorted(step for step in self.extra_steps if step % self.every_n_steps)
        return f"every {self.every_n_steps} steps" + (f" and at {listed(extra)}" if extra else "")

    def next_after(self, step: int) -> int:
        """The first scheduled step after this one."""
        regular = (step // self.every_n_steps + 1) * self.every_n_steps
        return min([regular, *(extra for extra in self.extra_steps if extra > step)])
