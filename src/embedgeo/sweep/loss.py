"""The loss of a model on the probe text, without the logits of a batch: they are many times the size of all else."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from embedgeo.capture.structure import measured_model
from embedgeo.checkpoints.loading import LoadedModel

_POSITIONS = 128
"""At a time."""


class TokenLoss:
    """Runs a model over batches, and adds up its loss of the next token or, of an encoder, of masked tokens.

    Args:
        loaded: the model.
        measured: modules that are being measured: they are left to work on everything.
        mask_token_id: what stands for a masked token, for an encoder's loss; None to leave that out.
    """

    def __init__(self, loaded: LoadedModel, measured: Collection[nn.Module], mask_token_id: int | None) -> None:
        self.total = torch.zeros(2, dtype=torch.float64)
        """Sum and count."""
        self.is_wanted = loaded.has_head and (not loaded.is_encoder or mask_token_id is not None)
        self._model = measured_model(loaded.model)
        self._is_encoder = loaded.is_encoder
        self._mask_token_id = mask_token_id
        self._measured = measured
        self._head: nn.Module | None = None

    def find_head(self, token_ids: Tensor) -> None:
        """Find the module that makes the logits, if nothing scales or caps them after it, by running some tokens."""
        head = getattr(self._model, "get_output_embeddings", lambda: None)()
        if not isinstance(head, nn.Module) or any(part in self._measured for part in head.modules()):
            return
        with suppress(Exception), _shortened(head) as given:  # what is wrong with the model shows when it is measured
            logits = _logits(self._forward(token_ids))
            if given and logits is not None and torch.equal(logits, head(given[0])):
                self._head = head

    def run(self, token_ids: Tensor) -> Tensor | None:
        """Run a batch; returns what the head makes the logits from, else these, and None where there are none."""
        if self._head is None:
            return _logits(self._forward(token_ids))
        with _shortened(self._head) as given:
            self._forward(token_ids)
        return given[0]

    def add(self, states: Tensor | None, token_ids: Tensor, masked: Tensor | None) -> None:
        """Add the loss of a batch.

        Args:
            states: what `run` has returned.
            token_ids: shape (sequences, positions).
            masked: of an encoder, the tokens that its loss is about, of the same shape.
        """
        if self._is_encoder and self.is_wanted:
            assert masked is not None
            assert self._mask_token_id is not None
            states = self.run(token_ids.masked_fill(masked, self._mask_token_id))
        self.is_wanted = self.is_wanted and states is not None and states.shape[:-1] == token_ids.shape
        if not self.is_wanted:
            return
        assert states is not None
        for row, ids, chosen in zip(states, token_ids, token_ids if masked is None else masked, strict=True):
            predicted, wanted = (row[:-1], ids[1:]) if masked is None else (row[chosen], ids[chosen])
            for part, target in zip(predicted.split(_POSITIONS), wanted.split(_POSITIONS), strict=True):
                logits = part if self._head is None else self._head(part)
                loss = F.cross_entropy(logits.float(), target, reduction="sum")
                self.total += torch.tensor([float(loss), len(target)], dtype=torch.float64)

    def _forward(self, token_ids: Tensor) -> Any:
        is_hugging_face = isinstance(self._model, PreTrainedModel)
        return self._model(input_ids=token_ids) if is_hugging_face else self._model(token_ids)


def _logits(output: Any) -> Tensor | None:
    logits = getattr(output, "logits", output)
    return logits if isinstance(logits, Tensor) else None


@contextmanager
def _shortened(head: nn.Module) -> Iterator[list[Tensor]]:
    """Have the head work on the last position only; gives what it was to work on."""
    given: list[Tensor] = []

    def shorten(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        given.append(args[0])
        return (args[0][:, -1:], *args[1:])

    handle = head.register_forward_pre_hook(shorten)
    try:
        yield given
    finally:
        handle.remove()
