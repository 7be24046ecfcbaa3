"""The loop over checkpoints: fetch, load, measure, write, evict; the next is fetched while one is measured."""

import time
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from torch.utils.data import DataLoader, TensorDataset

from embedgeo.checkpoints import hub, loading
from embedgeo.store import SweepFolder, records_of
from embedgeo.sweep.measure import MODEL, Measurement, Row, probe_loader
from embedgeo.sweep.plan import Planned, reason
from embedgeo.sweep.probe_text import ProbeText, require_vocabulary
from embedgeo.sweep.settings import Settings
from embedgeo.sweep.summary import headline

Results = tuple[pd.DataFrame, pd.DataFrame | None]
"""Records, and the table of token types where that was asked for."""


class Rendezvous(LightningModule):
    """Predicts nothing: the Trainer starts the other processes for it."""

    def predict_step(self, batch: Any, batch_idx: int) -> int:
        """Nothing."""
        return batch_idx


def make_trainer(options: dict[str, Any]) -> Trainer:
    """The Trainer.

    Raises:
        ValueError: options that it does not take, or a strategy that forgets its processes between checkpoints.
    """
    try:
        trainer = Trainer(**options)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"trainer must be options of lightning's Trainer; got {options} ({error}).") from error
    except Exception as error:  # lightning's MisconfigurationException
        raise ValueError(f"trainer must be options that lightning accepts here; {reason(error)}") from error
    if isinstance(trainer.strategy.launcher, _MultiProcessingLauncher):
        raise ValueError(  # noqa: TRY004 - it is the user's choice of a value
            "trainer.strategy must keep its processes over the sweep, as ddp does; got one that spawns."
        )
    return trainer


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
        settings: Settings,
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
        self.series = {planned.name: planned.checkpoint.position.series for planned in plan}
        self.out = out
        self.evict = evict
        self.failures: dict[str, str] = {}
        self._downloads = hub.Downloads(out.path / ".downloads" / str(trainer.node_rank))
        self._fetches: dict[str, Future[Path]] = {}
        self._evictions: list[Future[None]] = []
        self._rebuilt = (time.monotonic(), 0.0)  # when, and how long it took

    def run(self) -> dict[str, str]:
        """Do everything that is pending; returns the reasons of those that failed, by name."""
        with ThreadPoolExecutor(1) as worker, self._progress() as progress:
            self._worker = worker
            try:
                self._evict_done()
                for i, planned in enumerate(self.pending):
                    progress.update(TaskID(0), description=planned.name)
                    self._finish(planned, i, progress.console)
                    progress.update(TaskID(0), advance=1)
            except BaseException:
                worker.shutdown(cancel_futures=True)  # the notes tell the next run what to evict
                raise
            for problem in {str(eviction.exception()) for eviction in self._evictions if eviction.exception()}:
                progress.console.print(f"not evicted from the cache: {problem}", markup=False)
        if self.trainer.is_global_zero:
            self.out.rebuild(self.series)
        return self.failures

    def _finish(self, planned: Planned, index: int, console: Console) -> None:
        started = time.monotonic()
        try:
            records, tokens = self._copied(planned) or self._measured(planned, index)
            if self.trainer.is_global_zero:
                self.out.write(planned.name, records, tokens)
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
            self._fetches.pop(planned.name, None)
            self._downloads.release(planned.name)
            if self.evict and planned.checkpoint.path is None and self.trainer.local_rank == 0:
                self._evictions.append(self._worker.submit(self._downloads.evict, planned.name))

    def _copied(self, planned: Planned) -> Results | None:
        """The results of the checkpoint that this one duplicates, as its own; None where it is to be measured."""
        results = None
        original = planned.duplicate_of
        if self.trainer.is_global_zero and original in self.out.done() and planned.contents is not None:
            with suppress(Exception):  # then it is measured
                if self.plan[original].checkpoint.config_digest() == planned.contents.config_digest:
                    copied = self.out.read(original)
                    rows = copied[copied["metric"] != "tokens_seen"][["layer", "layer_index", "metric", "value"]]
                    own = [*rows.itertuples(index=False, name=None), *_tokens_seen(planned)]
                    tokens = self.out.read_tokens(original) if self.settings.token_tables else None
                    results = records_of(own, **self._columns(planned)), tokens
        return self.trainer.strategy.broadcast(results)

    def _measured(self, planned: Planned, index: int) -> Results:
        """Every step that can fail on one rank is followed by one on which all agree."""
        path, error = None, None
        try:
            if planned.error:
                raise FileNotFoundError(planned.error)
            if self.trainer.local_rank == 0:
                path = self._fetch(planned).result()
        except Exception as caught:
            error = caught
        self._agree(error)
        loaded = None
        try:
            path = path or self._folder(planned)
            loaded = self._load(planned, path)
            if loading.num_token_types(loaded.model) is not None:
                require_vocabulary(loaded.model, self.text.token_ids)
        except Exception as caught:
            error = caught
        self._agree(error)
        assert loaded is not None
        self._downloads.release(planned.name)
        if self.trainer.local_rank == 0:
            self._prefetch(index + 1)
        measurement = Measurement(loaded, self.settings, self.text.mask_token_id)
        del loaded
        try:
            with _without_advice():
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
        records = records_of([*measurement.rows, *_tokens_seen(planned)], **self._columns(planned))
        return records, measurement.tokens

    def _agree(self, error: Exception | None) -> None:
        """Raise on every rank if there is an error on one."""
        if self.trainer.world_size > 1 and not self.trainer.strategy.reduce_boolean_decision(error is None):
            raise error or RuntimeError("it failed on another rank")
        if error is not None:
            raise error

    def _fetch(self, planned: Planned) -> "Future[Path]":
        name = planned.name
        if name not in self._fetches:
            self._fetches[name] = self._worker.submit(self._fetch_now, planned)
        return self._fetches[name]

    def _fetch_now(self, planned: Planned) -> Path:
        checkpoint = planned.checkpoint
        if checkpoint.path is not None:
            return checkpoint.path
        assert planned.contents is not None
        self._downloads.lease(planned.name, checkpoint.commit)
        if self.evict:
            self._downloads.note(planned.name, checkpoint.model, checkpoint.commit, planned.contents)
        return hub.fetch(checkpoint.model, checkpoint.commit, planned.contents)

    def _folder(self, planned: Planned) -> Path:
        """Where another rank of this machine has put the files."""
        return planned.checkpoint.path or hub.snapshot_folder(planned.checkpoint.model, planned.checkpoint.commit)

    def _prefetch(self, start: int) -> None:
        """Begin to fetch the next one that has to be: duplicates are expected to be copied."""
        for planned in self.pending[start:]:
            if not planned.duplicate_of and not planned.error:
                self._fetch(planned)
                return

    def _load(self, planned: Planned, path: Path) -> loading.LoadedModel:
        if path.is_file():
            assert self.settings.model_class is not None
            return loading.load_lightning(path, self.settings.model_class, dtype=self.settings.torch_dtype)
        assert planned.contents is not None
        return loading.load_model(
            path,
            planned.contents,
            dtype=self.settings.torch_dtype,
            trust_remote_code=self.settings.trust_remote_code,
        )

    def _columns(self, planned: Planned) -> dict[str, Any]:
        checkpoint = planned.checkpoint
        return {
            "model": checkpoint.model,
            "revision": checkpoint.revision,
            "step": checkpoint.step,
            "commit": checkpoint.commit,
            "weights_sha256": planned.weights_sha256,
            "duplicate_of": planned.duplicate_of,
        }

    def _rebuild_sometimes(self) -> None:
        """So that one can look on while it runs, for a small share of the time."""
        last, cost = self._rebuilt
        started = time.monotonic()
        if self.trainer.is_global_zero and started - last > 50 * cost:
            with suppress(OSError):  # as on a full disk: the rebuilding at the end tells
                self.out.rebuild(self.series)
            self._rebuilt = started, time.monotonic() - started

    def _evict_done(self) -> None:
        """What an earlier run, killed meanwhile, has left in the cache of checkpoints that are done."""
        if self.evict and self.trainer.local_rank == 0:
            done = self.out.done()
            for name in self._downloads.noted():
                if name in done:
                    self._evictions.append(self._worker.submit(self._downloads.evict, name))

    @contextmanager
    def _progress(self) -> Iterator[Progress]:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        console = Console(quiet=not self.trainer.is_global_zero)
        with Progress(*columns, console=console, disable=not self.pending, transient=True) as progress:
            progress.add_task("", total=len(self.pending))
            yield progress


def rendezvous(trainer: Trainer) -> None:
    """Start the other processes, and meet them."""
    if trainer.world_size > 1:
        with _without_advice():
            loader = DataLoader(TensorDataset(torch.zeros(trainer.world_size)))
            trainer.predict(Rendezvous(), loader, return_predictions=False)


def _tokens_seen(planned: Planned) -> list[Row]:
    tokens = planned.checkpoint.position.tokens
    return [] if tokens is None else [(MODEL, -1, "tokens_seen", float(tokens))]


@contextmanager
def _without_advice() -> Iterator[None]:
    """Without lightning's advice on the Trainer's options, which are the user's choice, and on loading from memory."""
    with warnings.catch_warnings():
        for message in (".*does not have many workers", "GPU available but not used", ".*treespec, LeafSpec"):
            warnings.filterwarnings("ignore", message)
        yield
