"""False alarms and power of `embedgeo.GeometryAlarm`, by simulation.

    python -m benchmarks.alarms [--runs 2000] [--law "AR 0.9, t with 3"] [--processes 2]

Runs of 200 measurements of 4 metrics at 8 blocks, and their means over blocks, are autoregressions
whose standard deviation is 1 or falls with a learning rate, about nothing or about smooth trends.
For each law of runs the table has the share of them with any false alarm, and the share of jumps of
5 standard deviations, after 50 values, that are found at the first or second measurement: of one
metric at all blocks, and at a single one. Beside the latter stands the share that the best test
finds which knows the law, the scale and the time of the jump, at the same rate of false alarms.
"""

import argparse
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from embedgeo.results.departures import PAST, WINDOW, Forecasts, departures, forecasts
from embedgeo.training.alarm import MEASUREMENTS, alarm_levels

Array = NDArray[np.float64]
NUM_METRICS, NUM_BLOCKS = 4, 8
WARM_UP = 40
JUMP, BEFORE = 5.0, 50
AT_ONCE = 20  # runs


class Law(NamedTuple):
    """Law of the simulated runs."""

    correlation: float = 0.0  # of one value with the next
    degrees: float = np.inf  # of freedom, of Student's t
    together: float = 0.0  # share of the variance that the blocks of a metric have in common
    # degrees of freedom of the first metric, where they are not those of the others
    first: float | None = None
    trend: str = "none"
    falls: bool = False  # the standard deviation, to a twentieth, as a cosine

    def __str__(self) -> str:
        tails = "normal" if np.isinf(self.degrees) else f"t with {self.degrees:g}"
        parts = [f"AR {self.correlation:g}", tails]
        parts += [f"a metric t with {self.first:g}"] if self.first else []
        parts += [f"{self.together:.0%} in common"] if self.together else []
        parts += [f"trend: {self.trend}"] if self.trend != "none" else []
        parts += ["falling"] if self.falls else []
        return ", ".join(parts)


LAWS = (
    *(Law(correlation) for correlation in (0.0, 0.5, 0.9)),
    *(Law(correlation, together=0.9) for correlation in (0.0, 0.5, 0.9)),
    *(Law(correlation, degrees=3) for correlation in (0.0, 0.5, 0.9)),
    Law(0.5, degrees=5, together=0.9),
    Law(0.9, degrees=3, together=0.9),
    Law(0.5, first=3),
    *(Law(correlation, together=0.9, first=3) for correlation in (0.0, 0.5)),
    *(Law(0.5, trend=trend) for trend in ("saturating", "hump", "linear")),
    Law(0.5, falls=True),
    Law(0.9, trend="saturating", falls=True),
)


def simulated(law: Law, runs: int, length: int, seed: int) -> Array:
    """Runs of the law, shape (runs, length, metrics × blocks)."""
    random = np.random.default_rng(seed)

    def of_law(degrees: float, *shape: int) -> Array:
        if np.isinf(degrees):
            return random.standard_normal(shape)
        return random.standard_t(degrees, shape) * np.sqrt((degrees - 2) / degrees)

    def drawn(*blocks: int) -> Array:
        found = of_law(law.degrees, runs, length, NUM_METRICS, *blocks)
        if law.first is not None:
            found[:, :, 0] = of_law(law.first, runs, length, *blocks)
        return found

    noise = np.sqrt(1 - law.together) * drawn(NUM_BLOCKS)
    noise += np.sqrt(law.together) * drawn()[..., None]
    noise = noise.reshape(runs, length, -1)
    x = noise.copy()
    for t in range(1, length):
        x[:, t] = law.correlation * x[:, t - 1] + np.sqrt(1 - law.correlation**2) * noise[:, t]
    time = np.arange(length)[:, None]
    if law.falls:
        x *= 0.05 + 0.95 * (1 + np.cos(np.pi * time / MEASUREMENTS)) / 2
    shape = runs, 1, NUM_METRICS * NUM_BLOCKS
    size = random.uniform(-30, 30, shape)
    match law.trend:
        case "saturating":
            x += size * (1 - np.exp(-time / random.uniform(20, 120, shape)))
        case "hump":
            x += size * np.exp(
                -(((time - random.uniform(20, 180, shape)) / random.uniform(30, 60, shape)) ** 2)
                / 2
            )
        case "linear":
            x += size * time / MEASUREMENTS
    return x


