"""Adapters of loggers, by which they are given charts, text and pictures beside scalars."""

import csv
import io
import math
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar, NamedTuple
from urllib.parse import quote
from weakref import WeakKeyDictionary

from lightning.pytorch.loggers import CometLogger, CSVLogger, MLFlowLogger, TensorBoardLogger

from embedgeo.results.events import custom_scalars_layout
from embedgeo.results.records import Record

HF_CALLBACKS = "transformers.integrations.integration_utils"
"""Module of the callbacks by which the Hugging Face Trainer logs."""

Picture = tuple[bytes, int, int]
"""A PNG, its width and height."""


class Charts(NamedTuple):
    """The charts of a monitor: one for each metric, with a line for each layer."""

    prefix: str  # the monitor's
    metrics: Sequence[str]  # their keys
    tag_start: str = ""  # in front of the tags of scalars: "train/" in the Hugging Face Trainer
    is_due: bool = True  # all pictures are drawn now: the time to write again what holds the whole history


class Adapter:
    """A logger as the place of charts, text and pictures; a method that is not overridden does nothing.

    It belongs to one monitor in one run, and is called on the rank that writes. An error ends its work alone.
    """

    takes_pictures: ClassVar[bool] = True  # none are drawn where no adapter takes any

    @classmethod
    def of(cls, logger: Any) -> "Adapter | None":
        """The adapter of a logger; None for another object. The logger's package is not imported for this."""
        return logger if isinstance(logger, Adapter) else None

    def write_charts(self, charts: Charts, history: Sequence[Record]) -> None:
        """Draw or update charts, after each measurement and once more at the end, of all records of this run."""

    def write_text(self, tag: str, markdown: str, step: int) -> None:
        """Write the explanation of the metrics, once, at the first measurement."""

    def write_image(self, tag: str, picture: Picture, step: int) -> None:
        """Write a picture when it is drawn."""


def is_instance(logger: object, module: str, name: str) -> bool:
    """Test a logger for a class of a module that is not imported for this."""
    kind = getattr(sys.modules.get(module), name, None)
    return isinstance(kind, type) and isinstance(logger, kind)


