"""Pictures for loggers, beside the scalars, while a model trains."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from operator import itemgetter

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from embedgeo import drawing
from embedgeo.drawing import Png
from embedgeo.glossary import headlines
from embedgeo.report import figures
from embedgeo.report.runs import make_run
from embedgeo.results.records import Record

_STEPS = 128  # of a picture at most: of a longer run, early ones are closer together
_PIXELS = 700
_SIZE = 3.5, 3.3  # inches: TensorBoard's image cards are 350 pixels wide


def draw_pictures(history: Sequence[Record], prefix: str) -> Iterator[tuple[str, Png]]:
    """The pictures of a monitor's history, of what there are values for; their tags begin with a
    prefix.

    For each metric to look at first: a heatmap and a profile; and the shares of M, V_W and V_B at
    each layer.
    """
    run = make_run("", _thinned(history))
    if not run.depth:
        return
    known = run.values.dropna(axis="columns", how="all")
    metrics = [metric for metric in headlines() if metric in known]
    kinds = {"heatmap": figures.heatmap, "profile": figures.profile}
    with drawing.style(), drawing.resized(*_SIZE):
        for kind, draw in kinds.items():
            for metric in metrics:
                yield f"{prefix}.{kind}/{metric}", _picture(draw(run, metric).figure)
        for shares in figures.composition(run):
            yield f"{prefix}.shares/M, V_W, V_B", _picture(shares.figure)


def _thinned(history: Sequence[Record]) -> pd.DataFrame:
    """The records of at most `_STEPS` of its steps."""
    step = itemgetter("step")
    places = (np.linspace(0, 1, _STEPS) ** 2 * (len(history) - 1)).astype(int)
    return pd.DataFrame(
        [
            each
            for at in dict.fromkeys(history[i]["step"] for i in places)
            for each in history[
                bisect_left(history, at, key=step) : bisect_right(history, at, key=step)
            ]
        ]
    )


def _picture(figure: Figure) -> Png:
    """A PNG of 700 pixels: TensorBoard shows it with 350, and leaves out pixels instead of blending
    them.
    """
    return drawing.png(figure, (_PIXELS + 0.5) / figure.get_size_inches()[0])
