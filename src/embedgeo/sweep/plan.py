"""The plan of a sweep: its checkpoints, their files, and which are duplicates."""

import json
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import pandas as pd

from embedgeo.checkpoints.files import Contents, duplicates
from embedgeo.checkpoints.sources import (
    UNREADABLE,
    Checkpoint,
    Steps,
    list_checkpoints,
    place,
    select_steps,
)
from embedgeo.formatting import reason
from embedgeo.results.folder import SweepFolder
from embedgeo.results.groups import groups_of, parse_groups
from embedgeo.sweep.settings import SweepSettings


class Recorded(NamedTuple):
    """The weights that a checkpoint had when it was measured."""

    sha256: str
    state: str  # see `Checkpoint.weights_state`


@dataclass(frozen=True)
class Planned:
    """A checkpoint of a sweep."""

    checkpoint: Checkpoint
    contents: Contents | None = None  # None if its files could not be listed, or need not be
    weights_sha256: str = ""  # empty if unknown
    weights_state: str = ""  # see `Checkpoint.weights_state`
    is_stale: bool = False  # measured with other weights than are there now
    duplicate_of: str | None = None  # an earlier checkpoint of the sweep with the same weights
    error: str = ""  # why its files could not be listed
    group: str = ""  # of its model, if it is in one
    is_first: bool = False  # of the whole sweep

    @property
    def name(self) -> str:
        """Name of the checkpoint."""
        return self.checkpoint.name

    @property
    def original(self) -> str:
        """Name of the first checkpoint with its weights, which may be itself."""
        return self.duplicate_of or self.name

    @property
    def facts(self) -> dict[str, str]:
        """Facts to be written beside its records, some of them empty."""
        has_step = "" if self.checkpoint.has_step else "false"
        digests = {} if self.contents is None else self.contents.digests
        held = json.dumps(digests) if len(digests) > 1 else ""  # of one file weights_sha256 says it
        return {
            "files": self.weights_state,
            "has_step": has_step,
            "group": self.group,
            "weight_files": held,
        }

    def is_done(self, records: pd.DataFrame | None) -> bool:
        """True if it has records, of the weights that it has now."""
        return records is not None and (
            not self.is_stale or records["weights_sha256"].iloc[0] == self.weights_sha256
        )


class SweepPlan(NamedTuple):
    """All checkpoints of a sweep, those of its shard, and those of them that are to be measured."""

    checkpoints: Sequence[Planned]
    mine: Sequence[Planned]
    pending: Sequence[Planned]


def as_recorded(settings: SweepSettings, folder: SweepFolder) -> dict[str, Any]:
    """The settings ``model`` and ``tokenizer``, whose paths are written as in the manifest of a
    folder; and what earlier versions did with special tokens, to go on with a folder of theirs.
    """
    asked = folder.manifest().get("asked", {})
    before = [
        asked.get("tokenizer"),
        *(asked["model"] if isinstance(asked.get("model"), list) else ()),
    ]
    written = {place(name): name for name in before if isinstance(name, str)}
    tokenizer = settings.tokenizer
    recorded = {
        "model": [written.get(place(name), name) for name in settings.models],
        "tokenizer": tokenizer and written.get(place(tokenizer), tokenizer),
    }
    # which was the default before there was a choice
    is_earlier = asked.get("special_tokens") == "document" and "count_special" not in asked
    if is_earlier and settings.special_tokens == "default":
        recorded["special_tokens"] = "document"
    return recorded


def plan_sweep(settings: SweepSettings, folder: SweepFolder) -> SweepPlan:
    """The plan of a sweep into a folder; what is done there is not read again."""
    known = {
        name: Recorded(
            str(folder.read(name)["weights_sha256"].iloc[0]), folder.facts(name).get("files", "")
        )
        for name in folder.done()
    }
    written = {place(name): name for name in settings.models}
    groups = {
        written.get(place(name), name): group
        for name, group in parse_groups(settings.model_group).items()
    }
    plan = make_plan(settings.models, settings.revisions, settings.steps, known, groups)
    index, count = settings.part
    position = {planned.name: i for i, planned in enumerate(plan)}
    # duplicates go with it
    mine = [planned for planned in plan if position[planned.original] % count == index]
    num_originals = sum(not planned.duplicate_of for planned in mine)
    if settings.workers > max(1, num_originals):
        raise ValueError(
            "workers must be at most the checkpoints to measure, duplicates apart; got "
            f"{settings.workers} for {num_originals}."
        )
    return SweepPlan(
        plan, mine, [planned for planned in mine if planned.name not in known or planned.is_stale]
    )


