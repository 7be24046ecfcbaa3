"""What a sweep is going to do, before it does anything."""

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from embedgeo.checkpoints import Checkpoint, Contents, Steps, duplicates, list_checkpoints, select_steps
from embedgeo.results.wording import reason

_THREADS = 8


@dataclass(frozen=True)
class Planned:
    """A checkpoint of a sweep.

    Attributes:
        checkpoint: which one.
        contents: its files; None where they could not be listed, or need not be.
        weights_sha256: of its weights; empty where it could not be found out.
        duplicate_of: name of the first checkpoint of the sweep with the same weights, if that is another one.
        error: why its files could not be listed.
    """

    checkpoint: Checkpoint
    contents: Contents | None = None
    weights_sha256: str = ""
    duplicate_of: str | None = None
    error: str = ""

    @property
    def name(self) -> str:
        """The checkpoint's."""
        return self.checkpoint.name

    @property
    def step(self) -> int:
        """The checkpoint's."""
        return self.checkpoint.step


def make_plan(
    model: str | Sequence[str], revisions: str, steps: Steps, known: Callable[[str], str | None] = lambda name: None
) -> list[Planned]:
    """List the checkpoints of a sweep with their files and duplicates, by series and step.

    Args:
        model: see `embedgeo.checkpoints.list_checkpoints`.
        revisions: likewise.
        steps: see `embedgeo.checkpoints.select_steps`.
        known: gives the hash of a checkpoint's weights where it is known, so that local ones are not read for it.
    """
    listed = list_checkpoints(model, revisions)
    chosen = select_steps((checkpoint.step for checkpoint in listed), steps)
    checkpoints = [checkpoint for checkpoint in listed if checkpoint.step in chosen]
    with ThreadPoolExecutor(_THREADS) as pool:
        plan = list(pool.map(lambda checkpoint: _inspect(checkpoint, known(checkpoint.name)), checkpoints))
    owners = duplicates({planned.name: planned.weights_sha256 for planned in plan if planned.weights_sha256})
    return [replace(planned, duplicate_of=owners.get(planned.name)) for planned in plan]


def _inspect(checkpoint: Checkpoint, weights_sha256: str | None) -> Planned:
    if weights_sha256 is not None and checkpoint.path is not None:
        return Planned(checkpoint, weights_sha256=weights_sha256)
    try:
        contents = checkpoint.contents()
    except Exception as error:
        return Planned(checkpoint, weights_sha256=weights_sha256 or "", error=reason(error))
    return Planned(checkpoint, contents, weights_sha256 or contents.sha256)


def parse_shard(shard: str) -> tuple[int, int]:
    """Which of how many parts ``i/n`` means. i counts from 0 or from 1: part n is part 0.

    Raises:
        ValueError: it is not two numbers with 0 <= i <= n.

    >>> parse_shard("1/4"), parse_shard("4/4")
    ((1, 4), (0, 4))
    """
    index, _, count = shard.partition("/")
    if not (index.isdecimal() and count.isdecimal() and int(count) and int(index) <= int(count)):
        raise ValueError(f"shard must be i/n with 0 <= i <= n, as 0/4 for the first of four; got {shard!r}.")
    return int(index) % int(count), int(count)


def shard_of(plan: Sequence[Planned], shard: tuple[int, int]) -> list[Planned]:
    """The checkpoints that one of several processes takes: duplicates go with the one they are copies of."""
    index, count = shard
    position = {planned.name: i for i, planned in enumerate(plan)}
    return [planned for planned in plan if position[planned.duplicate_of or planned.name] % count == index]


def describe(plan: Sequence[Planned], done: Collection[str] = ()) -> str:
    """The plan as a table, and the size of what is yet to be read."""
    rows = []
    to_read = 0
    for planned in plan:
        size = 0 if planned.contents is None else planned.contents.size
        note = f"duplicate of {planned.duplicate_of}" if planned.duplicate_of else planned.error
        if planned.name in done:
            note = "done"
        elif not note:
            to_read += size
        commit = planned.checkpoint.commit[:12] or "local"
        rows.append(f"{planned.step:>12}  {planned.name:<32}  {commit:<12}  {size / 1e6:>10.1f} MB  {note}".rstrip())
    verb = "read" if all(planned.checkpoint.path for planned in plan) else "download"
    return "\n".join([*rows, f"{len(plan)} checkpoints, {to_read / 1e6:.1f} MB to {verb}"])
