"""Blocks that stand out: at which a number jumps far more than at others, or hardly any does."""

import re
from collections.abc import Iterator
from math import log10
from typing import Any

import numpy as np
import pandas as pd

from embedgeo.formatting import number
from embedgeo.glossary import headlines, term
from embedgeo.report.runs import Run

# "Blocks that stand out" on the page of the report says what these are set from
_BLOCK = re.compile(r"\bblock\.\d+$")
_FEWEST = 5  # blocks
_FACTOR = 2.5  # beyond what the others do
_SPREADS = 6.0  # of the others, too
_IDLE = 0.125  # of the least that another block does
_NAMED = 3


def ratios(run: Run) -> Iterator[pd.DataFrame]:
    """The headlines and V of each block ÷ those of the block before, at the last step, without
    massive rows: a row for each block but the first, and a column for each metric. Encoder and
    decoder are apart, and sides of few blocks left out.
    """
    metrics = [metric for metric in ("V", *headlines()) if metric in run.values]
    for side in run.blocks.values():
        blocks = [layer for layer in side if _BLOCK.search(layer)]  # not any other layers
        if len(blocks) >= _FEWEST and metrics:
            of_blocks = {key: run.shown(key).table[blocks].iloc[-1] for key in metrics}
            values = pd.DataFrame(of_blocks)
            values = values.where(values > 0)
            yield (values / values.shift()).iloc[1:]


def standing_out(run: Run) -> list[str]:
    """A sentence on each block that stands out, three at most: the last step's.

    A jump stands out that is more than 2.5 times the median of those at the other blocks, or less
    by as much, and 6 of their spreads (median absolute deviations × 1.48) from it; the first two
    blocks are not asked. A block stands out that changes each number by less than an eighth (on a
    logarithmic scale) of what any other block does to one.
    """
    at = f" at step {run.steps[-1]:,}" if run.has_steps and run.steps else ""
    found: dict[str, tuple[float, str]] = {}
    for of_side in ratios(run):
        jumps: Any = np.log10(of_side)
        for metric, each in jumps.items():
            for block, jump in each.iloc[1:].items():
                others = each.drop(block)
                usual = others.median()
                spread = 1.4826 * (others - usual).abs().median()
                beyond = abs(jump - usual)
                most, _ = found.get(str(block), (0.0, ""))  # of another number
                if beyond > max(most, log10(_FACTOR), _SPREADS * spread):
                    found[str(block)] = (
                        beyond,
                        f"{block} stands out{at}: {term(str(metric)).name} is {number(10**jump)} "
                        "times that of the block before; at other blocks, as a rule, "
                        f"{number(10**usual)} times.",
                    )
        largest = jumps.abs().max(axis=1).sort_values()
        idle, (most, least) = str(largest.index[0]), largest.iloc[:2]
        if most < _IDLE * least:
            found[idle] = (
                np.inf,
                f"{idle} stands out{at}: it changes no headline by more than {number(10**most)} "
                f"times; each other block changes one by {number(10**least)} times or more.",
            )
    return [sentence for _, sentence in sorted(found.values(), reverse=True)[:_NAMED]]
