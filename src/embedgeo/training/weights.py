"""A few of the weights that are trained, which tell what has become of all."""

from collections.abc import Sequence
from contextlib import suppress

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parameter import is_lazy

from embedgeo.capture.torch_names import local_part, version


def some_weights(model: nn.Module) -> Sequence[Tensor]:
    """Four or a few more of the parameters that are trained, from all of the depth; none of a model
    that FSDP shards, which has others in their place in a forward pass.
    """
    if any(isinstance(each, FSDPModule | FullyShardedDataParallel) for each in model.modules()):
        return []
    trained = [w for w in model.parameters() if w.requires_grad and not is_lazy(w)]
    return trained[len(trained) // 8 :: max(1, len(trained) // 4)]


def first_numbers(weights: Sequence[Tensor]) -> list[Tensor]:
    """Copies of the first numbers of this rank's part of each; none where they cannot be read."""
    with suppress(RuntimeError):
        return [local_part(each).detach().flatten()[:16].clone() for each in weights]
    return []


def states(weights: Sequence[Tensor]) -> list[object]:
    """What changes with each step of an optimizer, also where no number does."""
    return [(version(own), own.data_ptr()) for own in map(local_part, weights)]
