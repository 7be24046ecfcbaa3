"""The plan of a sweep: its checkpoints, and which of them are to be measured."""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from embedgeo.checkpoints.iteration import Recorded, find_checkpoints
from embedgeo.checkpoints.sources import UNREADABLE, Checkpoint
from embedgeo.results.folder import SweepFolder
from embedgeo.sweep.settings import SweepSettings


class SweepPlan(NamedTuple):
    """All checkpoints of a sweep, and which of them are done."""

    checkpoints: Sequence[Checkpoint]
    done: Collection[str]  # names of those whose records are of what they have now
    # names of those measured with other weights, configuration or step than are there now
    replaced: Collection[str]

    @property
    def pending(self) -> list[Checkpoint]:
        """The checkpoints that are to be measured."""
        return [each for each in self.checkpoints if each.name not in self.done]

    def is_current(self, checkpoint: Checkpoint, folder: SweepFolder) -> bool:
        """True if the records of a checkpoint are of what it has now."""
        name = checkpoint.name
        return name not in self.replaced or _recorded(folder, name).is_of(checkpoint)

    def for_texts(self, texts: Mapping[str, Any]) -> "SweepPlan":
        """The plan where what is measured on another text, by model, is no duplicate."""
        own = {each.name: texts.get(each.model) for each in self.checkpoints}
        return self._replace(
            checkpoints=[
                each if own[each.name] is own[each.original] else replace(each, duplicate_of=None)
                for each in self.checkpoints
            ]
        )


def plan_sweep(settings: SweepSettings, folder: SweepFolder) -> SweepPlan:
    """The plan of a sweep into a folder; what is done there is not read again."""
    known = {name: _recorded(folder, name) for name in folder.done()}
    plan = find_checkpoints(
        settings.models,
        settings.revisions,
        settings.steps,
        known,
        model_class=settings.model_class,
        trust_remote_code=settings.trust_remote_code,
    )
    replaced = {
        each.name for each in plan if each.name in known and not known[each.name].is_of(each)
    }
    return SweepPlan(plan, known.keys() - replaced, replaced)


def _recorded(folder: SweepFolder, name: str) -> Recorded:
    first = folder.read(name).iloc[0]  # which checks the file
    facts = folder.facts(name)
    return Recorded(
        first["weights_sha256"], facts.get("files", ""), facts.get("config", ""), first["step"]
    )


def checkpoint_facts(checkpoint: Checkpoint) -> dict[str, str]:
    """Facts to be written beside the records of a checkpoint, some of them empty."""
    digests = {} if checkpoint.contents is None else checkpoint.contents.digests
    return {
        "files": checkpoint.weights_state,
        "config": checkpoint.contents.config_digest if checkpoint.contents else "",
        "has_step": "" if checkpoint.has_step else "false",
        # of one file weights_sha256 says it
        "weight_files": json.dumps(digests) if len(digests) > 1 else "",
    }


def plan_table(plan: SweepPlan) -> str:
    """The plan as a table, and the size of the files yet to be read."""
    rows = []
    to_read = 0
    for checkpoint in plan.checkpoints:
        contents = checkpoint.contents
        size = 0 if contents is None else sum(file.size for file in contents.files)
        owner = checkpoint.duplicate_of
        note = f"duplicate of {owner}" if owner else checkpoint.error
        if checkpoint.name in plan.replaced:
            note = "measured with other weights or config.json: to be measured again"
            to_read += size
        elif checkpoint.name in plan.done:
            note = "done"
        elif not note:
            to_read += size
        commit = checkpoint.commit[:12] or "local"
        step = str(checkpoint.step) if checkpoint.has_step else "final"
        step = "?" if checkpoint.step == UNREADABLE else step
        row = f"{step:>12}  {checkpoint.name:<32}  {commit:<12}  {size / 1e6:>10.1f} MB  {note}"
        rows.append(row.rstrip())
    verb = "read" if all(checkpoint.path for checkpoint in plan.checkpoints) else "download"
    rows.append(f"{len(plan.checkpoints)} checkpoints, {to_read / 1e6:.1f} MB to {verb}")
    return "\n".join(rows)
