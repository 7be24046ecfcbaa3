"""Earlier runs beside others in a report: the range of their means over blocks, at equal tokens or
steps.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from embedgeo import drawing as draw
from embedgeo.drawing import FigureData, Lines
from embedgeo.formatting import listed
from embedgeo.glossary import term
from embedgeo.report.figures import trend
from embedgeo.report.runs import Run, read_runs

REFERENCE_TEXT = (
    "The mean over blocks of each run, in black, before the range of those of earlier runs, in "
    "grey. A range of few runs is no confidence interval."
)

_COLOUR = "#7a7a7a"
_IGNORED = {"torch"}  # of the settings: numbers do not depend on it but by rounding


class Band(NamedTuple):
    """The range of a mean over blocks over earlier runs, at the steps of another run; NaN where
    none of them was.
    """

    low: pd.Series  # by step
    high: pd.Series
    runs: list[str]  # labels of the earlier runs
    unit: str  # "tokens" or "steps", by which they stand beside each other

    def describe(self, mean: pd.Series) -> str:
        """A sentence on what is drawn, and at how many steps a mean over blocks is within it."""
        known = self.low.notna() & mean.reindex(self.low.index).notna()
        is_within = mean.reindex(self.low.index).between(self.low, self.high)
        return (
            f"Grey: {len(self.runs)} earlier ({listed(self.runs, 4)}), mean over blocks, at equal "
            f"{self.unit}; within it at {int((known & is_within).sum())} of {int(known.sum())} "
            "steps."
        )


def read_references(folders: Sequence[Path], runs: Sequence[Run]) -> list[Run]:
    """Earlier runs of folders, to stand behind others.

    Raises:
        ValueError: one of them was not measured at several steps, or not on the text, the rows and
            by the definitions of the others.
    """
    references = read_runs(folders)
    for reference in references:
        if not reference.has_steps or len(reference.steps) < 2:
            raise ValueError(
                f"a reference must be a run measured at several steps; {reference.label} is not."
            )
        for run in runs:
            what = "; ".join(
                f"{name} {theirs} in place of {own}"
                for name, (own, theirs) in run.differences_of(reference).items()
                if name not in _IGNORED
            )
            if what:
                raise ValueError(
                    f"a reference must be measured like the runs before it; {reference.label} is "
                    f"not like {run.label or 'this one'}: {what}."
                )
    return references


def before_band(run: Run, metric: str, references: Sequence[Run]) -> Iterator[FigureData]:
    """Each mean over blocks of a metric against the step, before the range of those of earlier
    runs, if there are any.
    """
    for name in map(str, run.means(metric)) if metric in run.values else ():
        band = reference_band(run, metric, name, references)
        if band is None or not run.varies(metric):
            continue
        mean, named = run.means(metric)[[name]], term(metric)
        ends = pd.DataFrame({"lowest": band.low, "highest": band.high})
        figure, (ax,) = draw.new_figure(f"{named.name} beside earlier runs", named.unit)
        draw.step_axis(ax, run.steps)
        look: dict[str, Any] = {"color": _COLOUR, "alpha": 0.4, "lw": 0.8, "label": "earlier"}
        ax.fill_between(run.steps, band.low, band.high, **look)
        lines = [
            Lines("earlier", ends.add_prefix("earlier runs, "), [_COLOUR], width=0.8),
            Lines("mean", mean, ["black"], width=2.0),
        ]
        draw.lines(ax, lines[1])
        draw.value_axis(ax, named, mean.join(ends))
        draw.legend(ax)
        numbers = mean.join(ends.add_prefix("reference "))
        alt = f"{named.name} against optimizer step, before the range of earlier runs."
        text = f"{name.capitalize()}: {trend(mean[name])} {band.describe(mean[name])}"
        part = f"-{name.replace(' ', '-')}" if len(run.blocks) > 1 else ""
        yield FigureData(f"{metric}-reference{part}", figure, numbers, alt, text, lines)


def reference_band(run: Run, metric: str, name: str, references: Sequence[Run]) -> Band | None:
    """The range of a mean over blocks, by its name, over earlier runs, or None if none has the
    metric.

    Between two of its steps an earlier run is taken to be on the line through both, over log(1 +
    step).
    """
    earlier = [each for each in references if metric in each.values and name in each.means(metric)]
    if not earlier or not run.has_steps:
        return None
    own = _tokens(run)
    are_tokens = len(own) > 1 and all(len(_tokens(each)) > 1 for each in earlier)
    at = np.log1p(np.array(run.steps, dtype=float))
    curves = []
    for each in earlier:
        curve = each.means(metric)[name].dropna()
        steps = np.array(curve.index, dtype=float)
        if are_tokens:
            seen = _tokens(each)
            tokens = np.interp(steps, seen.index, seen)
            steps = np.interp(tokens, own, own.index, left=np.nan, right=np.nan)
        curve = curve[np.isfinite(steps)]
        if len(curve):
            x = np.log1p(steps[np.isfinite(steps)])
            curves.append(np.interp(at, x, curve, left=np.nan, right=np.nan))
    if not curves or np.isnan(curves).all():
        return None
    table = pd.DataFrame(np.array(curves).T, pd.Index(run.steps, name="step"))
    labels = [each.label for each in earlier]
    return Band(table.min(axis=1), table.max(axis=1), labels, ("steps", "tokens")[are_tokens])


def _tokens(run: Run) -> pd.Series:
    """Tokens seen by step, as far as they are known, ascending."""
    seen = run.of_model("tokens_seen")
    return seen[seen.diff().fillna(1) > 0]
