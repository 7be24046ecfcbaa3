"""The loop over checkpoints: fetch, load, measure, write, remove; the next is fetched while one is measured."""

import gc
import time
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from lightning.fabric import Fabric
from rich.console import Console
from rich.progress import Progress

from embedgeo.checkpoints import loading
from embedgeo.results.folder import SweepFolder
from embedgeo.results.locks import Locks
from embedgeo.results.parquet import to_frame, to_records
from embedgeo.results.schema import Record, model_record
from embedgeo.results.wording import listed, reason
from embedgeo.sweep.downloads import Downloads
from embedgeo.sweep.measure import Measured, measure
from embedgeo.sweep.plan import Planned
from embedgeo.sweep.probe_text import ProbeText, require_vocabulary
from embedgeo.sweep.processes import all_agree, from_local_zero
from embedgeo.sweep.settings import SweepSettings
from embedgeo.sweep.summary import Lines

_POLL_SECONDS = 1.0


@dataclass
class Sweep:
    """One process of a sweep: all ranks measure, rank 0 writes, local rank 0 downloads for its node.

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
        self._downloads = Downloads(self.out.path, evict=self.settings.evict)
        self._locks = Locks(self.out.path / "manifest.json")
        self._left = list(self.pending)
        self._console = Console(quiet=not self.fabric.is_global_zero)
        self._said: set[str] = set()
        self._rebuilt = (time.monotonic(), 0.0)  # when, and how long it took

    def run(self) -> dict[str, str]:
        """Measure all pending checkpoints; returns the reasons of those that failed, by name."""
        is_shown = bool(self.pending) and self._console.is_terminal
        bar = Progress(console=self._console, disable=not is_shown, transient=True)
        task = bar.add_task("", total=len(self.pending))
        lines = Lines(self.pending)
        with bar, closing(self._locks), self._downloads:
            while (planned := self._next()) is not None:
                number = len(self.pending) - len(self._left)
                bar.update(task, description=f"{planned.name}  {number}/{len(self.pending)}", completed=number - 1)
                started = time.monotonic()
                try:
                    frame = self._finish(planned)
                except Exception as error:
                    line = lines.failed(planned, number, self._fail(planned, error))
                else:
                    line = lines.measured(planned, number, frame, time.monotonic() - started)
                finally:
                    self._downloads.remove(planned)
                    self._locks.release(_begun(planned))
                self._say(line)
                self._rebuild_sometimes()
            if self.fabric.is_global_zero:
                self.out.rebuild(self._num_series)
        return self.failures

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
            time.sleep(_POLL_SECONDS)

    def _free(self, among: Sequence[Planned]) -> Planned | None:
        """The first checkpoint that no other process has begun; from now on it is this one's. For rank 0."""
        for planned in list(among):
            if not self._locks.take(_begun(planned)):
                self._say_once(f"another sweep is at work in {self.out.path}: what it has begun is left to it")
            elif self._is_done(planned):  # by another process, since this one has made its plan
                self._left.remove(planned)
                self._locks.release(_begun(planned))
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

    def _finish(self, planned: Planned) -> pd.DataFrame:
        """Measure a checkpoint or copy its duplicate, and write the results."""
        measured = self._copied(planned) or self._measured(planned)
        frame = to_frame([*measured.records, *_tokens_seen(planned)], **self._columns(planned))
        if self.fabric.is_global_zero:
            about = {**measured.about, "files": planned.weights_state}
            self.out.write(planned.name, frame, measured.tables, {key: value for key, value in about.items() if value})
        return frame

    def _fail(self, planned: Planned, error: Exception) -> str:
        why = self.failures[planned.name] = planned.error or reason(error)
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
                if is_same and first.config_digest() == planned.contents.config_digest:
                    tables = self.out.read_tables(original) if self.settings.token_tables else {}
                    kept = to_records(records[records["metric"] != "tokens_seen"])
                    copied = Measured(kept, tables, self.out.about(original))
        return self.fabric.broadcast(copied)

    def _measured(self, planned: Planned) -> Measured:
        path = None
        with all_agree(self.fabric):
            if planned.error:
                raise FileNotFoundError(planned.error)
            if self.fabric.local_rank == 0:
                path = self._downloads.start(planned).result()
        path = from_local_zero(self.fabric, path)
        assert path is not None
        with all_agree(self.fabric):
            loaded = self._load(planned, path)
            require_vocabulary(loaded.model, self._text(planned).token_ids)
        to_fetch = [p for p in self._left if not p.duplicate_of and not p.error]  # duplicates are expected to be copied
        upcoming = self.fabric.broadcast(self._free(to_fetch) if self.fabric.is_global_zero else None)
        if self.fabric.local_rank == 0 and upcoming is not None:
            self._downloads.start(upcoming)
        return measure(self.fabric, loaded, self._text(planned), self.settings)

    def _text(self, planned: Planned) -> ProbeText:
        return self.texts[planned.checkpoint.model]

    def _load(self, planned: Planned, path: Path) -> loading.LoadedModel:
        dtype = getattr(torch, self.settings.dtype)
        if path.is_file():
            assert self.settings.model_class is not None
            return loading.load_lightning(path, self.settings.model_class, dtype=dtype)
        assert planned.contents is not None
        if self.settings.device_map is not None:
            gc.collect()  # accelerate's hooks keep the model before this one in reference cycles
        return loading.load_model(
            path,
            planned.contents,
            dtype=dtype,
            trust_remote_code=self.settings.trust_remote_code,
            device_map=self.settings.device_map,
            offload_folder=self._downloads.offload_folder(planned),
        )

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


def _begun(planned: Planned) -> str:
    """What a process holds of a checkpoint that it has begun: duplicates go with their original, to be copied."""
    return planned.duplicate_of or planned.name


def _tokens_seen(planned: Planned) -> list[Record]:
    tokens = planned.checkpoint.position.tokens
    return [] if tokens is None else [model_record("tokens_seen", float(tokens))]
