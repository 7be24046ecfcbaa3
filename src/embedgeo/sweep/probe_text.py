"""The text that a model of a sweep is measured on, in batches, and whether the model fits it."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from inspect import signature
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from embedgeo.capture.layers import resolve_layers
from embedgeo.capture.structure import measured_model
from embedgeo.checkpoints import loading
from embedgeo.checkpoints.devices import placement
from embedgeo.sweep.settings import SweepSettings
from embedgeo.text import Words, hash_ids

_MASKED_SHARE = 0.15


class Batch(NamedTuple):
    """Some of the texts, each a row, padded on the right; all of shape (texts, positions).

    Attributes:
        token_ids: int64.
        mask: bool, False = padding; None where there is none.
        masked: for an encoder, the tokens that its loss is computed at; bool.
        word_ids: if asked for, the number of each token's word in its text, int64; -1 for tokens of no word.
        word_types: likewise, the type of each token's word, or -1.
    """

    token_ids: Tensor
    mask: Tensor | None = None
    masked: Tensor | None = None
    word_ids: Tensor | None = None
    word_types: Tensor | None = None


@dataclass(frozen=True)
class ProbeText:
    """The tokens that every checkpoint of a model is measured on: sequences of one length, or texts of several.

    Attributes:
        token_ids: of all texts in a row, shape (n,), int64.
        lengths: number of tokens of each text, int64.
        masked: for an encoder, the tokens that its loss is computed at; bool, shape of ``token_ids``.
        mask_token_id: for an encoder, the token that replaces these.
        pad_token_id: the token that shorter texts of a batch are filled up with.
        words: the word of each token, if asked for.
        token_texts: each token type as text, if tables of token types are asked for; or each type of words.
        type_sizes: mean number of tokens of the words of each type.
        shown_types: those of which occurrences are kept, if tables of token types are asked for.
        num_cut: how many texts were longer and have been cut.
        text_sha256: hash of the documents that it was made from; of a dataset, of the texts taken from it.
    """

    token_ids: Tensor
    lengths: Tensor
    masked: Tensor | None = None
    mask_token_id: int | None = None
    pad_token_id: int = 0
    words: Words | None = None
    token_texts: Mapping[int, str] = field(default_factory=dict)
    type_sizes: Mapping[int, float] = field(default_factory=dict)
    shown_types: tuple[int, ...] = ()
    num_cut: int = 0
    text_sha256: str = ""

    @property
    def is_even(self) -> bool:
        """Whether all texts have the same length, as sequences have."""
        return len(self.lengths.unique()) <= 1

    @property
    def sha256(self) -> str:
        """The sha256 of the tokens and their texts."""
        if self.is_even:
            return hash_ids(self.token_ids.view(len(self.lengths), -1))
        return hash_ids(torch.cat((self.lengths, self.token_ids)))

    def batches(self, batch_size: int, rank: int = 0, world_size: int = 1) -> list[Batch]:
        """The batches of one rank: every ``world_size``-th of all batches.

        Texts of several lengths are sorted by length into batches, which then are put into a random order, always the
        same one: a metric that samples rows, or takes them in turn, does not get those of the shortest texts first.

        Raises:
            ValueError: there are fewer batches than ranks.
        """
        groups = self.lengths.argsort(stable=True).split(batch_size)
        if len(groups) < world_size:
            raise ValueError(
                f"batch_size must leave a batch to each of {world_size} processes; {len(self.lengths)} sequences "
                f"make {len(groups)}. Take a smaller one, or more tokens."
            )
        order = torch.arange(len(groups))
        if not self.is_even:
            order = torch.randperm(len(groups), generator=torch.Generator().manual_seed(0))
        starts = self.lengths.cumsum(0) - self.lengths
        return [
            self._batch(self.lengths[texts], starts[texts]) for texts in (groups[i] for i in order[rank::world_size])
        ]

    def _batch(self, lengths: Tensor, starts: Tensor) -> Batch:
        """A batch of the texts of these lengths, which start at these places."""
        positions = torch.arange(int(lengths.max()))
        real = positions < lengths[:, None]
        places = torch.where(real, starts[:, None] + positions, 0)

        def padded(values: Tensor | None, fill: int) -> Tensor | None:
            return None if values is None else values[places].masked_fill(~real, fill)

        token_ids = self.token_ids[places].masked_fill(~real, self.pad_token_id)
        word_ids, types = (None, None) if self.words is None else (self.words.word_ids, self.words.word_types)
        word_ids = padded(word_ids, -1)
        if word_ids is not None:  # numbered over all texts
            first = torch.where(word_ids < 0, len(self.token_ids), word_ids).amin(1, keepdim=True)
            word_ids = torch.where(word_ids < 0, -1, word_ids - first)
        mask = None if bool(real.all()) else real
        return Batch(token_ids, mask, padded(self.masked, 0), word_ids, padded(types, -1))


def choose_masked(token_ids: Tensor, special: Sequence[int], seed: int = 0) -> Tensor:
    """Choose 15 % of the tokens that are not special, always the same ones; bool, shape of ``token_ids``."""
    drawn = torch.rand(token_ids.shape, generator=torch.Generator().manual_seed(seed)) < _MASKED_SHARE
    return drawn & ~torch.isin(token_ids, torch.tensor(list(special), dtype=token_ids.dtype))


def require_fit(model: nn.Module, text: ProbeText, settings: SweepSettings) -> None:
    """Check that a model has the layers, positions and embeddings that are to be measured.

    Raises:
        ValueError: it lacks some.
    """
    resolve_layers(model, settings.layer_patterns)
    require_vocabulary(model, text.token_ids)
    if settings.device_map is not None:
        placement(model, settings.device_map)
    measured = measured_model(model)
    if not loading.has_own(measured, "forward"):
        raise ValueError(
            f"model_class must be a model that can be run; {type(measured).__name__} has neither forward nor "
            "predict_step. Give it a forward that takes token ids of shape (sequences, positions)."
        )
    if settings.unit != "sequence" and not _takes_mask(measured):
        raise ValueError(
            f"unit must be 'sequence' for a model that takes no attention_mask, as texts of several lengths need one; "
            f"{type(measured).__name__} takes none, and unit is {settings.unit!r}."
        )
    longest_text = int(text.lengths.max())
    longest = getattr(getattr(measured, "config", None), "max_position_embeddings", None)
    if isinstance(longest, int):
        longest -= _num_unused_positions(measured)
    else:
        longest = _longest(measured, text.token_ids[:longest_text].view(1, -1))
    if longest_text > longest > 0:
        raise ValueError(f"seq_len must be at most the model's {longest} positions; got {settings.seq_len}.")


def _takes_mask(model: nn.Module) -> bool:
    return isinstance(model, PreTrainedModel) and "attention_mask" in signature(model.forward).parameters


def _num_unused_positions(model: nn.Module) -> int:
    """Positions up to that of padding, which RoBERTa and its kind have in the same table: tokens get later ones."""
    tables = (module for name, module in model.named_modules() if name.endswith("position_embeddings"))
    return max(
        (1 + table.padding_idx for table in tables if getattr(table, "padding_idx", None) is not None), default=0
    )


def _longest(model: nn.Module, token_ids: Tensor) -> int:
    """Positions of the first sequence that a model can be run on: all that are asked for, or fewer."""

    def fails(num_positions: int) -> bool:
        try:
            model(token_ids[:1, :num_positions])
        except Exception:
            return True
        return False

    num_positions = token_ids.shape[1]
    if any(parameter.is_meta for parameter in model.parameters()):
        return num_positions
    with torch.inference_mode():
        return bisect_left(range(1, num_positions + 1), True, key=fails) if fails(num_positions) else num_positions


def require_vocabulary(model: nn.Module, token_ids: Tensor) -> None:
    """Check that a model has an embedding of every token.

    Raises:
        ValueError: it lacks some.
    """
    known = loading.num_token_types(model)
    if known is not None and int(token_ids.max()) >= known:
        raise ValueError(
            f"tokenizer must give ids below the {known} that the model embeds; it gives {int(token_ids.max())}. "
            "Name the model's own by tokenizer=."
        )
