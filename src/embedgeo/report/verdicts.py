"""Two runs compared: how far each headline differs, how surely, and from which step on."""

from collections.abc import Sequence
from math import isnan
from typing import Any

import numpy as np
import pandas as pd

from embedgeo.formatting import listed, number, with_error, with_minus
from embedgeo.glossary import WITHOUT_MASSIVE, headlines, term
from embedgeo.report.reference import IGNORED, require_like
from embedgeo.report.runs import Results, Run, of_rows, runs_in

_ERRORS = 2  # standard errors beyond which means differ

_COLUMNS = (
    *("metric", "mean", "step", "a", "b", "difference", "stderr", "errors", "seeds"),
    *("verdict", "from_step"),
)

DIFFERS = "differs"
ALIKE = "does not differ"
UNKNOWN = "no error known"
UNLIKE = "cannot be compared"


def compare(a: Results, b: Results, seeds: Sequence[Results] = ()) -> pd.DataFrame:
    """Compare the headlines of two runs at their last common step, as means over blocks. A final
    model, of no step, is compared with the last step of a run.

    Where both runs were measured with ``jackknife=`` on the same sequences, by sweeps or as a
    ``probe=`` of monitors (read from their history files), the standard error of a difference is
    paired: what the choice of texts does to both cancels. Otherwise it is that of independent
    values.

    Args:
        a: a run: a folder, a table, a history, a monitor or a `embedgeo.Geometry`.
        b: the other run.
        seeds: runs that differ in their seed alone, to tell what that does.

    Returns:
        A row for each headline, of all rows and, where massive ones move it, without these, and
        mean over blocks, with the columns ``metric``, ``mean``,
        ``step``, ``a``, ``b``, ``difference`` (b − a), ``stderr`` of it, ``errors`` (the difference
        in these), ``seeds`` (the range over seeds at that step, or at the last one before at which
        two were measured, or else the next), ``verdict`` and ``from_step``.

        The verdict is ``"differs"`` beyond two standard errors and the range over seeds, as far as
        that is known, and else ``"does not differ"``; ``"no error known"`` where it is not;
        ``"cannot be compared"`` where texts, rows or settings are others, as far as they are
        recorded: a table of records has none. From ``from_step`` on all measurements differ; NaN
        where the last one does not.

    Raises:
        ValueError: there are no or several runs in one of the two, or runs of ``seeds`` have one
            step, or were measured otherwise.
    """
    runs = [runs_in(results) for results in (a, b)]
    if [len(each) for each in runs] != [1, 1]:
        got = " and ".join(str(len(each)) for each in runs)
        raise ValueError(f"compare takes two runs, one from each argument; got {got}.")
    (first,), (second,) = runs
    others = [run for results in seeds for run in runs_in(results)]
    require_like(others, [first, second])
    return pd.DataFrame(_rows(first, second, others), columns=_COLUMNS)


def _rows(a: Run, b: Run, seeds: Sequence[Run]) -> list[dict[str, Any]]:
    """The rows of `compare`, and the standard errors of both values, ``error_a`` and
    ``error_b``.
    """
    rows = []
    unlike = _unlike(a, b)
    paired = pd.DataFrame() if unlike else _paired_errors(a, b)
    for metric in (each + end for each in headlines() for end in ("", WITHOUT_MASSIVE)):
        of_all = metric.removesuffix(WITHOUT_MASSIVE)
        is_known = metric in a.values and metric in b.values
        if not is_known or (metric != of_all and not of_rows(of_all, [a, b])):
            continue
        for name in a.means(metric).columns.intersection(b.means(metric).columns):
            means = (_placed(each.means(metric)[name], each, of) for each, of in ((a, b), (b, a)))
            values: Any = pd.concat(means, axis=1, keys=["a", "b"]).dropna()
            if values.empty:
                continue
            difference = values["b"] - values["a"]
            ours, theirs = (
                _placed(each.mean_errors(metric)[name], each, of) for each, of in ((a, b), (b, a))
            )
            independent = (ours.pow(2) + theirs.pow(2)).pow(0.5)
            errors = paired.get((metric, name), independent).reindex(values.index)
            errors = errors.fillna(independent)
            # of equal runs the paired error is 0, too
            in_errors = (difference.abs() / errors).where(difference != 0, 0 * errors)
            ranges = _range(seeds, metric, name, values.index)
            is_apart = difference.abs() > np.fmax(_ERRORS * errors, ranges.fillna(0))
            is_apart &= errors.notna() & (not unlike)
            lasting = is_apart.index[is_apart[::-1].cummin()[::-1]]
            step = values.index[-1]
            verdict = UNKNOWN if isnan(errors[step]) else DIFFERS if is_apart[step] else ALIKE
            rows.append(
                {
                    "metric": metric,
                    "mean": name,
                    "step": step,
                    **values.loc[step],
                    "difference": difference[step],
                    "stderr": errors[step],
                    "errors": in_errors[step],
                    "seeds": ranges[step],
                    "verdict": UNLIKE if unlike else verdict,
                    "from_step": lasting[0] if len(lasting) else np.nan,
                    "error_a": ours[step],
                    "error_b": theirs[step],
                }
            )
    return rows


