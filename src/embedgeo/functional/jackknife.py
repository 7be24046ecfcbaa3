"""Standard errors by the delete-a-group jackknife over groups of whole sequences, for rows of one sequence are alike.

Source: Busing, Meijer & van der Leeden 1999, *Delete-m jackknife for unequal m*; for groups of equal size Tukey's.
"""

from collections.abc import Iterator, Sequence
from functools import reduce
from typing import Protocol, Self, TypeVar

import torch
from torch import Tensor


class Mergeable(Protocol):
    """A state that merges with that of further rows."""

    def merge(self, other: Self) -> Self:
        """The state of the rows of ``self`` followed by those of ``other``."""


M = TypeVar("M", bound=Mergeable)


def standard_error(estimate: Tensor, left_out: Tensor, sizes: Tensor) -> Tensor:
    """Standard error of an estimate, from those without each of the groups, shape (G, ...), and their sizes, (G,).

    It is right for smooth functions of means of many independent groups; for a maximum or a quantile it is not. Empty
    groups do not count; NaN for fewer than two others, and where an estimate is NaN.
    """
    left_out, sizes = left_out[sizes > 0], sizes[sizes > 0].to(left_out.dtype)
    if len(sizes) < 2:
        return torch.full_like(estimate, torch.nan)
    others = sizes.sum() / sizes - 1  # rows of the other groups for each of the group's own
    others = others.reshape(-1, *[1] * estimate.ndim)
    deviations = others * (estimate - left_out)  # of the pseudo-values from the estimate
    centred = deviations - (deviations / (others + 1)).sum(0)
    return (centred.square() / others).mean(0).sqrt()


def merge_all_but_one(groups: Sequence[M], others: M | None = None) -> Iterator[M]:
    """Yield the merged states of all groups but each in turn, and of ``others``: about G log G merges, by halves."""
    if len(groups) == 1 and others is not None:
        yield others
        return
    half = len(groups) // 2
    for inside, outside in ((groups[:half], groups[half:]), (groups[half:], groups[:half])):
        states = outside if others is None else [others, *outside]
        yield from merge_all_but_one(inside, reduce(lambda state, other: state.merge(other), states))
