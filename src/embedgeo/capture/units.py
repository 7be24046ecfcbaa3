"""Units that are rows in place of tokens: a sequence, as the mean, first or last of its tokens,
or a word.
"""

from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from embedgeo.functional.precision import accumulator_dtype
from embedgeo.functional.rows import BatchIds, RowIds, on_cpu, require_arithmetic

RowUnit = Literal["tokens", "mean", "first", "last", "words"]
"""Units that are rows: a token; a sequence, as the mean of its tokens, its first or last; or a
word.
"""

# of the polynomial in `spellings`: a multiplier of random number generators
_BASE = 0x5851F42D4C957F2D


def require_row_unit(rows: str) -> None:
    """Raise ValueError unless ``rows`` is a `RowUnit`."""
    if rows not in get_args(RowUnit):
        raise ValueError(
            f"rows must be one of {', '.join(map(repr, get_args(RowUnit)))}; got {rows!r}."
        )


def require_word_ids(rows: str, word_ids: object) -> None:
    """Raise ValueError unless ``rows`` is a `RowUnit` and ``word_ids`` are given, that is not None,
    just for words.
    """
    require_row_unit(rows)
    if rows == "words" and word_ids is None:
        raise ValueError(
            'rows="words" needs word_ids; got none. Give word_ids=, the number of each token\'s '
            "word (a tokenizer's word_ids()), with -1 for tokens of no word."
        )
    if rows != "words" and word_ids is not None:
        raise ValueError(f'word_ids go with rows="words"; got rows={rows!r}. Leave them out.')


