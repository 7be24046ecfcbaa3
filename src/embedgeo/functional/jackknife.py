"""Standard errors by the delete-a-group jackknife over groups of whole sequences, for rows of one
sequence are alike.

Source: Busing, Meijer & van der Leeden 1999, *Delete-m jackknife for unequal m*; for groups of
equal size Tukey's.
"""

from collections.abc import Iterator, Sequence
from functools import reduce
from typing import TypeVar

import torch
from torch import Tensor

from embedgeo.functional.distributed import State
from embedgeo.functional.moments import column

S = TypeVar("S", bound=State)


def deviations(estimate: Tensor, left_out: Tensor, sizes: Tensor) -> Tensor:
    """Deviations of the groups, shape (G, ...), from an estimate, those without each of the groups,
    shape (G, ...), and their sizes, (G,).

    The sum of their squares is the square of the standard error, which is right for smooth
    functions of means of many independent groups; for a maximum or a quantile it is not.

    Of a difference or a mean of estimates from the same groups they are the difference or the mean
    of the estimates' deviations. So what the choice of texts does to both estimates cancels in the
    error of their difference. An empty group has 0; NaN for fewer than two others, and where an
    estimate is NaN.
    """
    left_out = left_out.to(
        torch.promote_types(left_out.dtype, torch.promote_types(estimate.dtype, torch.float32))
    )
    is_full = sizes > 0
    shifts = torch.zeros_like(left_out)
    if is_full.sum() < 2:
        return shifts.fill_(torch.nan)
    left_out, sizes = left_out[is_full], sizes[is_full].to(left_out.dtype)
    others = sizes.sum() / sizes - 1  # rows of the other groups for each of the group's own
    others = column(others, left_out)
    of_pseudo_values = others * (estimate - left_out)
    centred = of_pseudo_values - (of_pseudo_values / (others + 1)).sum(0)
    shifts[is_full] = centred / (others * len(sizes)).sqrt()
    return shifts


def merge_all_but_one(groups: Sequence[S], others: S | None = None) -> Iterator[S]:
    """Yield the merged states of all groups but each in turn, and of ``others``: about G log G
    merges, by halves.
    """
    if len(groups) == 1 and others is not None:
        yield others
        return
    half = len(groups) // 2
    for inside, outside in ((groups[:half], groups[half:]), (groups[half:], groups[:half])):
        states = outside if others is None else [others, *outside]
        yield from merge_all_but_one(
            inside, reduce(lambda state, other: state.merge(other), states)
        )
