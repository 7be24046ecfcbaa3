"""False alarms and power of the alarm in `examples/alarm.py`, by simulation.

    python -m research.alarms [--runs 60] [--series 100] [--law walk]

Runs of 200 measurements of some numbers, half of whose variance they have in common. For each law
of runs the table has the share of them with any alarm, and the share of those with a jump of all
numbers by 7 standard deviations of their changes between measurements, after 100 of them, that is
told at its second measurement.
"""

import argparse
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from examples.alarm import Alarm

Array = NDArray[np.float64]
LENGTH, JUMP, AT = 200, 10.0, 100


def in_common(draw: Callable[..., Array], series: int) -> Array:
    """Numbers of a law, shape (200, series), half of whose variance is in common."""
    return (draw(size=(LENGTH, 1)) + draw(size=(LENGTH, series))) / 2**0.5


def simulated(law: str, series: int, seed: int) -> Array:
    """A sound run of the law, shape (200, series)."""
    random = np.random.default_rng(seed)
    time = np.arange(LENGTH)[:, None]
    if law in ("t with 3", "walk, t with 3"):
        noise = in_common(partial(random.standard_t, 3), series)
        return noise if law == "t with 3" else noise.cumsum(0)
    noise = in_common(random.standard_normal, series)
    if law == "AR 0.9":
        values = np.zeros_like(noise)
        for step in range(1, LENGTH):
            values[step] = 0.9 * values[step - 1] + noise[step]
        return values
    return {
        "normal": noise,
        "walk": noise.cumsum(0),
        "trend": noise + 0.2 * time,
        "settling": 10 * np.exp(-time / 40) * (1 + 0.05 * noise) + 0.1 * noise,
        "shrinking": noise * np.exp(-time / 60),
    }[law]


LAWS = ("normal", "AR 0.9", "walk", "trend", "settling", "shrinking", "t with 3", "walk, t with 3")


def alarm_steps(values: Array) -> list[int]:
    """The steps at which a run alarms."""
    alarm = Alarm(lambda text: None, metrics=["x"])
    for step, row in enumerate(values.tolist()):
        alarm(
            step,
            [
                {"layer": f"block.{i:03d}", "metric": "x", "value": value}
                for i, value in enumerate(row)
            ],
        )
    return [each.step for each in alarm.departures]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=60)
    parser.add_argument("--series", type=int, default=100)
    parser.add_argument("--law", choices=LAWS)
    asked = parser.parse_args(argv)
    print(f"{'law':16} {'false alarms':>12} {'jump found':>10}")
    for law in LAWS if asked.law is None else (asked.law,):
        false, found = 0, 0
        for seed in range(asked.runs):
            values = simulated(law, asked.series, seed)
            false += bool(alarm_steps(values))
            values[AT:] += JUMP * np.diff(values[:AT], axis=0).std() / 2**0.5
            found += AT + 1 in alarm_steps(values)
        print(f"{law:16} {false / asked.runs:12.1%} {found / asked.runs:10.1%}", flush=True)


if __name__ == "__main__":
    main()
