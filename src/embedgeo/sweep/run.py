"""The loop over checkpoints: choose, measure or copy, write; the next is fetched while one is measured."""

import gc
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Self

import pandas as pd
import torch
from lightning.fabric import Fabric
from rich.console import Console
from rich.progress import Progress

from embedgeo.checkpoints import hub, loading
from embedgeo.formatting import listed, reason
from embedgeo.glossary import headlines
from embedgeo.layer_names import blocks_by_side
from embedgeo.metrics.defaults import width_notes
from embedgeo.results.files import Locks, remove_leftovers, temporary_path
from embedgeo.results.folder import SweepFolder
from embedgeo.results.parquet import to_frame, to_records
from embedgeo.results.records import MODEL, Record, loss_outliers, model_record
from embedgeo.results.samples import load_sample
from embedgeo.sweep.measure import Measured, measure, metric_factory
from embedgeo.sweep.plan import Planned
from embedgeo.sweep.processes import all_agree, from_local_zero
from embedgeo.sweep.settings import SweepSettings
from embedgeo.sweep.texts import ProbeText, require_vocabulary

_HEADLINES = headlines()[:4]  # as many as fit in a line
_VALUES = ("loss", *_HEADLINES)
_OVER = "means over {}"


class Lines:
    """The lines of a sweep, in columns: what has become of each checkpoint, and an estimate of the time left.

    Args:
        pending: the checkpoints that are to be measured.
    """

    def __init__(self, pending: Sequence[Planned]) -> None:
        self._total = len(pending)
        self._width = min(max([len(_OVER.format("blocks")), *(len(planned.name) for planned in pending)]), 40)
        self._started = time.monotonic()
        self._num_ended = 0
        self._columns: list[str] = []

    def measured(self, planned: Planned, number: int, records: pd.DataFrame, seconds: float) -> str:
        """The loss, and means over blocks (over all layers if none is a block), as far as they are measured.

        Above the first line stand the columns, and again where there are more of them.
        """
        at_layers = records[records["layer"] != MODEL]
        names = [name for side in blocks_by_side(at_layers["layer"].unique()).values() for name in side]
        blocks = at_layers[at_layers["layer"].isin(names)]
        means = (blocks if len(blocks) else at_layers).groupby("metric")["value"].mean()
        loss = records[(records["layer"] == MODEL) & (records["metric"] == "loss")]["value"]
        values = {**means, **({"loss": loss.iloc[0]} if len(loss) else {})}
        columns = [key for key in _VALUES if key in values or key in self._columns] + ["time", "left"]
        cells = [f"{values[key]:.4g}" if key in values else "" for key in columns[:-2]]
        self._num_ended += 1
        left = (time.monotonic() - self._started) / self._num_ended * (self._total - number)
        cells += [f"{seconds:.1f} s", str(timedelta(seconds=round(left)))]
        is_headed, self._columns = columns == self._columns, columns
        heading = "" if is_headed else self._line("", _OVER.format("blocks" if len(blocks) else "layers"), columns)
        return "\n".join(filter(None, (heading, self._line(f"{number}/{self._total}", planned.name, cells))))

    def failed(self, planned: Planned, number: int, why: str) -> str:
        """Why there are no results."""
        self._num_ended += 1
        return f"{self._line(f'{number}/{self._total}', planned.name, [])}  failed: {why}"

    def _line(self, number: str, name: str, cells: Sequence[str]) -> str:
        aligned = [f"{cell:>{max(8, len(key))}}" for cell, key in zip(cells, self._columns, strict=False)]
        return "  ".join([f"{number:>{2 * len(str(self._total)) + 1}}", f"{name:<{self._width}}", *aligned])


def shortfall(settings: SweepSettings, text: ProbeText) -> str:
    """Whether fewer tokens are used than were asked for, and whether texts were cut, in sentences; empty if neither."""
    used, left = len(text.token_ids), settings.num_tokens - len(text.token_ids)
    many = f"{len(text.lengths):,} sequences of {settings.seq_len:,}"
    rest = "what does not fill a sequence is left out"
    if settings.unit != "sequence":
        many, rest = f"{len(text.lengths):,} texts", "only whole texts are taken"
    why = "the text has no more" if left >= settings.seq_len else rest
    lines = [f"{settings.num_tokens:,} tokens asked for, {used:,} used ({many}): {why}"] if left else []
    if text.num_cut:
        lines.append(f"{text.num_cut:,} of {len(text.lengths):,} texts are cut to seq_len={settings.seq_len} tokens")
    return "; ".join(lines)


