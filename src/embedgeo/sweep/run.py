"""The loop over checkpoints: fetch, load, measure, write, remove; the next is fetched while one is measured."""

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric
from rich.console import Console
from rich.progress import Progress

from embedgeo.checkpoints import loading
from embedgeo.results.folder import SweepFolder, to_frame, to_records
from embedgeo.results.schema import Record, model_record
from embedgeo.results.wording import reason
from embedgeo.sweep.downloads import Downloads
from embedgeo.sweep.measure import Measured, measure
from embedgeo.sweep.plan import Planned
from embedgeo.sweep.probe_text import ProbeText, require_vocabulary
from embedgeo.sweep.processes import all_agree, from_local_zero
from embedgeo.sweep.settings import SweepSettings
from embedgeo.sweep.summary import headline


@dataclass
class Sweep:
    """One process of a sweep: all ranks measure, rank 0 writes, local rank 0 downloads for its node.

    Args:
        fabric: the processes and their devices.
        settings: of the sweep.
        plan: all checkpoints.
        pending: those to measure in this run.
        text: what to measure them on.
        out: the sweep folder.
    """

    fabric: Fabric
    settings: SweepSettings
    plan: Sequence[Planned]
    pending: Sequence[Planned]
    text: ProbeText
    out: SweepFolder

    def __post_init__(self) -> None:
        self._num_series = len({planned.checkpoint.position.series for planned in self.plan})
        self.failures: dict[str, str] = {}
        self._downloads = Downloads(self.out.path, evict=self.settings.evict)
        self._rebuilt = (time.monotonic(), 0.0)  # when, and how long it took

    def run(self) -> dict[str, str]:
        """Measure all pending checkpoints; returns the reasons of those that failed, by name."""
        console = Console(quiet=not self.fabric.is_global_zero)
        bar = Progress(console=console, disable=not self.pending, transient=True)
        task = bar.add_task("", total=len(self.pending))
        with bar, self._downloads:
            for i, planned in enumerate(self.pending):
                bar.update(task, description=f"{planned.name}  {i + 1}/{len(self.pending)}")
                self._finish(planned, self.pending[i + 1 :], console)
                bar.update(task, advance=1)
            if self.fabric.is_global_zero:
                self.out.rebuild(self._num_series)
        return self.failures

    def _finish(self, planned: Planned, following: Sequence[Planned], console: Console) -> None:
        """Write the results of a checkpoint, or why there are none."""
        started = time.monotonic()
        try:
            records, tables = self._copied(planned) or self._measured(planned, following)
            frame = to_frame(records, **self._columns(planned))
            if self.fabric.is_global_zero:
                self.out.write(planned.name, frame, tables)
        except Exception as error:
            why = self.failures[planned.name] = planned.error or reason(error)
            if self.fabric.is_global_zero:
                self.out.fail(planned.name, why)
            line = f"{planned.name}  failed: {why}"
        else:
            line = f"{planned.name}  {headline(frame)}  ({time.monotonic() - started:.1f} s)"
            self._rebuild_sometimes()
        finally:
            self._downloads.remove(planned)
        console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _copied(self, planned: Planned) -> Measured | None:
        """The results of the checkpoint that this one duplicates; None if it must be measured itself."""
        copied = None
        original = planned.duplicate_of
        if self.fabric.is_global_zero and original in self.out.done() and planned.contents is not None:
            with suppress(Exception):  # then it is measured
                first = next(other.checkpoint for other in self.plan if other.name == original)
                if first.config_digest() == planned.contents.config_digest:
                    records = self.out.read(original)
                    tables = self.out.read_tables(original) if self.settings.token_tables else {}
                    copied = [*to_records(records[records["metric"] != "tokens_seen"]), *_tokens_seen(planned)], tables
        return self.fabric.broadcast(copied)

    def _measured(self, planned: Planned, following: Sequence[Planned]) -> Measured:
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
            require_vocabulary(loaded.model, self.text.token_ids)
        upcoming = next((p for p in following if not p.duplicate_of and not p.error), None)
        if self.fabric.local_rank == 0 and upcoming is not None:  # duplicates are expected to be copied
            self._downloads.start(upcoming)
        records, tables = measure(self.fabric, loaded, self.text, self.settings)
        return [*records, *_tokens_seen(planned)], tables

    def _load(self, planned: Planned, path: Path) -> loading.LoadedModel:
        dtype = getattr(torch, self.settings.dtype)
        if path.is_file():
            assert self.settings.model_class is not None
            return loading.load_lightning(path, self.settings.model_class, dtype=dtype)
        assert planned.contents is not None
        trusted = self.settings.trust_remote_code
        return loading.load_model(path, planned.contents, dtype=dtype, trust_remote_code=trusted)

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


def _tokens_seen(planned: Planned) -> list[Record]:
    tokens = planned.checkpoint.position.tokens
    return [] if tokens is None else [model_record("tokens_seen", float(tokens))]
