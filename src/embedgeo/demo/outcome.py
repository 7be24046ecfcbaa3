"""What the demo leaves behind: records, and a table of what happened."""

import shlex
from pathlib import Path

import pandas as pd
from rich.console import Console
from rich.table import Table

from embedgeo.demo.training import SaveCheckpoints
from embedgeo.results.folder import SCHEMA
from embedgeo.results.glossary import HEADLINES
from embedgeo.results.schema import StepRecord

SUMMARY = HEADLINES[:4]
"""Metrics of the table: as many as fit in a line."""


def to_records(history: list[StepRecord], checkpoints: SaveCheckpoints) -> pd.DataFrame:
    """The history with the columns of a sweep's records."""
    frame = pd.DataFrame(history)
    return frame.assign(
        model=str(checkpoints.folder),
        revision="step" + frame["step"].astype(str),
        commit="",
        series="step",
        weights_sha256=frame["step"].map(checkpoints.sha256),
        duplicate_of="",
    )[SCHEMA.names]


def compare(online: pd.DataFrame, offline: pd.DataFrame) -> str:
    """Whether the numbers of a sweep are those of the monitor, in a sentence."""
    keys = ["step", "layer", "metric"]
    both = online.merge(offline, on=keys, how="left", suffixes=("", "_again"))
    value, again = both["value"], both["value_again"]
    apart = (value - again).abs() / value.abs().clip(lower=1e-12)
    num_same = int(((apart <= 1e-6) | (value.isna() & again.isna())).sum())
    largest = f"the largest relative difference is {apart.max():.1g}"
    if num_same == len(both):
        return f"The sweep gives the monitor's {num_same:,} numbers again: {largest}."
    return f"The sweep gives only {num_same:,} of the monitor's {len(both):,} numbers again to 1e-6: {largest}."


def show(console: Console, out: Path, records: pd.DataFrame) -> None:
    """What happened, where it lies, what to open."""
    table = Table("layer", title="first → last step, and the peak (or low) with its step", box=None)
    for metric in SUMMARY:
        stem, _, rest = metric.rpartition("_")
        table.add_column(f"{stem}\n_{rest}" if len(metric) > 12 else metric, justify="right")
    for layer in records["layer"].unique():
        table.add_row(layer, *(_cell(records, layer, metric) for metric in SUMMARY))
    console.print()
    console.print(table)
    console.print()
    for name, content in (
        ("checkpoints", "a Hugging Face folder for each measured step"),
        ("history.parquet", f"{len(records):,} records: every metric at every layer and measured step"),
        ("probe.txt", "the held-out text that was measured"),
        ("sweep", "the same numbers out of the checkpoints, and Q, M, V of each token type"),
        ("sweep/report/index.html", "all of it in figures: open it in a browser"),
        ("tensorboard", "the curves; to look at them:"),
    ):
        console.print(f"[bold]{out / name}[/bold]  {content}", highlight=False, soft_wrap=True)
    command = f"tensorboard --logdir {shlex.quote(str(out / 'tensorboard'))}"
    console.print(f"\n    [bold]{command}[/bold]\n", highlight=False, soft_wrap=True)


def _cell(records: pd.DataFrame, layer: str, metric: str) -> str:
    values = records[(records["layer"] == layer) & (records["metric"] == metric)].set_index("step")["value"]
    kind = "low" if metric == "V_W_over_V_unbiased" else "peak"
    at = int(values.argmin() if kind == "low" else values.argmax())
    return f"{values.iloc[0]:.2f} → {values.iloc[-1]:.2f}\n[dim]{kind} {values.iloc[at]:.2f} @{values.index[at]}[/dim]"
