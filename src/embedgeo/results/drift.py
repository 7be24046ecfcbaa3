"""What is compared between checkpoints and layers, beside the records of each checkpoint: files, read with them."""

from pathlib import Path

import pandas as pd
import pyarrow as pa

from embedgeo.results.parquet import read_parquet, read_records

_PLACE = (("checkpoint", pa.string()), ("step", pa.int64()), ("layer", pa.string()))
CKA = pa.schema(
    [
        *((f"{column}_{which}", kind) for which in "ab" for column, kind in _PLACE),
        ("n", pa.int64()),
        ("cka", pa.float64()),
    ]
)
"""Columns of ``cka.parquet``: the debiased CKA of n rows at checkpoint and layer a and at checkpoint and layer b."""


def drift_file(folder: Path, name: str) -> Path:
    """Where the records of a checkpoint are that need its saved sample and those of others."""
    return folder / "drift" / f"{name}.parquet"


def cka_file(folder: Path) -> Path:
    """Where the similarity of steps with steps and of layers with layers is."""
    return folder / "cka.parquet"


def read_cka(folder: Path) -> pd.DataFrame:
    """The table of `CKA` of a sweep; empty where there is none.

    Raises:
        ValueError: it cannot be read, or lacks columns.
    """
    path = cka_file(folder)
    if not path.exists():
        return pd.DataFrame(columns=CKA.names)
    return read_parquet(path, CKA.names, "Removing it is safe: embedgeo drift writes it again.")


def read_measured(path: Path) -> pd.DataFrame:
    """The records of a checkpoint, given their file, with those of its drift.

    Raises:
        ValueError: a file is not one of records.
    """
    return pd.concat(map(read_records, _files(path)), ignore_index=True)


def last_change(path: Path) -> int:
    """When what `read_measured` reads was written, in nanoseconds."""
    return max(file.stat().st_mtime_ns for file in _files(path))


def _files(path: Path) -> list[Path]:
    drift = drift_file(path.parents[1], path.stem)
    return [path, drift] if drift.exists() else [path]
