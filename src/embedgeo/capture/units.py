"""Units that are rows in place of tokens: a sequence, as the mean, first or last of its tokens,
or a word.
"""

from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from embedgeo.functional.precision import accumulator_dtype
from embedgeo.functional.rows import BatchIds, RowIds, on_cpu, require_arithmetic

RowUnit = Literal["tokens", "mean", "first", "last", "words"]
"""Units that are rows: a token; a sequence, as the mean of its tokens, its first or last; or a
word.
"""

# of the polynomial in `spellings`: a multiplier of random number generators
_BASE = 0x5851F42D4C957F2D
_ROWS_AT_ONCE = 1 << 14  # that are copied in float64


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


class Units(NamedTuple):
    """The texts or words of a batch that have a token that counts, by sequence and number."""

    # of the tokens that count and are of a unit, among all tokens of the batch, shape (m,)
    places: Tensor
    units: Tensor | None  # the unit of each of these tokens, shape (m,); None: one each
    num_tokens: Tensor  # number of these tokens in each unit, shape (n,)
    ids: RowIds  # the units' types, None where there are neither token ids nor types, and sequences

    def rows(self, hidden: Tensor) -> Tensor:
        """The token of each unit, or the mean of its tokens, shape (n, d). Means are summed in
        float64 and are float32 at least.
        """
        require_arithmetic(hidden)
        rows = hidden.reshape(-1, hidden.shape[-1])
        if self.units is None:
            return rows[self.places]
        total = rows.new_zeros(
            len(self.num_tokens), rows.shape[1], dtype=accumulator_dtype(rows.device)
        )
        parts = self.units.split(_ROWS_AT_ONCE), self.places.split(_ROWS_AT_ONCE)
        for units, places in zip(*parts, strict=True):
            total.index_add_(0, units, rows[places].to(total.dtype))
        return (total / self.num_tokens[:, None]).to(torch.promote_types(rows.dtype, torch.float32))


def find_texts(
    rows: Literal["mean", "first", "last"],
    hidden: Tensor,
    sequence_ids: Tensor,
    token_ids: Tensor | None,
    mask: Tensor | None,
) -> Units:
    """Find the tokens of each sequence that count, whose mean is a row, or the first or last of
    them. Sequence ids ascend; means have no token ids.
    """
    if hidden.ndim != 3:
        raise ValueError(
            f"rows={rows!r} needs hidden states of shape (batch, positions, d); got "
            f"{tuple(hidden.shape)}. "
            'Leave the layer out, or take rows="tokens".'
        )
    if rows == "mean":
        return find_words(hidden.device, torch.zeros_like(sequence_ids), sequence_ids, mask=mask)
    sequences, ids, marks = (
        None if each is None else each.reshape(-1) for each in on_cpu(sequence_ids, token_ids, mask)
    )
    assert sequences is not None
    places = (torch.ones_like(sequences) if marks is None else marks).nonzero().flatten()
    lengths = sequences[places].unique_consecutive(return_counts=True)[1]
    ends = lengths.cumsum(0)
    places = places[ends - lengths if rows == "first" else ends - 1]
    ids = None if ids is None else ids[places].to(torch.int64)
    ids_of_texts = RowIds.of(BatchIds(ids, sequences[places]))
    return Units(places.to(hidden.device), None, torch.ones_like(places), ids_of_texts)


def find_words(
    device: torch.device,
    word_ids: Tensor,
    sequence_ids: Tensor,
    *,
    token_ids: Tensor | None = None,
    types: Tensor | None = None,
    mask: Tensor | None = None,
) -> Units:
    """Find the tokens of each word, whose mean is a row, as in Yamagiwa & Shimodaira 2025, appendix
    J.

    A word's type is that of its first token in ``types`` or, without, its spelling in
    ``token_ids``, masked ones among them. Tokens with negative word ids are of none; sequence ids
    are not negative.
    """
    of_tokens = token_ids if types is None else types
    on_host = on_cpu(word_ids, sequence_ids, mask, of_tokens)
    words, sequences, marks, ids_of_tokens = (
        None if each is None else each.reshape(-1) for each in on_host
    )
    assert words is not None
    assert sequences is not None
    words = words.to(torch.int64)
    sequences = sequences.to(torch.int64)
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
        ids = ids_of_tokens[place[order]].to(torch.int64)
        lengths = word.bincount()
        type_of_word = (
            spellings(ids, lengths) if types is None else ids[lengths.cumsum(0) - lengths]
        )[kept]
    ids_of_words = RowIds.of(BatchIds(type_of_word, sequence_of_word[kept]))
    return Units(
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
