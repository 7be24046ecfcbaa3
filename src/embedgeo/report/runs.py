"""The records of runs: of sweeps, of monitored runs, and of those that only TensorBoard has seen."""

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from embedgeo.results.layer_names import blocks_by_side, side
from embedgeo.results.schema import MODEL

_EVENTS = "events.out.tfevents."
_TAG = re.compile(r"(?P<prefix>.+)\.(?P<metric>[^./]+)/(?P<layer>.+)")
_NEEDED = ("step", "layer", "layer_index", "metric", "value")
_ABOUT = ("revision", "weights_sha256", "duplicate_of")


@dataclass(frozen=True)
class Run:
    """One training run.

    Attributes:
        label: its name.
        layers: in forward order.
        values: a column a metric; the index is (step, layer).
        model: a column a metric of the whole model, such as the loss; the index is the step.
        checkpoints: revision, weights_sha256 and duplicate_of, where known; the index is the step.
        tokens: tables of token types, by step.
        projections: tables of chosen tokens in the plane, by step.
        failures: reasons, by name of a checkpoint that failed.
    """

    label: str
    layers: list[str]
    values: pd.DataFrame
    model: pd.DataFrame
    checkpoints: pd.DataFrame
    tokens: dict[int, Path] = field(default_factory=dict)
    projections: dict[int, Path] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    @property
    def metrics(self) -> list[str]:
        """Of the layers."""
        return [str(metric) for metric in self.values]

    @property
    def steps(self) -> list[int]:
        """Measured steps."""
        return [int(step) for step in self.values.index.unique("step").sort_values()]

    @property
    def depth(self) -> list[str]:
        """The layers that lie along the model, without means over several."""
        return [layer for layer in self.layers if "mean(" not in layer]

    @property
    def axis(self) -> list[str]:
        """The same, with a gap, named "", between an encoder and its decoder."""
        sides = groupby(self.depth, side)
        return [layer for _, layers in sides for layer in ("", *layers)][1:]

    @property
    def blocks(self) -> dict[str, list[str]]:
        """The blocks, by what their mean is called: of encoder and decoder apart; all layers where none is one."""
        found = blocks_by_side(self.depth) or {"": self.depth}
        return {f"{of[:-1]} mean" if of else "mean over blocks": layers for of, layers in found.items()}

    def table(self, metric: str, values: pd.DataFrame | None = None) -> pd.DataFrame:
        """A metric at each step (rows) and layer (columns)."""
        column = (self.values if values is None else values)[metric]
        return column.unstack("layer").reindex(columns=self.layers).sort_index()

    def means(self, table: pd.DataFrame) -> pd.DataFrame:
        """The means over blocks, of an encoder and its decoder apart, at each row of a table of layers (columns)."""
        return pd.DataFrame({name: table[blocks].mean(axis=1) for name, blocks in self.blocks.items()})


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """The runs of some folders, with distinct labels.

    Raises:
        FileNotFoundError: a folder that is not there.
        ValueError: one that holds no results, or a file that cannot be read.
    """
    runs: list[Run] = []
    for folder in folders:
        if not folder.is_dir():
            raise FileNotFoundError(f"report takes folders of runs; {folder} is none.")
        found = list(_read_folder(folder))
        if not found:
            raise ValueError(
                f"report takes the folder of a sweep (checkpoints/*.parquet), of a monitored run (history.parquet) or "
                f"of its TensorBoard event files; {folder} holds no measurements of these kinds."
            )
        name = folder.resolve().name
        runs += [_run(f"{name}: {part}" if len(found) > 1 else name, folder, records) for part, records in found]
    labels = [run.label for run in runs]
    return [
        run if labels.count(run.label) == 1 else replace(run, label=f"{run.label} ({labels[: i + 1].count(run.label)})")
        for i, run in enumerate(runs)
    ]


def _read_folder(folder: Path) -> Iterator[tuple[str, pd.DataFrame]]:
    """The records of each run in a folder, with what tells it from the others."""
    files = sorted((folder / "checkpoints").glob("[!.]*.parquet"))
    history = folder / "history.parquet"
    if files:
        series = _series(folder)
        records = pd.concat([_read_parquet(path).assign(name=path.stem) for path in files], ignore_index=True)
        for part, of_part in records.groupby(records["name"].map(lambda name: series.get(name, "")), sort=True):
            yield str(part), of_part
    elif history.exists():
        yield "", _read_parquet(history)
    else:
        for events in sorted({path.parent for path in folder.rglob(f"{_EVENTS}*")}):
            for prefix, records in _read_events(events):
                yield f"{os.path.relpath(events, folder)} {prefix}", records


