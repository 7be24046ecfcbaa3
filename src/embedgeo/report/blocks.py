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


def ratios(run: Run) -> Iterator[dict[str, pd.DataFrame]]:
    """The headlines and V of each block ÷ those of the block before, without massive rows: of each
    metric a row for each step, and a column for each block but the first. Encoder and decoder are
    apart, and sides of few blocks left out.
    """
    metrics = [metric for metric in ("V", *headlines()) if metric in run.values]
    for side in run.blocks.values():
        blocks = [layer for layer in side if _BLOCK.search(layer)]  # not any other layers
        if len(blocks) >= _FEWEST and metrics:
            tables = {key: run.shown(key).table[blocks] for key in metrics}
            values = {key: table.where(table > 0) for key, table in tables.items()}
            yield {key: (each / each.shift(axis=1)).iloc[:, 1:] for key, each in values.items()}


def last_ratios(of_side: dict[str, pd.DataFrame]) -> pd.DataFrame:
    """Those at the last step: a row for each block, and a column for each metric, by its name."""
    return pd.DataFrame({term(key).name: table.iloc[-1] for key, table in of_side.items()})


def standing_out(run: Run) -> list[str]:
    """A sentence on each block that stands out, three at most.

    A ratio to the block before at the last step, or its change between two steps, stands out that
    is more than 2.5 times the median of those at the other blocks, or less by as much, and 6 of
    their spreads (median absolute deviations × 1.48) from it, the first two blocks aside. A block
    stands out that changes each number at the last step by less than an eighth (on a
    logarithmic scale) of what any other block does to one.
    """
    at = f" at step {run.steps[-1]:,}" if run.has_steps and run.steps else ""
    found: list[tuple[float, str, str]] = []
    for of_side in ratios(run):
        for metric, of_steps in of_side.items():
            jumps: Any = np.log10(of_steps)
            name = term(metric).name
            for beyond, block, _, jump, usual in _beyond(jumps.iloc[-1:]):
                sentence = (
                    f"{block} stands out{at}: {name} is {jump} times that of the block before; at "
                    f"other blocks, as a rule, {usual} times."
                )
                found.append((beyond, block, sentence))
            for beyond, block, i, change, usual in _beyond(jumps.diff().iloc[1:]):
                before, step = of_steps.index[i : i + 2]
                sentence = (
                    f"{block} stands out at step {step:,}: its {name} ÷ that of the block before "
                    f"is {change} times what it was at step {before:,}; at other blocks, as a "
                    f"rule, {usual} times."
                )
                found.append((beyond, block, sentence))
        jumps = np.log10(last_ratios(of_side))
        largest = jumps.abs().max(axis=1).sort_values()
        idle, (most, least) = str(largest.index[0]), largest.iloc[:2]
        if most < _IDLE * least:
            sentence = (
                f"{idle} stands out{at}: it changes no headline by more than {number(10**most)} "
                f"times; each other block changes one by {number(10**least)} times or more."
            )
            found.append((np.inf, idle, sentence))
    of_blocks: dict[str, str] = {}
    for _, block, sentence in sorted(found, reverse=True):
        of_blocks.setdefault(block, sentence)
    return [*of_blocks.values()][:_NAMED]


def _beyond(jumps: pd.DataFrame) -> Iterator[tuple[float, str, int, str, str]]:
    """How far blocks stand out, and which, in which row most, and there its number and that of the
    others. The jumps are logarithms, of a column for each block.
    """
    for block in jumps.columns[1:]:
        others = jumps.drop(columns=block)
        usual = others.median(axis=1)
        spread = 1.4826 * others.sub(usual, axis=0).abs().median(axis=1)
        beyond = (jumps[block] - usual).abs()
        beyond = beyond.where(beyond > (_SPREADS * spread).clip(lower=log10(_FACTOR)), 0)
        if beyond.any():
            i = int(beyond.argmax())
            own, of_others = (number(10 ** each.iloc[i]) for each in (jumps[block], usual))
            yield beyond.iloc[i], block, i, own, of_others
