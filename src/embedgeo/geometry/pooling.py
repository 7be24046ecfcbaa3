"""From the tokens of a layer to its rows."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from embedgeo.capture.rows import Aligned
from embedgeo.functional.row_ids import row_ids
from embedgeo.functional.rows import RowUnit, pool_tokens, require_word_ids
from embedgeo.functional.words import find_words


def pooled(
    hidden: Tensor,
    tokens: Aligned,
    sequence_ids: Callable[[torch.Size], Tensor],
    unit: RowUnit,
    *,
    has_word_types: bool,
) -> tuple[Tensor, dict[str, Any]]:
    """The rows of a layer, each a token, a sequence or a word.

    What depends on the ids of tokens or words alone is made once for all layers of a forward pass.

    Args:
        hidden: shape (..., d).
        tokens: what is known of each position.
        sequence_ids: the sequence of each row, given their shape.
        unit: what a row is.
        has_word_types: whether the token ids are the types of the words.

    Returns:
        Hidden states, and the other arguments of `LayerMetrics.update`.

    Raises:
        ValueError: hidden states that cannot be pooled, or no word ids.
    """
    shape, device = hidden.shape[:-1], hidden.device
    if unit == "tokens":
        given = tokens.token_ids, tokens.mask
        return hidden, {"ids": tokens.prepared_once(device, lambda: row_ids(hidden, *given, sequence_ids(shape)))}
    if unit != "words":
        rows, token_ids, mask = pool_tokens(hidden, tokens.token_ids, tokens.mask, unit)
        return rows, {"token_ids": token_ids, "mask": mask}
    word_ids = tokens.word_ids
    require_word_ids("words", word_ids)
    assert word_ids is not None
    ids = {"types" if has_word_types else "token_ids": tokens.token_ids, "mask": tokens.mask}
    words = tokens.prepared_once(device, lambda: find_words(device, word_ids, sequence_ids(shape), **ids))
    return words.means(hidden), {"ids": words.ids}
