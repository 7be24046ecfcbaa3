"""Parquet files of results: records of checkpoints, tables beside them, histories of monitors."""

import atexit
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import nan
from pathlib import Path
from time import monotonic
from typing import Any
from urllib.parse import quote, unquote

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from embedgeo.results.files import replacing
from embedgeo.results.records import Record

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
        ("stderr", pa.float64()),
    ]
)
"""Columns of the records of a sweep."""

RECORD_COLUMNS = ("layer", "layer_index", "width", "metric", "value", "stderr")
"""Columns of `SCHEMA` that differ from record to record of a checkpoint."""
HISTORY = pa.schema([SCHEMA.field(name) for name in ("step", *RECORD_COLUMNS)])
"""Columns of the records of a training run."""

_AT_LAYER = [("layer", pa.string()), ("layer_index", pa.int64())]
_TYPE = [*_AT_LAYER, ("token_id", pa.int64())]
_BY_TYPE = [*_TYPE, ("n", pa.float64())]
_TEXT = ("token", pa.dictionary(pa.int32(), pa.string()))
_IN_PLANE = pa.schema([*_BY_TYPE, ("pc1", pa.float64()), ("pc2", pa.float64()), _TEXT])
_OF_COORDINATES = ("mean", "variance", "share_of_M", "share_of_V", "share_of_cosine", "kurtosis", "max_abs")
_IN_VOCABULARY = [
    ("token", pa.string()),
    ("same_as", pa.int64()),
    ("without_token", pa.bool_()),
    ("untrained", pa.bool_()),
]
TABLES = {
    "tokens": pa.schema([*_BY_TYPE, *((name, pa.float64()) for name in ("Q", "M", "V", "num_tokens")), _TEXT]),
    "distances": pa.schema([*_BY_TYPE, ("distance", pa.float64()), _TEXT]),
    "projections": _IN_PLANE,
    "occurrences": _IN_PLANE,
    "spectra": pa.schema([*_AT_LAYER, ("index", pa.int64()), ("eigenvalue", pa.float64()), ("n", pa.int64())]),
    "coordinates": pa.schema(
        [*_AT_LAYER, ("coordinate", pa.int64()), *((name, pa.float64()) for name in _OF_COORDINATES)]
    ),
    "vocabulary": pa.schema([*_TYPE, *_IN_VOCABULARY]),
}
"""Columns of the tables beside the records, by their folder.

Of token types, ``num_tokens``: of the words of a type, on average, or 1. Of spectra: the eigenvalues of the covariance
of n rows, descending, ``index`` from 1. Of coordinates: the largest ones, from 0; see
`embedgeo.OutlierCoordinates.coordinates`.
"""

_ADDED = ("num_tokens", "token")
"""Columns of ``tokens`` that those of earlier versions lack."""


def read_parquet(path: Path, columns: Sequence[str], remedy: str = "") -> pd.DataFrame:
    """Read a Parquet file that has at least these columns.

    Args:
        path: the file.
        columns: that it must have.
        remedy: what to do about a file that is not as it must be.

    Raises:
        ValueError: it cannot be read, or lacks columns.
    """
    return _read(path, columns, remedy).to_pandas()


def read_records(path: Path) -> pd.DataFrame:
    """Read the records of a checkpoint.

    Raises:
        ValueError: it is not a file of these.
    """
    remedy = f"Removing it is safe: the next sweep measures {path.stem} again."
    table = _read(path, SCHEMA.names, remedy)
    try:
        table = table.select(SCHEMA.names).cast(SCHEMA)
    except (pa.ArrowException, ValueError) as error:
        raise ValueError(f"{path} must have columns of records; it has others ({error}). {remedy}") from error
    return table.to_pandas()


def read_table(path: Path) -> pd.DataFrame:
    """Read a table beside the records; its folder says of which kind it is."""
    again = path.parents[1] / "checkpoints" / path.name
    remedy = f"Removing it and {again} is safe: the next sweep measures {path.stem} again."
    kind = path.parent.name
    wanted = [name for name in TABLES[kind].names if kind != "tokens" or name not in _ADDED]
    table = read_parquet(path, wanted, remedy)
    if kind != "tokens":
        return table
    if "token" not in table or table["token"].isna().any():  # by hand nobody knows the texts
        ids = table["token_id"].astype("string")
        table["token"] = table.get("token", ids).astype("string").fillna(ids).astype("category")
    return table if "num_tokens" in table else table.assign(num_tokens=1.0)


def read_metadata(path: Path) -> dict[str, str]:
    """What is written in a Parquet file beside its columns."""
    return {key.decode(): value.decode() for key, value in (pq.read_schema(path).metadata or {}).items()}