def summarize(
    records: Mapping[str, pd.DataFrame], plan: Sequence[Planned], mine: Sequence[Planned], failures: Mapping[str, str]
) -> str:
    """How many checkpoints are done, and which are duplicates, have moved, were replaced, are other models, or failed.

    Args:
        records: of the checkpoints that are done, by name, as `SweepFolder.read_runs` has them.
        plan: all checkpoints of the sweep.
        mine: those that this run was to have done.
        failures: reasons, by name.
    """
    done = [planned for planned in plan if planned.is_done(records.get(planned.name))]
    left = [planned.name for planned in mine if planned not in done]
    part = f" ({len(mine) - len(left)} of {len(mine)} in this shard)" if len(mine) < len(plan) else ""
    lines = [f"{len(done)} of {len(plan)} checkpoints done{part}"]
    losses: dict[str, list[tuple[str, float]]] = {}
    models: dict[str, dict[str, list[str]]] = {}
    for planned in done:
        name, frame = planned.name, records[planned.name]
        if planned.duplicate_of:
            lines.append(f"  duplicate: {name} has the weights of {planned.duplicate_of}")
        before, now = frame["commit"].iloc[0], planned.checkpoint.commit
        if before != now:
            lines.append(f"  moved: {name} was measured at commit {before[:12]}; its revision is {now[:12]} now")
        if planned.is_stale:
            lines.append(f"  replaced: {name} was measured before with other weights; measured again")
        series = str(frame["series"].iloc[0])
        models.setdefault(planned.checkpoint.position.series, {}).setdefault(series, []).append(name)
        for value in frame[(frame["layer"] == MODEL) & (frame["metric"] == "loss")]["value"]:
            losses.setdefault(series, []).append((name, float(value)))
    for apart in models.values():
        if len(apart) > 1:
            which = "; ".join(f"{series} ({listed(names)})" for series, names in apart.items())
            lines.append(f"  different models, kept apart as runs of their own: {which}")
    for by_step in losses.values():
        for name in loss_outliers(by_step):
            lines.append(f"  outlier: {name} has a loss of {dict(by_step)[name]:.4g}, out of line with its neighbours")
    lines += [f"  failed: {name}: {reason}" for name, reason in failures.items()]
    lines += [f"  not done: {name}: its results are gone again" for name in left if name not in failures]
    if left:
        lines.append(f"{len(left)} checkpoints failed; once the reasons are mended, the next run tries only those")
    return "\n".join(lines)


