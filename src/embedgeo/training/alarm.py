"""An alarm for training runs: it tells when a number departs from its own past."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
from numpy.typing import NDArray

import embedgeo.metrics  # noqa: F401 - whose keys the headlines are
from embedgeo.extras import require_extra
from embedgeo.formatting import listed
from embedgeo.glossary import headlines, term
from embedgeo.layer_names import LEDGER, PARTS, blocks_by_side
from embedgeo.results.departures import PAST, WINDOW, departures, forecasts
from embedgeo.results.records import MEANS, Record

MEASUREMENTS = 200
"""Measurements that the rate of false alarms is meant for."""

_INFLATION = 6  # probabilities are up to so many times too small: benchmarks/alarms.py
_ALSO = 0.01  # probability below which a layer is named beside those that the alarm is for
_KEPT = WINDOW + PAST + 2  # values that the test looks at

Series = tuple[str, str]  # metric and layer


@dataclass(frozen=True)
class Alarm:
    """A number that has departed from its own past, or is not finite, at two measurements in a row.

    Attributes:
        step: of the second of these measurements.
        since: the step of the first.
        metric: key of the metric.
        layers: where, those that are farthest off first; ``"mean"`` is the mean over blocks.
        value: at ``step``, at the first of the layers.
        expected: forecast of that value from the measurements before ``since``; where it is not
            finite, the last value.
        standard_errors: by how many standard errors of its forecast the value at ``since`` was off,
            with its sign; infinite where it is not finite.
    """

    step: int
    since: int
    metric: str
    layers: tuple[str, ...]
    value: float
    expected: float
    standard_errors: float

    def __str__(self) -> str:
        where = "the mean over blocks" if self.layers[0] == "mean" else self.layers[0]
        others = f" (also {listed(self.layers[1:])})" if len(self.layers) > 1 else ""
        if not math.isfinite(self.value):
            return (
                f"step {self.step}: {term(self.metric).name} is {self.value} at {where}{others} "
                f"since step "
                f"{self.since}; before that it was {self.expected:.4g}."
            )
        verb = "rose" if self.standard_errors > 0 else "fell"
        return (
            f"step {self.step}: {term(self.metric).name} {verb} at {where}{others}: "
            f"{self.value:.4g}, where "
            f"{self.expected:.4g} was expected; off by {abs(self.standard_errors):.1f} standard "
            f"errors since step "
            f"{self.since}."
        )


def alarm_levels(is_mean: NDArray[np.bool_], false_alarms: float) -> NDArray[np.float64]:
    """Probability of each of some numbers below which it alarms, for a rate of false alarms of all
    of them together.

    ``is_mean`` tells which of them are means over the others.
    """
    level = false_alarms / MEASUREMENTS / _INFLATION
    if is_mean.any() and not is_mean.all():
        level /= 2
    return level / np.where(is_mean, is_mean.sum(), (~is_mean).sum())


class GeometryAlarm:
    """Tells when a number of a run departs from its own past: ``alarm=`` of a monitor.

    Each new value of the watched numbers is forecast from the run's own values before it: from
    their trend, from how they follow each other, and with a standard error that their fluctuation
    gives. An alarm is raised where two measurements in a row are off in the same direction, by more
    than chance has it: see `embedgeo.results.departures`. So the learning rate, the size of the
    probe and the unit of a number do not matter, and a single outlier is no alarm. What has alarmed
    begins a new past.

    ``false_alarms`` is the share of sound runs of 200 measurements in which any of the watched
    numbers raises an alarm, at most; half of it is for layers and half for the means over blocks,
    however many there are. A simulation with autocorrelated and heavy-tailed numbers, layers that
    move together, trends and falling fluctuation keeps it: `benchmarks/alarms.py`. A jump of 5
    standard deviations of all blocks is found at the second measurement where blocks fluctuate
    independently and normally. It is found less often where they move together or have outliers.

    A number that is NaN or infinite at two measurements in a row, and never was before, raises an
    alarm, too.

    A number is tested from its 42nd value on, the first that ends two with 40 before them; single
    values that are NaN, and numbers that are constant so far, are passed over. Only the order of
    the measurements counts, not the steps between them. Values and alarms are part of the monitor's
    checkpoint; with the Hugging Face Trainer, a resumed run takes the values from its history file.

    Each alarm is a line in the terminal and a text for the loggers, and an item of ``alarms``.

    Args:
        call: called with each `Alarm`, on every rank at the same step: to save a checkpoint, keep
            the batch or stop. What it raises ends neither training nor the alarm, unless the
            monitor has ``on_error="raise"``.
        metrics: keys to watch; default: the headlines.
        layers: names or patterns of the layers to watch; default: blocks and their means.
        false_alarms: the rate, more than 0 and less than 1.
        warm_up: values of a number before the first two that are tested, 20 or more.

    Raises:
        ImportError: scipy, which the extra ``report`` brings, is not installed.
        ValueError: an argument is outside its range.

    Example::

        alarm = GeometryAlarm(lambda alarm: trainer.save_checkpoint(f"alarm-{alarm.step}.ckpt"))
        monitor = GeometryMonitor(every_n_steps=100, probe=loader, alarm=alarm)
    """

    def __init__(
        self,
        call: Callable[[Alarm], object] | None = None,
        metrics: Sequence[str] | None = None,
        layers: Sequence[str] | None = None,
        false_alarms: float = 0.05,
        warm_up: int = 40,
    ) -> None:
        require_extra("report", "embedgeo.GeometryAlarm", "scipy")
        if isinstance(metrics, str) or isinstance(layers, str):
            raise TypeError(
                f"metrics and layers must be lists of names; got {metrics!r} and {layers!r}."
            )
        if not 0 < false_alarms < 1:
            raise ValueError(
                f"false_alarms must be more than 0 and less than 1, a share of runs; got "
                f"{false_alarms!r}."
            )
        if warm_up < 20:
            raise ValueError(
                f"warm_up must be at least 20 values, which a forecast rests on; got {warm_up!r}."
            )
        self.call = call
        self.metrics = None if metrics is None else frozenset(metrics)
        self.layers = None if layers is None else tuple(layers)
        self.false_alarms = false_alarms
        self.warm_up = warm_up
        self.reset()

    def reset(self) -> None:
        """Forget all values: another run begins."""
        self.alarms: list[Alarm] = []
        self._last_step: int | None = None
        # steps and values that are finite
        self._past: dict[Series, list[tuple[int, float]]] = defaultdict(list)
        self._gaps: dict[Series, list[int]] = defaultdict(list)  # the first three steps of others

    def state_dict(self) -> dict[str, Any]:
        """The values that later ones are compared with, and the alarms so far."""
        past = [
            [*series, *zip(*of_series, strict=True)]
            for series, of_series in self._past.items()
            if of_series
        ]
        gaps = [[*series, steps] for series, steps in self._gaps.items()]
        alarms = [asdict(alarm) for alarm in self.alarms]
        return {"last_step": self._last_step, "past": past, "gaps": gaps, "alarms": alarms}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from values of `state_dict`."""
        self._last_step = state["last_step"]
        self._past = defaultdict(list)
        for metric, layer, steps, values in state["past"]:
            self._past[metric, layer] = [*zip(steps, values, strict=True)]
        self._gaps = defaultdict(
            list, {(metric, layer): [*steps] for metric, layer, steps in state.get("gaps", ())}
        )
        self.alarms = [
            Alarm(**{**alarm, "layers": tuple(alarm["layers"])}) for alarm in state["alarms"]
        ]

    def add(self, step: int, records: Iterable[Record]) -> list[Series]:
        """Add the values measured at a step, and tell of which series; see `test`."""
        if self._last_step is not None and step <= self._last_step:
            return []
        self._last_step = step
        new = list[Series]()
        for record in self._watched(list(records)):
            series = record["metric"], record["layer"]
            if math.isfinite(record["value"]):
                self._past[series] = [*self._past[series][1 - _KEPT :], (step, record["value"])]
            elif len(self._gaps[series]) < 3:
                self._gaps[series].append(step)
            new.append(series)
        return new

    def test(self, step: int, records: Sequence[Record]) -> list[Alarm]:
        """Add the values measured at a step, and tell what departs; nothing is forgotten and nobody
        called.

        Args:
            step: the step, larger than those before; another time the same step is passed over.
            records: of the layers and of their means over blocks.
        """
        new = {
            series: self._past[series] for series in self.add(step, records) if self._past[series]
        }
        tested = [
            series
            for series, past in new.items()
            if past[-1][0] == step and len(past) > self.warm_up + 1
        ]
        alarmed = {(alarm.metric, layer) for alarm in self.alarms for layer in alarm.layers}
        lost = [
            series
            for series, past in new.items()
            if (len(past) > self.warm_up or series in alarmed)
            and len(gaps := self._gaps[series]) == 2
            and past[-1][0] < gaps[0]
        ]
        return [*self._no_numbers(lost, records), *(self._departed(tested) if tested else [])]

    def accept(self, alarm: Alarm) -> None:
        """Add to ``alarms``, and let what has alarmed begin a new past."""
        self.alarms.append(alarm)
        for layer in alarm.layers:
            series = alarm.metric, layer
            self._past[series] = self._past[series][-2:]

    def _watched(self, records: list[Record]) -> list[Record]:
        metrics = headlines() if self.metrics is None else self.metrics
        names = dict.fromkeys(record["layer"] for record in records)
        if self.layers is None:
            inside = tuple(f"{part}." for part in (*PARTS, LEDGER))
            sides = {
                prefix: blocks
                for prefix, blocks in blocks_by_side(names).items()
                if not prefix.endswith(inside)
            }
            layers = {
                layer for prefix, blocks in sides.items() for layer in (*blocks, f"{prefix}mean")
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

    def _no_numbers(self, lost: list[Series], records: Sequence[Record]) -> list[Alarm]:
        values = {(record["metric"], record["layer"]): record["value"] for record in records}
        of_metrics: dict[str, list[str]] = defaultdict(list)
        for metric, layer in sorted(lost, key=lambda series: series[1] not in MEANS):
            of_metrics[metric].append(layer)
        return [
            Alarm(
                step=self._gaps[metric, layers[0]][1],
                since=self._gaps[metric, layers[0]][0],
                metric=metric,
                layers=tuple(layers),
                value=values[metric, layers[0]],
                expected=self._past[metric, layers[0]][-1][1],
                standard_errors=math.inf,
            )
            for metric, layers in of_metrics.items()
        ]

    def _departed(self, tested: list[Series]) -> list[Alarm]:
        values = np.full((_KEPT, len(tested)), np.nan)
        for column, series in enumerate(tested):
            kept = self._past[series]
            values[len(values) - len(kept) :, column] = [value for _, value in kept]
        values = values[np.isfinite(values).any(1)]
        of_metric = {
            metric: number
            for number, metric in enumerate(dict.fromkeys(metric for metric, _ in tested))
        }
        found = departures(forecasts(values), np.array([of_metric[metric] for metric, _ in tested]))
        is_mean = np.array([layer in MEANS for _, layer in tested])
        has_departed = found.p < alarm_levels(is_mean, self.false_alarms)
        alarms = list[Alarm]()
        for metric, sign in dict.fromkeys(
            (metric, np.sign(off))
            for (metric, _), off, is_off in zip(
                tested, found.standard_errors, has_departed, strict=True
            )
            if is_off
        ):
            places = [
                place
                for place, (key, _) in enumerate(tested)
                if key == metric
                and np.sign(found.standard_errors[place]) == sign
                and found.p[place] < _ALSO
            ]
            places.sort(
                key=lambda place: (not has_departed[place], not is_mean[place], found.p[place])
            )
            first = places[0]
            alarms.append(
                Alarm(
                    step=self._past[tested[first]][-1][0],
                    since=self._past[tested[first]][-2][0],
                    metric=metric,
                    layers=tuple(tested[place][1] for place in places),
                    value=float(values[-1, first]),
                    expected=float(values[-1, first] - found.excess[first]),
                    standard_errors=float(found.standard_errors[first]),
                )
            )
        return alarms
