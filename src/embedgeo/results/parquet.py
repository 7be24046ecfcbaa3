"""Parquet files of results: records of checkpoints, tables beside them, histories of monitors."""

import atexit
import json
import math
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from itertools import count
from pathlib import Path
from time import monotonic
from types import MappingProxyType
from typing import Any, NamedTuple
from urllib.parse import quote, unquote
from uuid import uuid4
from weakref import WeakValueDictionary

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from embedgeo.formatting import listed, reason
from embedgeo.glossary import foreign_terms, learn
from embedgeo.results.files import claim, link, remove_leftovers, replacing
from embedgeo.results.records import Record


def _columns(kind: pa.DataType, *names: str) -> list[tuple[str, pa.DataType]]:
    return [(name, kind) for name in names]


SCHEMA = pa.schema(  # of the records of a sweep
    [
        *_columns(pa.string(), "model", "revision"),
        ("step", pa.int64()),
        *_columns(pa.string(), "commit", "series", "weights_sha256", "duplicate_of", "layer"),
        *_columns(pa.int64(), "layer_index", "width"),
        ("metric", pa.string()),
        *_columns(pa.float64(), "value", "stderr"),
    ]
)

# that differ within a checkpoint
RECORD_COLUMNS = ("layer", "layer_index", "width", "metric", "value", "stderr")
# of the records of a training run, and the deviations of means from which errors are paired
HISTORY = pa.schema([SCHEMA.field(name) for name in ("step", *RECORD_COLUMNS)]).append(
    pa.field("deviations", pa.list_(pa.float32()))
)
PAUSE = 50  # after writing, as a multiple of what it took: it takes at most some 2 % of the time

_LAYER = [("layer", pa.string()), ("layer_index", pa.int64())]
_TYPE = [*_LAYER, ("token_id", pa.int64())]
_TEXT = ("token", pa.dictionary(pa.int32(), pa.string()))
TABLES = {
    "tokens": pa.schema([*_TYPE, *_columns(pa.float64(), "n", "Q", "M", "V", "num_tokens"), _TEXT]),
    "jackknife": pa.schema(
        [*_LAYER, ("metric", pa.string()), ("group", pa.int64()), ("deviation", pa.float64())]
    ),
}
"""Columns of the tables beside the records, by their folder.

Of token types, ``num_tokens``: of the words of a type, on average, or 1. Of the jackknife, by
groups, of `IntrinsicDimension` those that have rows in its sample: see
`embedgeo.functional.jackknife.deviations`.
"""

_TERMS = b"terms"  # of metrics, in the metadata of records
_ORIGIN = "origin"  # of a history, there, too
_WRITER = "writer"
_RUN = "run"
# of an origin: they change no value at a layer
_WITHOUT_EFFECT = {"date", "model", "layers", "jackknife", "embedgeo", "torch", "ranks"}
_open = WeakValueDictionary[Path, "HistoryFile"]()  # the last one of this process at each path


def _read(path: Path, columns: Sequence[str], remedy: str) -> pa.Table:
    """The content of a Parquet file that has at least these columns; the error about another one
    ends with the remedy.
    """
    try:
        table = pq.read_table(path, partitioning=None)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(
            f"{path} must be a Parquet file; it cannot be read ({error}). {remedy or 'Remove it.'}"
        ) from error
    missing = [column for column in columns if column not in table.column_names]
    if missing:
        raise ValueError(
            f"{path} must have the columns {', '.join(columns)}; {', '.join(missing)} missing. Was "
            "it written by another version of embedgeo? Then measure again, into another folder. "
            f"{remedy}".rstrip()
        )
    learn((table.schema.metadata or {}).get(_TERMS, b"").decode())
    return table


def _with_terms(table: pa.Table) -> pa.Table:
    """Records with the terms of their metrics that are not this package's, which another process
    cannot know.
    """
    if "metric" not in table.column_names:
        return table
    terms = foreign_terms(table["metric"].drop_null().unique().to_pylist())
    metadata = {**(table.schema.metadata or {}), _TERMS: terms}
    return table.replace_schema_metadata(metadata) if terms else table


