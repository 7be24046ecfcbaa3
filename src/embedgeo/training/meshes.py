"""Which ranks of a device mesh have different rows, and whether all have the same model."""

import math
import re
from collections.abc import Sequence
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
_STAGES = re.compile(r"pp|pipe.*|stages?", re.I)


def data_parallel_group(mesh: DeviceMesh) -> dist.ProcessGroup:
    """The ranks that have other rows than this one; every rank must call this.

    Rows differ along dimensions of data parallelism, which are told by their names (``dp``, ``dp_replicate``,
    ``dp_shard``, ``data_parallel``, ``fsdp`` …), and are repeated along those of tensor and sequence parallelism
    (``tp``, ``tensor_parallel``, ``sp`` …), and along that of the stages of a pipeline (``pp``, ``pipeline`` …), which
    see the same rows at other layers. A mesh of one dimension without a name is of data parallelism.

    Raises:
        ValueError: the mesh is not of all ranks, or has a dimension of another name: context parallel ranks, say, have
            other positions of a sequence.
    """
    names = mesh.mesh_dim_names or (("dp",) if mesh.ndim == 1 else ())
    other = [name for name in names if not any(kind.fullmatch(name) for kind in (_ROWS, _REPEATED, _STAGES))]
    if other or not names:
        raise ValueError(
            "device_mesh must have dimensions of data parallelism (named dp, data_parallel, fsdp …), of tensor or "
            "sequence parallelism (tp, tensor_parallel, sp …) and of a pipeline (pp, pipeline …); got "
            f"{listed(other) if other else 'unnamed ones'}. Under context parallelism sweep over the checkpoints."
        )
    if mesh.size() != dist.get_world_size():
        raise ValueError(
            f"device_mesh must be the mesh of all {dist.get_world_size()} ranks, not a part of it; got one of "
            f"{mesh.size()}. Give the whole mesh, or process_group=, the ranks that have different rows."
        )
    return _group(mesh, [i for i, name in enumerate(names) if _ROWS.fullmatch(name)])


def sequence_mesh(mesh: DeviceMesh) -> DeviceMesh | None:
    """The ranks of tensor parallelism, of which each may have a part of the positions; None if there are none."""
    names = [name for name in mesh.mesh_dim_names or () if _REPEATED.fullmatch(name) and mesh[name].size() > 1]
    return mesh[names[0]] if len(names) == 1 else None


def pipeline_groups(mesh: DeviceMesh) -> tuple[dist.ProcessGroup, dist.ProcessGroup] | None:
    """The ranks of the stages of one model, in order, and those that have this rank's stage; every rank must call this.

    None: the mesh has no dimension of a pipeline.
    """
    stages = [i for i, name in enumerate(mesh.mesh_dim_names or ()) if _STAGES.fullmatch(name)]
    if not stages:
        return None
    return _group(mesh, stages), _group(mesh, [i for i in range(mesh.ndim) if i not in stages])


def _group(mesh: DeviceMesh, dimensions: Sequence[int]) -> dist.ProcessGroup:
    """The ranks that differ from this one along these dimensions alone."""
    others = [i for i in range(mesh.ndim) if i not in dimensions]
    num_groups = math.prod(mesh.shape[i] for i in others)
    ranks = mesh.mesh.permute([*others, *dimensions]).reshape(num_groups, -1)
    group, _ = dist.new_subgroups_by_enumeration(ranks.tolist())
    return group


def require_same_modules(model: nn.Module, device: torch.device, ranks: dist.ProcessGroup | None) -> None:
    """Raise ValueError if ranks (None: all) have models of other modules; each of them must call this."""
    if not is_distributed():
        return
    digest = blake2b(" ".join(module_names(model)).encode(), digest_size=7).digest()
    number = int.from_bytes(digest)
    largest, least = all_reduce_max(torch.tensor([number, -number], device=device), ranks).tolist()
    if largest != -least:
        raise ValueError(
            "model must have the same modules on every rank; they differ, as those of pipeline stages do. Give "
            "device_mesh= a mesh with the pipeline's dimension, named pp."
        )
