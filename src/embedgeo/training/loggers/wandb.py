"""Weights & Biases: a chart of all layers for each metric, pictures, and the explanation as HTML."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from math import ceil, isfinite
from typing import Any

from lightning.pytorch.loggers import WandbLogger

from embedgeo.results.events import chart_title
from embedgeo.results.records import Record
from embedgeo.training.loggers.adapters import HF_CALLBACKS, Adapter, Charts, Picture, is_instance, png_file

_MOST_STEPS, _MOST_ROWS = 128, 10_000
"""Steps in a chart, each row of which takes some 30 µs to log; rows of a table that Weights & Biases draws."""

_LIGHTNING, _TRAINER = "trainer/global_step", "train/global_step"
"""The keys of the step with which Lightning's logger and the callback of the Hugging Face Trainer log."""

_STYLE = "<style>body {font: 14px sans-serif} th, td {padding: 2px 8px; text-align: left; vertical-align: top}</style>"


class Wandb(Adapter):
    """Writes to a run by a function of the prefix, a step and values; the axis is the key of the trainer's steps."""

    def __init__(self, run: Any, log: Callable[[str, int, Mapping[str, Any]], object], axis: str | None = None) -> None:
        self._run = run
        self._log = log
        self._axis = axis
        self._prefix = ""
        self._num_drawn = 0

    @classmethod
    def of(cls, logger: Any) -> "Wandb | None":
        if isinstance(logger, WandbLogger):
            return cls(logger.experiment, lambda _, step, values: logger.log_metrics(values, step), _LIGHTNING)
        if is_instance(logger, HF_CALLBACKS, "WandbCallback"):
            run = sys.modules["wandb"].run
            return run and cls(run, lambda _, step, values: run.log({**values, _TRAINER: step}), _TRAINER)
        run = _run(logger)
        return run and cls(run, partial(_log_in_open_row, run))

    def write_charts(self, charts: Charts, history: Sequence[Record]) -> None:
        if not self._prefix and self._axis:
            self._run.define_metric(f"{charts.tag_start}{charts.prefix}.*", step_metric=self._axis)
        self._prefix = charts.prefix
        if charts.is_due and self._num_drawn < len(history):  # each chart takes a table of the whole history
            self._num_drawn = len(history)
            self._log(self._prefix, history[-1]["step"], dict(_charts(charts, history)))

    def write_text(self, tag: str, markdown: str, step: int) -> None:
        from markdown import markdown as to_html  # type: ignore[import-untyped]  # TensorBoard's own renderer

        html = _STYLE + to_html(markdown, extensions=["tables"])  # a workspace shows no Markdown
        self._log(self._prefix, step, {tag: sys.modules["wandb"].Html(html, data_is_not_path=True)})

    def write_image(self, tag: str, picture: Picture, step: int) -> None:
        with png_file(picture) as path:
            self._log(self._prefix, step, {tag: sys.modules["wandb"].Image(str(path))})


def scalar_writer(log: Any, prefix: str) -> Callable[[int, Mapping[str, float]], object] | None:
    """A function that writes scalars, at a step, to a run or to ``wandb`` itself; None for another log.

    The counter of steps of a run only goes forward, and what is logged at one that is over is lost. So the step is a
    value, ``{prefix}/step``, and the axis, and a measurement goes into the row that the loop has open, which is closed
    before only if the last measurement is in it.
    """
    if not _is_package(log) and _run(log) is None:
        return None
    last_row: int | None = None

    def write(step: int, scalars: Mapping[str, float]) -> None:
        nonlocal last_row
        run = _run(log)
        if run is None:
            return
        row = None if _is_shared(run) else run.step
        if last_row is None:
            run.define_metric(_axis(prefix), hidden=True)
            run.define_metric(f"{prefix}.*", step_metric=_axis(prefix))
        elif row == last_row:
            run.log({}, commit=True)
            row += 1
        _log_in_open_row(run, prefix, step, scalars)
        last_row = row

    return write


def _is_package(log: object) -> bool:
    return log is not None and log is sys.modules.get("wandb")


def _run(log: Any) -> Any:
    """The run that a log is, or that ``wandb`` has now, if any."""
    if _is_package(log):
        return log.run
    return log if is_instance(log, "wandb.sdk.wandb_run", "Run") else None


def _axis(prefix: str) -> str:
    return prefix.replace(".", "_") + "/step"  # a dot would be read as a path


def _is_shared(run: Any) -> bool:
    return run.settings.mode == "shared"  # several processes write to it: it has no counter, and each row is its own


def _log_in_open_row(run: Any, prefix: str, step: int, values: Mapping[str, Any]) -> None:
    run.log({**values, _axis(prefix): step}, commit=_is_shared(run))


def _charts(charts: Charts, history: Sequence[Record]) -> Iterator[tuple[str, Any]]:
    """The charts by key: lines of defined values; of too many steps some are left out evenly, never the last one."""
    lines: dict[str, dict[str, dict[int, float]]] = {}
    for record in history:
        if isfinite(record["value"]):
            line = lines.setdefault(record["metric"], {}).setdefault(record["layer"], {})
            line[record["step"]] = record["value"]
    for metric in (metric for metric in charts.metrics if metric in lines):
        layers = lines[metric]
        steps = sorted({step for line in layers.values() for step in line}, reverse=True)
        drawn = sorted(steps[:: ceil(len(steps) / min(_MOST_STEPS, _MOST_ROWS // len(layers)))])
        yield (
            f"{charts.prefix}.charts/{metric}",
            sys.modules["wandb"].plot.line_series(
                [[step for step in drawn if step in line] for line in layers.values()],
                [[line[step] for step in drawn if step in line] for line in layers.values()],
                keys=list(layers),
                title=chart_title(metric),
                xname="step",
                split_table=True,
            ),
        )
