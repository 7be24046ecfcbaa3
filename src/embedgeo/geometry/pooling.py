"""From the tokens of a layer to its rows."""

from torch import Tensor

from embedgeo.capture.rows import Aligned
from embedgeo.functional.rows import RowUnit, pool_tokens, require_word_ids
from embedgeo.functional.words import pool_words

PooledRows = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]
"""Hidden states, token ids, mask and sequence ids of the rows: the arguments of a metric."""


def pooled(
    hidden: Tensor, tokens: Aligned, sequence_ids: Tensor | None, unit: RowUnit, *, has_word_types: bool
) -> PooledRows:
    """The rows of a layer, each a token, a sequence or a word.

    Args:
        hidden: shape (..., d).
        tokens: what is known of each position.
        sequence_ids: shape (...); None where each row is a sequence.
        unit: what a row is.
        has_word_types: whether the token ids are the types of the words.

    Raises:
        ValueError: hidden states that cannot be pooled, or no word ids.
    """
    if unit != "words":
        return (*pool_tokens(hidden, tokens.token_ids, tokens.mask, unit), sequence_ids)
    require_word_ids("words", tokens.word_ids)
    assert tokens.word_ids is not None
    assert sequence_ids is not None
    ids = {"types" if has_word_types else "token_ids": tokens.token_ids, "mask": tokens.mask}
    rows, types, sequences = pool_words(hidden, tokens.word_ids, sequence_ids, **ids)
    return rows, types, None, sequences
