"""Sides that take turns, so that drift of the machine and other load hit all of them, and what came
of it.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from benchmarks.machine import describe_machine
from benchmarks.workers import mean_seconds

Side = Callable[[], float]
"""Runs once and says how many seconds that took."""


def clocked(run: Callable[[], object]) -> Side:
    return partial(mean_seconds, run)


def take_turns(
    sides: Mapping[str, Side], rounds: int, pause: float = 0.3
) -> dict[str, list[float]]:
    """Seconds of each side, one number a round, after one round that does not count.

    Every other round is in reverse order. The pause lets the threads of the other sides' libraries
    stop spinning, so that nobody pays for them.
    """
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for i in range(rounds + 1):
        for name in sides if i % 2 else reversed([*sides]):
            time.sleep(pause)
            seconds[name].append(sides[name]())
    return {name: times[1:] for name, times in seconds.items()}


class Record(Protocol):
    """A line of the output: as text, and its fields as JSON."""

    def as_dict(self) -> dict[str, Any]: ...


@dataclass
class Line:
    """Sides that took turns, and the ratio of two of them.

    Args:
        name: what ran, with its size.
        seconds: of each side, one number a round.
        over: the side whose seconds are divided, round by round; default: the fastest peer.
        under: by those of this one.
        at_least: what the median ratio must be at least, if anything.
        at_most: at most.
        floors: seconds that nothing of this kind can go below, by what they are of.
    """

    name: str
    seconds: dict[str, list[float]]
    over: str = ""
    under: str = "embedgeo"
    at_least: float | None = None
    at_most: float | None = None
    floors: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        peers = {
            side: np.median(times) for side, times in self.seconds.items() if side != self.under
        }
        self.over = self.over or min(peers, key=lambda side: peers[side])

    @property
    def ratios(self) -> list[float]:
        return [
            a / b for a, b in zip(self.seconds[self.over], self.seconds[self.under], strict=True)
        ]

    def as_dict(self) -> dict[str, Any]:
        ratio = spread(self.ratios)
        low, high = self.at_least or 0, self.at_most or float("inf")
        return {
            "kind": "line",
            "name": self.name,
            "seconds": {side: spread(times) for side, times in self.seconds.items()},
            "over": self.over,
            "under": self.under,
            "ratio": ratio,
            "at_least": self.at_least,
            "at_most": self.at_most,
            "holds": low <= ratio["median"] <= high,
            "floors": self.floors,
        }

    def __str__(self) -> str:
        ratio = spread(self.ratios)
        goal = "" if self.at_least is None else f", at least {self.at_least:g}"
        goal += "" if self.at_most is None else f", at most {self.at_most:g}"
        times = {side: spread(values) for side, values in self.seconds.items()}
        sides = [f"{side} {span(values, duration)}" for side, values in times.items()]
        floors = [f"{name} {duration(value)}" for name, value in self.floors.items()]
        floor = f"\n    floors: {', '.join(floors)}" if floors else ""
        title = f"{self.name}\n    {self.over} ÷ {self.under}: {span(ratio, '{:.3g}'.format)}{goal}"
        return f"{title}\n    {', '.join(sides)}{floor}"


@dataclass
class Slope:
    """How seconds grow with a size: the exponent is the slope of their logarithms, by least
    squares.
    """

    name: str
    sizes: list[int]
    seconds: list[float]

    def as_dict(self) -> dict[str, Any]:
        return {"kind": "slope", **asdict(self), "exponent": self.exponent}

    @property
    def exponent(self) -> float:
        return float(np.polyfit(np.log(self.sizes), np.log(self.seconds), 1)[0])

    def __str__(self) -> str:
        times = ", ".join(
            f"{size:,}: {duration(s)}" for size, s in zip(self.sizes, self.seconds, strict=True)
        )
        return f"{self.name}: exponent {self.exponent:.2f} ({times})"


def spread(values: Iterable[float]) -> dict[str, Any]:
    """Median, quartiles, extremes and number of some values."""
    found = [*values]
    low, median, high = np.quantile(found, (0.25, 0.5, 0.75)).tolist()
    return {
        "median": median,
        "low": low,
        "high": high,
        "min": min(found),
        "max": max(found),
        "n": len(found),
    }


def span(values: Mapping[str, Any], text: Callable[[float], str]) -> str:
    return f"{text(values['median'])} ({text(values['low'])} to {text(values['high'])})"


def duration(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def arguments_parser(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=_file, help="also write the results into this file")
    return parser


def _file(name: str) -> Path:
    """A file that can be written, as is found out before hours of timing."""
    if not Path(name).parent.is_dir() or Path(name).is_dir():
        raise argparse.ArgumentTypeError(f"must be a file in a folder that exists; got {name!r}")
    return Path(name)


def report(records: Iterable[Record], file: Path | None) -> None:
    """Print records as they come, and write all there are so far into the file after each."""
    machine = describe_machine()
    print("; ".join(f"{key} {value}" for key, value in machine.items()))
    found: list[dict[str, Any]] = []
    for record in records:
        print(f"\n{record}", flush=True)
        found.append(record.as_dict())
        if file is not None:
            file.write_text(json.dumps({"machine": machine, "records": found}, indent=1) + "\n")