@contextmanager
def png_file(picture: Picture) -> Iterator[Path]:
    """Context of a file with the picture as it is: loggers encode an image in memory again."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "picture.png"
        path.write_bytes(picture[0])
        yield path


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

    The file is complete after each measurement. A resumed run goes on with the file of the run before, whose lines of
    earlier steps stay, and a run that starts anew replaces it. What is undefined is an empty cell.
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
        lines = _csv_lines([record.get(column) for column in COLUMNS] for record in new)
        with path.open("ab") as file:
            file.write(lines if file.tell() else _CSV_HEADER + lines)
        self._num_written = len(history)


def _csv_lines(rows: Iterable[Iterable[Any]]) -> bytes:
    text = io.StringIO(newline="")
    cells = (["" if isinstance(value, float) and math.isnan(value) else value for value in row] for row in rows)
    csv.writer(text, lineterminator="\n").writerows(cells)
    return text.getvalue().encode()


_CSV_HEADER = _csv_lines([COLUMNS])


def _keep_earlier(path: Path, step: int) -> None:
    """Cut a file off where a line is not whole, or of this step or a later one."""
    data = path.read_bytes() if path.exists() else b""
    if _CSV_HEADER.startswith(data):
        size = 0
    elif data.startswith(_CSV_HEADER):
        lines = data.removeprefix(_CSV_HEADER).splitlines(keepends=True)
        earlier = takewhile(lambda line: line.endswith(b"\n") and int(line.partition(b",")[0]) < step, lines)
        size = len(_CSV_HEADER) + sum(map(len, earlier))
    else:
        raise ValueError(f"{path} must begin with the columns {','.join(COLUMNS)}; it does not. Move it away.")
    if size < len(data):
        with path.open("r+b") as file:
            file.truncate(size)


class Aim(Adapter):
    """Pictures and the explanation among the images and texts of a run."""

    def __init__(self, run: Any) -> None:
        self._run = run

    @classmethod
    def of(cls, logger: Any) -> "Aim | None":
        kinds = ("pytorch_lightning", "AimLogger"), ("hugging_face", "AimCallback")
        is_aim = any(is_instance(logger, f"aim.sdk.adapters.{module}", name) for module, name in kinds)
        return cls(logger.experiment) if is_aim else None

    def write_text(self, tag: str, markdown: str, step: int) -> None:
        self._run.track(sys.modules["aim"].Text(markdown), name=tag, step=step)

    def write_image(self, tag: str, picture: Picture, step: int) -> None:
        from PIL import Image

        image = sys.modules["aim"].Image(Image.open(io.BytesIO(picture[0])))
        self._run.track(image, name=tag, step=step)


class Comet(Adapter):
    """Pictures, and the explanation as a text without a name, in a ``CometExperiment``, online or offline."""

    def __init__(self, experiment: Any) -> None:
        self._experiment = experiment

    @classmethod
    def of(cls, logger: Any) -> "Comet | None":
        experiment: Any = None
        if isinstance(logger, CometLogger):
            experiment = logger.experiment
        elif is_instance(logger, "comet_ml", "CometExperiment"):
            experiment = logger
        elif is_instance(logger, HF_CALLBACKS, "CometCallback"):
            experiment = sys.modules["comet_ml"].get_running_experiment()
        return None if experiment is None else cls(experiment)

    def write_text(self, tag: str, markdown: str, step: int) -> None:
        self._experiment.log_text(markdown, step=step, metadata={"name": tag})

    def write_image(self, tag: str, picture: Picture, step: int) -> None:
        self._experiment.log_image(io.BytesIO(picture[0]), name=tag, step=step)


class MLflow(Adapter):
    """Pictures, and the explanation as a Markdown file, among the artifacts of a run."""

    def __init__(self, client: Any, run_id: str | None) -> None:
        self._client = client
        self._run_id = run_id

    @classmethod
    def of(cls, logger: Any) -> "MLflow | None":
        if isinstance(logger, MLFlowLogger):
            return cls(logger.experiment, logger.run_id)
        mlflow: Any = sys.modules.get("mlflow")
        if mlflow is None or not (logger is mlflow or is_instance(logger, HF_CALLBACKS, "MLflowCallback")):
            return None
        run = mlflow.active_run()
        return cls(mlflow.MlflowClient(), run.info.run_id) if run else None

    def write_text(self, tag: str, markdown: str, step: int) -> None:
        self._client.log_text(self._run_id, markdown, f"{_artifact_name(tag)}.md")

    def write_image(self, tag: str, picture: Picture, step: int) -> None:
        from PIL import Image

        image = Image.open(io.BytesIO(picture[0])).convert("RGB")  # of a palette, thumbnails would leave out pixels
        self._client.log_image(self._run_id, image, key=_artifact_name(tag), step=step)


def _artifact_name(tag: str) -> str:
    return re.sub(r"[^a-zA-Z0-9_\-./ ]", "", tag)  # MLflow refuses the others in the name of an image


class Trackio(Adapter):
    """Pictures, and the explanation as Markdown, in a run.

    With ``counts_logs`` its steps are the number of times that something was logged, as with the Hugging Face Trainer:
    what is written then has the step of the scalars before it, and the caption the step of training.
    """

    def __init__(self, run: Any, *, counts_logs: bool = False) -> None:
        self._run = run
        self._counts_logs = counts_logs

    @classmethod
    def of(cls, logger: Any) -> "Trackio | None":
        if is_instance(logger, "trackio", "Run"):
            return cls(logger)
        trackio: Any = sys.modules.get("trackio")
        counts_logs = is_instance(logger, HF_CALLBACKS, "TrackioCallback")
        if trackio is None or not (counts_logs or logger is trackio):
            return None
        run = trackio.context_vars.current_run.get()
        return cls(run, counts_logs=counts_logs) if run else None

    def write_text(self, tag: str, markdown: str, step: int) -> None:
        self._log(tag, sys.modules["trackio"].Markdown(markdown), step)

    def write_image(self, tag: str, picture: Picture, step: int) -> None:
        with png_file(picture) as path:
            self._log(tag, sys.modules["trackio"].Image(path, caption=f"step {step}"), step)

    def _log(self, tag: str, value: object, step: int) -> None:
        if self._counts_logs:
            step = getattr(self._run, "_next_step", step + 1) - 1  # without a step, Trackio would count this, too
        self._run.log({tag: value}, step=step)
