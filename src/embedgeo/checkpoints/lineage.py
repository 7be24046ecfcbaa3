"""Distances of the weights of a run from checkpoint to checkpoint, by a few tensors; and what
cannot be one run.
"""

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from math import nan
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from embedgeo.checkpoints.files import Contents
from embedgeo.checkpoints.ranges import StoredTensor, WeightRanges
from embedgeo.checkpoints.sources import Checkpoint
from embedgeo.formatting import listed, reason

NUM_VALUES = 2**16  # of each tensor that are read: the first ones
DETOUR = 2.0  # times the way past checkpoints that the ways to them and from them have to be
# times the machine epsilon of the stored dtype up to which distances are those of a few roundings
ROUNDING = 0.25
# correlation of the weights of two checkpoints up to which they are those of two runs
CHANCE = 0.05
# correlation of neighbours from which on those of two runs do not follow by training alone
KEPT = 0.5
_BLOCK = re.compile(r"(?<=\.)\d+(?=\.)")

Array = NDArray[np.float64]


class Lineage(NamedTuple):
    """The checkpoints of one run by step, what was read of them, and how far they are from each
    other.
    """

    names: list[str]
    steps: list[int]
    tensors: list[str]
    # (tensors, checkpoints, checkpoints), relative to the norms; see `relative_distances`
    distances: Array
    correlations: Array  # the same shape: of the values, less their means
    rounding: Array  # (tensors,): machine epsilon of the coarsest dtype that each is stored in
    errors: dict[str, str]  # why a checkpoint is not among them, by name

    def to_first(self) -> Array:
        """Distances to the first checkpoint and correlations with it, means over tensors, shape (2,
        checkpoints).
        """
        return np.array([_mean(self.distances[:, 0]), _mean(self.correlations[:, 0])])

    def to_previous(self) -> Array:
        """Distances to the checkpoint before, means over tensors, shape (checkpoints,); NaN for the
        first.
        """
        steps = np.arange(1, len(self.names))
        return np.concatenate([[nan], _mean(self.distances[:, steps, steps - 1])])


SAME_TENSOR = "same tensor"


class Finding(NamedTuple):
    """A fault that cannot be of one training run: its kind, the checkpoints, and words."""

    kind: str  # "not finite", "constant", `SAME_TENSOR`, "jump" or "does not descend"
    names: list[str]
    text: str


def _mean(values: Array) -> Array:
    """Means over tensors, without those that have no value; NaN where none has one."""
    known = np.isfinite(values)
    total = np.where(known, values, 0).sum(0)
    return np.divide(total, known.sum(0), out=np.full(total.shape, nan), where=known.any(0))


