"""From the tokens of words to one row a word."""

import torch
from torch import Tensor

from embedgeo.functional.precision import accumulator_dtype

_BASE = 0x5851F42D4C957F2D
"""Of the polynomial in `spellings`: a multiplier of random number generators."""


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
    device = hidden.device
    rows = hidden.reshape(-1, hidden.shape[-1])
    if rows.dtype.itemsize == 1:  # float8 has no arithmetic
        rows = rows.float()
    words, sequences = (ids.reshape(-1).to(device, torch.int64) for ids in (word_ids, sequence_ids))
    place = (words >= 0).nonzero().flatten()
    numbers, number = words[place].unique(return_inverse=True)
    keys, word = (sequences[place] * len(numbers) + number).unique(return_inverse=True)
    counts = slice(None) if mask is None else mask.reshape(-1).to(device)[place]
    num_tokens = word[counts].bincount(minlength=len(keys))
    total = rows.new_zeros(len(keys), rows.shape[1], dtype=accumulator_dtype(device))
    total.index_add_(0, word[counts], rows[place[counts]].to(total.dtype))
    kept = num_tokens > 0
    mean = (total[kept] / num_tokens[kept, None]).to(torch.promote_types(rows.dtype, torch.float32))
    sequence_of_word = keys.div(max(1, len(numbers)), rounding_mode="floor")
    given = token_ids if types is None else types
    if given is None:
        return mean, None, sequence_of_word[kept]
    order = word.argsort(stable=True)
    ids, lengths = given.reshape(-1).to(device, torch.int64)[place[order]], word.bincount()
    of_words = spellings(ids, lengths) if types is None else ids[lengths.cumsum(0) - lengths]
    return mean, of_words[kept], sequence_of_word[kept]


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
