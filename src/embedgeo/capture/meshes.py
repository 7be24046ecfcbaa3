"""Meshes of ranks: along which dimensions ranks have different rows, told by the names."""

import math
import re
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from embedgeo.capture.structure import unmeasured_dimensions
from embedgeo.capture.torch_names import fsdp1_sizes
from embedgeo.formatting import listed
from embedgeo.functional.distributed import OwnGroup, num_ranks, own_group

_ROWS = re.compile(
    r"dp.*|ddp.*|e?fsdp.*|hsdp.*|data.*|.*replicate|(?!tensor|seq|model).*shard|ep|expert.*", re.I
)
_REPEATED = re.compile(r"tp|tensor.*|sp|sequence.*|mp|model.*", re.I)

_shared = WeakKeyDictionary[Any, dict[str, OwnGroup]]()  # by default group and mesh


def data_parallel_group(mesh: DeviceMesh) -> OwnGroup:
    """A new group of the ranks that have other rows than this one; every rank must call this.

    Rows differ along dimensions of data and expert parallelism, told by their names (``dp``,
    ``dp_replicate``, ``dp_shard``, ``data_parallel``, ``fsdp``, ``ep`` …), and repeat along those
    of tensor and sequence parallelism (``tp``, ``tensor_parallel``, ``sp``, ``model`` …).
    Dimensions of size 1 may have any name.
    """
    require_known_dimensions(mesh)
    if mesh.size() != dist.get_world_size():
        raise ValueError(
            f"device_mesh must be the mesh of all {dist.get_world_size()} ranks, not a part of it; "
            f"got one of {mesh.size()}. Give the whole mesh, or process_group=, the ranks that "
            "have different rows."
        )
    along = [i for i, name in enumerate(mesh.mesh_dim_names or ()) if _ROWS.fullmatch(name)]
    others = [i for i in range(mesh.ndim) if i not in along]
    num_groups = math.prod(mesh.shape[i] for i in others)
    ranks = mesh.mesh.permute([*others, *along]).reshape(num_groups, -1)
    group = own_group(ranks.tolist())
    group.original = group.process_group  # a mesh may have none of these ranks
    return group


def require_known_dimensions(mesh: DeviceMesh) -> None:
    """Raise ValueError if a name does not tell whether ranks have different rows along it, or tells
    of context or pipeline parallelism.
    """
    names = mesh.mesh_dim_names or ("",) * mesh.ndim
    unmeasured = unmeasured_dimensions(mesh)
    other = unmeasured or [
        name or "an unnamed one"
        for name, size in zip(names, mesh.shape, strict=True)
        if size > 1 and not (_ROWS.fullmatch(name) or _REPEATED.fullmatch(name))
    ]
    if other:
        remedy = (
            "Under context and pipeline parallelism sweep over the checkpoints."
            if unmeasured
            else "Name them so, or give process_group=, the ranks that have different rows."
        )
        raise ValueError(
            "device_mesh must have dimensions of data or expert parallelism (named dp, "
            "data_parallel, fsdp, ep …) and of tensor or sequence parallelism (tp, "
            f"tensor_parallel, sp, model …); got {listed(other)}. {remedy}"
        )


def shared_group(mesh: DeviceMesh) -> OwnGroup:
    """`data_parallel_group`, one for all meshes of these ranks and names; do not end it."""
    made = _shared.setdefault(dist.group.WORLD, {})
    key = str((mesh.mesh.tolist(), mesh.mesh_dim_names))
    if key not in made:
        made[key] = data_parallel_group(mesh)
    return made[key]


def mesh_of(model: nn.Module) -> DeviceMesh | None:
    """The mesh of a model in tensor parallel, which its parameters tell; None of another one.

    FSDP alone has one dimension, of any name, or names of data parallelism.
    """
    parameters = [each for each in model.parameters() if isinstance(each, DTensor)]
    mesh = max((each.device_mesh for each in parameters), key=lambda each: each.ndim, default=None)
    names = (mesh and mesh.mesh_dim_names) or ()
    is_sharded = any(isinstance(module, FSDPModule) for module in model.modules())
    of_rows = len(names) == 1 or all(map(_ROWS.fullmatch, names))
    if mesh is None or (is_sharded and of_rows):
        sizes = [*fsdp1_sizes(model), *(each.device_mesh.size() for each in parameters)]
        if max(sizes, default=num_ranks()) < num_ranks():
            raise ValueError(
                f"device_mesh= or process_group= must be given where FSDP shards over some ranks; "
                f"it does over {max(sizes)} of {num_ranks()}, and others may have the same rows. "
                "Give the whole mesh, or the ranks that have different rows."
            )
        return None
    if not names:
        raise ValueError(
            "device_mesh= must be given of a model whose parameters are on a mesh without names; "
            "got none. Name its dimensions: init_device_mesh(…, mesh_dim_names=…)."
        )
    return mesh


def sequence_mesh(mesh: DeviceMesh) -> DeviceMesh | None:
    """The ranks of tensor parallelism, of which each may have a part of the positions."""
    names = [
        name
        for name in mesh.mesh_dim_names or ()
        if _REPEATED.fullmatch(name) and mesh[name].size() > 1
    ]
    return mesh[names[0]] if len(names) == 1 else None
