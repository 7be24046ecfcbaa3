"""A few of the weights that are trained, which tell what has become of all."""

from collections.abc import Sequence
from contextlib import suppress

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from embedgeo.capture.torch_names import changes, is_whole, local_part, named_shards


def some_weights(model: nn.Module) -> Sequence[Tensor]:
    """Four or a few more of the parameters that are trained, from all of the depth; where FSDP
    shards the model, of those of which this rank has a part.
    """
    weights = [weight for _, weight in named_shards(model)] or [*model.parameters()]
    trained = [w for w in weights if w.requires_grad and not is_lazy(w)]
    return trained[len(trained) // 8 :: max(1, len(trained) // 4)]


def first_numbers(weights: Sequence[Tensor]) -> list[Tensor]:
    """Copies of the first numbers of this rank's part of each; none where they cannot be read."""
    with suppress(RuntimeError):
        return [local_part(each).detach().flatten()[:16].clone() for each in weights]
    return []


def states(weights: Sequence[Tensor]) -> list[object]:
    """What changes with each step of an optimizer, also where no number does."""
    return [(changes(each), is_whole(each) and each.data_ptr()) for each in weights]
