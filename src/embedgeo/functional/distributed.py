"""Collectives over the ranks of a process group ; arguments are left as they are."""

from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

Group: TypeAlias = "dist.ProcessGroup | None"  # None: the world


def all_reduce_sum(tensor: Tensor, group: Group = None) -> Tensor:
    """Sum of the ranks' tensors of one shape."""
    return _all_reduce(tensor, dist.ReduceOp.SUM, group)


def all_reduce_max(tensor: Tensor, group: Group = None) -> Tensor:
    """Elementwise maximum of the ranks' tensors of one shape."""
    return _all_reduce(tensor, dist.ReduceOp.MAX, group)


def all_gather_cat(tensor: Tensor, group: Group = None) -> Tensor:
    """Concatenation of the ranks' one-dimensional tensors, which may differ in length, in the order of the ranks."""
    lengths = [torch.zeros(1, dtype=torch.int64, device=tensor.device) for _ in range(dist.get_world_size(group))]
    dist.all_gather(lengths, lengths[0].new_tensor([len(tensor)]), group=group)
    longest = max(int(length) for length in lengths)
    padded = torch.cat((tensor, tensor.new_zeros(longest - len(tensor))))
    gathered = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(gathered, padded, group=group)
    return torch.cat([part[: int(length)] for part, length in zip(gathered, lengths, strict=True)])


def is_distributed() -> bool:
    """Tell if a process group has been initialized."""
    return dist.is_available() and dist.is_initialized()


def has_other_ranks() -> bool:
    """Tell if there are several processes."""
    return is_distributed() and dist.get_world_size() > 1


def current_rank(group: Group = None) -> int:
    """Rank of this process in a process group; 0 where none has been initialized."""
    return dist.get_rank(group) if is_distributed() else 0


def num_ranks(group: Group = None) -> int:
    """Number of processes in a process group; 1 where none has been initialized."""
    return dist.get_world_size(group) if is_distributed() else 1


def _all_reduce(tensor: Tensor, op: dist.ReduceOp.RedOpType, group: Group) -> Tensor:
    reduced = tensor.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(reduced, op=op, group=group)
    return reduced
