"""Pictures and explanations for TensorBoard, beside the scalars, while a model trains."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from time import monotonic
from typing import Any

import numpy as np
import pandas as pd

from embedgeo.results.glossary import HEADLINES, in_order, term
from embedgeo.results.schema import StepRecord

Picture = tuple[bytes, int, int]
"""A PNG, its width and height."""

_DRAWN = {*HEADLINES, "M", "V", "V_W_unbiased", "V_B_unbiased"}
_OFTEN = ("curves", "heatmap")
_GROWTH = 1.05
_MOST_STEPS = 512
_PIXELS = 700
_PAUSE = 50
"""Pause after drawing, as a multiple of what drawing took: it takes at most some 2 % of the time."""


class TensorBoardPictures:
    """The monitor's images and text in TensorBoard.

    For each metric to look at first, its curves (value against step, a coloured line for each layer), a heatmap (layer
    against step) and a profile (value against layer, a line for each step); and the shares of M, V_W and V_B in the
    embeddings' size at each layer. They are drawn at the first, second, fourth, eighth … measurement and at the last;
    curves and heatmaps also whenever there are 5 % more measurements, unless that would take more than 2 % of the time:
    what is written does not grow with the square of a run's length. At most 512 steps are drawn, evenly spaced along
    the axis. A text that explains each metric is written once.

    The images are 700 pixels wide, twice the width at which TensorBoard shows them.

    Args:
        prefix: of the tags.
        start: how many records of other runs the history holds already.
    """

    def __init__(self, prefix: str = "geometry", start: int = 0) -> None:
        self.prefix = prefix
        self._start = start
        self._num_drawn = dict.fromkeys(("curves", "heatmap", "profile", "shares"), start)
        self._num_measurements = self._measurements_drawn = 0
        self._paused_until = 0.0

    def write(self, writers: Sequence[Any], history: Sequence[StepRecord], *, last: bool = False) -> None:
        """Draw the history, unless drawing is paused.

        Args:
            writers: TensorBoard's ``SummaryWriter`` objects.
            history: the monitor's, with the records of one more measurement than at the last call.
            last: whether there will be no more measurements: draw what has not been drawn yet.
        """
        if not writers or len(history) <= self._start:
            return
        step = history[-1]["step"]
        if not self._num_measurements:
            text = "\n".join(_explanation({record["metric"] for record in history[self._start :]}))
            for writer in writers:
                writer.add_text(f"{self.prefix}/what the numbers mean", text, step)
        self._num_measurements += not last
        is_due = last or self._num_measurements & (self._num_measurements - 1) == 0
        started = monotonic()
        is_welcome = started >= self._paused_until and self._num_measurements >= _GROWTH * self._measurements_drawn
        wanted = self._num_drawn if is_due else _OFTEN if is_welcome else ()
        kinds = [kind for kind in wanted if self._num_drawn[kind] < len(history)]
        if not kinds:
            return
        for tag, picture in _pictures(history[self._start :], self.prefix, kinds):
            for writer in writers:
                _add_image(writer, tag, *picture, step)
        self._num_drawn |= dict.fromkeys(kinds, len(history))
        self._measurements_drawn = self._num_measurements
        finished = monotonic()
        self._paused_until = finished + _PAUSE * (finished - started)


def _pictures(history: Sequence[StepRecord], prefix: str, kinds: Collection[str]) -> Iterator[tuple[str, Picture]]:
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


def _picture(figure: Any) -> Picture:
    """A PNG of 700 pixels: TensorBoard shows it with 350, and leaves out pixels instead of blending them."""
    from embedgeo.report.drawing import png

    return png(figure, (_PIXELS + 0.5) / figure.get_size_inches()[0])


def _thinned(steps: Iterable[int]) -> set[int]:
    """At most 512 of the steps, evenly spaced along the axis on which they are drawn, with the first and the last."""
    from embedgeo.report.axes import StepAxis

    every = sorted(steps)
    if len(every) <= _MOST_STEPS:
        return set(every)
    chosen = np.searchsorted(StepAxis(every).position(every), np.linspace(0, 1, _MOST_STEPS))
    return {every[i] for i in chosen.clip(max=len(every) - 1)}


def _explanation(metrics: Iterable[str]) -> Iterator[str]:
    """A table of the metrics in Markdown, line by line."""
    yield "| number | is | unit or estimator | how to read it |"
    yield "|---|---|---|---|"
    for metric in in_order(metrics):
        named = term(metric)
        row = (metric, named.name, named.unit, named.meaning)
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |"
    yield ""
    yield (
        "Layers: `embed` is what enters the first block, `block.00` … are the blocks' outputs, `mean` is the mean over "
        "blocks. The step is the number of optimizer steps that the weights have taken. Undefined values (too few "
        "rows, rows that do not vary) are missing in the charts and grey in the heatmaps."
    )


def _add_image(writer: Any, tag: str, png: bytes, width: int, height: int, step: int) -> None:
    """`SummaryWriter.add_image` would decode, resize and encode the picture again."""
    from tensorboard.compat.proto.summary_pb2 import Summary

    image = Summary.Image(height=height, width=width, colorspace=3, encoded_image_string=png)
    writer.file_writer.add_summary(Summary(value=[Summary.Value(tag=tag, image=image)]), step)
