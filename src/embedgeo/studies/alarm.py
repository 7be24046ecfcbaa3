"""An alarm for training runs: it tells when a number departs from its own recent values."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
from lightning.pytorch.utilities import rank_zero_info
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from embedgeo.formatting import listed
from embedgeo.functional.distributed import current_rank
from embedgeo.glossary import headlines, term
from embedgeo.layer_names import LEDGER, PARTS, blocks_by_side
from embedgeo.results.records import MEANS, Record

_KEPT = 64  # values of a number that later ones are compared with
_LAG = 5  # values whose median is the forecast of the next two
_ALSO = 3.0  # deviations at which a layer is named beside those that the alarm is for
_EQUAL = 1e-15  # relative size of deviations that are rounding

Series = tuple[str, str]  # metric and layer


@dataclass(frozen=True)
class Alarm:
    """A number that has departed from its own recent values, or is not finite.

    Attributes:
        step: at which it is told.
        since: the first step of the departure.
        metric: key of the metric.
        layers: where, those that are farthest off first; ``"mean"`` is the mean over blocks.
        value: at ``step``, at the first of the layers.
        expected: the median of the five values before ``since``, with the number's usual change.
        deviations: by how many deviations the value is off, with its sign: see `deviations`;
            infinite where the value is not finite.
    """

    step: int
    since: int
    metric: str
    layers: tuple[str, ...]
    value: float
    expected: float
    deviations: float

    def __str__(self) -> str:
        where = "the mean over blocks" if self.layers[0] == "mean" else self.layers[0]
        others = f" (also {listed(self.layers[1:], 4)})" if len(self.layers) > 1 else ""
        name = f"step {self.step}: {term(self.metric).name}"
        if not math.isfinite(self.value):
            return f"{name} is {self.value} at {where}{others}; it was {self.expected:.4g}."
        verb = "rose" if self.deviations > 0 else "fell"
        return (
            f"{name} {verb} at {where}{others}: {self.value:.4g}, where {self.expected:.4g} was "
            f"expected; off by {abs(self.deviations):.1f} deviations since step {self.since}."
        )


def deviations(past: NDArray[np.float64], new: NDArray[np.float64]) -> tuple[float, float]:
    """Tell by how many deviations two new values of a number are off from its past ones.

    A value is compared with the median of the five values before the two. How much values usually
    differ from the median of five earlier ones, the past itself shows: the median of these
    differences is taken off, so that a trend counts as usual, and the deviation is 1.4826 times
    their median absolute deviation, which is the standard deviation of normal numbers.

    Args:
        past: shape (k,), in the order of the steps, k at least 7.
        new: shape (2,), the two values after them.

    Returns:
        The deviations of the value that is less far off, with its sign, 0 where the two are off in
        different directions; and what was expected of the second value.

    >>> off, expected = deviations(np.arange(20.0) % 3, np.array([9.0, 9.0]))
    >>> off > 5, expected
    (True, 1.0)
    """
    medians = np.median(sliding_window_view(past, _LAG), axis=1)
    found = []
    expected = medians[-1]
    for ahead, value in enumerate(new, 1):
        usual = past[_LAG - 1 + ahead :] - medians[:-ahead]
        center = np.median(usual)
        scale = 1.4826 * np.median(np.abs(usual - center))
        expected = medians[-1] + center
        scale = max(scale, _EQUAL * abs(expected))
        found.append((value - expected) / scale if scale > 0 else 0.0)
    first, second = found
    off = math.copysign(min(abs(first), abs(second)), second) if first * second > 0 else 0.0
    return off, float(expected)


class GeometryAlarm:
    """Tells when a number of a run departs from its own recent values: a listener of a monitor.

    A number alarms when its last two values are both off in the same direction by more than
    ``threshold`` deviations: see `deviations`. One level holds for all numbers, and a single
    outlier is no alarm. A number that was finite alarms at once where it is NaN or infinite. What
    has alarmed is then compared with its values from the departure on.

    In simulated sound runs of 200 measurements and 100 numbers, half of whose fluctuation is in
    common, at most one run in twenty alarms, whether the numbers are independent in time, have a
    trend, are correlated or a random walk, settle, or have three degrees of freedom; a random walk
    with such tails alarms in every second run (``python -m benchmarks.alarms``). A step of the
    learning rate is a departure, too: it alarms.

    An alarm is printed, and is in the monitor's history as records of the metric ``alarm_<key>``,
    whose values are the deviations, and NaN where the number is not finite; the report lists and
    draws them. State and
    alarms are part of the monitor's checkpoint, where it has one.

    Args:
        call: called with each `Alarm`, on every rank at the same step: to save a checkpoint, keep
            the batch or stop.
        metrics: keys to watch; default: the headlines.
        layers: names or patterns of the layers to watch; default: blocks and their means.
        threshold: deviations, more than 0.
        warm_up: values of a number before the first two that are compared, 8 or more.

    Raises:
        TypeError: metrics or layers are not lists.
        ValueError: an argument is outside its range.

    Example::

        alarm = GeometryAlarm(lambda alarm: trainer.save_checkpoint(f"alarm-{alarm.step}.ckpt"))
        monitor = GeometryMonitor(every_n_steps=100, probe=loader, listeners=[alarm])
    """

    def __init__(
        self,
        call: Callable[[Alarm], object] | None = None,
        metrics: Sequence[str] | None = None,
        layers: Sequence[str] | None = None,
        threshold: float = 7.0,
        warm_up: int = 40,
    ) -> None:
        if isinstance(metrics, str) or isinstance(layers, str):
            raise TypeError(
                f"metrics and layers must be lists of names; got {metrics!r} and {layers!r}."
            )
        if not threshold > 0:
            raise ValueError(
                f"threshold must be a number of deviations above 0; got {threshold!r}."
            )
        if warm_up < _LAG + 3:
            raise ValueError(f"warm_up must be at least {_LAG + 3} values; got {warm_up!r}.")
        self.call = call
        self.metrics = None if metrics is None else frozenset(metrics)
        self.layers = None if layers is None else tuple(layers)
        self.threshold = threshold
        self.warm_up = warm_up
        self.reset()

    def reset(self) -> None:
        """Forget all values: another run begins."""
        self.alarms: list[Alarm] = []
        self._past: dict[Series, list[tuple[int, float]]] = defaultdict(list)
        self._lost: set[Series] = set()  # that have alarmed for not being finite
        self._last_step: int | None = None

    def state_dict(self) -> dict[str, Any]:
        """The values that later ones are compared with, and the alarms so far."""
        return {
            "past": [
                [*series, [list(pair) for pair in past]] for series, past in self._past.items()
            ],
            "last_step": self._last_step,
            "lost": [list(series) for series in self._lost],
            "alarms": [asdict(alarm) for alarm in self.alarms],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from values of `state_dict`."""
        self.reset()
        for metric, layer, past in state["past"]:
            self._past[metric, layer] = [(step, value) for step, value in past]
        self._last_step = state["last_step"]
        self._lost = {(metric, layer) for metric, layer in state["lost"]}
        self.alarms = [
            Alarm(**{**alarm, "layers": tuple(alarm["layers"])}) for alarm in state["alarms"]
        ]

    def __call__(
        self, step: int, records: Sequence[Record], geometry: object = None
    ) -> list[Record]:
        """Compare the values measured at a step, tell of those that depart, and remember them.

        Args:
            step: the step; one that is not after the last, as in a resumed run, is passed over.
            records: of the layers and of their means over blocks.
            geometry: not used.

        Returns:
            A record ``alarm_<metric>`` for each number that alarms.
        """
        if self._last_step is not None and step <= self._last_step:
            return []
        self._last_step = step
        watched = {
            (record["metric"], record["layer"]): record for record in self._watched(list(records))
        }
        departed: dict[tuple[str, bool], list[tuple[float, str, float]]] = defaultdict(list)
        for (metric, layer), record in watched.items():
            off, expected = self._compare(step, (metric, layer), record["value"])
            if abs(off) > _ALSO:
                departed[metric, off > 0].append((off, layer, expected))
        found: list[Record] = []
        for (metric, _), places in departed.items():
            if max(abs(off) for off, *_ in places) > self.threshold:
                places.sort(key=lambda place: (-abs(place[0]), place[1] not in MEANS))
                found += self._tell(step, metric, places, watched)
        return found

    def _compare(self, step: int, series: Series, value: float) -> tuple[float, float]:
        """The deviations of a number and what was expected; infinite where it is lost."""
        past = self._past[series]
        if not math.isfinite(value):
            if not past or series in self._lost:
                return 0.0, math.nan
            self._lost.add(series)
            return math.inf, past[-1][1]
        past.append((step, value))
        del past[: -_KEPT - 2]
        if len(past) < self.warm_up + 2:
            return 0.0, math.nan
        values = np.array([each for _, each in past])
        return deviations(values[:-2], values[-2:])

    def _tell(
        self,
        step: int,
        metric: str,
        places: list[tuple[float, str, float]],
        watched: Mapping[Series, Record],
    ) -> Iterator[Record]:
        off, first, expected = places[0]
        past = self._past[metric, first]
        alarm = Alarm(
            step=step,
            since=past[-2][0] if math.isfinite(off) else step,
            metric=metric,
            layers=tuple(layer for _, layer, _ in places),
            value=watched[metric, first]["value"],
            expected=expected,
            deviations=off,
        )
        self.alarms.append(alarm)
        for deviation, layer, _ in places:
            is_finite = math.isfinite(deviation)
            if is_finite:
                del self._past[metric, layer][:-2]
            record = watched[metric, layer]
            yield Record(
                **{
                    **record,
                    "metric": f"alarm_{metric}",
                    "value": deviation if is_finite else math.nan,
                    "stderr": math.nan,
                }
            )
        if current_rank() == 0:
            rank_zero_info(f"GeometryAlarm: {alarm}")
        if self.call is not None:
            self.call(alarm)

    def _watched(self, records: list[Record]) -> list[Record]:
        metrics = headlines() if self.metrics is None else self.metrics
        names = dict.fromkeys(record["layer"] for record in records)
        if self.layers is None:
            inside = tuple(f"{part}." for part in (*PARTS, LEDGER))
            sides = blocks_by_side(names).items()
            layers = {
                layer
                for prefix, blocks in sides
                if not prefix.endswith(inside)
                for layer in (*blocks, f"{prefix}mean")
            }
        else:
            layers = {
                name for name in names if any(fnmatchcase(name, pattern) for pattern in self.layers)
            }
        return [
            record
            for record in records
            if record["metric"] in metrics and record["layer"] in layers
        ]
