"""Earlier runs behind the curves of others: the range of their means over blocks, at equal tokens
or steps.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba

from embedgeo.drawing import Lines
from embedgeo.formatting import listed
from embedgeo.report.runs import Run, read_runs

COLOUR = "#7a7a7a"
_IGNORED = {"torch"}  # of the settings: numbers do not depend on it but by rounding


class Band(NamedTuple):
    """The range of a mean over blocks over earlier runs, at the steps of another run; NaN where
    none of them was.
    """

    low: pd.Series  # by step
    high: pd.Series
    runs: list[str]  # labels of the earlier runs
    unit: str  # "tokens" or "steps", by which they stand beside each other

    @property
    def numbers(self) -> pd.DataFrame:
        """The range by step."""
        return pd.DataFrame({"reference low": self.low, "reference high": self.high})

    @property
    def label(self) -> str:
        """Its name in a legend."""
        return f"earlier runs ({len(self.runs)})" if len(self.runs) > 1 else "earlier run"

    def describe(self, mean: pd.Series) -> str:
        """A sentence on what is drawn, and at how many steps a mean over blocks is within it."""
        known = self.low.notna() & mean.reindex(self.low.index).notna()
        is_within = mean.reindex(self.low.index).between(self.low, self.high)
        what = f"range of {len(self.runs)} earlier runs" if len(self.runs) > 1 else "earlier run"
        return (
            f" Grey: the {what} ({listed(self.runs, 4)}), mean over blocks, at equal {self.unit}; "
            f"within it at {int((known & is_within).sum())} of {int(known.sum())} steps."
        )


def read_references(folders: Sequence[Path]) -> list[Run]:
    """The runs of folders, each of which has to be measured at several steps (ValueError)."""
    references = read_runs(folders)
    for reference in references:
        if not reference.has_steps or len(reference.steps) < 2:
            raise ValueError(
                f"a reference must be a run measured at several steps; {reference.label} is not."
            )
    return references


def with_references(runs: Sequence[Run], references: Sequence[Run]) -> list[Run]:
    """The runs with earlier ones behind their curves.

    Raises:
        ValueError: an earlier run was measured on another text, of other rows or by other
            definitions than a run.
    """
    for reference in references:
        for run in runs:
            different = {
                k: v for k, v in run.differences_of(reference).items() if k not in _IGNORED
            }
            if different:
                what = "; ".join(
                    f"{name} {theirs} in place of {own}"
                    for name, (own, theirs) in different.items()
                )
                raise ValueError(
                    f"a reference must be measured like the runs before it; {reference.label} is "
                    f"not like {run.label or 'this one'}: {what}."
                )
    return [replace(run, references=tuple(references)) for run in runs]


def reference_band(run: Run, metric: str, name: str) -> Band | None:
    """The range of a mean over blocks, by its name, over the earlier runs of a run, or None if none
    has the metric.

    Between two of its steps an earlier run is taken to be on the line through both, over log(1 +
    step).
    """
    earlier = [each for each in run.references if metric in each.values and name in each.blocks]
    if not earlier or not run.has_steps:
        return None
    own = _tokens(run)
    are_tokens = len(own) > 1 and all(len(_tokens(each)) > 1 for each in earlier)
    at = np.log1p(np.array(run.steps, dtype=float))
    curves = []
    for each in earlier:
        curve = each.means(each.table(metric))[name].dropna()
        steps = curve.index.to_numpy(dtype=float)
        if are_tokens:
            seen = _tokens(each)
            tokens = np.interp(steps, seen.index.to_numpy(dtype=float), seen.to_numpy())
            steps = np.interp(
                tokens, own.to_numpy(), own.index.to_numpy(dtype=float), left=np.nan, right=np.nan
            )
        is_known = np.isfinite(steps)
        if is_known.any():
            x = np.log1p(steps[is_known])
            curves.append(np.interp(at, x, curve.to_numpy()[is_known], left=np.nan, right=np.nan))
    if not curves or np.isnan(curves).all():
        return None
    table = pd.DataFrame(np.array(curves).T, pd.Index(run.steps, name="step"))
    return Band(
        table.min(axis=1),
        table.max(axis=1),
        [each.label for each in earlier],
        ("steps", "tokens")[are_tokens],
    )


def _tokens(run: Run) -> pd.Series:
    """Tokens seen by step, as far as they are known, ascending."""
    seen = (
        run.model["tokens_seen"].dropna() if "tokens_seen" in run.model else pd.Series(dtype=float)
    )
    return seen[seen.diff().fillna(1) > 0]


def draw_band(ax: Axes, band: Band, *, is_named: bool) -> None:
    """Draw the range behind all lines."""
    steps = band.low.index.to_numpy(dtype=float)
    edge: dict[str, Any] = {
        "facecolor": to_rgba(COLOUR, 0.3),
        "edgecolor": to_rgba(COLOUR, 0.9),
        "lw": 0.8,
        "zorder": 1.2,
    }
    ax.fill_between(
        steps,
        band.low.to_numpy(),
        band.high.to_numpy(),
        label=band.label if is_named else "",
        **edge,
    )


def band_lines(bands: Mapping[str, Band]) -> list[Lines]:
    """The ends of ranges, by the name of the mean, for a page that draws them again."""
    names = {
        name: f"{band.label}, {name}" if len(bands) > 1 else band.label
        for name, band in bands.items()
    }
    ends = ("lowest", "highest")
    tables = {
        name: band.numbers.set_axis([f"{names[name]}, {end}" for end in ends], axis=1)
        for name, band in bands.items()
    }
    return [Lines("earlier", table, COLOUR, width=0.8) for table in tables.values()]
