"""The folder of a sweep: a Parquet file a checkpoint, and what is rebuilt from them."""

import json
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any
from urllib.parse import quote

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from embedgeo.results.atomic import remove_leftovers, replacing
from embedgeo.results.events import write_events
from embedgeo.results.schema import Record

SCHEMA = pa.schema(
    [
        ("model", pa.string()),
        ("revision", pa.string()),
        ("step", pa.int64()),
        ("commit", pa.string()),
        ("series", pa.string()),
        ("weights_sha256", pa.string()),
        ("duplicate_of", pa.string()),
        ("layer", pa.string()),
        ("layer_index", pa.int64()),
        ("width", pa.int64()),
        ("metric", pa.string()),
        ("value", pa.float64()),
    ]
)
"""Columns of the records of a sweep."""

_BY_TYPE = [("layer", pa.string()), ("layer_index", pa.int64()), ("token_id", pa.int64()), ("n", pa.float64())]
TABLES = {
    "tokens": pa.schema([*_BY_TYPE, *((name, pa.float64()) for name in ("Q", "M", "V"))]),
    "projections": pa.schema([*_BY_TYPE, ("pc1", pa.float64()), ("pc2", pa.float64()), ("token", pa.string())]),
}
"""Columns of the tables of token types, by their folder."""

_EVENTS = "events.out.tfevents."


