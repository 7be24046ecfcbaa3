"""Pictures for loggers, beside the scalars, while a model trains."""

from collections.abc import Collection, Iterable, Iterator, Sequence

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from embedgeo import drawing
from embedgeo.drawing import Png
from embedgeo.glossary import headlines
from embedgeo.report import figures
from embedgeo.report.runs import Run, make_run
from embedgeo.report.story import story
from embedgeo.results.records import Record

_OF_SHARES = ("M", "V", "V_W_unbiased", "V_B_unbiased")
_OFTEN = ("curves", "heatmap")
_MOST_STEPS = 512
_PIXELS = 700


class LivePictures:
    """The pictures of a monitor's history while a model trains; their tags begin with a prefix.

    For each metric to look at first: curves, a heatmap and a profile; and the shares of M, V_W and
    V_B at each layer. All of them are drawn when they are due, at other times curves and heatmaps.
    """

    def __init__(self, prefix: str = "geometry") -> None:
        self.prefix = prefix
        self._num_drawn = dict.fromkeys(("curves", "heatmap", "profile", "shares"), 0)

    def draw(self, history: Sequence[Record], *, is_due: bool) -> Iterator[tuple[str, Png]]:
        """Tags and pictures of a history, of the kinds that have not been drawn of it before."""
        outdated = [kind for kind, num_drawn in self._num_drawn.items() if num_drawn < len(history)]
        kinds = [kind for kind in outdated if is_due or kind in _OFTEN]
        self._num_drawn |= dict.fromkeys(kinds, len(history))
        if kinds:
            yield from draw_pictures(history, self.prefix, kinds)

    def story(self, history: Sequence[Record]) -> list[str]:
        """Sentences on what happened so far: see `embedgeo.report.story.story`."""
        run = _run_of(history, headlines())
        return [] if run is None else story(run)


def draw_pictures(
    history: Sequence[Record], prefix: str, kinds: Collection[str]
) -> Iterator[tuple[str, Png]]:
    """The tags and pictures of some kinds, of what there are values for."""
    run = _run_of(history, {*headlines(), *_OF_SHARES, "n"})
    if run is None:
        return
    metrics = [
        metric
        for metric in headlines()
        if metric in run.values and run.values[metric].notna().any()
    ]
    with drawing.style():
        for kind, draw in (
            ("curves", figures.curves),
            ("heatmap", figures.heatmap),
            ("profile", figures.profile),
        ):
            for metric in metrics if kind in kinds else ():
                yield f"{prefix}.{kind}/{metric}", _picture(draw(run, metric).figure)
        if "shares" in kinds and figures.has_composition(run):
            yield f"{prefix}.shares/M, V_W, V_B", _picture(figures.composition(run, "layer").figure)


def _run_of(history: Sequence[Record], metrics: Collection[str]) -> Run | None:
    """The run so far, of some metrics at thinned out steps; None without any layer."""
    steps = _thinned({record["step"] for record in history})
    records = pd.DataFrame([r for r in history if r["metric"] in metrics and r["step"] in steps])
    if records.empty:
        return None
    run = make_run("", records.replace([np.inf, -np.inf], np.nan))
    return run if run.depth else None


def _picture(figure: Figure) -> Png:
    """A PNG of 700 pixels: TensorBoard shows it with 350, and leaves out pixels instead of blending
    them.
    """
    return drawing.png(figure, (_PIXELS + 0.5) / figure.get_size_inches()[0])


def _thinned(steps: Iterable[int]) -> set[int]:
    """At most 512 of the steps, evenly spaced along the axis on which they are drawn, with the
    first and the last.
    """
    every = sorted(steps)
    if len(every) <= _MOST_STEPS:
        return set(every)
    chosen = np.searchsorted(
        drawing.StepAxis(every).position(every), np.linspace(0, 1, _MOST_STEPS)
    )
    return {every[i] for i in chosen.clip(max=len(every) - 1)}
