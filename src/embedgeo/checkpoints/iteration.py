"""The checkpoints of training runs, one after the other, and which of them are the same."""

import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from embedgeo.checkpoints.files import duplicates, sample_digest
from embedgeo.checkpoints.sources import (
    UNREADABLE,
    Checkpoint,
    Steps,
    list_checkpoints,
    local_files,
    select_steps,
)
from embedgeo.formatting import listed, reason

if TYPE_CHECKING:
    from embedgeo.checkpoints.loading import ModelClass


class Recorded(NamedTuple):
    """The weights, the configuration and the step that a checkpoint had when it was measured."""

    sha256: str
    state: str  # see `Checkpoint.weights_state`
    config: str  # see `Contents.config_digest`
    step: int

    def is_of(self, checkpoint: Checkpoint) -> bool:
        """True if a checkpoint has these now; a revision on the Hub keeps what it had."""
        contents = checkpoint.contents if checkpoint.path else None
        return (
            self.sha256 == checkpoint.weights_sha256
            and self.step == checkpoint.step
            and (contents is None or contents.config_digest == self.config)
        )


def iter_checkpoints(
    source: str | Sequence[str],
    steps: Steps = "all",
    revisions: str = "*",
    *,
    model_class: "ModelClass | None" = None,
    trust_remote_code: bool | None = None,
) -> Iterator[Checkpoint]:
    """Iterate over the checkpoints of training runs, in order of their steps; none is loaded yet.

    ``checkpoint.load()`` gives the model, with the checks of a sweep: files are of the commit that
    the revision pointed to, they have the digests that the Hub lists, and no weight is missing or
    misshapen. A checkpoint whose ``duplicate_of`` is not None has the weights and the configuration
    of an earlier one.

    Args:
        source: a repository on the Hub whose branches or tags name steps, or which names a step
            itself, or a local folder of checkpoints; or a list of these. A model without steps is
            one checkpoint, of step 0.
        steps: ``"all"``, ``"log"``, ``"final"`` or the steps, as for
            `embedgeo.sweep.SweepSettings`.
        revisions: take only the branches and tags that match this pattern.
        model_class: the LightningModule of ``.ckpt`` files; of state dicts (``.pt``, ``.pth``) the
            function or class that makes the model. Its name is ``package.module.Class`` or
            ``package.module:make``.
        trust_remote_code: True runs code that comes with a repository or folder; False takes
            transformers' own class in its place; None refuses where there is such code.

    Returns:
        An iterator over objects with ``name``, ``step``, ``commit``, ``weights_sha256``,
        ``duplicate_of`` and ``load``; those of one run follow each other.

    Raises:
        FileNotFoundError: there is no such repository, or no checkpoint in the source.
        ValueError: a path that is not there, steps that there are not, a file without a
            ``model_class``, or one with what is no file.

    Example:
        >>> import embedgeo
        >>> for checkpoint in embedgeo.iter_checkpoints(
        ...     "EleutherAI/pythia-70m", steps=[0, 512]
        ... ):  # doctest: +SKIP
        ...     model = checkpoint.load()
    """
    checkpoints = find_checkpoints(
        source,
        revisions,
        steps,
        model_class=model_class,
        trust_remote_code=trust_remote_code,
    )
    require_model_class(checkpoints, model_class)
    return (checkpoint.hashed() for checkpoint in checkpoints)


def require_model_class(
    checkpoints: Sequence[Checkpoint], model_class: "ModelClass | None"
) -> None:
    """Check that what makes a model is given for files, and for these alone."""
    if model_class is not None:
        from embedgeo.checkpoints.loading import import_maker

        import_maker(model_class)
    for checkpoint in checkpoints:
        is_file = bool(checkpoint.path and checkpoint.path.is_file())
        if checkpoint.error or is_file == (model_class is not None):
            continue
        if is_file:
            raise ValueError(
                f"model_class must name the LightningModule of {checkpoint.path}, or what makes "
                "its model; got none. Give --model-class package.module.Class, or "
                "package.module:make."
            )
        raise ValueError(
            f"model_class is for .ckpt, .pt and .pth files; {checkpoint.name} is a folder or "
            "repository, whose config.json says its class. Leave model_class out, or save the "
            "state dict as .pt."
        )