def _read_parquet(path: Path, needed: Sequence[str] = _NEEDED) -> pd.DataFrame:
    try:
        table = pq.read_table(path, partitioning=None)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path} must be a Parquet file; it cannot be read ({error}). Remove it.") from error
    missing = [column for column in needed if column not in table.column_names]
    if missing:
        raise ValueError(f"{path} must have the columns {', '.join(needed)}; {', '.join(missing)} missing.")
    return table.to_pandas()


def read_tokens(path: Path) -> pd.DataFrame:
    """The table of token types of a checkpoint: n, Q, M and V of each at each layer.

    Raises:
        ValueError: it cannot be read.
    """
    return _read_parquet(path, ("layer", "layer_index", "token_id", "n", "Q", "M", "V"))


def read_projection(path: Path) -> pd.DataFrame:
    """Chosen tokens of a checkpoint in the plane of their two largest directions; token_id -1 is the origin.

    Raises:
        ValueError: it cannot be read.
    """
    return _read_parquet(path, ("layer", "layer_index", "token_id", "n", "pc1", "pc2"))


def _series(folder: Path) -> dict[str, str]:
    """Which training run each checkpoint of a sweep belongs to: a sweep of several has a TensorBoard run for each."""
    paths = (folder / "tensorboard").glob(f"*/{_EVENTS}*")
    return {path.name.removeprefix(_EVENTS).partition(".")[2]: path.parent.name for path in paths}


def _read_events(folder: Path) -> Iterator[tuple[str, pd.DataFrame]]:
    """What a monitor has written to TensorBoard, by its prefix; of a step that was repeated, the last value."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    rows: dict[str, list[tuple[int, str, str, float]]] = {}
    for tag in events.Tags()["scalars"]:
        match = _TAG.fullmatch(tag)
        if match and match["layer"] != "mean":
            values = {event.step: event.value for event in events.Scalars(tag)}
            rows.setdefault(match["prefix"], []).extend((s, match["layer"], match["metric"], values[s]) for s in values)
    for prefix, found in sorted(rows.items()):
        records = pd.DataFrame(found, columns=["step", "layer", "metric", "value"])
        yield prefix, records.assign(layer_index=pd.factorize(records["layer"])[0])


def _run(label: str, folder: Path, records: pd.DataFrame) -> Run:
    for column in _ABOUT:
        known = records.get(column, pd.Series("", index=records.index)).astype(object)
        records = records.assign(**{column: known.where(known.notna(), "")})
    unnamed = records["revision"] == ""
    records.loc[unnamed, "revision"] = "step" + records["step"].astype(str)
    of_model = records["layer"] == MODEL
    at_layers = records[~of_model]
    order = at_layers.drop_duplicates("layer").sort_values("layer_index")["layer"]
    return Run(
        label=label,
        layers=[str(layer) for layer in order],
        values=wide(at_layers, ["step", "layer"]),
        model=wide(records[of_model], ["step"]),
        checkpoints=records.drop_duplicates("step", keep="last").set_index("step")[list(_ABOUT)].sort_index(),
        tokens=_beside(folder / "tokens", records),
        projections=_beside(folder / "projections", records),
        failures={path.stem: path.read_text().strip() for path in sorted((folder / "failed").glob("[!.]*.txt"))},
    )


def wide(records: pd.DataFrame, index: list[str]) -> pd.DataFrame:
    """Records with a column for each metric; of a value that is there twice, the last."""
    last = records.drop_duplicates([*index, "metric"], keep="last")
    return last.pivot(index=index, columns="metric", values="value").sort_index().astype(float)


def _beside(folder: Path, records: pd.DataFrame) -> dict[int, Path]:
    """Files of the checkpoints in another folder, by step."""
    if "name" not in records:
        return {}
    named = records.drop_duplicates("name").set_index("name")["step"].sort_values()
    paths = {int(step): folder / f"{name}.parquet" for name, step in named.items()}
    return {step: path for step, path in paths.items() if path.exists()}