def write_parquet(path: Path, frame: pd.DataFrame, schema: pa.Schema, about: Mapping[str, str] | None = None) -> None:
    """Write a table, whole or not at all, with what is to be known beside its columns."""
    unknown = {"num_tokens": nan, "token": None}
    frame = frame.assign(**{name: unknown[name] for name in unknown.keys() & {*schema.names} - {*frame}})
    table = pa.Table.from_pandas(frame, schema=schema, preserve_index=False).replace_schema_metadata(about)
    with replacing(path) as temporary:
        pq.write_table(table, temporary)


def _read(path: Path, columns: Sequence[str], remedy: str) -> pa.Table:
    try:
        table = pq.read_table(path, partitioning=None)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(
            f"{path} must be a Parquet file; it cannot be read ({error}). {remedy or 'Remove it.'}"
        ) from error
    missing = [column for column in columns if column not in table.column_names]
    if missing:
        raise ValueError(
            f"{path} must have the columns {', '.join(columns)}; {', '.join(missing)} missing. Was it written by "
            f"another version of embedgeo? Then measure again, into another folder. {remedy}".rstrip()
        )
    return table


def to_records(frame: pd.DataFrame) -> list[Record]:
    """The records in a table of a checkpoint."""
    records: Any = frame[[*RECORD_COLUMNS]].to_dict("records")
    return records


def to_frame(records: Iterable[Record], **checkpoint: Any) -> pd.DataFrame:
    """Records as a table, with the columns that all records of a checkpoint share."""
    return pd.DataFrame(list(records), columns=[*RECORD_COLUMNS]).assign(**checkpoint)[SCHEMA.names]


_PAUSE = 50
"""Pause after writing, as a multiple of what writing took: it takes at most some 2 % of the time."""


class HistoryFile:
    """The file of a monitor's records: ``history.parquet``, or ``history.{prefix}.parquet`` if its prefix is another.

    What the file holds already, of earlier steps than the first one that is added, stays in it: a resumed run goes on
    with the file of the run before, and a run that starts anew replaces it. Each time it is written whole, and takes
    the place of the one before at once; so that this takes at most 2 % of the time, `add` leaves it out where the last
    time is too near, and `close` must be called at the end; if it is not, the interpreter writes when it exits.

    Args:
        folder: it is made when something is written.
        prefix: the monitor's.
    """

    def __init__(self, folder: Path, prefix: str = "geometry") -> None:
        self.path = folder / (
            "history.parquet" if prefix == "geometry" else f"history.{quote(prefix, safe='')}.parquet"
        )
        self._tables: list[pa.Table] = []
        self._num_written = 0
        self._paused_until = 0.0
        atexit.register(self.write)

    def add(self, records: Sequence[Record]) -> None:
        """Add the records of one measurement, if there are any.

        Raises:
            OSError: the file cannot be written.
            ValueError: there is a file that cannot be read.
        """
        if not records:
            return
        if not self._tables:
            self._tables += self._earlier(records[0]["step"])
        self._tables.append(pa.Table.from_pylist(records, HISTORY))
        if monotonic() >= self._paused_until:
            self.write()

    def write(self) -> None:
        """Write what has been added since the last time, if anything has.

        Raises:
            OSError: the file cannot be written.
        """
        if self._num_written == len(self._tables):
            return
        started = monotonic()
        with replacing(self.path) as temporary:
            pq.write_table(pa.concat_tables(self._tables), temporary)
        self._num_written = len(self._tables)
        finished = monotonic()
        self._paused_until = finished + _PAUSE * (finished - started)

    def close(self) -> None:
        """Write what has not been written; nothing is added any more.

        Raises:
            OSError: the file cannot be written.
        """
        atexit.unregister(self.write)
        self.write()

    def _earlier(self, first_step: int) -> Iterator[pa.Table]:
        if self.path.exists():
            records = read_parquet(self.path, HISTORY.names)
            yield pa.Table.from_pandas(records[records["step"] < first_step], HISTORY, preserve_index=False)


def read_histories(folder: Path) -> Iterator[tuple[Path, str, pd.DataFrame]]:
    """The records of monitors, from the files in a folder or, where it has none, in the folders inside it.

    Yields:
        The folder of a file, the prefix of its monitor, and the records.

    Raises:
        ValueError: a file cannot be read, or lacks columns.
    """
    name = "history.*parquet"
    for path in sorted(folder.glob(name)) or sorted(folder.rglob(name)):
        prefix = unquote(path.name.removeprefix("history").removesuffix("parquet").strip(".")) or "geometry"
        yield path.parent, prefix, read_parquet(path, HISTORY.names)