def choose_tensors(shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Matrices by which checkpoints are compared: two of the first, a middle and the last block,
    and those outside.

    Of a block, the first and the last by name: as a rule one of its attention and one of its MLP.
    Vectors and buffers, which may not move, are not among them.

    >>> choose_tensors(
    ...     {
    ...         "wte.weight": (9, 4),
    ...         "h.0.attn.weight": (4, 4),
    ...         "h.0.mlp.weight": (4, 8),
    ...         "ln.weight": (4,),
    ...     }
    ... )
    ['h.0.attn.weight', 'h.0.mlp.weight', 'wte.weight']
    """
    blocks: dict[str, dict[int, list[str]]] = {}
    chosen = []
    for name in sorted(shapes):
        if len(shapes[name]) < 2 or name.endswith("bias"):
            continue
        if match := _BLOCK.search(name):
            blocks.setdefault(name[: match.start()], {}).setdefault(int(match[0]), []).append(name)
        else:
            chosen.append(name)
    for by_index in blocks.values():
        indices = sorted(by_index)
        for index in (indices[0], indices[(len(indices) - 1) // 2], indices[-1]):
            chosen += [by_index[index][0], by_index[index][-1]]
    return sorted(dict.fromkeys(chosen))


def read_lineage(checkpoints: Sequence[tuple[Checkpoint, Contents]]) -> Lineage:
    """Read the same tensors of the checkpoints of a run, by ranges; what differs in its tensors is
    an error.
    """
    with ThreadPoolExecutor(8) as pool:
        headers = list(pool.map(_header, checkpoints))
        layouts = Counter(
            frozenset((n, t.shape) for n, t in found.items())
            for found in headers
            if not isinstance(found, str)
        )
        if not layouts:
            nothing = np.empty((0, 0, 0))
            return Lineage(
                [], [], [], nothing, nothing, np.empty(0), _failures(checkpoints, headers)
            )
        most = layouts.most_common(1)[0][0]
        chosen = choose_tensors(dict(most))
        if not chosen:
            raise ValueError("checkpoints must have matrices to be compared by; they have none.")

        def read(
            each: tuple[tuple[Checkpoint, Contents], dict[str, StoredTensor] | str],
        ) -> list[Array] | str:
            held, found = each
            if isinstance(found, str):
                return found
            if any(name not in found or found[name].shape != dict(most)[name] for name in chosen):
                return (
                    "its tensors have other names or shapes than those of most checkpoints of its "
                    "run"
                )
            try:
                ranges = WeightRanges(*held)
                return [ranges.values(found[name], NUM_VALUES).numpy() for name in chosen]
            except Exception as error:
                return _why(error)

        values = list(pool.map(read, zip(checkpoints, headers, strict=True)))
    read_ones = [
        (held[0], found)
        for held, found in zip(checkpoints, values, strict=True)
        if not isinstance(found, str)
    ]
    by_tensor = [np.stack(each) for each in zip(*(found for _, found in read_ones), strict=True)]
    known = [found for found in headers if not isinstance(found, str)]
    return Lineage(
        [checkpoint.name for checkpoint, _ in read_ones],
        [checkpoint.step for checkpoint, _ in read_ones],
        chosen,
        np.stack([relative_distances(each) for each in by_tensor])
        if by_tensor
        else np.empty((0, 0, 0)),
        np.stack([correlations(each) for each in by_tensor]) if by_tensor else np.empty((0, 0, 0)),
        np.array(
            [
                max(torch.finfo(found[name].dtype).eps for found in known if name in found)
                for name in chosen
            ]
        ),
        _failures(checkpoints, values),
    )


def _header(held: tuple[Checkpoint, Contents]) -> dict[str, StoredTensor] | str:
    try:
        return WeightRanges(*held).tensors()
    except Exception as error:
        return _why(error)


def _why(error: Exception) -> str:
    return str(error) if isinstance(error, ValueError) else reason(error)


def _failures(
    checkpoints: Sequence[tuple[Checkpoint, Contents]], results: Sequence[object]
) -> dict[str, str]:
    return {
        held[0].name: each
        for held, each in zip(checkpoints, results, strict=True)
        if isinstance(each, str)
    }


def relative_distances(values: Array) -> Array:
    """‖a − b‖ / √(‖a‖ ‖b‖) of the rows of (checkpoints, values); 0 where they are the same, NaN
    where one is zero.
    """
    norms = np.sqrt(np.einsum("ij,ij->i", values, values))
    # exactly 0 where equal
    difference = np.array([np.sqrt(((values - row) ** 2).sum(1)) for row in values])
    scale = np.sqrt(np.outer(norms, norms))
    found = np.divide(difference, scale, out=np.full(scale.shape, nan), where=scale > 0)
    return np.where(difference == 0, 0.0, found)


def correlations(values: Array) -> Array:
    """Pearson's correlations of the rows of (checkpoints, values); NaN where one does not vary."""
    centred = values - values.mean(1, keepdims=True)
    norms = np.sqrt(np.einsum("ij,ij->i", centred, centred))
    scale = np.outer(norms, norms)
    return np.divide(centred @ centred.T, scale, out=np.full(scale.shape, nan), where=scale > 0)


def find_faults(lineage: Lineage) -> list[Finding]:
    """The faults of a lineage: weights without numbers, identical ones, jumps, and those that do
    not descend.
    """
    jumps = _jumps(lineage)
    off_the_way = {name for jump in jumps for name in jump.names}
    return [
        *_without_numbers(lineage),
        *_same_tensors(lineage),
        *jumps,
        *_breaks(lineage, off_the_way),
    ]


def _without_numbers(lineage: Lineage) -> list[Finding]:
    """Checkpoints with a NaN or Inf, and those with tensors of equal values (zeros, say) after they
    have had others.
    """
    is_finite = lineage.distances.diagonal(axis1=1, axis2=2) == 0
    varies = np.isfinite(lineage.correlations.diagonal(axis1=1, axis2=2))
    findings = []
    for i, name in enumerate(lineage.names):
        is_constant = is_finite[:, i] & ~varies[:, i] & varies[:, :i].any(1)
        for kind, marks, what in (
            ("not finite", ~is_finite[:, i], "have a NaN or Inf"),
            ("constant", is_constant, "have one value alone"),
        ):
            names = [tensor for tensor, mark in zip(lineage.tensors, marks, strict=True) if mark]
            if names:
                text = f"{len(names)} of {len(lineage.tensors)} tensors {what}: {listed(names, 3)}"
                findings.append(Finding(kind, [name], text))
    return findings


def _same_tensors(lineage: Lineage) -> list[Finding]:
    """Tensors that are equal in some checkpoints; those that are in all are frozen, and no fault.

    Nor is a table outside of blocks that is equal from one checkpoint to the next: of an embedding,
    rows of token types that were not seen in between stay as they are.
    """
    groups: dict[tuple[int, ...], list[str]] = {}
    for name, distances in zip(lineage.tensors, lineage.distances, strict=True):
        same = distances == 0
        for i, row in enumerate(same):
            members = tuple(int(j) for j in np.flatnonzero(row))
            if members[:1] != (i,) or not 1 < len(members) < len(lineage.names):
                continue
            if _BLOCK.search(name) or members[-1] - members[0] != len(members) - 1:
                groups.setdefault(members, []).append(name)
    return [
        Finding(
            SAME_TENSOR,
            [lineage.names[i] for i in members],
            f"{len(names)} of {len(lineage.tensors)} tensors are the same: {listed(names, 3)}",
        )
        for members, names in groups.items()
    ]


def _jumps(lineage: Lineage) -> list[Finding]:
    """Checkpoints off the way of their run: it is much shorter past them than to them, and than
    from them.

    The least of the two ways, over the way past, is no more than 1 where weights move in one
    direction (½ in even steps), at random (1/√2), or back and forth around a point (1); weights of
    another step or run have a multiple. Ways below `ROUNDING` do not count: there a few values that
    round the other way, and back, make the ratio.
    """
    found: dict[tuple[int, int], tuple[float, list[str]]] = {}
    left = list(range(len(lineage.names)))
    while worst := _worst_detour(lineage, left):
        start, stop = worst
        block = left[start:stop]
        ratios = _detours(lineage, left[start - 1 : stop + 1])
        names = [
            name for name, ratio in zip(lineage.tensors, ratios, strict=True) if ratio > DETOUR
        ]
        found[block[0], block[-1]] = float(ratios.max()), names
        del left[start:stop]
    return [
        Finding(
            "jump",
            [name for i, name in enumerate(lineage.names) if first <= i <= last],
            f"{ratio:.3g} times as far from both neighbours as these are from each other, in "
            f"{len(names)} of "
            f"{len(lineage.tensors)} tensors: {listed(names, 3)}",
        )
        for (first, last), (ratio, names) in sorted(found.items())
    ]


def _detours(lineage: Lineage, way: Sequence[int]) -> Array:
    """The lesser of the ways there and back over the way past, of each tensor; 0 where that is none
    or undefined.

    ``way`` has the checkpoints in question between the one before and the one after them.
    """
    past = lineage.distances[:, way[0], way[-1]]
    least = np.nan_to_num(
        np.minimum(lineage.distances[:, way[0], way[1]], lineage.distances[:, way[-2], way[-1]])
    )
    return np.divide(
        least,
        past,
        out=np.zeros_like(least),
        where=(past > 0) & (least > ROUNDING * lineage.rounding),
    )


def _worst_detour(lineage: Lineage, left: Sequence[int]) -> tuple[int, int] | None:
    """The first and last but one of those ``left`` that are off the way, the fewest at once; None
    if none are.
    """
    for size in range(1, max(1, len(left) // 3) + 1):
        worst: tuple[float, tuple[int, int] | None] = DETOUR, None
        for start in range(1, len(left) - size):
            stop = start + size
            ratio = _detours(lineage, left[start - 1 : stop + 1]).max()
            if ratio > worst[0]:
                worst = ratio, (start, stop)
        if worst[1] is not None:
            return worst[1]
    return None


def _breaks(lineage: Lineage, off_the_way: Collection[str]) -> list[Finding]:
    """Neighbours whose weights correlate no more than those of two runs do.

    In at least half of the tensors; or in some that did correlate with those before, `KEPT` or
    more, while the median of all still does.
    """
    findings = []
    before_that = np.full(len(lineage.tensors), nan)
    for before, after in pairwise(
        i for i, name in enumerate(lineage.names) if name not in off_the_way
    ):
        found = lineage.correlations[:, before, after]
        known = found[np.isfinite(found)]
        is_off = found <= CHANCE
        if len(known) and is_off.sum() < len(known) / 2:
            is_off &= (before_that >= KEPT) & (np.median(known) >= KEPT)
        if is_off.any():
            names = [tensor for tensor, mark in zip(lineage.tensors, is_off, strict=True) if mark]
            text = (
                f"correlation of their weights {np.median(found[is_off]):.3f}, as of two runs (at "
                f"most {CHANCE}), in "
                f"{len(names)} of {len(lineage.tensors)} tensors: {listed(names, 3)}"
            )
            findings.append(
                Finding("does not descend", [lineage.names[after], lineage.names[before]], text)
            )
        before_that = found
    return findings
