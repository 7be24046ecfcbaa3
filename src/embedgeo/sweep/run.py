"""The commands ``embedgeo sweep`` and ``embedgeo check``."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pandas as pd
from rich.console import Console

from embedgeo.checkpoints.files import hashed_file
from embedgeo.checkpoints.iteration import find_checkpoints
from embedgeo.checkpoints.sources import Checkpoint
from embedgeo.formatting import listed, reason, shell_command
from embedgeo.glossary import headlines
from embedgeo.metrics.defaults import width_notes
from embedgeo.results.findings import lines as finding_lines, massive_tokens
from embedgeo.results.folder import SweepFolder
from embedgeo.results.parquet import to_frame, to_records
from embedgeo.results.records import MODEL, block_means, model_record, shared_files
from embedgeo.results.samples import load_sample
from embedgeo.sweep.locks import Locks
from embedgeo.sweep.measure import Downloads, Measured, Worker, chosen_device, metrics_function
from embedgeo.sweep.plan import SweepPlan, checkpoint_facts, plan_sweep, plan_table
from embedgeo.sweep.processes import muted_libraries
from embedgeo.sweep.settings import SweepSettings
from embedgeo.sweep.texts import ProbeText, prepare_texts
from embedgeo.text import Documents

POLL_SECONDS = 1.0  # between two looks at whether another sweep is through with what it has begun
# the keys that are printed of a checkpoint, as many as fit in a line
_VALUES = ("loss", *headlines()[:4])


def run_sweep(settings: SweepSettings) -> int:
    """Run a sweep: see `embedgeo.sweep.sweep`."""
    metrics_function(settings)  # which is refused before anything is downloaded
    on_ray = settings.on == "ray"
    if not on_ray:
        chosen_device(settings)
    documents = Documents(settings.texts)
    folder = SweepFolder(settings.folder)
    tokens = settings.tokens
    sha256 = documents.sha256 if tokens is None else hashed_file(Path(tokens).expanduser()).digest
    manifest = settings.as_manifest(sha256)
    folder.require_settings(manifest)
    with muted_libraries(), ExitStack() as stack:
        if settings.dry_run:
            print(plan_table(plan_sweep(settings, folder), folder.done()))
            return 0
        if on_ray:
            from embedgeo.sweep.cluster import connected, measure_on_cluster

            stack.enter_context(connected(settings))
        plan, texts = _prepared(settings, documents, folder, manifest)
        sweep = Sweep(settings, plan, texts, folder)
        with sweep.at_work():
            if on_ray:
                measure_on_cluster(sweep)
            else:
                with Downloads(folder.path, evict=settings.evict) as downloads:
                    worker = Worker(settings, texts, downloads)
                    measure_here(sweep, worker.measure)
    return finish(sweep)


def _prepared(
    settings: SweepSettings,
    documents: Documents,
    folder: SweepFolder,
    manifest: Mapping[str, Any],
) -> tuple[SweepPlan, dict[str, ProbeText]]:
    """The plan, and the text of each model."""
    plan = plan_sweep(settings, folder)
    texts: dict[str, ProbeText] = {}
    # the tokenizer of local ones may be another now
    may_differ = settings.tokens is None and any(each.path for each in plan.checkpoints)
    if plan.pending or may_differ or not folder.manifest():
        texts, lines = prepare_texts(documents, plan.checkpoints, settings)
        for model, text in texts.items():
            if less := shortfall(settings, text):
                lines.append(f"{model}: {less}" if len(texts) > 1 else less)
        print(*lines, sep="\n", end="\n" if lines else "")
    _open(folder, manifest, texts, settings.texts if settings.tokens is None else [settings.tokens])
    return plan, texts


def _open(
    folder: SweepFolder,
    manifest: Mapping[str, Any],
    texts: Mapping[str, ProbeText],
    text_files: Sequence[str],
) -> None:
    """Make the sweep folder, or continue one whose results are on the same tokens of the same
    documents.
    """
    now: dict[str, dict[str, Any]] = {
        model: {
            "sha256": text.text_sha256,
            "tokens_sha256": text.sha256,
            "num_sequences": len(text.lengths),
            "num_tokens": len(text.token_ids),
            **({"begins_with": text.begins_with} if text.begins_with else {}),
            "num_ordinary_tokens": text.num_ordinary,
            "num_types": text.num_types,
            "num_types_once": text.num_types_once,
        }
        for model, text in texts.items()
    }
    for model, text in texts.items():
        length = int(text.lengths.max())
        # as many as the model has positions
        if manifest["unit"] == "sequence" and length < manifest["seq_len"]:
            now[model]["seq_len"] = length
    recorded = folder.manifest().get("text", {})
    for model, entry in now.items():
        before = recorded if "tokens_sha256" in recorded else recorded.get(model, {})
        for key, change in (
            ("sha256", "text; the dataset no longer gives that"),
            ("tokens_sha256", "sequence of tokens; the tokenizer no longer gives those"),
        ):
            if before.get(key, entry[key]) != entry[key]:
                raise ValueError(
                    f"a sweep folder holds results on one {change} of {folder.path}. Give another "
                    f"out."
                )
    text_entry = next(iter(now.values())) if len(now) == 1 else now
    folder.open(manifest, {"text_files": [*text_files], "text": text_entry})


def shortfall(settings: SweepSettings, text: ProbeText) -> str:
    """Sentences on fewer tokens than ``num_tokens``, and on texts that were cut; empty if there are
    none.
    """
    used = len(text.token_ids)
    longest = int(text.lengths.max())
    what = f"sequences of {longest:,}" if settings.unit == "sequence" else "whole texts"
    many = f"{len(text.lengths):,} {what}"
    lines = []
    if used < settings.num_tokens:
        share = f" of a share of {settings.sample:g} (--sample)" if settings.sample < 1 else ""
        lines.append(f"{settings.num_tokens:,} tokens asked for, {used:,} used: {many}{share}")
    if text.num_cut:
        lines.append(f"{text.num_cut:,} of {many} are cut to {longest:,} tokens (--seq-len)")
    return "; ".join(lines)


def measure_here(
    sweep: "Sweep", measure: Callable[[Checkpoint, Callable[[], Checkpoint | None]], Measured]
) -> None:
    """Measure the pending checkpoints; ``measure`` also takes what chooses the next to fetch."""
    while (checkpoint := sweep.next()) is not None:
        sweep.show_progress([checkpoint.name])
        started = time.monotonic()
        result: Measured | str
        try:
            result = sweep.known(checkpoint) or measure(checkpoint, sweep.choose_upcoming)
        except Exception as error:
            result = reason(error)
        sweep.end(checkpoint, result, started)


@dataclass
class Sweep:
    """The checkpoints of a sweep: the next one, and the results of each."""

    settings: SweepSettings
    plan: SweepPlan
    texts: Mapping[str, ProbeText]  # by `Checkpoint.model`
    folder: SweepFolder

    def __post_init__(self) -> None:
        pending = self.plan.pending
        self.left = list(pending)  # those that are not under way yet
        self.failures: dict[str, str] = {}  # reasons, by name
        self.num_ended = 0
        self._make_metrics = metrics_function(self.settings)
        # a folder holds results of one choice of steps
        self._locks = Locks(self.folder.path, is_alone=not self.settings.are_steps_by_rule)
        self._status = Console().status("")
        self._width = min(max(20, *(len(each.name) for each in self.plan.checkpoints)), 40)
        self._started = time.monotonic()
        self._printed: set[str] = set()
        self._told = False  # what makes the numbers of the first checkpoint
        self._next_rebuild = time.monotonic()

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Show the progress, and hold what has been begun; at the end bring the folder up to
        date.
        """
        with self._status, closing(self._locks):
            yield
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
            name = checkpoint.name
            if not self._locks.take(checkpoint.original):
                self.print_once(
                    f"another sweep is at work in {self.folder.path}: what it has begun is left to "
                    f"it"
                )
            elif name in self.folder.done() and self.plan.is_current(checkpoint, self.folder):
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
            first = next(other for other in self.plan.checkpoints if other.name == original)
            records = self.folder.read(original)
            is_same = records["weights_sha256"].iloc[0] == checkpoint.weights_sha256
            # one tokenizer
            is_same &= self.texts.get(first.model) is self.texts.get(checkpoint.model)
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
        records = None
        try:
            if not isinstance(result, str):
                records = self._write(checkpoint, result)
        except Exception as error:
            result = reason(error)
        finally:
            self._locks.release(checkpoint.original)
        self.num_ended += 1
        if records is not None:
            for width in sorted(set(records["width"]) - {0}):
                for note in width_notes(self._make_metrics, int(width)):
                    self.print_once(note)
            self._print_values(checkpoint, records, time.monotonic() - started)
            if not self._told:
                self._told = True
                assert isinstance(result, Measured)
                of_massive = massive_tokens(result.tables.get("massive"))
                for line in finding_lines(to_records(records), of_massive):
                    self.print(f"{'':9}{line}")
        else:
            self.failures[checkpoint.name] = str(result)
            self.folder.write_failure(checkpoint.name, str(result))
            self.print(f"{self._place(checkpoint)}  failed: {result}")
        now = time.monotonic()
        if now > self._next_rebuild:
            with suppress(OSError):  # as on a full disk: rebuilding at the end reports it
                self.folder.rebuild()
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
        self._status.update(f"{listed([*names])}  {self.num_ended}/{len(self.plan.pending)} done")

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
        """Print the loss, and means over blocks (over all layers if none is a block), below a line
        with the names of the columns.
        """
        means: dict[Any, float] = {
            each["metric"]: each["value"] for each in block_means(to_records(records))
        }
        over = "means over blocks" if means else "means over layers"
        of_model = records["layer"] == MODEL
        means = means or records[~of_model].groupby("metric")["value"].mean().to_dict()
        values = {**means, **records[of_model].set_index("metric")["value"]}
        cells = {key: f"{values[key]:.4g}" for key in _VALUES if key in values}
        num_left = len(self.plan.pending) - self.num_ended
        left = (time.monotonic() - self._started) / self.num_ended * num_left
        cells |= {"time": f"{seconds:.1f} s", "left": str(timedelta(seconds=round(left)))}
        self.print_once("  ".join([f"{'':9}{over:<{self._width}}", *(f"{k:>8}" for k in cells)]))
        aligned = [f"{cell:>{max(8, len(key))}}" for key, cell in cells.items()]
        self.print("  ".join([self._place(checkpoint), *aligned]))

    def _place(self, checkpoint: Checkpoint) -> str:
        """How many have ended, and the name of the last one."""
        number = f"{self.num_ended}/{len(self.plan.pending)}"
        return f"{number:>7}  {checkpoint.name:<{self._width}}"


