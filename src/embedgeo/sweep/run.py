"""The loop over checkpoints: fetch, load, measure, write, evict; the next is fetched while one is measured."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from lightning.pytorch import Trainer
from rich.console import Console
from rich.progress import Progress, TaskID

from embedgeo.checkpoints import loading
from embedgeo.results.folder import SweepFolder, to_frame, to_records
from embedgeo.results.schema import Record, model_record
from embedgeo.results.wording import reason
from embedgeo.sweep.fetching import Fetching, folder_of
from embedgeo.sweep.measure import Measurement, probe_loader
from embedgeo.sweep.plan import Planned
from embedgeo.sweep.probe_text import ProbeText, require_vocabulary
from embedgeo.sweep.settings import SweepSettings
from embedgeo.sweep.summary import headline

Results = tuple[pd.DataFrame, dict[str, pd.DataFrame]]
"""Records, and the tables of token types where these were asked for."""


class Sweep:
    """One process of a sweep: rank 0 plans and writes, all ranks measure.

    Args:
        trainer: runs the models.
        settings: what was asked for.
        plan: the whole sweep.
        pending: what of it is to be done here.
        text: what to measure on.
        out: the sweep folder; only rank 0 writes there.
        evict: take what is downloaded out of the cache again.
    """

    def __init__(
        self,
        trainer: Trainer,
        settings: SweepSettings,
        plan: Sequence[Planned],
        pending: Sequence[Planned],
        text: ProbeText,
        out: SweepFolder,
        evict: bool,
    ) -> None:
        self.trainer = trainer
        self.settings = settings
        self.pending = list(pending)
        self.text = text
        self.plan = {planned.name: planned for planned in plan}
        self.out = out
        self.failures: dict[str, str] = {}
        self._fetching = Fetching(out.path / ".downloads" / str(trainer.node_rank), evict)
        self._rebuilt = (time.monotonic(), 0.0)  # when, and how long it took

    def run(self) -> dict[str, str]:
        """Do everything that is pending; returns the reasons of those that failed, by name."""
        with self._progress() as progress, self._fetching as fetching:
            if self.trainer.local_rank == 0:
                fetching.evict_done(self.out.done())
            for i, planned in enumerate(self.pending):
                progress.update(TaskID(0), description=f"{planned.name}  {i + 1}/{len(self.pending)}")
                self._finish(planned, i, progress.console)
                progress.update(TaskID(0), advance=1)
            if self.trainer.is_global_zero:
                self.out.rebuild()
        for problem in self._fetching.problems:
            print(f"not evicted from the cache: {problem}")
        return self.failures

    def _finish(self, planned: Planned, index: int, console: Console) -> None:
        started = time.monotonic()
        try:
            records, tables = self._copied(planned) or self._measured(planned, index)
            if self.trainer.is_global_zero:
                self.out.write(planned.name, records, tables)
        except Exception as error:
            why = self.failures[planned.name] = planned.error or reason(error)
            if self.trainer.is_global_zero:
                self.out.fail(planned.name, why)
            console.print(f"{planned.name}  failed: {why}", markup=False, highlight=False, soft_wrap=True)
        else:
            took = f"({time.monotonic() - started:.1f} s)"
            line = f"{planned.name}  {headline(records)}  {took}"
            console.print(line, markup=False, highlight=False, soft_wrap=True)
            self._rebuild_sometimes()
        finally:
            if self.trainer.local_rank == 0:
                self._fetching.finish(planned)

    def _copied(self, planned: Planned) -> Results | None:
        """The results of the checkpoint that this one duplicates, as its own; None where it is to be measured."""
        results = None
        original = planned.duplicate_of
        if self.trainer.is_global_zero and original in self.out.done() and planned.contents is not None:
            with suppress(Exception):  # then it is measured
                if self.plan[original].checkpoint.config_digest() == planned.contents.config_digest:
                    copied = self.out.read(original)
                    own = [*to_records(copied[copied["metric"] != "tokens_seen"]), *_tokens_seen(planned)]
                    tables = self.out.read_tables(original) if self.settings.token_tables else {}
                    results = to_frame(own, **self._columns(planned)), tables
        return self.trainer.strategy.broadcast(results)

    def _measured(self, planned: Planned, index: int) -> Results:
        """Every step that can fail on one rank is followed by one on which all agree."""
        path, error = None, None
        try:
            if planned.error:
                raise FileNotFoundError(planned.error)
            if self.trainer.local_rank == 0:
                path = self._fetching.start(planned).result()
        except Exception as caught:
            error = caught
        self._agree(error)
        loaded = None
        try:
            loaded = self._load(planned, path or folder_of(planned))
            if loading.num_token_types(loaded.model) is not None:
                require_vocabulary(loaded.model, self.text.token_ids)
        except Exception as caught:
            error = caught
        self._agree(error)
        assert loaded is not None
        if self.trainer.local_rank == 0:
            self._fetching.release(planned)
            upcoming = (p for p in self.pending[index + 1 :] if not p.duplicate_of and not p.error)
            for following in islice(upcoming, 1):  # duplicates are expected to be copied
                self._fetching.start(following)
        measurement = Measurement(loaded, self.settings, self.text.mask_token_id)
        del loaded
        try:
            loader = probe_loader(
                self.text.token_ids,
                self.text.masked,
                self.settings.batch_size,
                rank=self.trainer.global_rank,
                world_size=self.trainer.world_size,
            )
            self.trainer.predict(measurement, loader, return_predictions=False)
        finally:
            measurement.release()
        records = to_frame([*measurement.records, *_tokens_seen(planned)], **self._columns(planned))
        tables = measurement.tables
        if "projections" in tables:
            texts = tables["projections"]["token_id"].map(self.text.token_texts)
            tables["projections"] = tables["projections"].assign(token=texts)
        return records, tables

    def _agree(self, error: Exception | None) -> None:
        """Raise on every rank if there is an error on one."""
        if self.trainer.world_size > 1 and not self.trainer.strategy.reduce_boolean_decision(error is None):
            raise error or RuntimeError("it failed on another rank")
        if error is not None:
            raise error

    def _load(self, planned: Planned, path: Path) -> loading.LoadedModel:
        if path.is_file():
            assert self.settings.model_class is not None
            return loading.load_lightning(path, self.settings.model_class, dtype=getattr(torch, self.settings.dtype))
        assert planned.contents is not None
        return loading.load_model(
            path,
            planned.contents,
            dtype=getattr(torch, self.settings.dtype),
            trust_remote_code=self.settings.trust_remote_code,
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
        """So that one can look on while it runs, for a small share of the time."""
        last, cost = self._rebuilt
        started = time.monotonic()
        if self.trainer.is_global_zero and started - last > 50 * cost:
            with suppress(OSError):  # as on a full disk: the rebuilding at the end tells
                self.out.rebuild()
            self._rebuilt = started, time.monotonic() - started

    @contextmanager
    def _progress(self) -> Iterator[Progress]:
        console = Console(quiet=not self.trainer.is_global_zero)
        with Progress(console=console, disable=not self.pending, transient=True) as progress:
            progress.add_task("", total=len(self.pending))
            yield progress


def _tokens_seen(planned: Planned) -> list[Record]:
    tokens = planned.checkpoint.position.tokens
    return [] if tokens is None else [model_record("tokens_seen", float(tokens))]
