"""What a monitor has measured, in a Parquet file beside what the trainer logs."""

import atexit
from collections.abc import Iterator, Sequence
from pathlib import Path
from time import monotonic
from urllib.parse import quote, unquote

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from embedgeo.results.files import replacing
from embedgeo.results.parquet import read_parquet
from embedgeo.results.records import StepRecord

COLUMNS = ("step", *(name for name in StepRecord.__annotations__ if name != "step"))
"""Columns of the file: the keys of a `StepRecord`."""

_TYPES = {int: pa.int64(), float: pa.float64(), str: pa.string()}
_SCHEMA = pa.schema([(name, _TYPES[StepRecord.__annotations__[name]]) for name in COLUMNS])
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

    def add(self, records: Sequence[StepRecord]) -> None:
        """Add the records of one measurement, if there are any.

        Raises:
            OSError: the file cannot be written.
            ValueError: there is a file that cannot be read.
        """
        if not records:
            return
        if not self._tables:
            self._tables += self._earlier(records[0]["step"])
        self._tables.append(pa.Table.from_pylist(records, _SCHEMA))
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
            records = read_parquet(self.path, COLUMNS)
            yield pa.Table.from_pandas(records[records["step"] < first_step], _SCHEMA, preserve_index=False)


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
        yield path.parent, prefix, read_parquet(path, COLUMNS)