class SweepFolder:
    """The results of a sweep on disk, complete at every moment.

    ``checkpoints/<name>.parquet`` are the records of a checkpoint: the file's existence means that it is done.
    ``tokens/<name>.parquet`` and ``projections/<name>.parquet``, where asked for, are its tables of token types: all
    of them in numbers, the most frequent ones in the plane. They are there before.
    ``metrics.csv`` and ``tensorboard/`` hold the same values and follow from those files alone. Every file is written
    under a temporary name, then renamed. Several processes may write into one folder, each its own checkpoints.

    Args:
        path: the folder; made by `open`.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.checkpoints = self.path / "checkpoints"
        self.failures = self.path / "failed"
        self.tensorboard = self.path / "tensorboard"

    def open(self, asked: Mapping[str, Any], about: Mapping[str, Any]) -> None:
        """Make the folder, or go on with one that was made with the same settings.

        Args:
            asked: the settings that the results depend on.
            about: what else ``manifest.json`` says; that of the first time is kept.

        Raises:
            ValueError: the folder was made with other settings, or is none of a sweep.
            OSError: it cannot be written.
        """
        self.require_same(asked)
        try:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            written = (*self.tensorboard.glob("*/"), *(self.path / folder for folder in TABLES))
            remove_leftovers(self.path, self.checkpoints, self.tensorboard, self.failures, *written)
            manifest = {"asked": dict(asked), **about}
            with replacing(self.path / "manifest.json", keep=True) as temporary:
                temporary.write_text(json.dumps(manifest, indent=2, sort_keys=True) + "\n")
        except OSError as error:
            raise OSError(f"out must be a folder that can be written; {self.path} is not ({error}).") from error
        self.require_same(asked)  # another process may have made it meanwhile

    def require_same(self, asked: Mapping[str, Any]) -> None:
        """Check that the folder is new, or was made with these settings; writes nothing.

        Raises:
            ValueError: it was made with others, or holds something else.
        """
        manifest = self.manifest()
        if not manifest:
            if self.path.is_dir() and any(
                not p.name.startswith(".") and p != self.checkpoints for p in self.path.iterdir()
            ):
                raise ValueError(f"out must be a new folder or that of a sweep; {self.path} holds something else.")
            return
        before = manifest["asked"]
        now = json.loads(json.dumps(dict(asked)))
        different = [key for key in sorted(before.keys() | now.keys()) if before.get(key) != now.get(key)]
        if different:
            listed = "; ".join(f"{key} was {before.get(key)!r}, is {now.get(key)!r}" for key in different)
            raise ValueError(f"a sweep folder holds results of one setting; in {self.path} {listed}. Give another out.")

    def manifest(self) -> dict[str, Any]:
        """What ``manifest.json`` says; empty where there is none yet."""
        path = self.path / "manifest.json"
        if not path.exists():
            return {}
        try:
            manifest: dict[str, Any] = json.loads(path.read_text())
            dict(manifest["asked"])
        except (LookupError, TypeError, ValueError) as error:
            raise ValueError(f"out must be a new folder or that of a sweep; {path} is none of a sweep's.") from error
        return manifest

    def done(self) -> set[str]:
        """Names of the checkpoints that are done."""
        return {path.stem for path in self.checkpoints.glob("[!.]*.parquet")}

    def read(self, name: str) -> pd.DataFrame:
        """The records of a checkpoint that is done."""
        return _read(self.checkpoints / f"{name}.parquet")

    def read_tables(self, name: str) -> dict[str, pd.DataFrame]:
        """The tables of token types of a checkpoint that is done and was swept with them, by folder."""
        return {folder: _read(self.path / folder / f"{name}.parquet") for folder in TABLES}

    def write(
        self, name: str, records: pd.DataFrame, tables: Mapping[str, pd.DataFrame] = MappingProxyType({})
    ) -> None:
        """Write the records of a checkpoint, which is done then, and before them its tables of token types."""
        for folder, table in tables.items():
            _write(self.path / folder / f"{name}.parquet", table, TABLES[folder])
        _write(self.checkpoints / f"{name}.parquet", records, SCHEMA)
        self._failure(name).unlink(missing_ok=True)

    def fail(self, name: str, reason: str) -> None:
        """Write down why a checkpoint failed, for the reader; the next run tries it again."""
        with suppress(OSError):  # as where the disk is full: the summary says it, too
            self.failures.mkdir(exist_ok=True)
            with replacing(self._failure(name)) as temporary:
                temporary.write_text(reason + "\n")

    def rebuild(self, series: Mapping[str, str]) -> None:
        """Bring ``metrics.csv`` and ``tensorboard/`` up to date with the Parquet files.

        Args:
            series: which series each checkpoint belongs to; several become several TensorBoard runs.
        """
        with suppress(OSError):
            self.failures.rmdir()  # once it is empty
        seen: list[Path] = []
        while (now := sorted(self.checkpoints.glob("[!.]*.parquet"))) != seen:  # others may finish meanwhile
            seen = now
            tables = {path.stem: self.read(path.stem) for path in seen}
            with replacing(self.path / "metrics.csv") as temporary:
                _ordered(tables, series).to_csv(temporary, index=False)
            self._write_scalars(tables, series)

    def _write_scalars(self, tables: Mapping[str, pd.DataFrame], series: Mapping[str, str]) -> None:
        """An event file a checkpoint: done and written stay in step however often a sweep is killed."""
        is_one_run = len(set(series.values())) < 2
        wanted: dict[str, Path] = {}
        for name, records in tables.items():
            run = "" if is_one_run else quote(series.get(name, "other"), safe=" =+,@") or "other"
            step = int(records["step"].iloc[0])
            path = self.tensorboard / run / f"{_EVENTS}{step:012d}.{name}"
            wanted[name] = path
            changed = (self.checkpoints / f"{name}.parquet").stat().st_mtime_ns
            if not path.exists() or path.stat().st_mtime_ns < changed:
                with replacing(path) as temporary:
                    write_events(temporary, step, to_records(records))
        for path in self.tensorboard.rglob(f"{_EVENTS}*"):
            name = path.name.removeprefix(_EVENTS).partition(".")[2]
            if wanted.get(name, path) != path or name not in self.done():
                path.unlink(missing_ok=True)

    def _failure(self, name: str) -> Path:
        return self.failures / f"{name}.txt"


def _read(path: Path) -> pd.DataFrame:
    return pq.read_table(path, partitioning=None).to_pandas()


def _write(path: Path, frame: pd.DataFrame, schema: pa.Schema) -> None:
    table = pa.Table.from_pandas(frame, schema=schema, preserve_index=False).replace_schema_metadata(None)
    with replacing(path) as temporary:
        pq.write_table(table, temporary)


def _ordered(tables: Mapping[str, pd.DataFrame], series: Mapping[str, str]) -> pd.DataFrame:
    """All records, by series, step and name; in a checkpoint as they are."""
    if not tables:
        return SCHEMA.empty_table().to_pandas()
    names = sorted(tables, key=lambda name: (series.get(name, ""), tables[name]["step"].iloc[0], name))
    return pd.concat([tables[name] for name in names], ignore_index=True)


def to_records(frame: pd.DataFrame) -> list[Record]:
    """The records in a table of a checkpoint."""
    records: Any = frame[[*Record.__annotations__]].to_dict("records")
    return records


def to_frame(records: Iterable[Record], **checkpoint: Any) -> pd.DataFrame:
    """Records as a table, with the columns that are the same for all of a checkpoint."""
    return pd.DataFrame(list(records)).assign(**checkpoint)[SCHEMA.names]