def make_plan(
    model: str | Sequence[str],
    revisions: str,
    steps: Steps,
    known: Mapping[str, Recorded] = MappingProxyType({}),
    groups: Mapping[str, str] = MappingProxyType({}),
) -> list[Planned]:
    """Checkpoints by series and step; local ones of ``known`` weights are read again only if they
    look changed.
    """
    listed = list_checkpoints(model, revisions, final=steps == "final")
    with ThreadPoolExecutor(8) as pool:
        plan = list(
            pool.map(lambda each: _inspect(each, known.get(each.name)), _choose(listed, steps))
        )
    owners = duplicates(
        {planned.name: planned.weights_sha256 for planned in plan if planned.weights_sha256}
    )
    models = dict.fromkeys(
        [*([model] if isinstance(model, str) else model), *(c.model for c in listed)]
    )
    group = groups_of(groups, models)
    return [
        replace(
            each,
            duplicate_of=owners.get(each.name),
            group=group.get(each.checkpoint.model, ""),
            is_first=each is plan[0],
        )
        for each in plan
    ]


def _choose(listed: Sequence[Checkpoint], steps: Steps) -> list[Checkpoint]:
    """The checkpoints to take; ``log`` is for each series by itself. Final ones are always
    taken.
    """
    existing: dict[str, set[int]] = {each.position.series: set() for each in listed}
    for each in listed:
        existing[each.position.series] |= {each.step} - {UNREADABLE}
    if steps == "log":
        chosen = {series: select_steps(own, steps) for series, own in existing.items()}
    else:
        chosen = dict.fromkeys(existing, select_steps(set().union(*existing.values()), steps))
    # so that they are said to have failed
    others = {UNREADABLE} if steps in ("all", "log", "final") else set()
    return [
        each
        for each in listed
        if each.step in chosen[each.position.series] | others or not each.has_step
    ]


def _inspect(checkpoint: Checkpoint, known: Recorded | None) -> Planned:
    state = ""
    try:
        # before they are read: of what changes meanwhile it is out of date
        state = checkpoint.weights_state()
        if known is not None and checkpoint.path is not None and state == known.state:
            return Planned(checkpoint, weights_sha256=known.sha256, weights_state=state)
        contents = checkpoint.contents()
    except Exception as error:
        if known is not None and checkpoint.path is not None:  # it is gone: what was measured stays
            return Planned(checkpoint, weights_sha256=known.sha256, weights_state=known.state)
        return Planned(
            checkpoint, weights_sha256=known.sha256 if known else "", error=reason(error)
        )
    # a revision that moved keeps its
    sha256 = known.sha256 if known and checkpoint.path is None else contents.sha256
    return Planned(
        checkpoint, contents, sha256, state, is_stale=known is not None and known.sha256 != sha256
    )


def plan_table(plan: Sequence[Planned], done: Collection[str] = ()) -> str:
    """The plan as a table, and the size of the files yet to be read."""
    rows = []
    to_read = 0
    for planned in plan:
        size = 0 if planned.contents is None else sum(file.size for file in planned.contents.files)
        note = f"duplicate of {planned.duplicate_of}" if planned.duplicate_of else planned.error
        if planned.is_stale:
            note = "measured with other weights: to be measured again"
            to_read += size
        elif planned.name in done:
            note = "done"
        elif not note:
            to_read += size
        checkpoint = planned.checkpoint
        commit = checkpoint.commit[:12] or "local"
        step = str(checkpoint.step) if checkpoint.has_step else "final"
        step = "?" if checkpoint.step == UNREADABLE else step
        rows.append(
            f"{step:>12}  {planned.name:<32}  {commit:<12}  {size / 1e6:>10.1f} MB  {note}".rstrip()
        )
    verb = "read" if all(planned.checkpoint.path for planned in plan) else "download"
    return "\n".join([*rows, f"{len(plan)} checkpoints, {to_read / 1e6:.1f} MB to {verb}"])
