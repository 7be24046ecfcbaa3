"""The commands ``embedgeo sweep`` and ``embedgeo check``, from top to bottom."""

import platform
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from lightning.fabric import Fabric

from embedgeo.checkpoints import shared_parts
from embedgeo.results.folder import SweepFolder
from embedgeo.results.groups import parse_groups
from embedgeo.results.wording import shell_command
from embedgeo.sweep.metrics import metric_factory
from embedgeo.sweep.plan import Planned, Recorded, describe, make_plan, parse_shard, shard_of
from embedgeo.sweep.probe_text import ProbeText, prepare_text
from embedgeo.sweep.processes import launched, make_fabric
from embedgeo.sweep.quiet import quiet
from embedgeo.sweep.run import Sweep
from embedgeo.sweep.settings import SweepSettings
from embedgeo.sweep.summary import shortfall, summarize
from embedgeo.sweep.worker import versions
from embedgeo.text import hash_documents, hash_ids, read_documents


def run_sweep(settings: SweepSettings) -> int:
    """See `embedgeo.sweep.sweep`."""
    part = parse_shard(settings.shard)
    metric_factory(settings)  # before anything is downloaded
    documents = read_documents(settings.texts)
    asked = settings.as_manifest(hash_documents(documents))
    folder = SweepFolder(settings.folder)
    folder.require_same(asked)
    with quiet(), ExitStack() as entered:
        if settings.dry_run:
            print(describe(shard_of(_plan(settings, folder), part), folder.done()))
            return 0
        fabric, kind = entered.enter_context(_place(settings))
        if settings.device_map is not None and fabric.world_size > 1:
            raise ValueError(
                f"device_map must be left out where {fabric.world_size} processes each have the whole model; got "
                f"{settings.device_map!r}. Take one process, with trainer.devices=1."
            )
        job: tuple[list[Planned], list[Planned], ProbeText] | None = None
        if fabric.is_global_zero:
            plan = _plan(settings, folder)
            done = folder.done()
            if settings.model_group:
                folder.regroup({each.name: each.group for each in plan if not each.is_stale})
            pending = [each for each in shard_of(plan, part) if each.name not in done or each.is_stale]
            text = ProbeText()
            if pending or not folder.manifest():
                text = prepare_text(documents, plan, settings)
                text.batches(settings.batch_size, world_size=fabric.world_size)
                if less := shortfall(settings.num_tokens, text):
                    print(less)
            _open(folder, asked, text)
            job = plan, pending, text
        with launched(fabric):
            job = fabric.broadcast(job)
            assert job is not None
            plan, pending, text = job
            failures = kind(
                fabric, settings, plan, pending, {planned.checkpoint.model: text for planned in plan}, folder
            ).run()
    if not fabric.is_global_zero:
        return 0  # a status other than 0 makes lightning end the process that writes
    records = {name: frame for run in folder.read_runs().values() for name, frame in run.items()}
    mine = shard_of(plan, part)
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
    from embedgeo.sweep.cluster import connected
    from embedgeo.sweep.on_ray import RaySweep

    with connected(settings):
        yield make_fabric({"accelerator": "cpu"}), RaySweep


def _plan(settings: SweepSettings, folder: SweepFolder) -> list[Planned]:
    known = {
        name: Recorded(str(folder.read(name)["weights_sha256"].iloc[0]), folder.about(name).get("files", ""))
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


def _open(folder: SweepFolder, asked: Mapping[str, Any], text: ProbeText) -> None:
    """Make the sweep folder, or continue one whose results are on the same tokens.

    Raises:
        ValueError: the tokenizer now produces other tokens.
    """
    sha256 = hash_ids(text.token_ids)
    before = folder.manifest().get("text", {}).get("tokens_sha256")
    if len(text.token_ids) and before not in (None, sha256):
        raise ValueError(
            f"a sweep folder holds results on one sequence of tokens; the tokenizer no longer gives those of "
            f"{folder.path}. Give another out."
        )
    about = {
        "versions": {"python": platform.python_version(), **versions()},
        "text": {
            "sha256": asked["text_sha256"],
            "tokens_sha256": sha256,
            "num_sequences": len(text.token_ids),
            "num_tokens": text.token_ids.numel(),
        },
    }
    folder.open(asked, about)