def one_text_a_row(
    hidden: Tensor, token_ids: Tensor | None, mask: Tensor | None, sequence_ids: Tensor
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Put texts that are packed into one row of the batch, by ascending ``sequence_ids``, into rows
    of their own, with padding behind that does not count; what is not packed stays as it is.
    """
    counts = sequence_ids.flatten().bincount()
    if hidden.ndim != 3 or len(counts) <= len(hidden):
        return hidden, token_ids, mask
    lengths = counts.tolist()
    mask = torch.ones(hidden.shape[:2], dtype=torch.bool, device="cpu") if mask is None else mask

    def padded(values: Tensor) -> Tensor:
        return pad_sequence([*values.flatten(0, 1).split(lengths)], batch_first=True)

    return padded(hidden), None if token_ids is None else padded(token_ids), padded(mask)


def pool_tokens(
    hidden: Tensor,
    token_ids: Tensor | None,
    mask: Tensor | None,
    rows: Literal["tokens", "mean", "first", "last"],
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Reduce each sequence to one row of the tokens that count: their mean, or the first or last
    of them.

    Means are summed in float64 and are float32 at least. States (batch, positions, d), ids and mask
    become those of the sequences: no ids for means; a mask, False where no token counts,
    or None. All is kept for ``"tokens"``. Ids and masks are best on the CPU: no device is then
    waited for.
    """
    if rows == "tokens":
        return hidden, token_ids, mask
    if hidden.ndim != 3:
        raise ValueError(
            f"rows={rows!r} needs hidden states of shape (batch, positions, d); got "
            f"{tuple(hidden.shape)}. "
            'Leave the layer out, or take rows="tokens".'
        )
    token_ids, mask = on_cpu(token_ids, mask)
    counts = torch.ones(hidden.shape[:2], dtype=torch.bool, device="cpu") if mask is None else mask
    some = counts.any(1)
    kept = None if bool(some.all()) else some
    if hidden.shape[1] == 0 and rows != "mean":
        return hidden.new_zeros(len(hidden), hidden.shape[2]), None, kept
    if rows == "mean":
        left_out = ~counts[..., None].to(hidden.device)
        total = hidden.masked_fill(left_out, 0).sum(1, dtype=accumulator_dtype(hidden.device))
        mean = total / counts.sum(1, keepdim=True).clamp(min=1).to(hidden.device)
        return mean.to(torch.promote_types(hidden.dtype, torch.float32)), None, kept
    place = (
        counts.int().argmax(1)
        if rows == "first"
        else hidden.shape[1] - 1 - counts.int().flip(1).argmax(1)
    )
    sequence = torch.arange(len(hidden), device="cpu")
    ids = None if token_ids is None else token_ids[sequence, place]
    return hidden[sequence.to(hidden.device), place.to(hidden.device)], ids, kept


class Words(NamedTuple):
    """The words of a batch that have a token that counts, by sequence and number."""

    # of the tokens that count and are of a word, among all tokens of the batch, shape (m,)
    places: Tensor
    words: Tensor  # the word of each of these tokens, shape (m,)
    num_tokens: Tensor  # number of these tokens in each word, shape (n,)
    ids: RowIds  # the words' types, None where there are neither token ids nor types, and sequences

    def means(self, hidden: Tensor) -> Tensor:
        """The mean of each word's tokens, shape (n, d), summed in float64 and float32 at least."""
        require_arithmetic(hidden)
        rows = hidden.reshape(-1, hidden.shape[-1])
        total = rows.new_zeros(
            len(self.num_tokens), rows.shape[1], dtype=accumulator_dtype(rows.device)
        )
        total.index_add_(0, self.words, rows[self.places].to(total.dtype))
        return (total / self.num_tokens[:, None]).to(torch.promote_types(rows.dtype, torch.float32))


def find_words(
    device: torch.device,
    word_ids: Tensor,
    sequence_ids: Tensor,
    *,
    token_ids: Tensor | None = None,
    types: Tensor | None = None,
    mask: Tensor | None = None,
) -> Words:
    """Find the tokens of each word, whose mean is a row, as in Yamagiwa & Shimodaira 2025, appendix
    J.

    A word's type is that of its first token in ``types`` or, without, its spelling in
    ``token_ids``, masked ones among them. Tokens with negative word ids are of none; sequence ids
    are not negative.
    """
    of_tokens = token_ids if types is None else types
    found = on_cpu(word_ids, sequence_ids, mask, of_tokens)
    words, sequences, marks, ids_of_tokens = (
        None if each is None else each.reshape(-1) for each in found
    )
    assert words is not None
    assert sequences is not None
    words, sequences = words.to(torch.int64), sequences.to(torch.int64)
    place = (words >= 0).nonzero().flatten()
    numbers, number = words[place].unique(return_inverse=True)
    keys, word = (sequences[place] * len(numbers) + number).unique(return_inverse=True)
    counts = slice(None) if marks is None else marks[place]
    num_tokens = word[counts].bincount(minlength=len(keys))
    kept = num_tokens > 0
    row = (kept.cumsum(0) - 1)[word[counts]]
    sequence_of_word = keys.div(max(1, len(numbers)), rounding_mode="floor")
    type_of_word = None
    if ids_of_tokens is not None:
        order = word.argsort(stable=True)
        ids, lengths = ids_of_tokens[place[order]].to(torch.int64), word.bincount()
        type_of_word = (
            spellings(ids, lengths) if types is None else ids[lengths.cumsum(0) - lengths]
        )[kept]
    ids_of_words = RowIds.of(BatchIds(type_of_word, sequence_of_word[kept]))
    return Words(
        place[counts].to(device), row.to(device), num_tokens[kept].to(device), ids_of_words
    )


def spellings(token_ids: Tensor, lengths: Tensor) -> Tensor:
    """A number for each word, equal for equal ids in equal order: a polynomial in its token ids,
    word after word.

    The number of a single id is the id. Different words of up to two ids below 2 ** 18 never have
    equal numbers; that any two of T longer ones do has a probability of about T² / 2 ** 64. Lengths
    are at least 1.
    """
    if not len(lengths):
        return lengths
    word = torch.arange(len(lengths), device=token_ids.device).repeat_interleave(lengths)
    position = (
        torch.arange(len(token_ids), device=token_ids.device) - (lengths.cumsum(0) - lengths)[word]
    )
    powers = torch.full((int(lengths.max()),), _BASE, device=token_ids.device)
    powers[0] = 1
    # a word that goes on, with id 0, is another one
    terms = (token_ids + (position > 0)) * powers.cumprod(0)[position]
    return torch.zeros_like(lengths).index_add_(0, word, terms) & torch.iinfo(torch.int64).max