def find_checkpoints(
    model: str | Sequence[str],
    revisions: str = "*",
    steps: Steps = "all",
    known: Mapping[str, Recorded] = MappingProxyType({}),
    *,
    model_class: "ModelClass | None" = None,
    trust_remote_code: bool | None = None,
) -> list[Checkpoint]:
    """Checkpoints by series and step with their files and digests.

    Local weights are hashed here only where others may be the same, or were ``known`` and look
    changed.
    """
    found = list_checkpoints(model, revisions, final=steps == "final")
    with ThreadPoolExecutor(8) as pool:
        checkpoints = list(
            pool.map(
                lambda each: _inspect(
                    replace(each, model_class=model_class, trust_remote_code=trust_remote_code),
                    known.get(each.name),
                ),
                _choose(found, steps),
            )
        )
        samples = list(pool.map(_sample, checkpoints))
        counts = Counter(samples)
        checkpoints = list(
            pool.map(
                lambda each, sample: each.hashed() if sample and counts[sample] > 1 else each,
                checkpoints,
                samples,
            )
        )
    owners = duplicates(
        {
            each.name: each.weights_sha256 + (each.contents.config_digest if each.contents else "")
            for each in checkpoints
            if each.weights_sha256
        }
    )
    return [replace(each, duplicate_of=owners.get(each.name)) for each in checkpoints]


def _choose(found: Sequence[Checkpoint], steps: Steps) -> list[Checkpoint]:
    """The checkpoints to take; ``log`` is for each series by itself. Final ones are always
    taken.
    """
    existing: dict[str, set[int]] = {each.position.series: set() for each in found}
    for each in found:
        existing[each.position.series] |= {each.step} - {UNREADABLE}
    if steps == "log":
        chosen = {series: select_steps(own, steps) for series, own in existing.items()}
    else:
        chosen = dict.fromkeys(existing, select_steps(set().union(*existing.values()), steps))
    # so that they are said to have failed
    others = {UNREADABLE} if steps in ("all", "log", "final") else set()
    for series, one in {each.position.series: each for each in found}.items():
        own = {e.step for e in found if e.model == one.model or e.position.series == series}
        if not others and one.has_step and (lacking := sorted(chosen[series] - own)):
            warnings.warn(
                f"{one.model}: left out step {listed(lacking)}, of which there is no checkpoint "
                f"beside {one.name}.",
                stacklevel=2,
            )
    return [
        each
        for each in found
        if each.step in chosen[each.position.series] | others or not each.has_step
    ]


def _sample(checkpoint: Checkpoint) -> str:
    """What local checkpoints of the same weights have in common; empty where there is none."""
    with suppress(OSError, ValueError):  # it is gone, or cannot be measured
        return "" if checkpoint.path is None else sample_digest(local_files(checkpoint.path)[0])
    return ""


def _inspect(checkpoint: Checkpoint, known: Recorded | None) -> Checkpoint:
    is_local = checkpoint.path is not None
    try:
        # before the files are read: of what changes meanwhile it is out of date
        state = checkpoint.read_weights_state()
        if known is not None and is_local and state == known.state:
            contents = checkpoint.read_contents(with_hashes=False)
            if contents.config_digest == known.config:
                return replace(
                    checkpoint,
                    contents=contents,
                    weights_sha256=known.sha256,
                    weights_state=state,
                )
        contents = checkpoint.read_contents(with_hashes=known is not None)
    except Exception as error:
        # it is gone: what was measured stays
        if known is not None and is_local and checkpoint.step == known.step:
            return replace(checkpoint, weights_sha256=known.sha256, weights_state=known.state)
        return replace(
            checkpoint, weights_sha256=known.sha256 if known else "", error=reason(error)
        )
    # a revision that moved keeps its
    sha256 = known.sha256 if known and not is_local else contents.sha256
    return replace(checkpoint, contents=contents, weights_sha256=sha256, weights_state=state)
