"""Standard errors by the delete-a-group jackknife.

Rows of one sequence are alike, so that standard errors that take rows as independent are too small. Here the rows are
dealt into groups of whole sequences, and an estimate is repeated without each of the groups.

Source: Busing, Meijer & van der Leeden 1999, *Delete-m jackknife for unequal m* (equations 4 and 6); with groups of
equal size it is the jackknife of Tukey.
"""

from collections.abc import Sequence
from typing import Protocol, Self, TypeVar

import torch
from torch import Tensor


class Mergeable(Protocol):
    """A state that merges with that of further rows."""

    def merge(self, other: Self) -> Self:
        """The state of the rows of ``self`` followed by those of ``other``."""


M = TypeVar("M", bound=Mergeable)


def standard_error(estimate: Tensor, left_out: Tensor, sizes: Tensor) -> Tensor:
    """Standard error of an estimate, from the estimates without each group.

    It is right for smooth functions of means of many independent groups; for a maximum or a quantile it is not.

    Args:
        estimate: from all rows, shape (...).
        left_out: from the rows of all groups but one, shape (G, ...).
        sizes: rows in each group, shape (G,). Empty groups do not count.

    Returns:
        Shape (...); NaN for fewer than two groups with rows, and where an estimate is NaN.

    >>> x = torch.tensor([1.0, 2.0, 4.0, 9.0])
    >>> without_one = (x.sum() - x) / 3
    >>> float(standard_error(x.mean(), without_one, torch.ones(4))), float(x.std() / 2)
    (1.7795131206512451, 1.7795130014419556)
    """
    left_out, sizes = left_out[sizes > 0], sizes[sizes > 0].to(left_out.dtype)
    if len(sizes) < 2:
        return torch.full_like(estimate, torch.nan)
    others = (sizes.sum() / sizes - 1).reshape(-1, *[1] * estimate.ndim)  # rows of the other groups for each of one's own
    deviations = others * (estimate - left_out)  # of the pseudo-values from the estimate
    centred = deviations - (deviations / (others + 1)).sum(0)
    return (centred.square() / others).mean(0).sqrt()


def merge_all_but_one(groups: Sequence[M]) -> list[M]:
    """For each of two or more groups the merged states of the others, in order, by 3 G merges."""
    before = [groups[0]]
    for state in groups[1:-1]:
        before.append(before[-1].merge(state))
    after = [groups[-1]]
    for state in reversed(groups[1:-1]):
        after.append(state.merge(after[-1]))
    inner = [before[i - 1].merge(after[-1 - i]) for i in range(1, len(groups) - 1)]
    return [after[-1], *inner, before[-1]]
