"""Reductions over the ranks of a process group."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from embedgeo.functional.sampling import Sample


class Ranks:
    """All-reduce and gather over a process group; arguments are left as they are.

    Args:
        group: the process group; None for the world.
    """

    def __init__(self, group: Any = None) -> None:
        self.group = group

    def total(self, tensor: Tensor) -> Tensor:
        """Sum over ranks."""
        return self._reduce(tensor, dist.ReduceOp.SUM)

    def total_of(self, terms: Sequence[Tensor]) -> Tensor:
        """Sum over the terms held here and over ranks."""
        return self.total(sum(terms[1:], terms[0]))

    def largest(self, tensor: Tensor) -> Tensor:
        """Maximum over ranks."""
        return self._reduce(tensor, dist.ReduceOp.MAX)

    def concatenate(self, tensor: Tensor) -> tuple[Tensor, int]:
        """All ranks' one-dimensional tensors, of whatever lengths, one after the other; and where this one begins."""
        lengths = [
            torch.zeros(1, dtype=torch.int64, device=tensor.device) for _ in range(dist.get_world_size(self.group))
        ]
        dist.all_gather(lengths, lengths[0].new_tensor([len(tensor)]), group=self.group)
        longest = max(int(length) for length in lengths)
        padded = torch.cat((tensor, tensor.new_zeros(longest - len(tensor))))
        gathered = [torch.empty_like(padded) for _ in lengths]
        dist.all_gather(gathered, padded, group=self.group)
        parts = [part[: int(length)] for part, length in zip(gathered, lengths, strict=True)]
        return torch.cat(parts), sum(map(len, parts[: dist.get_rank(self.group)]))

    def sample(self, drawn: Sample, size: int) -> Sample:
        """The sample of at most ``size`` rows of what all ranks' samples were drawn from; only these rows travel."""
        rows, keys, seen = drawn
        everyone, offset = self.concatenate(keys)
        order = everyone.argsort(stable=True)[:size]
        slots = ((order >= offset) & (order < offset + len(keys))).nonzero().flatten()  # those of this rank's rows
        is_double = bool(self.largest(seen.new_tensor(rows.dtype == torch.float64)))
        dtype = torch.float64 if is_double else torch.float32
        pooled = torch.zeros(len(order), rows.shape[1], dtype=dtype, device=rows.device)
        pooled.index_copy_(0, slots, rows.index_select(0, order[slots] - offset).to(dtype))
        return Sample(self.total(pooled), everyone[order], self.total(seen))

    def _reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType) -> Tensor:
        reduced = tensor.detach().clone(memory_format=torch.contiguous_format)
        dist.all_reduce(reduced, op=op, group=self.group)
        return reduced


def is_distributed() -> bool:
    """Whether this process is one of several that exchange rows."""
    return dist.is_available() and dist.is_initialized()


def current_rank(group: Any = None) -> int:
    """Rank of this process in a process group, the world if None; 0 outside of distributed runs."""
    return dist.get_rank(group) if is_distributed() else 0
