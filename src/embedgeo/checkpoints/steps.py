"""Steps in the names of checkpoints, and which of them to take."""

import math
import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from embedgeo.results.wording import listed

_STEP = re.compile(
    r"(?<![a-z])(?:(?:global[_-]?)?steps?|iter(?:ation)?s?|checkpoint|ckpt)[-_=]?"
    r"(?P<number>\d+(?:\.\d+)?)(?P<unit>[km]?)(?![a-z0-9])",
    re.IGNORECASE,
)
_TOKENS = re.compile(r"[-_](?:tokens?[-_]?)?(?P<number>\d+(?:\.\d+)?)(?P<unit>[mbt])t?(?![a-z0-9])", re.IGNORECASE)
_EPOCH = re.compile(r"epoch[-_=]?\d+[-_]?", re.IGNORECASE)  # Lightning's file names count both
_LIKE_STEP = re.compile(
    r"(?<![a-z])(?:steps?|iter(?:ation)?s?|checkpoint|ckpt|epoch)[^a-z\d]{0,3}\d|^\d+$", re.IGNORECASE
)
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}

Steps = str | int | Sequence[int]
"""``"all"``, ``"log"``, ``"final"``, or the steps themselves: a number, ``"0,1,2,512"`` or a list."""


class Position(NamedTuple):
    """Where in its training run a checkpoint is.

    Attributes:
        step: optimizer steps taken, or the number of the checkpoint if its publisher counts these instead.
        tokens: tokens seen, if the name contains them.
        series: the name without both, which checkpoints of one training run have in common.
    """

    step: int
    tokens: int | None
    series: str


def parse_position(name: str) -> Position | None:
    """Step and tokens seen in the name of a revision, repository, folder or file; None if there is no step in it.

    >>> parse_position("stage1-step1000-tokens5B")
    Position(step=1000, tokens=5000000000, series='stage1-step')
    >>> parse_position("TinyLlama-1.1B-intermediate-step-1431k-3T")[:2]
    (1431000, 3000000000000)
    >>> parse_position("main") is None
    True
    """
    matches = list(_STEP.finditer(name))
    if not matches:
        return None
    match = max(matches, key=lambda m: ("step" in m[0].lower(), m.start()))
    before, after = name[: match.start("number")], name[match.end() :]
    tokens = _TOKENS.search(after)
    if tokens is not None:
        after = after[: tokens.start()] + after[tokens.end() :]
    series = _EPOCH.sub("", before) + after
    return Position(_amount(match), None if tokens is None else _amount(tokens), series)


def looks_like_step(name: str) -> bool:
    """Whether a name may be meant to name a step, though `parse_position` reads none in it.

    >>> [looks_like_step(name) for name in ("my step 5", "epoch3", "1000", "v1.0", "stepwise", "main")]
    [True, True, True, False, False, False]
    """
    return parse_position(name) is None and _LIKE_STEP.search(name) is not None


def name_overlooked(model: str, names: Iterable[str]) -> None:
    """Warn of names that look like steps and are none, in one warning."""
    overlooked = sorted(name for name in names if looks_like_step(name))
    if overlooked:
        warnings.warn(
            f"{model}: left out {listed([repr(name) for name in overlooked])}, in which no step is read. Names with a "
            "step are such as step1000, checkpoint-1000 or epoch=1-step=1000; rename these to have them measured.",
            stacklevel=2,
        )


def _amount(match: re.Match[str]) -> int:
    return round(float(match["number"]) * _UNITS[match["unit"].lower()]) if match["unit"] else int(match["number"])


def select_steps(existing: Iterable[int], steps: Steps) -> set[int]:
    """Select steps among those that exist.

    Args:
        existing: steps of the checkpoints that exist.
        steps: ``"all"``; ``"log"`` for the first, the last, and the nearest one to each power of two; ``"final"``
            for all, which are then the final ones; or the steps.

    Raises:
        ValueError: anything else, or a step without a checkpoint.

    >>> sorted(select_steps(range(0, 5000, 1000), "log"))
    [0, 1000, 2000, 4000]
    """
    available = sorted(set(existing))
    if steps in ("all", "final"):
        return set(available)
    if steps == "log":
        return _log_spaced(available)
    wanted = _numbers(steps)
    unknown = sorted(wanted - set(available))
    if unknown:
        near = sorted({_nearest(available, step) for step in unknown}) if available else []
        raise ValueError(
            f"steps must name steps of which there is a checkpoint; got {listed(unknown)}. "
            f"{f'The nearest are {listed(near)}' if near else 'There are none'}; steps=all takes all {len(available)}."
        )
    return wanted


def _numbers(steps: Steps) -> set[int]:
    parts = steps.split(",") if isinstance(steps, str) else [steps] if isinstance(steps, int) else list(steps)
    try:
        numbers = {int(part) for part in parts}
    except (TypeError, ValueError):
        numbers = set()
    if not numbers:
        raise ValueError(f'steps must be "all", "log", "final", or steps such as 0,1,2,512; got {steps!r}.')
    return numbers


def _log_spaced(available: Sequence[int]) -> set[int]:
    positive = [step for step in available if step > 0]
    if not positive:
        return set(available)
    powers = [2**k for k in range(positive[-1].bit_length())]
    nearest = {_nearest(positive, power, scale=math.log) for power in powers}
    return {available[0], *nearest, available[-1]}


def _nearest(available: Sequence[int], step: int, scale: Callable[[int], float] = float) -> int:
    return min(available, key=lambda candidate: abs(scale(candidate) - scale(step)))
