"""The commands ``embedgeo sweep`` and ``embedgeo check``, from top to bottom."""

import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from lightning.fabric import Fabric

from embedgeo.checkpoints import shared_parts
from embedgeo.formatting import shell_command
from embedgeo.results.folder import SweepFolder
from embedgeo.results.records import parse_groups
from embedgeo.sweep.measure import metric_factory
from embedgeo.sweep.plan import Planned, Recorded, describe, make_plan, parse_shard, shard_of
from embedgeo.sweep.processes import launched, make_fabric, quiet
from embedgeo.sweep.run import Sweep, shortfall, summarize, versions
from embedgeo.sweep.settings import SweepSettings
from embedgeo.sweep.texts import ProbeText, prepare_texts
from embedgeo.text import Documents


def run_sweep(settings: SweepSettings) -> int:
    """See `embedgeo.sweep.sweep`."""
    part = parse_shard(settings.shard)
    metric_factory(settings)  # before anything is downloaded
    documents = Documents(settings.texts)
    asked = settings.as_manifest(documents.sha256)
    folder = SweepFolder(settings.folder)
    folder.require_settings(asked)
    with quiet(), ExitStack() as entered:
        if settings.dry_run:
            print(describe(shard_of(plan_for(settings, folder), part), folder.done()))
            return 0
        fabric, kind = entered.enter_context(_place(settings))
        if settings.device_map is not None and fabric.world_size > 1:
            raise ValueError(
                f"device_map must be left out where {fabric.world_size} processes each have the whole model; got "
                f"{settings.device_map!r}. Take one process, with trainer.devices=1."
            )
        job: tuple[list[Planned], list[Planned], dict[str, ProbeText]] | None = None
        if fabric.is_global_zero:
            plan = plan_for(settings, folder)
            done = folder.done()
            if settings.model_group:
                folder.write_groups({each.name: each.group for each in plan if not each.is_stale})
            pending = [each for each in shard_of(plan, part) if each.name not in done or each.is_stale]
            texts: dict[str, ProbeText] = {}
            if pending or not folder.manifest():
                texts, lines = prepare_texts(documents, plan, settings)
                for model, text in texts.items():
                    text.batches(settings.batch_size, world_size=fabric.world_size)
                    if less := shortfall(settings, text):
                        lines.append(f"{model}: {less}" if len(texts) > 1 else less)
                print(*lines, sep="\n", end="\n" if lines else "")
            _open(folder, asked, texts)
            job = plan, pending, texts
        with launched(fabric):
            job = fabric.broadcast(job)
            assert job is not None
            plan, pending, texts = job
            failures = kind(fabric, settings, plan, pending, texts, folder).run()
    if not fabric.is_global_zero:
        return 0  # a status other than 0 makes lightning end the process that writes
    return finish(folder, plan, shard_of(plan, part), failures)


def finish(folder: SweepFolder, plan: Sequence[Planned], mine: Sequence[Planned], failures: Mapping[str, str]) -> int:
    """Print what has become of a plan, and what to open; returns the exit status: see `summarize`."""
    folder.write_architecture()
    records = {name: frame for run in folder.runs().values() for name, frame in run.items()}
    print(summarize(records, plan, mine, failures))
    print(f"{folder.path}: metrics.csv; {shell_command('tensorboard', '--logdir', folder.tensorboard)}")
    return 0 if all(planned.is_done(records.get(planned.name)) for planned in mine) else 3


def run_check(model: str | list[str], steps: str | int | list[int], revisions: str) -> int:
    """See `embedgeo.sweep.check`."""
    with quiet():
        plan = make_plan(model, revisions, steps)
    groups: dict[str, list[str]] = {}
    for planned in plan:
        if planned.duplicate_of:
            groups.setdefault(planned.duplicate_of, []).append(planned.name)
    for first, others in groups.items():
        print(f"same weights: {', '.join([first, *others])}")
    parts = shared_parts({planned.name: planned.contents for planned in plan if planned.contents is not None})
    for file, names in parts:
        print(f"same file {file}: {', '.join(names)}")
    failed = [planned for planned in plan if planned.error]
    for planned in failed:
        print(f"not read: {planned.name}: {planned.error}")
    num_duplicates = sum(map(len, groups.values()))
    print(f"{len(plan)} checkpoints, {num_duplicates} of them with the weights of an earlier one")
    return 1 if groups or parts else 3 if failed else 0


@contextmanager
def _place(settings: SweepSettings) -> Iterator[tuple[Fabric, type[Sweep]]]:
    """The processes that choose and write, and the sweep that measures: in them, or on a Ray cluster."""
    if settings.on is None:
        yield make_fabric(settings.trainer or {}), Sweep
        return
    from embedgeo.sweep.cluster import RaySweep, connected

    with connected(settings):
        yield make_fabric({"accelerator": "cpu"}), RaySweep


def plan_for(settings: SweepSettings, folder: SweepFolder) -> list[Planned]:
    """The plan of a sweep into a folder, whose checkpoints that are done are not read again."""
    known = {
        name: Recorded(str(folder.read(name)["weights_sha256"].iloc[0]), folder.facts(name).get("files", ""))
        for name in folder.done()
    }
    plan = make_plan(settings.models, settings.revisions, settings.steps, known, parse_groups(settings.model_group))
    mine = [planned for planned in shard_of(plan, parse_shard(settings.shard)) if not planned.duplicate_of]
    if settings.workers > max(1, len(mine)):
        raise ValueError(
            f"workers must be at most the checkpoints to measure, duplicates apart; got {settings.workers} for "
            f"{len(mine)}."
        )
    return plan


def _open(folder: SweepFolder, asked: Mapping[str, Any], texts: Mapping[str, ProbeText]) -> None:
    """Make the sweep folder, or continue one whose results are on the same tokens of the same documents.

    Raises:
        ValueError: a tokenizer now produces other tokens, or a dataset is another.
    """
    now = {
        model: {
            "sha256": text.text_sha256,
            "tokens_sha256": text.sha256,
            "num_sequences": len(text.lengths),
            "num_tokens": len(text.token_ids),
        }
        for model, text in texts.items()
    }
    recorded = folder.manifest().get("text", {})
    for model, entry in now.items():
        before = recorded if "tokens_sha256" in recorded else recorded.get(model, {})
        if before.get("sha256", entry["sha256"]) != entry["sha256"]:
            raise ValueError(
                f"a sweep folder holds results on one text; the dataset no longer gives that of {folder.path}. Give "
                "another out."
            )
        if before.get("tokens_sha256", entry["tokens_sha256"]) != entry["tokens_sha256"]:
            raise ValueError(
                f"a sweep folder holds results on one sequence of tokens; the tokenizer no longer gives those of "
                f"{folder.path}. Give another out."
            )
    about = {
        "versions": {"python": platform.python_version(), **versions()},
        "text": next(iter(now.values())) if len(now) == 1 else now,
    }
    folder.open(asked, about)
