"""Which token types of the probe text have their occurrences kept, for the figure of them."""

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from embedgeo.functional import types_by_frequency
from embedgeo.sweep.settings import SweepSettings
from embedgeo.text.tokenizing import TokenizedText

_LEAST_LETTERS = 3


def shown_types(
    text: TokenizedText, spelled: Mapping[int, str], special: Collection[int], settings: SweepSettings
) -> tuple[int, ...]:
    """The token types that `embedgeo.functional.types_by_frequency` chooses, the same at every layer and checkpoint.

    They have at least three characters beside white space, and are no special tokens.

    Args:
        text: the tokens of all texts.
        spelled: the types as texts.
        special: ids of tokens that stand for no text; words have none.
        settings: of the sweep, which say what a row is and what is left out.
    """
    types, counts = _rows(text, settings).unique(return_counts=True)
    is_text = [
        len(spelled[token_id].strip()) >= _LEAST_LETTERS and (text.words is not None or token_id not in special)
        for token_id in types.tolist()
    ]
    chosen = types_by_frequency(counts, torch.tensor(is_text, dtype=torch.bool))
    return tuple(types[chosen].tolist())


def counting(text: TokenizedText, settings: SweepSettings) -> Tensor:
    """Which tokens count, shape (n,), bool."""
    first = (text.lengths.cumsum(0) - text.lengths).repeat_interleave(text.lengths)
    kept = torch.arange(len(text.token_ids)) - first >= settings.skip_first_positions
    return kept & ~torch.isin(text.token_ids, torch.tensor(list(settings.ignore_token_ids), dtype=torch.int64))


def _rows(text: TokenizedText, settings: SweepSettings) -> Tensor:
    """The type of each row that counts."""
    kept = counting(text, settings)
    if text.words is not None:
        words = torch.stack((text.words.word_types, text.words.word_ids))
        return words[:, kept & (text.words.word_ids >= 0)].unique(dim=1)[0]
    places = kept.nonzero().flatten()
    if settings.rows in ("first", "last"):
        of_text = torch.arange(len(text.lengths)).repeat_interleave(text.lengths)[places]
        is_end = of_text.diff(prepend=of_text.new_tensor([-1])) != 0
        places = places[is_end if settings.rows == "first" else is_end.roll(-1)]  # the first one begins a text, too
    return text.token_ids[places]