def with_means(x: Array) -> Array:
    """Values of the blocks, then the means over blocks of each metric."""
    return np.concatenate((x, x.reshape(*x.shape[:2], NUM_METRICS, NUM_BLOCKS).mean(-1)), -1)


def raises(found: Forecasts, stop: int) -> NDArray[np.bool_]:
    """Tell for each of some runs and numbers if there is an alarm at the last of ``stop``
    measurements.
    """
    is_mean = np.arange(NUM_METRICS * (NUM_BLOCKS + 1)) >= NUM_METRICS * NUM_BLOCKS
    seen = Forecasts(*(each[..., max(0, stop - WINDOW - PAST - 2) : stop, :] for each in found))
    metrics = np.concatenate(
        (np.repeat(np.arange(NUM_METRICS), NUM_BLOCKS), np.arange(NUM_METRICS))
    )
    return departures(seen, metrics).p < alarm_levels(is_mean, 0.05)


def false_alarms(law: Law, seed: int) -> int:
    """Runs, of those of this seed, with an alarm."""
    found = forecasts(with_means(simulated(law, AT_ONCE, MEASUREMENTS, seed)))
    raised = np.zeros(AT_ONCE, dtype=bool)
    for stop in range(WARM_UP + 2, MEASUREMENTS + 1):
        raised |= raises(found, stop).any(-1)
    return int(raised.sum())


def found_jumps(law: Law, seed: int, blocks: slice) -> int:
    """Runs, of those of this seed, in which a jump at some blocks of the first metric is found."""
    x = simulated(law, AT_ONCE, BEFORE + 2, seed)
    x[:, BEFORE:, blocks] += JUMP
    found = forecasts(with_means(x))
    return int((raises(found, BEFORE + 1).any(-1) | raises(found, BEFORE + 2).any(-1)).sum())


def best_power(law: Law) -> float:
    """Share of jumps at one block that a test finds which knows the law, the scale and the time:
    Neyman & Pearson.
    """
    level = 0.05 / MEASUREMENTS / NUM_METRICS / NUM_BLOCKS
    scale = np.sqrt(1 - law.correlation**2)
    means = np.array([JUMP, JUMP * (1 - law.correlation)]) / scale
    if np.isinf(law.degrees):
        return float(stats.norm.sf(stats.norm.isf(level / 2) - np.linalg.norm(means)))
    random = np.random.default_rng(0)
    unit = stats.t(law.degrees, scale=np.sqrt((law.degrees - 2) / law.degrees))
    errors = unit.rvs((2_000_000, 2), random_state=random)
    # of likelihoods, under none
    ratio = unit.logpdf(errors - means).sum(-1) - unit.logpdf(errors).sum(-1)
    jumped = unit.logpdf(errors).sum(-1) - unit.logpdf(errors + means).sum(-1)
    return float((jumped > np.quantile(ratio, 1 - level / 2)).mean())


def main(runs: int, only: str | None, processes: int) -> None:
    """Print the table, of all laws or of one."""
    laws = [each for each in LAWS if only in (None, str(each))]
    repeats = max(1, -(-runs // AT_ONCE // len(laws)))
    each = repeats * AT_ONCE
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        columns = f"{'false alarms':>12} {'jump, all blocks':>17} {'one block':>10} {'best':>6}"
        print(f"{'runs of 200 measurements':<46} {columns}")
        total = 0
        for law in laws:
            false = sum(pool.map(partial(false_alarms, law), range(repeats)))
            seeds = range(1000, 1000 + repeats)
            every = sum(pool.map(partial(found_jumps, law, blocks=slice(0, NUM_BLOCKS)), seeds))
            one = sum(pool.map(partial(found_jumps, law, blocks=slice(0, 1)), seeds))
            total += false
            is_plain = not (law.falls or law.first or law.trend != "none")
            best = f"{best_power(law):.0%}" if is_plain else ""
            print(
                f"{law!s:<46} {false / each:>12.1%} {every / each:>17.0%} {one / each:>10.0%} "
                f"{best:>6}",
                flush=True,
            )
    print(f"{f'all {each * len(laws)} runs':<46} {total / each / len(laws):>12.1%}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=2000)
    parser.add_argument(
        "--law",
        dest="only",
        choices=[*map(str, LAWS)],
        metavar="NAME",
        help="as the table has it; default: all",
    )
    parser.add_argument("--processes", type=int, default=2)
    main(**vars(parser.parse_args()))
