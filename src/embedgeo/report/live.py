"""Pictures for loggers, beside the scalars, while a model trains."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from time import monotonic
from typing import Any

import numpy as np

from embedgeo.results.glossary import HEADLINES
from embedgeo.results.schema import StepRecord

_DRAWN = {*HEADLINES, "M", "V", "V_W_unbiased", "V_B_unbiased"}
_OFTEN = ("curves", "heatmap")
_GROWTH = 1.05
_MOST_STEPS = 512
_PIXELS = 700
_PAUSE = 50
"""Pause after drawing, as a multiple of what drawing took: it takes at most some 2 % of the time."""


class LivePictures:
    """The pictures of a monitor's history while a model trains.

    For each metric to look at first, its curves (value against step, a coloured line for each layer), a heatmap (layer
    against step) and a profile (value against layer, a line for each step); and the shares of M, V_W and V_B in the
    embeddings' size at each layer. They are drawn when they are due; curves and heatmaps also whenever there are 5 %
    more measurements, unless that would take more than 2 % of the time: what is drawn does not grow with the square of
    a run's length. At most 512 steps are drawn, evenly spaced along the axis.

    They are 700 pixels wide, twice the width at which TensorBoard shows them.

    Args:
        prefix: of the tags.
    """

    def __init__(self, prefix: str = "geometry") -> None:
        self.prefix = prefix
        self._num_drawn = dict.fromkeys(("curves", "heatmap", "profile", "shares"), 0)
        self._num_measurements = self._measurements_drawn = 0
        self._paused_until = 0.0

    def draw(self, history: Sequence[StepRecord], *, is_due: bool) -> Iterator[tuple[str, tuple[bytes, int, int]]]:
        """Draw the history, unless drawing is paused.

        Args:
            history: with the records of one more measurement than at the last call.
            is_due: draw all kinds of pictures that have not been drawn of this history.

        Yields:
            A picture's tag, and the picture: a PNG, its width and height.

        Raises:
            ImportError: what pictures are drawn with is not installed.
        """
        self._num_measurements += 1
        started = monotonic()
        is_welcome = started >= self._paused_until and self._num_measurements >= _GROWTH * self._measurements_drawn
        wanted = self._num_drawn if is_due else _OFTEN if is_welcome else ()
        kinds = [kind for kind in wanted if self._num_drawn[kind] < len(history)]
        if not kinds:
            return
        yield from _pictures(history, self.prefix, kinds)
        self._num_drawn |= dict.fromkeys(kinds, len(history))
        self._measurements_drawn = self._num_measurements
        finished = monotonic()
        self._paused_until = finished + _PAUSE * (finished - started)


def _pictures(
    history: Sequence[StepRecord], prefix: str, kinds: Collection[str]
) -> Iterator[tuple[str, tuple[bytes, int, int]]]:
    import pandas as pd

    from embedgeo.report import figures, shares
    from embedgeo.report.curves import curves
    from embedgeo.report.drawing import style
    from embedgeo.report.runs import make_run

    steps = _thinned({record["step"] for record in history})
    records = pd.DataFrame([r for r in history if r["metric"] in _DRAWN and r["step"] in steps])
    if records.empty or not (run := make_run("", records.replace([np.inf, -np.inf], np.nan))).depth:
        return
    metrics = [metric for metric in HEADLINES if metric in run.values and run.values[metric].notna().any()]
    with style():
        for kind, draw in (("curves", curves), ("heatmap", figures.heatmap), ("profile", figures.profile)):
            for metric in metrics if kind in kinds else ():
                yield f"{prefix}.{kind}/{metric}", _picture(draw(run, metric).figure)
        if "shares" in kinds and shares.has_shares(run):
            yield f"{prefix}.shares/M, V_W, V_B", _picture(shares.shares_by_layer(run).figure)


def _picture(figure: Any) -> tuple[bytes, int, int]:
    """A PNG of 700 pixels: TensorBoard shows it with 350, and leaves out pixels instead of blending them."""
    from embedgeo.report.saving import png

    return png(figure, (_PIXELS + 0.5) / figure.get_size_inches()[0])


def _thinned(steps: Iterable[int]) -> set[int]:
    """At most 512 of the steps, evenly spaced along the axis on which they are drawn, with the first and the last."""
    from embedgeo.report.axes import StepAxis

    every = sorted(steps)
    if len(every) <= _MOST_STEPS:
        return set(every)
    chosen = np.searchsorted(StepAxis(every).position(every), np.linspace(0, 1, _MOST_STEPS))
    return {every[i] for i in chosen.clip(max=len(every) - 1)}
