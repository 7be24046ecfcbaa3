"""The rows of a layer's hidden state, which tensors have an entry for each of them, and which to leave out."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from embedgeo.capture.layers import Layer

T = TypeVar("T")


class LayerRows(NamedTuple):
    """The rows of a layer's hidden state; the shape is the hidden state's without its last dimension."""

    layer: Layer
    shape: torch.Size

    def fit(self, tensor: Tensor, *, is_batch_first: bool = False) -> Tensor | None:
        """Token ids or a mask in the order of the rows; None if there is not one for each row.

        If the model has positions first, they may be (positions, batch), unless they are known to be batch first.
        """
        if self.layer.positions_first and not is_batch_first and tensor.ndim == 2 and tensor.T.shape == self.shape:
            return tensor.T
        is_flat = len(self.shape) == 1 and tensor.numel() == self.shape[0]
        return tensor if tensor.shape == self.shape or is_flat else None

    def require_fit(self, tensor: Tensor, what: str, *, is_batch_first: bool = False) -> Tensor:
        """As `fit`, but a ValueError, with ``what`` the tensor is, instead of None."""
        fitted = self.fit(tensor, is_batch_first=is_batch_first)
        if fitted is None:
            raise ValueError(
                f"layer {self.layer.name!r} must have a row for each token; its rows have shape {tuple(self.shape)}, "
                f"the {what} {tuple(tensor.shape)}. Leave the layer out, or give token_ids= and mask= in the order of "
                "its rows."
            )
        return fitted


class Aligned(NamedTuple):
    """What the rows of a hidden state are, each of the rows' shape (...), or None.

    Attributes:
        token_ids: None if there are none.
        mask: bool, True = count this row; None if all rows count.
        word_ids: None if none were given.
        prepared: what has been made of these, for the other layers of the forward pass: see `prepared_once`.
    """

    token_ids: Tensor | None
    mask: Tensor | None
    word_ids: Tensor | None
    prepared: dict[Any, Any]

    def prepared_once(self, device: torch.device, make: Callable[[], T]) -> T:
        """What ``make`` makes of these for hidden states on a device, or has made: again if they change in place."""
        given = (t for t in (self.token_ids, self.mask, self.word_ids) if t is not None and not t.is_inference())
        key = (device, *(t._version for t in given))
        if key not in self.prepared:
            self.prepared[key] = make()
        found: T = self.prepared[key]
        return found


def covers_cached_positions(mask: Tensor, token_ids: Tensor) -> bool:
    """Whether a mask has more positions than there are token ids: those before are in the cache of keys and values."""
    return token_ids.ndim == 2 and mask.shape[0] == token_ids.shape[0] and mask.shape[1] > token_ids.shape[1]


def require_integers(ids: Tensor, name: str) -> Tensor:
    """The same ids; TypeError if they are not integers."""
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise TypeError(f"{name} must be an integer tensor; got {ids.dtype}.")
    return ids


def require_exclusions(skip_first_positions: int, ignore_token_ids: Sequence[int]) -> None:
    """Check what to leave out: TypeError if something is not an integer, ValueError if the number is negative."""
    if isinstance(skip_first_positions, bool) or not hasattr(skip_first_positions, "__index__"):
        raise TypeError(f"skip_first_positions must be an integer; got {skip_first_positions!r}.")
    if isinstance(ignore_token_ids, int) or not all(isinstance(token, int) for token in ignore_token_ids):
        raise TypeError(f"ignore_token_ids must be a list of integers; got {ignore_token_ids!r}.")
    if skip_first_positions < 0:
        raise ValueError(f"skip_first_positions must not be negative; got {skip_first_positions}.")
