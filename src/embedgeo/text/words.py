"""The words that the tokens of a text belong to."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Words(NamedTuple):
    """The word of each token.

    Attributes:
        word_ids: shape (n,), int64: the number of the word, counted over all texts; -1 for tokens of no word, such as
            special tokens and white space.
        word_types: shape (n,), int64: the number of the word's type in ``spelled``, or -1.
        spelled: each type: the tokens of the word, decoded, without white space around them.
    """

    word_ids: Tensor
    word_types: Tensor
    spelled: list[str]


def find_words(token_ids: Tensor, places: Tensor, lengths: Tensor, decode: Callable[..., Any]) -> Words:
    """Number the words, and spell them. A word that was cut, at the end of a text, is a word of the tokens left.

    Args:
        token_ids: of all texts, shape (n,).
        places: shape (n,), int64: the same for consecutive tokens of one word, another for those of the next; -1 for
            tokens of no word.
        lengths: number of tokens of each text, shape (texts,).
        decode: the tokenizer's.

    Raises:
        ValueError: the tokenizer takes several words as one.
    """
    row = torch.arange(len(lengths)).repeat_interleave(lengths)
    runs = torch.where(places < 0, -1, places + row * (int(places.max()) + 1) if len(places) else places)
    of_run, run, counts = torch.unique_consecutive(runs, return_inverse=True, return_counts=True)
    types: dict[str, int] = {}
    seen: dict[tuple[int, ...], int] = {}
    found, start, ids = [], 0, token_ids.tolist()
    for is_word, count in zip((of_run >= 0).tolist(), counts.tolist(), strict=True):
        tokens = tuple(ids[start : start + count]) if is_word else ()
        start += count
        if tokens not in seen:
            word = str(decode(list(tokens), clean_up_tokenization_spaces=False)).strip() if tokens else ""
            if len(word.split()) > 1:
                raise ValueError(
                    f"rows='words' needs a tokenizer that tells words apart; this one takes {word[:40]!r} as one. Take "
                    "other rows."
                )
            seen[tokens] = types.setdefault(word, len(types)) if word else -1
        found.append(seen[tokens])
    word_types = torch.tensor(found, dtype=torch.int64)[run]
    return Words(torch.where(word_types < 0, -1, run), word_types, list(types))
