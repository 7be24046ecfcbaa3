"""Earlier runs beside others in a report: the range of their means over blocks, at equal steps."""

from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd

from embedgeo import drawing as draw
from embedgeo.drawing import FigureData, Lines
from embedgeo.formatting import listed
from embedgeo.glossary import term
from embedgeo.report.figures import trend
from embedgeo.report.runs import Run, of_rows

REFERENCE_TEXT = (
    "The mean over blocks of each run, in black, before the range of those of earlier runs, in "
    "grey. A range of few runs is no confidence interval."
)

_COLOUR = "#7a7a7a"
IGNORED = {"torch"}  # of the settings: numbers do not depend on it but by rounding


def require_like(references: Sequence[Run], runs: Sequence[Run]) -> None:
    """Raise ValueError if a reference was not measured at several steps, or not like the runs."""
    for reference in references:
        if not reference.has_steps or len(reference.steps) < 2:
            raise ValueError(
                f"a reference must be a run measured at several steps; {reference.label} is not."
            )
        for run in runs:
            what = "; ".join(
                f"{name} {theirs} in place of {own}"
                for name, (own, theirs) in run.differences_of(reference).items()
                if name not in IGNORED
            )
            if what:
                raise ValueError(
                    f"a reference must be measured like the runs before it; {reference.label} is "
                    f"not like {run.label or 'this one'}: {what}."
                )


def before_band(run: Run, metric: str, references: Sequence[Run]) -> Iterator[FigureData]:
    """Each mean over blocks of a metric against the step, before the range of those of earlier
    runs, if there are any.
    """
    if not (run.has_steps and run.varies(metric)):
        return
    named = term(metric)
    for name, mean in run.means(metric).items():
        earlier = [each for each in references if name in each.means(metric)]
        curves = _earlier_means(run, metric, name, earlier)
        low = curves.min(skipna=False)
        high = curves.max(skipna=False)
        if low.isna().all():
            continue
        ends = pd.DataFrame({"earlier runs, lowest": low, "earlier runs, highest": high})
        numbers = mean.to_frame().join(ends)
        figure, ax = draw.new_figure(f"{named.name} beside earlier runs", named.unit)
        draw.step_axis(ax, run.steps)
        look: dict[str, Any] = {"color": _COLOUR, "alpha": 0.4, "lw": 0.8, "label": "earlier"}
        ax.fill_between(run.steps, low, high, **look)
        lines = [
            Lines("earlier", ends, [_COLOUR], width=0.8),
            Lines("mean", mean.to_frame(), ["black"], width=2.0),
        ]
        draw.lines(ax, lines[1])
        draw.value_axis(ax, named, numbers)
        draw.legend(ax)
        alt = f"{named.name} against optimizer step, before the range of earlier runs."
        labels = listed([each.label for each in earlier], 4)
        text = (
            f"{str(name).capitalize()}: {trend(mean)} Grey: {len(earlier)} earlier ({labels}), "
            f"mean over blocks{of_rows(metric, [run, *earlier])}, at equal steps that all have; "
            f"within it at "
            f"{mean.between(low, high).sum()} of {(low.notna() & mean.notna()).sum()} steps."
        )
        part = f"-{str(name).replace(' ', '-')}" if len(run.blocks) > 1 else ""
        yield FigureData(f"{metric}-reference{part}", figure, numbers, alt, text, lines)


def _earlier_means(run: Run, metric: str, name: Hashable, earlier: Sequence[Run]) -> pd.DataFrame:
    """A mean over blocks, by its name, of earlier runs (rows) at the steps of a run (columns).

    Between two of its steps an earlier run is taken to be on the line through both, over log(1 +
    step). Elsewhere it is NaN.
    """
    at = np.log1p(np.array(run.steps, dtype=float))
    curves = []
    for each in earlier:
        curve = each.means(metric)[name].dropna()
        if len(curve):
            x = np.log1p(np.array(curve.index, dtype=float))
            curves.append(np.interp(at, x, curve, left=np.nan, right=np.nan))
    return pd.DataFrame(curves, columns=pd.Index(run.steps, name="step"))