class Downloads:
    """Fetches checkpoints one at a time, and removes their files once they have been measured.

    With ``evict``, files are downloaded into a folder of this process alone, inside ``out``, and the user's
    cache is only read: nothing is written to it or removed from it. If the process is killed, the next one that
    downloads into ``out`` removes what is left. Without ``evict``, files are downloaded into the user's cache and stay.

    Args:
        out: a folder: on the driver's machine, that of the sweep.
        evict: remove what has been downloaded.
    """

    def __init__(self, out: Path, *, evict: bool) -> None:
        remove_leftovers(out)  # of killed processes of this machine, also where another one opens the sweep folder
        self._folder = temporary_path(out / "downloads")
        self._evict = evict
        self._worker = ThreadPoolExecutor(1)
        self._fetches: dict[str, Future[Path]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        is_stopped = kind is not None and not issubclass(kind, Exception)  # then a download may not be waited for
        self._worker.shutdown(wait=not is_stopped, cancel_futures=True)
        self.discard()

    def discard(self) -> None:
        """Remove all that has been downloaded."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def start(self, planned: Planned) -> Future[Path]:
        """Begin to fetch a checkpoint, unless that has begun already; the result is its folder or file."""
        if planned.name not in self._fetches:
            self._fetches[planned.name] = self._worker.submit(self._fetch, planned)
        return self._fetches[planned.name]

    def _fetch(self, planned: Planned) -> Path:
        checkpoint = planned.checkpoint
        if checkpoint.path is not None:
            return checkpoint.path
        assert planned.contents is not None
        cache = self._folder / planned.name if self._evict else None
        return hub.fetch(checkpoint.model, checkpoint.commit, planned.contents, cache)

    def offload_folder(self, planned: Planned) -> Path:
        """A folder for the weights of a checkpoint that a device map keeps on disk."""
        return self._folder / planned.name / "offloaded"

    def remove(self, planned: Planned) -> None:
        """Remove what was downloaded of a checkpoint, and what a device map keeps on disk."""
        self._fetches.pop(planned.name, None)
        shutil.rmtree(self._folder / planned.name, ignore_errors=True)


_PACKAGES = ("embedgeo", "huggingface_hub", "lightning", "torch", "torchmetrics", "transformers")
"""Packages that the numbers depend on."""


def versions() -> dict[str, str]:
    """Versions of the packages that the numbers depend on."""
    return {name: version(name) for name in _PACKAGES}


@dataclass
class Worker:
    """One process of those that measure a checkpoint together: local rank 0 downloads for its node.

    Args:
        fabric: the processes and their devices.
        settings: of the sweep.
        texts: what to measure on, by `Checkpoint.model`.
        downloads: where to.
    """

    fabric: Fabric
    settings: SweepSettings
    texts: Mapping[str, ProbeText]
    downloads: Downloads
    _loader: ThreadPoolExecutor = field(default_factory=partial(ThreadPoolExecutor, 1), init=False)
    _loads: dict[str, Future[loading.LoadedModel]] = field(default_factory=dict, init=False)

    def measured(self, planned: Planned, upcoming: Callable[[], Planned | None]) -> Measured:
        """Measure a checkpoint; every rank must call this, and returns the same.

        Args:
            planned: the checkpoint.
            upcoming: chooses the next one, to be fetched meanwhile, once this one is loaded, and loaded while the
                metrics of this one, whose weights have gone by then, are computed and written.

        Raises:
            Exception: of any kind: it cannot be fetched, loaded or measured.
        """
        try:
            path = None
            with all_agree(self.fabric):
                if self.fabric.local_rank == 0:
                    path = self.downloads.start(planned).result()
            path = from_local_zero(self.fabric, path)
            assert path is not None
            with all_agree(self.fabric):
                loaded = self._loaded(planned, path)
                require_vocabulary(loaded.model, self._text(planned).token_ids)
            following = self.fabric.broadcast(upcoming())
            if self.fabric.local_rank == 0 and following is not None:
                self.downloads.start(following)
            return measure(
                self.fabric, loaded, self._text(planned), self.settings, partial(self._load_ahead, following)
            )
        finally:
            self.downloads.remove(planned)

    def load(self, planned: Planned, path: Path) -> loading.LoadedModel:
        """The model of a checkpoint, from its folder or file."""
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
            offload_folder=self.downloads.offload_folder(planned),
        )

    def _loaded(self, planned: Planned, path: Path) -> loading.LoadedModel:
        """The model that was loaded ahead, or loaded now: never two at a time, for transformers patches torch."""
        ahead = self._loads.pop(planned.name, None)
        wait(self._loads.values())
        self._loads.clear()
        return self.load(planned, path) if ahead is None else ahead.result()

    def _load_ahead(self, planned: Planned | None) -> None:
        """Begin to load a checkpoint, where that changes nothing for the metrics that are computed meanwhile.

        Loading sets torch's default dtype for all threads; and code of the user's may set anything.
        """
        own_code = self.settings.model_class is not None or self.settings.trust_remote_code
        in_place = self.settings.device_map is None and self.fabric.world_size == 1
        if planned is not None and in_place and not own_code and self.settings.dtype == "float32":
            fetched = self.downloads.start(planned)
            self._loads[planned.name] = self._loader.submit(lambda: self.load(planned, fetched.result()))

    def _text(self, planned: Planned) -> ProbeText:
        return self.texts[planned.checkpoint.model]


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
            worker = self._worker(downloads)
            while (planned := self._next()) is not None:
                number = len(self.pending) - len(self._left)
                self._show(planned.name, number, number - 1)
                started = time.monotonic()
                self._end(planned, number, self._measured(planned, worker), started)

    def _worker(self, downloads: Downloads) -> Any:
        """What measures a checkpoint, by its method ``measured``."""
        return Worker(self.fabric, self.settings, self.texts, downloads)

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
                for note in width_notes(metric_factory(self.settings), int(width)):
                    self._say_once(note)
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
            self.out.write_failure(planned.name, why)
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
                is_same &= self.texts.get(first.model) is self.texts.get(planned.checkpoint.model)  # one tokenizer
                if is_same and first.config_digest() == planned.contents.config_digest:
                    tables = self.out.read_tables(original, self.settings.tables)
                    kept = to_records(records[records["metric"] != "tokens_seen"])
                    layers = load_sample(self.out.path, original).layers if self.settings.save_samples else None
                    copied = Measured(kept, tables, self.out.facts(original), layers)
        return self.fabric.broadcast(copied)

    def _measured(self, planned: Planned, worker: Any) -> Measured | str:
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
