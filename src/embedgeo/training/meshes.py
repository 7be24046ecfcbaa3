"""Which ranks of a device mesh have different rows, and whether all have the same model."""

import math
import re
from hashlib import blake2b

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from embedgeo.capture.structure import module_names
from embedgeo.functional.distributed import all_reduce_max, is_distributed
from embedgeo.results.wording import listed

_ROWS = re.compile(r"dp.*|ddp.*|fsdp.*|hsdp.*|data.*|.*replicate|.*shard", re.I)
_REPEATED = re.compile(r"tp|tensor.*|sp|sequence.*", re.I)


def data_parallel_group(mesh: DeviceMesh) -> dist.ProcessGroup:
    """The ranks that have other rows than this one; every rank must call this.

    Rows differ along dimensions of data parallelism, which are told by their names (``dp``, ``dp_replicate``,
    ``dp_shard``, ``data_parallel``, ``fsdp`` …), and are repeated along those of tensor and sequence parallelism
    (``tp``, ``tensor_parallel``, ``sp`` …). A mesh of one dimension without a name is of data parallelism.

    Raises:
        ValueError: the mesh is not of all ranks, or has a dimension of another name: pipeline stages have other layers,
            context parallel ranks other positions of a sequence.
    """
    names = mesh.mesh_dim_names or (("dp",) if mesh.ndim == 1 else ())
    other = [name for name in names if not (_ROWS.fullmatch(name) or _REPEATED.fullmatch(name))]
    if other or not names:
        raise ValueError(
            "device_mesh must have dimensions of data parallelism (named dp, data_parallel, fsdp …) and of tensor or "
            f"sequence parallelism (tp, tensor_parallel, sp …); got {listed(other) if other else 'unnamed ones'}. "
            "Under pipeline or context parallelism sweep over the checkpoints instead."
        )
    if mesh.size() != dist.get_world_size():
        raise ValueError(
            f"device_mesh must be the mesh of all {dist.get_world_size()} ranks, not a part of it; got one of "
            f"{mesh.size()}. Give the whole mesh, or process_group=, the ranks that have different rows."
        )
    along = [i for i, name in enumerate(names) if _ROWS.fullmatch(name)]
    across = [i for i in range(mesh.ndim) if i not in along]
    num_groups = math.prod(mesh.shape[i] for i in across)
    ranks = mesh.mesh.permute(across + along).reshape(num_groups, -1)
    group, _ = dist.new_subgroups_by_enumeration(ranks.tolist())
    return group


def require_same_modules(model: nn.Module, device: torch.device) -> None:
    """Raise ValueError if ranks have models of other modules, as pipeline stages are; every rank must call this."""
    if not is_distributed():
        return
    digest = blake2b(" ".join(module_names(model)).encode(), digest_size=7).digest()
    number = int.from_bytes(digest)
    largest, least = all_reduce_max(torch.tensor([number, -number], device=device)).tolist()
    if largest != -least:
        raise ValueError(
            "model must have the same modules on every rank; they differ, as those of pipeline stages do. Sweep over "
            "the checkpoints instead."
        )
