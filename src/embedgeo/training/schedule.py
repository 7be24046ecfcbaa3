"""The optimizer steps at which to measure."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any
from weakref import WeakMethod, finalize

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from embedgeo.formatting import listed


def log_spaced_steps(last: int = 512) -> tuple[int, ...]:
    """0 and the powers of two up to ``last``: the early steps at which Pythia was saved.

    >>> log_spaced_steps(10)
    (0, 1, 2, 4, 8)
    """
    return (0, *(2**k for k in range(last.bit_length()) if 2**k <= last))


class Schedule:
    """The steps 0, n, 2n … and extra steps; at each of them a window begins, of steps that are measured together.

    Args:
        every_n_steps: n.
        extra_steps: further steps.
        window: how many consecutive steps make one measurement.

    Raises:
        TypeError: an argument is not an integer, or ``extra_steps`` are not several.
        ValueError: an argument is outside its range, or the window reaches into the next scheduled step.

    >>> schedule = Schedule(100, extra_steps=(1, 2))
    >>> [step for step in range(300) if schedule.is_due(step - 1, step)]
    [0, 1, 2, 100, 200]
    """

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
        """The steps, for a message.

        >>> str(Schedule(100)), str(Schedule(100, extra_steps=(0, 1, 2, 100)))
        ('every 100 steps', 'every 100 steps and at 1, 2')
        """
        extra = sorted(step for step in self.extra_steps if step % self.every_n_steps)
        return f"every {self.every_n_steps} steps" + (f" and at {listed(extra)}" if extra else "")

    def is_due(self, last_step: int, step: int) -> bool:
        """Whether a scheduled step is after ``last_step`` and not after ``step``.

        >>> Schedule(5).is_due(last_step=4, step=6)  # two optimizers take two steps for each batch
        True
        """
        return step // self.every_n_steps > last_step // self.every_n_steps or any(
            last_step < extra <= step for extra in self.extra_steps
        )

    def next_after(self, step: int) -> int:
        """The first scheduled step after this one.

        >>> schedule = Schedule(100, extra_steps=(1, 2))
        >>> schedule.next_after(1), schedule.next_after(2)
        (2, 100)
        """
        regular = (step // self.every_n_steps + 1) * self.every_n_steps
        return min([regular, *(extra for extra in self.extra_steps if extra > step)])


class Place:
    """How far a run has come in its schedule: what is saved in its checkpoints.

    Attributes:
        last_step: scheduled steps up to this one are done; None before the start.
        window_start: the step at which the open window began; None if there is none.

    >>> place = Place(Schedule(5))
    >>> place.start(step=4)
    >>> [place.take_due(step) for step in (4, 5, 5)]
    [False, True, False]
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.last_step: int | None = None
        self.window_start: int | None = None

    def start(self, step: int) -> None:
        """Begin at a step, or go on at it from where a checkpoint was saved."""
        if self.last_step is None:
            self.last_step = step - 1
        if self.is_window_over(step):
            self.window_start = None

    def take_due(self, step: int) -> bool:
        """Whether there is a scheduled step up to this one that has not been taken yet."""
        assert self.last_step is not None
        last, self.last_step = self.last_step, step
        return self.schedule.is_due(last, step)

    def is_window_over(self, step: int) -> bool:
        """Whether there is a window that does not reach this step."""
        return self.window_start is not None and step >= self.window_start + self.schedule.window

    def close_window(self) -> int:
        """Close the open window; the step at which it began."""
        step, self.window_start = self.window_start, None
        assert step is not None
        return step


class OptimizerSteps:
    """Calls a function after each step of an optimizer with parameters of a model, while it watches.

    Only torch's optimizers, and their subclasses, are seen. A hook on all of them is there meanwhile, which does not
    keep this object alive.

    Args:
        model: the model.
        on_step: called after a step.
    """

    def __init__(self, model: nn.Module, on_step: Callable[[], None]) -> None:
        self._model = model
        self._on_step = on_step
        self._end: finalize[..., Any] | None = None

    def watch(self) -> None:
        """Begin to watch; does nothing while it does."""
        if self._end is None:
            after = WeakMethod(self._after)

            def hook(*call: Any) -> None:
                if (found := after()) is not None:
                    found(*call)

            self._end = finalize(self, register_optimizer_step_post_hook(hook).remove)

    def ignore(self) -> None:
        """Undo `watch`; not to be called by ``on_step``, because torch goes through the hooks then."""
        end, self._end = self._end, None
        if end is not None:
            end()

    def _after(self, optimizer: Optimizer, *call: object) -> None:
        mine = set(self._model.parameters())
        if any(parameter in mine for group in optimizer.param_groups for parameter in group["params"]):
            self._on_step()
