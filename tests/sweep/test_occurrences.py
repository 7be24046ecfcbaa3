"""Which token types have their occurrences kept in a sweep, and what is kept of them."""

from dataclasses import replace

import pytest
import torch

from embedgeo.sweep.texts import ProbeText, frequent_types
from embedgeo.text.tokenizing import SpelledWords

SPELLED = {0: "the", 1: " cat", 2: "[CLS]", 3: "a", 4: "   "}
TOKENS = torch.tensor([2, 0, 1, 3, 4] * 30)
TEXT = ProbeText(TOKENS, torch.full((30,), 5), token_texts=SPELLED)


@pytest.mark.parametrize(
    ("asked", "shown"),
    [
        ({}, {0, 1}),
        ({"ignore_token_ids": (0,)}, {1}),
        ({"skip_first_positions": 2}, {1}),
    ],
)
def test_types_are_chosen_by_how_often_their_rows_count(asked, shown):
    assert set(frequent_types(replace(TEXT, **asked), [2])) == shown


def test_words_are_chosen_by_how_often_they_occur():
    first = torch.arange(30)[:, None] * 2
    numbers = (
        (torch.tensor([[0, 0, 0, 1, -1]]) + first)
        .where(torch.tensor([True] * 4 + [False]), -1)
        .flatten()
    )
    types = torch.tensor([0, 0, 0, 1, -1] * 30)
    words = SpelledWords(numbers, types, ["thecat", "dog"])
    text = replace(TEXT, words=words, token_texts={0: "thecat", 1: "dog"})
    assert frequent_types(replace(text, skip_first_positions=3), [0, 1]) == (1,)
    assert set(frequent_types(text, [0, 1])) == {0, 1}
