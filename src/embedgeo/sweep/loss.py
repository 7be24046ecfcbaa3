"""The loss of a model on the probe text, without holding the logits of a batch, which take the most memory."""

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from embedgeo.capture.structure import measured_model
from embedgeo.checkpoints.loading import LoadedModel, num_token_types

_POSITIONS, _TOKEN_TYPES = 1024, 2048
"""Logits are computed of so many token types at so many positions at a time, which the processor's cache holds."""
_POSITIONS_OF_ALL_TYPES = 128
"""Likewise, where the head gives the logits of all token types at once."""


class TokenLoss:
    """Runs a model over batches, and sums its loss at next tokens or, for an encoder, at masked tokens.

    Args:
        loaded: the model.
        measured: modules that are measured, and so must run on all positions.
        mask_token_id: the token that replaces masked tokens; None leaves out the loss of an encoder.
    """

    def __init__(self, loaded: LoadedModel, measured: Collection[nn.Module], mask_token_id: int | None) -> None:
        self.total = torch.zeros(2, dtype=torch.float64)
        """Sum of the losses, and their number."""
        self.is_wanted = loaded.has_head and (not loaded.is_encoder or mask_token_id is not None)
        self._model = measured_model(loaded.model)
        self._is_encoder = loaded.is_encoder
        self._mask_token_id = mask_token_id
        self._measured = measured
        self._head: nn.Module | None = None
        self._is_product = False  # the head, with weights that are at hand
        self._width = None if isinstance(self._model, PreTrainedModel) else num_token_types(self._model)

    def find_head(self, token_ids: Tensor) -> None:
        """Find the module whose output is the logits, with nothing that scales or caps them, by running some tokens."""
        head = getattr(self._model, "get_output_embeddings", lambda: None)()
        if not isinstance(head, nn.Module) or any(part in self._measured for part in head.modules()):
            return
        with suppress(Exception), _shortened(head) as given:  # an error of the model shows when it is measured
            logits = _logits(self._forward(token_ids))
            if given and logits is not None and torch.equal(logits, head(given[0]).to(logits.device)):
                self._head = head
                product = F.linear(given[0][:, -1:], head.weight, head.bias)  # type: ignore[arg-type]
                self._is_product = torch.equal(product, logits)

    def run(self, token_ids: Tensor, mask: Tensor | None = None) -> Tensor | None:
        """Run a batch; returns the input of the head, or the logits if no head was found, or None without logits."""
        if self._head is None:
            return _logits(self._forward(token_ids, mask))
        with _shortened(self._head) as given:
            self._forward(token_ids, mask)
        return given[0]

    def add(self, states: Tensor | None, token_ids: Tensor, masked: Tensor | None, mask: Tensor | None = None) -> None:
        """Add the loss of a batch; there is none where a model of the user's own gives something else than logits.

        Args:
            states: returned by `run`.
            token_ids: shape (sequences, positions).
            masked: for an encoder, the tokens to compute its loss at; bool, same shape.
            mask: bool, same shape, False = padding, on the right; None where there is none.
        """
        if self._is_encoder and self.is_wanted:
            assert masked is not None
            assert self._mask_token_id is not None
            states = self.run(token_ids.masked_fill(masked, self._mask_token_id), mask)
        self.is_wanted = self.is_wanted and states is not None and states.shape[:-1] == token_ids.shape
        if self._head is None and states is not None and self._width is not None:
            self.is_wanted = self.is_wanted and states.shape[-1] == self._width
        if not self.is_wanted:
            return
        assert states is not None
        if masked is None:  # at each position the next token
            predicts = torch.ones_like(token_ids, dtype=torch.bool) if mask is None else mask
            predicts, wanted = predicts.roll(-1, 1), token_ids.roll(-1, 1)
            predicts[:, -1] = False
        else:
            predicts, wanted = masked, token_ids
        states, wanted = states.flatten(0, 1), wanted.flatten().to(states.device)
        num_positions = _POSITIONS if self._is_product else _POSITIONS_OF_ALL_TYPES
        for part in predicts.flatten().nonzero().flatten().to(states.device).split(num_positions):
            loss = cross_entropy(self._logits_of(states[part]), wanted[part])
            self.total += torch.tensor([float(loss), len(part)], dtype=torch.float64)

    def _logits_of(self, states: Tensor) -> Iterator[Tensor]:
        """The logits of consecutive token types at some positions."""
        if self._head is None:
            yield states
        elif not self._is_product:
            yield self._head(states)
        else:
            weight: Any = self._head.weight
            bias: Any = self._head.bias
            for start in range(0, len(weight), _TOKEN_TYPES):
                types = slice(start, start + _TOKEN_TYPES)
                yield F.linear(states, weight[types], None if bias is None else bias[types])

    def _forward(self, token_ids: Tensor, mask: Tensor | None = None) -> Any:
        if not isinstance(self._model, PreTrainedModel):
            return self._model(token_ids)
        given = {} if mask is None else {"attention_mask": mask.long()}
        return self._model(input_ids=token_ids, **given)


def cross_entropy(logits: Iterable[Tensor], target: Tensor) -> Tensor:
    """The cross-entropy, summed over n positions, from the logits of consecutive classes: all are never held at once.

    Infinite where a target is none of the classes.

    Args:
        logits: shape (n, C_i), any floating dtype; of the first C_1 classes, the next C_2, and so on.
        target: the class at each position, shape (n,), int64.

    >>> round(float(cross_entropy([torch.zeros(5, 3), torch.zeros(5, 1)], torch.arange(5) % 4)) / 5, 6)  # log 4
    1.386294
    """
    sums, chosen, start = [], torch.full(target.shape, -torch.inf, device=target.device), 0
    for part in logits:
        inside = (target >= start) & (target < start + part.shape[1])
        place = (target - start).clamp(0, part.shape[1] - 1)
        wide = part.float().to(target.device)
        chosen = torch.where(inside, wide.gather(1, place[:, None])[:, 0], chosen)
        sums.append(wide.logsumexp(1))
        start += part.shape[1]
    return (torch.stack(sums).cpu().double().logsumexp(0) - chosen.cpu()).sum()


def _logits(output: Any) -> Tensor | None:
    logits = getattr(output, "logits", output)
    return logits if isinstance(logits, Tensor) else None


@contextmanager
def _shortened(head: nn.Module) -> Iterator[list[Tensor]]:
    """Run the head on the last position only; yields a list that its inputs are appended to."""
    given: list[Tensor] = []

    def shorten(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        given.append(args[0])
        return (args[0][:, -1:], *args[1:])

    handle = head.register_forward_pre_hook(shorten)
    try:
        yield given
    finally:
        handle.remove()
