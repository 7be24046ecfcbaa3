"""The story of a run in words: a sentence on each headline number."""

from collections.abc import Iterator

import pandas as pd

from embedgeo.formatting import number, with_error
from embedgeo.glossary import headlines, term
from embedgeo.report.blocks import standing_out
from embedgeo.report.runs import ALL_ROWS, Run


def story(run: Run) -> list[str]:
    """A sentence on each headline number: its mean over blocks at the first step, where that was
    lowest and highest, and at the last step, and there the blocks of its least and largest value.
    Steps of few rows are neither lowest nor highest. And on each block that stands out.

    Values have their standard errors, where these are known. There are no sentences on numbers of a
    final model, and none on a number that was measured once.
    """
    known = [metric for metric in headlines() if metric in run.values and run.has_steps]
    sentences = [sentence for metric in known for sentence in _sentences(run, metric)]
    return [*sentences, *standing_out(run)]


def _sentences(run: Run, metric: str) -> Iterator[str]:
    shown = run.shown(metric)
    rows = shown.mean_rows
    table = run.table(metric) if rows == ALL_ROWS else shown.table
    for side in shown.means:
        means = shown.means[side].dropna()
        if len(means) < 2:
            continue
        steps = [int(step) for step in means.index]
        errors = shown.mean_errors[side].reindex(steps)
        texts = [with_error(value, error) for value, error in zip(means, errors, strict=True)]
        name = term(metric).name + (f", {rows}" if rows else "")
        name += f" ({side})" if len(run.blocks) > 1 else ""
        at_last = table.T[steps[-1]][run.blocks.get(str(side), [])]
        first, last = (f"{texts[at]} at step {steps[at]:,}" for at in (0, -1))
        comparable = run.comparable(means, str(side))
        extremes = "".join(
            f", {which} {texts[at]} at step {steps[at]:,}"
            for which, i in (("lowest", comparable.argmin()), ("highest", comparable.argmax()))
            if 0 < (at := steps.index(comparable.index[int(i)])) < len(steps) - 1
        )
        yield f"{name}: {first}{extremes}, {last}{_least_and_largest(at_last)}."


def _least_and_largest(values: pd.Series) -> str:
    """The blocks with the least and the largest value, where there are several with a value."""
    known = values.dropna()
    if len(known) < 2:
        return ""
    least = known.idxmin()
    largest = known.idxmax()
    return f" ({number(known.min())} at {least} to {number(known.max())} at {largest})"
