"""At which optimizer steps to measure."""

from collections.abc import Sequence
from itertools import pairwise


def log_spaced_steps(last: int = 512) -> tuple[int, ...]:
    """0 and the powers of two up to ``last``: the early steps at which Pythia was saved.

    >>> log_spaced_steps(10)
    (0, 1, 2, 4, 8)
    """
    return (0, *(2**k for k in range(last.bit_length()) if 2**k <= last))


class Schedule:
    """The steps 0, n, 2n … and some extra ones, each with a window of steps that are measured together.

    Args:
        every_n_steps: n.
        extra_steps: measured too.
        window: how many steps, from the measured one on, make one measurement.

    Raises:
        ValueError: an argument outside its range, or a window that reaches into the next measured step.

    >>> schedule = Schedule(100, extra_steps=(1, 2))
    >>> [step for step in range(300) if step in schedule]
    [0, 1, 2, 100, 200]
    """

    def __init__(self, every_n_steps: int, extra_steps: Sequence[int] = (), window: int = 1) -> None:
        extra = [("extra_steps", step, 0) for step in extra_steps]
        for name, value, least in (("every_n_steps", every_n_steps, 1), ("window", window, 1), *extra):
            if value < least:
                raise ValueError(f"{name} must be at least {least}; got {value}.")
        self.every_n_steps = every_n_steps
        self.extra_steps = frozenset(extra_steps)
        self.window = window
        gap = self._least_gap()
        if window > gap:
            raise ValueError(f"window must not reach into the next measured step, {gap} steps on; got {window}.")

    def __contains__(self, step: int) -> bool:
        return self.reached(step - 1, step)

    def reached(self, before: int, step: int) -> bool:
        """Whether a step to measure lies after ``before`` and not after ``step``.

        >>> Schedule(5).reached(before=4, step=6)  # two optimizers: steps come in twos
        True
        """
        return step // self.every_n_steps > before // self.every_n_steps or any(
            before < extra <= step for extra in self.extra_steps
        )

    def _least_gap(self) -> int:
        """The shortest distance between two measured steps."""
        around = {step // self.every_n_steps * self.every_n_steps for step in self.extra_steps}
        regular = {0, self.every_n_steps, *around, *(step + self.every_n_steps for step in around)}
        return min(b - a for a, b in pairwise(sorted(regular | self.extra_steps)))