def today() -> str:
    """The date, in universal time, as results record it."""
    return datetime.now(UTC).date().isoformat()


def read_metadata(path: Path) -> dict[str, str]:
    """Texts in a Parquet file beside its columns, by name."""
    return {
        key.decode(): value.decode() for key, value in (pq.read_schema(path).metadata or {}).items()
    }


def read_records(path: Path) -> pd.DataFrame:
    """Read the records of a checkpoint."""
    remedy = f"Removing it is safe: the next sweep measures {path.stem} again."
    return _read_as(path, SCHEMA, remedy)


def _read_as(path: Path, schema: pa.Schema, remedy: str = "") -> pd.DataFrame:
    """The columns of a schema in a Parquet file, in its types, which what is there has to fit."""
    table = _read(path, schema.names, remedy)
    try:
        return table.select(schema.names).cast(schema).to_pandas()
    except (pa.ArrowException, ValueError) as error:
        raise ValueError(
            f"{path} must have columns of records; it has others ({error}). {remedy}".rstrip()
        ) from error


def read_table(path: Path) -> pd.DataFrame:
    """Read a table beside the records; its folder says of which kind it is."""
    records_file = path.parents[1] / "checkpoints" / path.name
    remedy = f"Removing it and {records_file} is safe: the next sweep measures {path.stem} again."
    schema = TABLES.get(path.parent.name)
    return _read(path, schema.names if schema else (), remedy).to_pandas()