def _placed(of_steps: pd.Series, run: Run, other: Run) -> pd.Series:
    """Of a final model, at the last step of the other run."""
    return of_steps if run.has_steps else of_steps.set_axis(other.steps[-1:])


def verdicts(a: Run, b: Run, seeds: Sequence[Run]) -> tuple[list[str], pd.DataFrame]:
    """A sentence on each headline of two runs, and their table in words."""
    rows = _rows(a, b, seeds)
    sentences = []
    cells = {}
    for row in rows:
        metric = row["metric"]
        name = term(metric).name + of_rows(metric, [a, b])
        name += f" ({row['mean']})" if len(a.blocks) > 1 else ""
        of_both = [with_error(row[key], row[f"error_{key}"]) for key in "ab"]
        difference = with_minus(with_error(row["difference"], row["stderr"]))
        cells[name] = {
            a.label: of_both[0],
            b.label: of_both[1],
            "difference": difference,
            "in standard errors": f"{row['errors']:.1f}",
            "range over seeds": number(row["seeds"]),
            "from step": f"{row['from_step']:,.0f}",
            "verdict": row["verdict"],
        }
        at = f" at step {row['step']:,}" if a.has_steps or b.has_steps else ""
        text = f"{name}: {of_both[0]} in {a.label}, {of_both[1]} in {b.label}{at}: {row['verdict']}"
        if row["verdict"] in (DIFFERS, ALIKE):
            text += f", by {difference} ({row['errors']:.1f} standard errors)"
            text += "" if isnan(row["seeds"]) else f"; seeds range over {number(row['seeds'])}"
        text += "" if isnan(row["from_step"]) else f"; apart from step {row['from_step']:,.0f} on"
        sentences.append(f"{text}.")
    if not _is_text_known(a, b):
        sentences.append("Whether both were measured on the same text is not recorded.")
    if unlike := _unlike(a, b):
        sentences = [f"These runs cannot be compared: they differ in {listed(unlike)}."]
    elif not rows:
        sentences = ["These runs cannot be compared: they have no headline at a common step."]
    elif {DIFFERS, ALIKE}.isdisjoint(row["verdict"] for row in rows):
        sentences.append("Measure both with jackknife= for standard errors.")
    elif any(isnan(row["seeds"]) for row in rows):
        sentences.append(
            "Errors are of the choice of texts. What another seed does is not known: give two runs "
            "of other seeds or more, measured at these steps, by --reference."
        )
    words = pd.DataFrame.from_dict(cells, orient="index").replace("nan", "–")
    return sentences, words.loc[:, (words != "–").any()] if len(words) else words


def _unlike(a: Run, b: Run) -> list[str]:
    return [name for name in b.differences_of(a) if name not in IGNORED]


def _is_text_known(a: Run, b: Run) -> bool:
    return not {"text_sha256", "probe"}.isdisjoint(a.settings.keys() & b.settings.keys())


def _paired_errors(a: Run, b: Run) -> pd.DataFrame:
    """Standard errors of differences of means over blocks from the groups of sequences of both: a
    column for each metric and mean, by step; NaN where the groups are others. There are none where
    the text is unknown.
    """
    if a.deviations.empty or b.deviations.empty or not _is_text_known(a, b):
        return pd.DataFrame()
    ours = _placed_deviations(a, b)
    theirs = _placed_deviations(b, a)
    squares = (theirs - ours).astype(float).pow(2).groupby("step")
    return pd.DataFrame({step: each.sum(skipna=False) for step, each in squares}).T.pow(0.5)


def _placed_deviations(run: Run, other: Run) -> pd.DataFrame:
    """Of a final model, at the last step of the other run."""
    of_groups = run.deviations
    last = other.steps[-1]
    return of_groups if run.has_steps else of_groups.rename(index=lambda _: last, level="step")


def _range(seeds: Sequence[Run], metric: str, name: Any, steps: pd.Index) -> pd.Series:
    """The range of a mean over blocks over runs, at or before these steps, where two of them have
    it, or else after.
    """
    means = [run.means(metric)[name] for run in seeds if name in run.means(metric)]
    table = pd.DataFrame(dict(enumerate(means)), dtype=float).sort_index()
    table = table[table.notna().sum(axis=1) > 1]
    ranges = table.max(axis=1) - table.min(axis=1)
    return ranges.reindex(steps, method="ffill").fillna(ranges.reindex(steps, method="bfill"))
