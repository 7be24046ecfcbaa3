"""From the tokens of words to one row a word."""

from typing import NamedTuple

import torch
from torch import Tensor

from embedgeo.functional.precision import accumulator_dtype
from embedgeo.functional.row_ids import RowIds

_BASE = 0x5851F42D4C957F2D
"""Of the polynomial in `spellings`: a multiplier of random number generators."""


class Words(NamedTuple):
    """The words of a batch that have a token that counts, by sequence and number: the same at every layer.

    Attributes:
        places: of the tokens that count and are of a word, among all tokens of the batch, shape (m,).
        words: the word of each of these tokens, shape (m,).
        num_tokens: number of these tokens in each word, shape (n,).
        ids: the words' types, None where there are neither token ids nor types, and sequences.
    """

    places: Tensor
    words: Tensor
    num_tokens: Tensor
    ids: RowIds

    def means(self, hidden: Tensor) -> Tensor:
        """The mean of each word's tokens, shape (n, d), summed in float64 and float32 at least.

        Args:
            hidden: shape (..., d), any floating dtype.
        """
        rows = hidden.reshape(-1, hidden.shape[-1])
        rows = rows.float() if rows.dtype.itemsize == 1 else rows  # float8 has no arithmetic
        total = rows.new_zeros(len(self.num_tokens), rows.shape[1], dtype=accumulator_dtype(rows.device))
        total.index_add_(0, self.words, rows[self.places].to(total.dtype))
        return (total / self.num_tokens[:, None]).to(torch.promote_types(rows.dtype, torch.float32))


def pool_words(
    hidden: Tensor,
    word_ids: Tensor,
    sequence_ids: Tensor,
    *,
    token_ids: Tensor | None = None,
    types: Tensor | None = None,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Reduce the tokens of each word to one row: their mean, as in Yamagiwa & Shimodaira 2025, appendix J.

    A mean over several tokens is shorter than they are: norms of words depend on how many tokens a word has.

    Args:
        hidden: shape (..., d), any floating dtype.
        word_ids: shape (...), integer: tokens of a sequence with the same number are one word; those with a negative
            one are of no word.
        sequence_ids: shape (...), integer, not negative.
        token_ids: shape (...), integer, or None; a word's type is its spelling in these, masked ones among them: see
            `spellings`.
        types: shape (...), integer, or None; used instead: a word's type is that of its first token.
        mask: shape (...), bool, True = this token counts; None if all do.

    Returns:
        For each word with a token that counts, by sequence and number: the mean of these tokens, shape (n, d), summed
        in float64 and float32 at least; its type, shape (n,), int64, or None where there are neither ids nor types; and
        its sequence, shape (n,), int64.

    >>> hidden, sequence_ids = torch.tensor([[1.0], [3.0], [9.0]]), torch.zeros(3, dtype=torch.int64)
    >>> word_ids, types = torch.tensor([0, 0, 1]), torch.tensor([7, 7, 5])
    >>> pool_words(hidden, word_ids, sequence_ids, types=types)
    (tensor([[2.],
            [9.]]), tensor([7, 5]), tensor([0, 0]))
    """
    words = find_words(hidden.device, word_ids, sequence_ids, token_ids=token_ids, types=types, mask=mask)
    assert words.ids.sequence_ids is not None
    return words.means(hidden), words.ids.token_ids, words.ids.sequence_ids


def find_words(
    device: torch.device,
    word_ids: Tensor,
    sequence_ids: Tensor,
    *,
    token_ids: Tensor | None = None,
    types: Tensor | None = None,
    mask: Tensor | None = None,
) -> Words:
    """Find the tokens of each word, for hidden states on ``device``; the other arguments are those of `pool_words`."""
    words, sequences = (ids.reshape(-1).to(device, torch.int64) for ids in (word_ids, sequence_ids))
    place = (words >= 0).nonzero().flatten()
    numbers, number = words[place].unique(return_inverse=True)
    keys, word = (sequences[place] * len(numbers) + number).unique(return_inverse=True)
    counts = slice(None) if mask is None else mask.reshape(-1).to(device)[place]
    num_tokens = word[counts].bincount(minlength=len(keys))
    kept = num_tokens > 0
    row = (kept.cumsum(0) - 1)[word[counts]]
    sequence_of_word = keys.div(max(1, len(numbers)), rounding_mode="floor")
    of_words = None
    if (given := token_ids if types is None else types) is not None:
        order = word.argsort(stable=True)
        ids, lengths = given.reshape(-1).to(device, torch.int64)[place[order]], word.bincount()
        of_words = (spellings(ids, lengths) if types is None else ids[lengths.cumsum(0) - lengths])[kept]
    return Words(place[counts], row, num_tokens[kept], RowIds(of_words, sequence_of_word[kept]))


def spellings(token_ids: Tensor, lengths: Tensor) -> Tensor:
    """A number for each sequence of token ids, the same for the same ids in the same order: a polynomial in these.

    That of a single id is the id. Different ones of up to two ids, below 2 ** 18, never have the same number; that any
    two of T longer ones do has a probability of about T² / 2 ** 64: 5e-8 for a million.

    Args:
        token_ids: shape (n,), int64, those of one word after those of the other.
        lengths: shape (T,), int64, at least 1 each, n in total.

    Returns:
        Shape (T,), int64, not negative.

    >>> spellings(torch.tensor([5, 8, 5, 5]), torch.tensor([1, 2, 1]))[[0, 2]]
    tensor([5, 5])
    """
    if not len(lengths):
        return lengths
    word = torch.arange(len(lengths), device=token_ids.device).repeat_interleave(lengths)
    position = torch.arange(len(token_ids), device=token_ids.device) - (lengths.cumsum(0) - lengths)[word]
    powers = torch.full((int(lengths.max()),), _BASE, device=token_ids.device)
    powers[0] = 1
    terms = (token_ids + (position > 0)) * powers.cumprod(0)[position]  # a word that goes on, with id 0, is another one
    return torch.zeros_like(lengths).index_add_(0, word, terms) & torch.iinfo(torch.int64).max