def write_parquet(
    path: Path,
    frame: pd.DataFrame,
    schema: pa.Schema | None,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write a table, whole or not at all, and texts beside its columns; without a schema, the
    columns as they are.
    """
    table = pa.Table.from_pandas(frame, schema=schema, preserve_index=False)
    table = table.replace_schema_metadata(metadata)
    with replacing(path) as temporary:
        pq.write_table(_with_terms(table), temporary)


def to_records(frame: pd.DataFrame) -> list[Record]:
    """The records in a table of a checkpoint."""
    rows = zip(*(frame[column].tolist() for column in RECORD_COLUMNS), strict=True)
    records: Any = [dict(zip(RECORD_COLUMNS, row, strict=True)) for row in rows]
    return records


def to_frame(records: Iterable[Record], **checkpoint: Any) -> pd.DataFrame:
    """Records as a table, with the columns that all records of a checkpoint share."""
    return pd.DataFrame(list(records), columns=[*RECORD_COLUMNS]).assign(**checkpoint)[SCHEMA.names]


class HistoryFile:
    """The file of a monitor's records: ``history.parquet``, or ``history.{prefix}.parquet`` if its
    prefix is another.

    Records of earlier steps than the first one that is added stay in it, up to the step at which
    the run ``start``s, so that a resumed run goes on with it. All records of ``start`` itself are
    replaced where it is measured again. Nothing else is dropped: if the file has other records of
    later steps, it is kept, whole, as ``history.1.parquet`` (the next free number). So it is if it
    is of another ``run`` (an id; "": the file's), or if what its values depend on differs, or if no
    id says that it goes on and it has other layers, or the layers other widths: nothing of it stays
    then. What a ``writer`` that it ``replaces`` has written is not kept. What is no history is kept
    beside it, too, with a warning. If another monitor has written in its place since, this one goes
    on in the next free file, with a warning.

    It is written whole, and as this takes time, not at each `add`; `close` writes the rest, or else
    the next file of this process at its path, or the interpreter's exit. Records are held until
    they are written. ``origin`` says what the values depend on, in texts by name, which are in the
    file's metadata, with the date; it may get more. What is not in it stays as the file has it that
    goes on.
    """

    def __init__(
        self,
        folder: Path,
        prefix: str = "geometry",
        origin: Mapping[str, str] = MappingProxyType({}),
        *,
        start: float = math.inf,
        run: str = "",
        replaces: Sequence[str] = (),
    ) -> None:
        suffix = "" if prefix == "geometry" else f".{quote(prefix, safe='')}"
        # wherever the process works later
        self.path = folder.expanduser().absolute() / f"history{suffix}.parquet"
        self.writer = uuid4().hex
        self.run = run
        self._replaces = replaces
        self.origin = {"date": today(), **origin}
        self._start = start
        self._kept = ""  # what the file at the path is, if it is to be kept
        self._earlier: pa.Table | None = None  # records of the file; None until it has been read
        self._tables: list[pa.Table] = []
        self._num_written = 0
        self._paused_until = 0.0
        self._process = os.getpid()
        atexit.register(self._write_at_exit)

    def earlier(self) -> Sequence[Record]:
        """The records of the run that this one goes on with, once the file has been read."""
        records: list[Record] = [] if self._earlier is None else self._earlier.to_pylist()
        return records

    def add(self, records: Sequence[Record]) -> str:
        """Add the records of one measurement, if there are any; see `write`."""
        if not records:
            return ""
        self._tables.append(pa.Table.from_pylist(records, HISTORY))
        return self.write() if monotonic() >= self._paused_until else ""

    def write(self) -> str:
        """Write what has been added since the last time; a sentence on where an earlier file is
        now, if that was in its place and is kept.
        """
        if self._num_written == len(self._tables):
            return ""
        started = monotonic()
        if self._earlier is None:
            self._earlier = self._read_earlier()
        elif self._num_written and self._is_others():
            other, self.path = self.path, self._take_free(claim)
            self._num_written = 0
            warnings.warn(
                f"a history must have one monitor; another one writes to {other}, and this one "
                f"goes on in {self.path}. Give each monitor a prefix or a folder of its own.",
                stacklevel=2,
            )
        said = ""
        with replacing(self.path) as temporary:
            table = pa.concat_tables([self._earlier, *self._tables])
            texts = {_ORIGIN: json.dumps(self.origin), _WRITER: self.writer, _RUN: self.run}
            pq.write_table(_with_terms(table.replace_schema_metadata(texts)), temporary)
            if self._kept and self.path.exists():
                said = f"{self._kept} is kept in {self._take_free(partial(link, self.path))}."
            self._kept = ""
        self._num_written = len(self._tables)
        finished = monotonic()
        self._paused_until = finished + PAUSE * (finished - started)
        return said

    def close(self) -> str:
        """Write the rest; nothing may be added afterwards; see `write`. Where that fails, the
        interpreter's exit tries again.
        """
        said = self.write()
        atexit.unregister(self._write_at_exit)
        return said

    def _write_at_exit(self) -> None:
        if os.getpid() != self._process:  # a fork's, which has the records of before alone
            return
        try:
            self.write()
        except Exception as error:
            print(f"embedgeo: {self.path} could not be written: {reason(error)}", file=sys.stderr)

    def _read_earlier(self) -> pa.Table:
        """The records of the file that stay in it; what is no history is moved aside, and what
        killed processes left is removed.
        """
        if (other := _open.get(self.path, self)) is not self:
            other.write()
        _open[self.path] = self
        remove_leftovers(self.path.parent)
        metadata = dict[str, str]()
        written = HISTORY.empty_table().to_pandas()
        if self.path.exists():
            try:
                written = _read_as(self.path, HISTORY, "It is kept")
                metadata = read_metadata(self.path)
            except ValueError as error:
                aside = self._take_free(partial(link, self.path), "unreadable")
                self.path.unlink(missing_ok=True)
                warnings.warn(f"{error} as {aside}.", stacklevel=3)
        run = metadata.get(_RUN, "")
        origin = json.loads(metadata.get(_ORIGIN, "{}"))
        differing = [
            name
            for name, own in self.origin.items()
            if name not in _WITHOUT_EFFECT and origin.get(name, own) != own
        ]
        added = pa.concat_tables(self._tables).to_pandas()
        if not self.run and _shape(written, added) != _shape(added, written):
            differing.append("set of layers or widths")
        goes_on = self.run in ("", run) and not differing
        self.origin = {**(origin if goes_on else {}), **self.origin}
        self.run = self.run or run or self.writer
        steps = written["step"]
        stays = (steps < added["step"][0]) & (steps <= self._start)
        later = written[~stays & (steps != self._start)]
        is_again = pd.concat([added, later]).duplicated(HISTORY.names[:-1])[len(added) :]
        is_replaced = metadata.get(_WRITER) in self._replaces
        if not (is_replaced or (goes_on and is_again.all())):
            what = f", with another {listed(differing)}," if differing else ""
            self._kept = f"the history of an earlier run{what}"
        return pa.Table.from_pandas(written[stays & goes_on], HISTORY, preserve_index=False)

    def _is_others(self) -> bool:
        """Tell whether another writer's file is in the place of this one."""
        try:
            return self.path.exists() and read_metadata(self.path).get(_WRITER) != self.writer
        except (pa.ArrowException, OSError):
            return True

    def _take_free(self, take: Callable[[Path], bool], end: str = "parquet") -> Path:
        """The next path beside the file that is free, taken before another process takes it."""
        paths = (self.path.with_suffix(f".{number}.{end}") for number in count(1))
        return next(path for path in paths if take(path))


def _shape(records: pd.DataFrame, others: pd.DataFrame) -> set[tuple[str, int]]:
    """Layers and their widths in records, of metrics that others have, too."""
    shared = records[(records["layer_index"] >= 0) & records["metric"].isin(others["metric"])]
    return {*zip(shared["layer"], shared["width"], strict=True)}


class MonitoredRun(NamedTuple):
    """A monitor's run: its name, its records, their origin."""

    name: str
    records: pd.DataFrame
    origin: dict[str, str]  # see `HistoryFile`


def _histories(source: Path) -> Iterator[tuple[Path, str]]:
    """The histories in a folder or else in the folders inside it, also where links lead, or one
    history itself, with their prefixes.

    Those of earlier runs that are kept beside them, ``history.1.parquet`` and so on, are left out
    of a folder's.
    """
    name = "history.*parquet"
    paths = [source] if source.is_file() else sorted(source.glob(name))
    if not paths:
        links = (path for path in source.rglob("*") if path.is_symlink() and path.is_dir())
        inside = [path for folder in (*links, source) for path in folder.rglob(name)]
        paths = sorted({path.resolve(): path for path in inside}.values())
    for path in paths:
        suffix = path.name.removeprefix("history").removesuffix("parquet").strip(".")
        current = path.with_name(re.sub(r"\.\d+\.parquet$", ".parquet", path.name))
        if path in (source, current) or not current.exists():
            yield path, unquote(suffix) or "geometry"


def is_history(path: Path) -> bool:
    """Tell a history from other files, by its name."""
    return path.is_file() and path.match("history.*parquet")


def monitored_runs(source: Path) -> list[MonitoredRun]:
    """The monitored runs in a folder, or of one history.

    A run has the name of its own folder, from wherever it is read, and its prefix unless that is
    the default one. Folders of one name have what is before it in their paths, as far as that tells
    them apart: names are longer where several such folders are read together. ``files``, in which
    W&B keeps those of a run, is no name.
    """
    sources = [*_histories(source)]
    folders = [path.parent.resolve() for path, _ in sources]
    every = [(folder.parent if folder.name == "files" else folder).parts for folder in folders]
    runs = []
    for parts, (path, prefix) in zip(every, sources, strict=True):
        lengths = range(1, len(parts))
        ends = (
            parts[-k:] for k in lengths if sum(each[-k:] == parts[-k:] for each in {*every}) == 1
        )
        name = "/".join(next(ends, parts))
        origin = json.loads(read_metadata(path).get(_ORIGIN, "{}"))
        if prefix != "geometry":
            name = f"{name} {prefix}"
        named = _read_as(path, HISTORY).assign(model=origin.get("model", ""))
        runs.append(MonitoredRun(name, named, origin))
    return runs
