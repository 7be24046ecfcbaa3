"""Which token types have their occurrences kept in a sweep, and what is kept of them."""

import pytest
import torch

from embedgeo.sweep import SweepSettings
from embedgeo.sweep.texts import frequent_types
from embedgeo.text.tokenizing import SpelledWords, TokenizedText

SPELLED = {0: "the", 1: " cat", 2: "[CLS]", 3: "a", 4: "   "}
TOKENS = torch.tensor([2, 0, 1, 3, 4] * 30)
TEXTS = TokenizedText(TOKENS, torch.full((30,), 5))


@pytest.mark.parametrize(
    ("asked", "shown"),
    [
        ({}, {0, 1}),
        ({"ignore_token_ids": [0]}, {1}),
        ({"skip_first_positions": 2}, {1}),
    ],
)
def test_types_are_chosen_by_how_often_their_rows_count(asked, shown):
    settings = SweepSettings("lab/x", **{"seq_len": 5, **asked})
    assert set(frequent_types(TEXTS, SPELLED, [2], settings)) == shown


def test_words_are_chosen_by_how_often_they_occur():
    first = torch.arange(30)[:, None] * 2
    numbers = (
        (torch.tensor([[0, 0, 0, 1, -1]]) + first)
        .where(torch.tensor([True] * 4 + [False]), -1)
        .flatten()
    )
    types = torch.tensor([0, 0, 0, 1, -1] * 30)
    text = TEXTS._replace(words=SpelledWords(numbers, types, ["thecat", "dog"]))
    settings = SweepSettings("lab/x", seq_len=5, rows="words", skip_first_positions=3)
    assert frequent_types(text, {0: "thecat", 1: "dog"}, [0, 1], settings) == (1,)
    assert set(
        frequent_types(text, {0: "thecat", 1: "dog"}, [0, 1], SweepSettings("lab/x", rows="words"))
    ) == {0, 1}
