"""The checkpoints of a sweep in progress: which are left, and what becomes of each."""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta

import pandas as pd
from rich.console import Console
from rich.text import Text

from embedgeo.checkpoints.sources import Checkpoint
from embedgeo.formatting import listed, reason
from embedgeo.glossary import headlines
from embedgeo.metrics.layer import MetricFactory
from embedgeo.results.findings import finding_lines
from embedgeo.results.folder import SweepFolder
from embedgeo.results.parquet import to_frame, to_records
from embedgeo.results.records import block_means, is_of_model, model_record
from embedgeo.results.samples import load_sample
from embedgeo.sweep.locks import Locks
from embedgeo.sweep.measure import Measured
from embedgeo.sweep.plan import SweepPlan, checkpoint_facts
from embedgeo.sweep.settings import SweepSettings
from embedgeo.sweep.texts import ProbeText

POLL_SECONDS = 1.0  # between two looks at whether another sweep is through with what it has begun
# the keys that are printed of a checkpoint, as many as fit in a line
_VALUES = ("loss", *headlines()[:4])


@dataclass
class Sweep:
    """The checkpoints of a sweep: the next one, and the results of each."""

    settings: SweepSettings
    plan: SweepPlan
    texts: Mapping[str, ProbeText]  # by `Checkpoint.model`
    folder: SweepFolder
    make_metrics: MetricFactory

    def __post_init__(self) -> None:
        self.left = self.plan.pending  # those that are not under way yet
        self.failures: dict[str, str] = {}  # reasons, by name
        self.num_ended = 0
        # a folder holds results of one choice of steps
        self._locks = Locks(
            self.folder.path, is_alone=self.settings.steps not in ("all", "log", "final")
        )
        self._status = Console().status("")
        self._width = min(max(20, *(len(each.name) for each in self.plan.checkpoints)), 40)
        self._started = time.monotonic()
        self._printed: set[str] = set()
        self._header: list[str] = []  # the last one that was printed
        self._are_findings_printed = False
        self._next_rebuild = self._started

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Show the progress, and hold what has been begun; at the end, and where it is stopped,
        bring the folder up to date.
        """
        with self._status, closing(self._locks):
            try:
                yield
            finally:
                self.folder.rebuild()

    def next(self) -> Checkpoint | None:
        """The checkpoint to measure now; None at the end. What other processes have begun comes
        last.
        """
        while (chosen := self.reserve(self.left)) is None and self.left:
            self.wait_for_others()
        if chosen is not None:
            self.left.remove(chosen)
        return chosen

    def choose_upcoming(self) -> Checkpoint | None:
        """The checkpoint to fetch while another is measured, from now on this process's; duplicates
        are copied.
        """
        return self.reserve(
            [each for each in self.left if not each.duplicate_of and not each.error]
        )

    def reserve(self, among: Sequence[Checkpoint]) -> Checkpoint | None:
        """The first checkpoint whose original no other process has begun; from now on this
        one's.
        """
        for checkpoint in list(among):
            if not self._locks.take(checkpoint.original):
                self.print_once(
                    f"another sweep is at work in {self.folder.path}: what it has begun is left to "
                    f"it"
                )
            elif checkpoint.name in self.folder.done() and self.plan.is_current(
                checkpoint, self.folder
            ):
                # another process has done it since this one has made its plan
                self.left.remove(checkpoint)
                self._locks.release(checkpoint.original)
            else:
                return checkpoint
        return None

    def put_back(self, checkpoint: Checkpoint) -> None:
        """Leave a checkpoint that is not measured after all to this process or another one."""
        self.left.insert(0, checkpoint)
        self._locks.release(checkpoint.original)

    def known(self, checkpoint: Checkpoint) -> Measured | str | None:
        """The results of the checkpoint that this one duplicates, or why its files could not be
        listed; None if it must be measured itself.
        """
        if checkpoint.error:
            return checkpoint.error
        original = checkpoint.duplicate_of
        if original not in self.folder.done() or checkpoint.contents is None:
            return None
        with suppress(Exception):  # then it is measured
            checkpoint.require_step()
            records = self.folder.read(original)
            is_same = records["weights_sha256"].iloc[0] == checkpoint.weights_sha256
            facts = self.folder.facts(original)
            if is_same and facts.get("config", "") == checkpoint.contents.config_digest:
                tables = self.folder.read_tables(original, self.settings.tables)
                kept = to_records(records[records["metric"] != "tokens_seen"])
                sample = (
                    load_sample(self.folder.path, original).layers
                    if self.settings.save_samples
                    else None
                )
                return Measured(kept, tables, facts, sample)
        return None

    def end(self, checkpoint: Checkpoint, result: Measured | str, started: float) -> None:
        """Write what was measured, or why nothing was; leave the checkpoint to others, and print
        its line.
        """
        records = pd.DataFrame()
        try:
            if isinstance(result, Measured):
                records = self._write(checkpoint, result)
        except Exception as error:
            result = reason(error)
        finally:
            self._locks.release(checkpoint.original)
        self.num_ended += 1
        if isinstance(result, str):
            self.failures[checkpoint.name] = result
            self.folder.write_failure(checkpoint.name, result)
            self.print(f"{self._numbered(checkpoint)}  failed: {result}")
        else:
            for width in sorted(set(records["width"]) - {0}):
                for metric in self.make_metrics(int(width)):
                    if sample := getattr(metric, "compromise", ""):
                        self.print_once(sample)
            self._print_values(checkpoint, records, time.monotonic() - started)
            if not self._are_findings_printed:
                self._are_findings_printed = True
                for line in finding_lines(to_records(records)):
                    self.print(f"{'':9}{line}")
        now = time.monotonic()
        if now > self._next_rebuild:
            with suppress(OSError):  # as on a full disk: rebuilding at the end reports it
                self.folder.rebuild(csv=False)
            self._next_rebuild = now + 50 * (time.monotonic() - now)

    def _write(self, checkpoint: Checkpoint, measured: Measured) -> pd.DataFrame:
        checkpoint = measured.checkpoint or checkpoint
        records = list(measured.records)
        if checkpoint.position.tokens is not None:
            records.append(model_record("tokens_seen", float(checkpoint.position.tokens)))
        frame = to_frame(
            records,
            model=checkpoint.model,
            revision=checkpoint.revision,
            step=checkpoint.step,
            commit=checkpoint.commit,
            series=checkpoint.position.series,
            weights_sha256=checkpoint.weights_sha256,
            duplicate_of=checkpoint.duplicate_of,
        )
        facts = {**measured.facts, **checkpoint_facts(checkpoint)}
        known = {key: value for key, value in facts.items() if value}
        self.folder.write(checkpoint.name, frame, measured.tables, known, measured.sample)
        return frame

    def show_progress(self, names: Iterable[str]) -> None:
        """Say in a line that goes again which checkpoints are under way."""
        done = f"{self.num_ended}/{len(self.plan.pending)} done"
        self._status.update(Text(f"{listed([*names])}  {done}"))

    def wait_for_others(self) -> None:
        """Wait for what has been begun by others, which is all that is left."""
        names = listed([checkpoint.name for checkpoint in self.left])
        self.print_once(f"waiting for another sweep to be through with {names}")
        time.sleep(POLL_SECONDS)

    def print(self, line: str) -> None:
        """Print a line."""
        self._status.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def print_once(self, line: str) -> None:
        """Print a line unless it has been printed before."""
        if line not in self._printed:
            self._printed.add(line)
            self.print(line)

    def _print_values(self, checkpoint: Checkpoint, records: pd.DataFrame, seconds: float) -> None:
        """Print the loss, and means over blocks, below a line with the names of the columns."""
        every = to_records(records)
        printed = (*block_means(every), *filter(is_of_model, every))
        values = {each["metric"]: each["value"] for each in printed}
        cells = {key: f"{values[key]:.4g}" for key in _VALUES if key in values}
        num_left = len(self.plan.pending) - self.num_ended
        left = (time.monotonic() - self._started) / self.num_ended * num_left
        cells |= {"time": f"{seconds:.1f} s", "left": str(timedelta(seconds=round(left)))}
        header = [f"{'':9}{'means over blocks':<{self._width}}", *(f"{key:>8}" for key in cells)]
        if header != self._header:
            self._header = header
            self.print("  ".join(header))
        aligned = [f"{cell:>{max(8, len(key))}}" for key, cell in cells.items()]
        self.print("  ".join([self._numbered(checkpoint), *aligned]))

    def _numbered(self, checkpoint: Checkpoint) -> str:
        """How many have ended, and the name of the last one."""
        number = f"{self.num_ended}/{len(self.plan.pending)}"
        return f"{number:>7}  {checkpoint.name:<{self._width}}"
