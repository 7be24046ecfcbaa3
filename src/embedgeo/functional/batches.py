"""Anisotropy averaged over consecutive batches of rows, as published curves are."""

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from embedgeo.functional.distributed import all_reduce_sum
from embedgeo.functional.moments import merge_parts, ratio
from embedgeo.functional.spectrum import anisotropy


class AnisotropyBatches(NamedTuple):
    """Moments of the anisotropies of consecutive batches of rows, and the rows that do not fill a batch yet.

    Attributes:
        n: number of batches, scalar.
        mean: mean of their anisotropies, scalar.
        m2: squared deviations from it, summed, scalar.
        pending: the rows seen since the last whole batch, shape (fewer than ``size``, d).
        size: rows in a batch.
    """

    n: Tensor
    mean: Tensor
    m2: Tensor
    pending: Tensor
    size: int

    @classmethod
    def empty(cls, dim: int, size: int) -> "AnisotropyBatches":
        """The state before any rows."""
        zero = torch.zeros((), dtype=torch.float64)
        return cls(zero, zero, zero, torch.zeros(0, dim), size)

    def extend(self, x: Tensor) -> "AnisotropyBatches":
        """The state after the next rows, ``x``, shape (n, d)."""
        dtype = torch.promote_types(torch.promote_types(self.pending.dtype, x.dtype), torch.float32)
        *whole, rest = torch.cat((self.pending.to(dtype), x.to(self.pending.device, dtype))).split(self.size)
        if len(rest) == self.size:
            whole, rest = [*whole, rest], rest[:0]
        moments = self[:3]
        for batch in whole:
            value = anisotropy(batch)
            moments = merge_parts([moments, (torch.ones_like(value), value, torch.zeros_like(value))])
        return AnisotropyBatches(*moments, rest.clone(), self.size)

    def merge(self, other: "AnisotropyBatches") -> "AnisotropyBatches":
        """The batches of both; rows pending in ``other`` follow those pending here."""
        return AnisotropyBatches(*merge_parts([self[:3], other[:3]]), self.pending, self.size).extend(other.pending)

    def all_reduce(self, group: Any = None) -> "AnisotropyBatches":
        """The batches of all ranks; no batch spans two ranks."""
        moments = merge_parts([self[:3]], partial(all_reduce_sum, group=group))
        return AnisotropyBatches(*moments, self.pending, self.size)


def batch_values(batches: AnisotropyBatches) -> dict[str, Tensor]:
    """``anisotropy_batch_mean`` and ``anisotropy_batch_std``; NaN for no batch, and for fewer than two batches."""
    n, mean, m2 = batches[:3]
    return {
        "anisotropy_batch_mean": torch.where(n > 0, mean, torch.nan),
        "anisotropy_batch_std": torch.where(n > 1, ratio(m2, n - 1), torch.nan).sqrt(),
    }
