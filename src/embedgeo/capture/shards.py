"""Hidden states of which each rank has a part of the positions (sequence parallelism), as plain tensors."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Shard


def gathered(hidden: Tensor, mesh: DeviceMesh, given: Sequence[Tensor]) -> Tensor:
    """The whole of a hidden state of which this rank has a part; any other one as it is. Every rank must call this.

    It is a part where it has one R-th of the positions that the model was given, and is of no other tensor's shape.

    Args:
        hidden: shape (..., d); a part is (batch, positions / R, d).
        mesh: of one dimension, the R ranks that have the parts in order.
        given: token ids and masks; those of the whole batch are (batch, positions), the same on all ranks.

    Raises:
        ValueError: the ranks have the same, though not the same token ids: it has fewer positions for another reason.
    """
    size = mesh.size()
    whole = [t for t in given if hidden.ndim == 3 and t.shape == (hidden.shape[0], size * hidden.shape[1])]
    if not whole or isinstance(hidden, DTensor) or any(t.shape == hidden.shape[:2] for t in given):
        return hidden
    found = DTensor.from_local(hidden.contiguous(), mesh, [Shard(1)], run_check=False).full_tensor()
    if _repeats(found, size) and not all(_repeats(t, size) for t in whole):
        raise ValueError(
            f"a layer must have a row for each token, or a part of them on each of {size} ranks; its rows have shape "
            f"{tuple(hidden.shape[:2])} and are the same on all ranks. Leave the layer out."
        )
    return found


def _repeats(tensor: Tensor, size: int) -> bool:
    first, *others = tensor.chunk(size, 1)
    return all(torch.equal(first, other) for other in others)
