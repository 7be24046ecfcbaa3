"""The commands ``embedgeo sweep`` and ``embedgeo check``."""

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from embedgeo.checkpoints.files import duplicates, hashed_file
from embedgeo.checkpoints.iteration import find_checkpoints
from embedgeo.checkpoints.sources import Checkpoint
from embedgeo.formatting import listed, reason, shell_command
from embedgeo.results.folder import SweepFolder
from embedgeo.results.records import shared_files
from embedgeo.sweep.measure import Downloads, Measured, Worker, chosen_device, metrics_function
from embedgeo.sweep.plan import SweepPlan, plan_sweep, plan_table
from embedgeo.sweep.processes import muted_libraries
from embedgeo.sweep.progress import Sweep
from embedgeo.sweep.settings import SweepSettings
from embedgeo.sweep.texts import ProbeText, prepare_texts, require_tokenizers
from embedgeo.text import Documents


def run_sweep(settings: SweepSettings) -> int:
    """Run a sweep: see `embedgeo.sweep.sweep`."""
    make_metrics = metrics_function(settings)  # which is refused before anything is downloaded
    on_ray = settings.on == "ray"
    if not on_ray:
        chosen_device(settings)
    documents = Documents(settings.texts)
    folder = SweepFolder(settings.folder)
    tokens = settings.tokens
    sha256 = documents.sha256 if tokens is None else hashed_file(Path(tokens).expanduser()).digest
    manifest = settings.as_manifest(sha256)
    recorded = folder.require_settings(manifest)
    with muted_libraries(), ExitStack() as stack:
        if on_ray and not settings.dry_run:
            from embedgeo.sweep.cluster import connected, measure_on_cluster

            stack.enter_context(connected(settings))
        plan = plan_sweep(settings, folder)
        if settings.dry_run:
            require_tokenizers(plan.checkpoints, settings)
            print(plan_table(plan))
            return 0
        texts = _prepared_texts(settings, documents, plan, recorded)
        entries = {model: _text_entry(settings, text) for model, text in texts.items()}
        _require_same_text(entries, recorded.get("text", {}), folder.path)
        folder.open(
            manifest,
            {
                "text_files": [*settings.texts] if tokens is None else [tokens],
                "text": next(iter(entries.values())) if len(entries) == 1 else entries,
            },
        )
        sweep = Sweep(settings, plan.for_texts(texts), texts, folder, make_metrics)
        with sweep.at_work():
            if on_ray:
                measure_on_cluster(sweep)
            else:
                with Downloads(folder.path, evict=settings.evict) as downloads:
                    worker = Worker(settings, texts, downloads, make_metrics)
                    measure_here(sweep, worker.measure)
    return finish(sweep)


def _prepared_texts(
    settings: SweepSettings,
    documents: Documents,
    plan: SweepPlan,
    recorded: Mapping[str, Any],
) -> dict[str, ProbeText]:
    """The text of each model, where there is something to measure or to compare with it."""
    # the tokenizer of local ones may be another now
    may_differ = settings.tokens is None and any(each.path for each in plan.checkpoints)
    if not (plan.pending or may_differ or not recorded):
        return {}
    texts, notes = prepare_texts(documents, plan.checkpoints, settings)
    for model, text in texts.items():
        if less := _shortfall(settings, text):
            notes.append(f"{model}: {less}" if len(texts) > 1 else less)
    for note in notes:
        print(note)
    return texts


def _text_entry(settings: SweepSettings, text: ProbeText) -> dict[str, Any]:
    """What the manifest says of the text of a model."""
    counts = text.type_counts
    entry: dict[str, Any] = {
        "sha256": text.text_sha256,
        "tokens_sha256": text.sha256,
        "num_sequences": len(text.lengths),
        "num_tokens": len(text.token_ids),
        "num_types": len(counts),
        "num_types_once": int((counts == 1).sum()),
    }
    if text.begins_with:
        entry["begins_with"] = text.begins_with
    longest = int(text.lengths.max())
    if settings.unit == "sequence" and longest < settings.length:  # the positions of the model
        entry["seq_len"] = longest
    return entry


def _require_same_text(
    entries: Mapping[str, Mapping[str, Any]], recorded: Mapping[str, Any], folder: Path
) -> None:
    """Refuse a sweep folder whose results are on other tokens, or on other documents."""
    for model, entry in entries.items():
        before = recorded if "tokens_sha256" in recorded else recorded.get(model, {})
        for key, change in (
            ("sha256", "text; the dataset no longer gives that"),
            ("tokens_sha256", "sequence of tokens; the tokenizer no longer gives those"),
        ):
            if before.get(key, entry[key]) != entry[key]:
                raise ValueError(
                    f"a sweep folder holds results on one {change} of {folder}. Give another out."
                )


def _shortfall(settings: SweepSettings, text: ProbeText) -> str:
    """Sentences on fewer tokens than ``num_tokens``, and on texts that were cut; empty if there are
    none.
    """
    used = len(text.token_ids)
    longest = int(text.lengths.max())
    number = f"{len(text.lengths):,}"
    what = f"sequences of {longest:,}" if settings.unit == "sequence" else "whole texts"
    notes = []
    if used < settings.num_tokens:
        notes.append(f"{settings.num_tokens:,} tokens asked for, {used:,} used: {number} {what}")
    if text.num_cut:
        notes.append(
            f"{text.num_cut:,} of {number} {what} are cut to {longest:,} tokens (--seq-len)"
        )
    return "; ".join(notes)


def measure_here(
    sweep: Sweep, measure: Callable[[Checkpoint, Callable[[], Checkpoint | None]], Measured]
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
    lines += [
        f"  failed: {name}: {sweep.failures.get(name, 'its results are gone again')}"
        for name in left
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
    # under another config.json, too
    owners = duplicates({each.name: each.weights_sha256 for each in plan if each.weights_sha256})
    for first in dict.fromkeys(owners.values()):
        others = [name for name, owner in owners.items() if owner == first]
        print(f"same weights: {', '.join([first, *others])}")
    parts = shared_files(
        {each.name: each.contents.digests for each in plan if each.contents is not None}
    )
    for file, names in parts:
        print(f"same file {file}: {', '.join(names)}")
    failed = {each.name: each.error for each in plan if each.error}
    for name, error in failed.items():
        print(f"not read: {name}: {error}")
    print(f"{len(plan)} checkpoints, {len(owners)} of them with the weights of an earlier one")
    return 1 if owners or parts else 3 if failed else 0
