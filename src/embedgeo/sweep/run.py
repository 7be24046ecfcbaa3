"""The loop over checkpoints: choose, measure or copy, write; the next is fetched while one is measured."""

import time
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Any

import pandas as pd
from lightning.fabric import Fabric
from rich.console import Console
from rich.progress import Progress

from embedgeo.geometry.widths import choices
from embedgeo.results.folder import SweepFolder
from embedgeo.results.locks import Locks
from embedgeo.results.parquet import to_frame, to_records
from embedgeo.results.samples import load_sample
from embedgeo.results.schema import Record, model_record
from embedgeo.results.wording import listed, reason
from embedgeo.sweep.downloads import Downloads
from embedgeo.sweep.measure import Measured
from embedgeo.sweep.metrics import metric_factory
from embedgeo.sweep.plan import Planned
from embedgeo.sweep.probe_text import ProbeText
from embedgeo.sweep.settings import SweepSettings
from embedgeo.sweep.summary import Lines
from embedgeo.sweep.worker import Worker

POLL_SECONDS = 1.0
"""Between two looks at whether another sweep is through with what it has begun."""


@dataclass
class Sweep:
    """One process of a sweep: all ranks measure, rank 0 chooses and writes.

    Args:
        fabric: the processes and their devices.
        settings: of the sweep.
        plan: all checkpoints.
        pending: those to measure in this run.
        texts: what to measure them on, by `Checkpoint.model`.
        out: the sweep folder.
    """

    fabric: Fabric
    settings: SweepSettings
    plan: Sequence[Planned]
    pending: Sequence[Planned]
    texts: Mapping[str, ProbeText]
    out: SweepFolder

    def __post_init__(self) -> None:
        self._num_series = len({planned.checkpoint.position.series for planned in self.plan})
        self.failures: dict[str, str] = {}
        self._locks = Locks(self.out.path / "manifest.json")
        self._left = list(self.pending)
        self._console = Console(quiet=not self.fabric.is_global_zero)
        is_shown = bool(self.pending) and self._console.is_terminal
        self._bar = Progress(console=self._console, disable=not is_shown, transient=True)
        self._task = self._bar.add_task("", total=len(self.pending))
        self._lines = Lines(self.pending)
        self._said: set[str] = set()
        self._rebuilt = (time.monotonic(), 0.0)  # when, and how long it took

    def run(self) -> dict[str, str]:
        """Measure all pending checkpoints; returns the reasons of those that failed, by name."""
        with self._bar, closing(self._locks):
            self._measure_all()
            if self.fabric.is_global_zero:
                self.out.rebuild(self._num_series)
        return self.failures

    def _measure_all(self) -> None:
        with Downloads(self.out.path, evict=self.settings.evict) as downloads:
            worker = Worker(self.fabric, self.settings, self.texts, downloads)
            while (planned := self._next()) is not None:
                number = len(self.pending) - len(self._left)
                self._show(planned.name, number, number - 1)
                started = time.monotonic()
                self._end(planned, number, self._measured(planned, worker), started)

    def _show(self, names: str, number: int, num_ended: int) -> None:
        self._bar.update(self._task, description=f"{names}  {number}/{len(self.pending)}", completed=num_ended)

    def _end(self, planned: Planned, number: int, result: Measured | str, started: float) -> None:
        """Write what was measured, or why nothing was; leave the checkpoint to others, and print its line."""
        try:
            frame = None if isinstance(result, str) else self._write(planned, result)
        except Exception as error:
            frame, result = None, reason(error)
        finally:
            self._locks.release(begun(planned))
        if frame is not None:
            for width in sorted(set(frame["width"]) - {0}):
                for choice in choices(metric_factory(self.settings), int(width)):
                    self._say_once(choice)
            line = self._lines.measured(planned, number, frame, time.monotonic() - started)
        else:
            line = self._lines.failed(planned, number, self._fail(planned, str(result)))
        self._say(line)
        self._rebuild_sometimes()

    def _next(self) -> Planned | None:
        """The checkpoint to measure now, the same on all ranks; None at the end.

        What another process has begun comes last, once that process is through with it or gone.
        """
        while True:
            chosen = self._free(self._left) if self.fabric.is_global_zero else None
            if chosen is not None:
                self._left.remove(chosen)
            chosen, self._left = self.fabric.broadcast((chosen, self._left))
            if chosen is not None or not self._left:
                return chosen
            self._say_once(f"waiting for another sweep to be through with {listed([p.name for p in self._left])}")
            time.sleep(POLL_SECONDS)

    def _free(self, among: Sequence[Planned]) -> Planned | None:
        """The first checkpoint that no other process has begun; from now on it is this one's. For rank 0."""
        for planned in list(among):
            if not self._locks.take(begun(planned)):
                self._say_once(f"another sweep is at work in {self.out.path}: what it has begun is left to it")
            elif self._is_done(planned):  # by another process, since this one has made its plan
                self._left.remove(planned)
                self._locks.release(begun(planned))
            else:
                if self._locks.error:
                    self._say_once(
                        f"{self.out.path} cannot be locked ({self._locks.error}): another sweep of the same "
                        "checkpoints at the same time would measure them, too"
                    )
                return planned
        return None

    def _is_done(self, planned: Planned) -> bool:
        if planned.name not in self.out.done():
            return False
        return not planned.is_stale or planned.is_done(self.out.read(planned.name))

    def _write(self, planned: Planned, measured: Measured) -> pd.DataFrame:
        frame = to_frame([*measured.records, *_tokens_seen(planned)], **self._columns(planned))
        if self.fabric.is_global_zero:
            about = {**measured.about, **planned.about}
            known = {key: value for key, value in about.items() if value}
            self.out.write(planned.name, frame, measured.tables, known, measured.sample)
        return frame

    def _fail(self, planned: Planned, why: str) -> str:
        self.failures[planned.name] = why
        if self.fabric.is_global_zero:
            self.out.fail(planned.name, why)
        return why

    def _say(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _say_once(self, line: str) -> None:
        if line not in self._said:
            self._said.add(line)
            self._say(line)

    def _copied(self, planned: Planned) -> Measured | None:
        """The results of the checkpoint that this one duplicates; None if it must be measured itself."""
        copied = None
        original = planned.duplicate_of
        if self.fabric.is_global_zero and original in self.out.done() and planned.contents is not None:
            with suppress(Exception):  # then it is measured
                first = next(other.checkpoint for other in self.plan if other.name == original)
                records = self.out.read(original)
                is_same = records["weights_sha256"].iloc[0] == planned.weights_sha256
                is_same &= self.texts[first.model] is self.texts[planned.checkpoint.model]  # one tokenizer
                if is_same and first.config_digest() == planned.contents.config_digest:
                    tables = self.out.read_tables(original, self.settings.tables)
                    kept = to_records(records[records["metric"] != "tokens_seen"])
                    layers = load_sample(self.out.path, original).layers if self.settings.save_samples else None
                    copied = Measured(kept, tables, self.out.about(original), layers)
        return self.fabric.broadcast(copied)

    def _measured(self, planned: Planned, worker: Worker) -> Measured | str:
        """What is copied or measured of a checkpoint, or the reason why nothing is."""
        try:
            return planned.error or self._copied(planned) or worker.measured(planned, self._upcoming)
        except Exception as error:
            return reason(error)

    def _upcoming(self) -> Planned | None:
        """The checkpoint to fetch while another is measured, from now on this process's; duplicates are copied."""
        to_fetch = [p for p in self._left if not p.duplicate_of and not p.error]
        return self._free(to_fetch) if self.fabric.is_global_zero else None

    def _columns(self, planned: Planned) -> dict[str, Any]:
        checkpoint = planned.checkpoint
        return {
            "model": checkpoint.model,
            "revision": checkpoint.revision,
            "step": checkpoint.step,
            "commit": checkpoint.commit,
            "series": checkpoint.position.series,
            "weights_sha256": planned.weights_sha256,
            "duplicate_of": planned.duplicate_of,
        }

    def _rebuild_sometimes(self) -> None:
        """Bring the folder up to date while the sweep runs, for a small share of its time."""
        last, cost = self._rebuilt
        started = time.monotonic()
        if self.fabric.is_global_zero and started - last > 50 * cost:
            with suppress(OSError):  # as on a full disk: rebuilding at the end reports it
                self.out.rebuild(self._num_series)
            self._rebuilt = started, time.monotonic() - started


def begun(planned: Planned) -> str:
    """What a process holds of a checkpoint that it has begun: duplicates go with their original, to be copied."""
    return planned.duplicate_of or planned.name


def _tokens_seen(planned: Planned) -> list[Record]:
    tokens = planned.checkpoint.position.tokens
    return [] if tokens is None else [model_record("tokens_seen", float(tokens))]
