"""Files on this machine: TensorBoard's charts, text and images, and a tidy CSV beside Lightning's."""

import csv
import io
import math
from collections.abc import Iterable, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any
from urllib.parse import quote
from weakref import WeakKeyDictionary

from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from embedgeo.results.events import custom_scalars_layout
from embedgeo.results.records import Record
from embedgeo.training.loggers.base import HF_CALLBACKS, Adapter, Charts, Picture, is_instance

_layouts: WeakKeyDictionary[Any, dict[str, Any]] = WeakKeyDictionary()
"""The charts of all monitors that write to a ``SummaryWriter``: TensorBoard keeps only the last layout."""


class TensorBoard(Adapter):
    """The custom-scalars, text and image pages of a ``SummaryWriter``."""

    def __init__(self, writer: Any) -> None:
        self._writer = writer
        self._has_charts = False

    @classmethod
    def of(cls, logger: Any) -> "TensorBoard | None":
        writer: Any = None
        if isinstance(logger, TensorBoardLogger):
            writer = logger.experiment
        elif is_instance(logger, "torch.utils.tensorboard.writer", "SummaryWriter"):
            writer = logger
        elif is_instance(logger, HF_CALLBACKS, "TensorBoardCallback"):
            writer = logger.tb_writer
        return None if writer is None else cls(writer)

    def write_charts(self, charts: Charts, history: Sequence[Record]) -> None:
        if self._has_charts:
            return
        layout = custom_scalars_layout(charts.metrics, charts.tag_start + charts.prefix)
        every = _layouts.setdefault(self._writer, {})
        every |= {category.removeprefix(charts.tag_start): each for category, each in layout.items()}
        self._writer.add_custom_scalars(every)
        self._has_charts = True

    def write_text(self, tag: str, markdown: str, step: int) -> None:
        self._writer.add_text(tag, markdown, step)

    def write_image(self, tag: str, picture: Picture, step: int) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        png, width, height = picture  # `SummaryWriter.add_image` would decode, resize and encode it again
        image = Summary.Image(height=height, width=width, colorspace=3, encoded_image_string=png)
        self._writer.file_writer.add_summary(Summary(value=[Summary.Value(tag=tag, image=image)]), step)


COLUMNS = ("step", "layer", "layer_index", "width", "metric", "value", "stderr")
"""Columns of the file: the keys of a `Record`."""


class Csv(Adapter):
    """The records of a monitor, a line each, in ``geometry.csv``; of another prefix, ``geometry.{prefix}.csv``.

    The file is complete after each measurement, of which all lines are appended at once. What it holds already of
    earlier steps than the first one that is added stays in it: a resumed run goes on with the file of the run before,
    and a run that starts anew replaces it. An undefined value, or standard error, is an empty cell.
    """

    takes_pictures = False

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._num_written = 0

    @classmethod
    def of(cls, logger: Any) -> "Csv | None":
        is_local = isinstance(logger, CSVLogger) and "://" not in logger.log_dir
        return cls(Path(logger.log_dir)) if is_local else None

    def write_charts(self, charts: Charts, history: Sequence[Record]) -> None:
        new = history[self._num_written :]
        if not new:
            return
        middle = "" if charts.prefix == "geometry" else f".{quote(charts.prefix, safe='')}"
        path = self._folder / f"geometry{middle}.csv"
        if not self._num_written:
            path.parent.mkdir(parents=True, exist_ok=True)
            _keep_earlier(path, new[0]["step"])
        lines = _lines([_cell(record.get(column)) for column in COLUMNS] for record in new)
        with path.open("ab") as file:
            file.write(lines if file.tell() else _HEADER + lines)
        self._num_written = len(history)


def _cell(value: Any) -> Any:
    return "" if isinstance(value, float) and math.isnan(value) else value


def _lines(rows: Iterable[Iterable[Any]]) -> bytes:
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().encode()


_HEADER = _lines([COLUMNS])


def _keep_earlier(path: Path, step: int) -> None:
    """Cut a file off where a line is not whole, or of this step or a later one."""
    data = path.read_bytes() if path.exists() else b""
    if _HEADER.startswith(data):
        size = 0
    elif data.startswith(_HEADER):
        lines = data.removeprefix(_HEADER).splitlines(keepends=True)
        earlier = takewhile(lambda line: line.endswith(b"\n") and int(line.partition(b",")[0]) < step, lines)
        size = len(_HEADER) + sum(map(len, earlier))
    else:
        raise ValueError(f"{path} must begin with the columns {','.join(COLUMNS)}; it does not. Move it away.")
    if size < len(data):
        with path.open("r+b") as file:
            file.truncate(size)