def finish(sweep: Sweep) -> int:
    """Print what has become of the plan, and what to open; returns the exit status."""
    folder = sweep.folder
    plan = sweep.plan
    records = {name: frame for run in folder.runs().values() for name, frame in run.items()}
    done = [
        each for each in plan.checkpoints if each.name in records and plan.is_current(each, folder)
    ]
    left = [each.name for each in plan.checkpoints if each not in done]
    lines = [f"{len(done)} of {len(plan.checkpoints)} checkpoints done"]
    for checkpoint in done:
        name = checkpoint.name
        if checkpoint.duplicate_of:
            lines.append(f"  duplicate: {name} has the weights of {checkpoint.duplicate_of}")
        before = records[name]["commit"].iloc[0]
        now = checkpoint.commit
        if before != now:
            lines.append(
                f"  moved: {name} was measured at commit {before[:12]}; its revision is {now[:12]} "
                f"now"
            )
        if name in plan.replaced:
            lines.append(
                f"  replaced: {name} was measured before with other weights or config.json; "
                "measured again"
            )
    lines += [
        f"  shared: {listed(names)} have the same {file}, though their other weights differ"
        for file, names in folder.shared_files()
    ]
    lines += [f"  failed: {name}: {why}" for name, why in sweep.failures.items()]
    lines += [
        f"  not done: {name}: its results are gone again"
        for name in left
        if name not in sweep.failures
    ]
    if left:
        lines.append(
            f"{len(left)} checkpoints failed; once the reasons are mended, the next run tries only "
            f"those"
        )
    print(*lines, sep="\n")
    print(
        f"{folder.path}: metrics.csv; "
        f"{shell_command('tensorboard', '--logdir', folder.tensorboard)}"
    )
    if done:
        print(shell_command("embedgeo", "report", folder.path))
    return 3 if left else 0


def run_check(model: str | list[str], steps: str | int | list[int], revisions: str) -> int:
    """Compare weights: see `embedgeo.sweep.check`."""
    with muted_libraries():
        plan = [each.hashed() for each in find_checkpoints(model, revisions, steps)]
    groups: dict[str, list[str]] = {}
    for each in plan:
        if each.duplicate_of:
            groups.setdefault(each.duplicate_of, []).append(each.name)
    for first, others in groups.items():
        print(f"same weights: {', '.join([first, *others])}")
    parts = shared_files(
        {each.name: each.contents.digests for each in plan if each.contents is not None}
    )
    for file, names in parts:
        print(f"same file {file}: {', '.join(names)}")
    failed = {each.name: each.error for each in plan if each.error}
    for name, error in failed.items():
        print(f"not read: {name}: {error}")
    print(
        f"{len(plan)} checkpoints, {sum(map(len, groups.values()))} of them with the weights of an "
        f"earlier one"
    )
    return 1 if groups or parts else 3 if failed else 0
