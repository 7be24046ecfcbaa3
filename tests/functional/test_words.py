from collections import defaultdict
from itertools import chain, product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from embedgeo.functional.rows import spellings
from tests.data import gaussian, pool_words
from tests.strategies import seeds

_BASE = 0x5851F42D4C957F2D


def naive_words(x, word_ids, sequence_ids, token_ids, mask):
    """One word after the other: its mean over the tokens that count, its spelling and its sequence."""
    of_word = defaultdict(list)
    for place in product(*map(range, word_ids.shape)):
        if word_ids[place] >= 0:
            of_word[sequence_ids[place].item(), word_ids[place].item()].append(place)
    rows = []
    for (sequence, _), places in sorted(of_word.items()):
        counted = [x[place].double() for place in places if mask is None or mask[place]]
        if counted:
            spelling = tuple(token_ids[place].item() for place in places)
            rows.append((sum(counted) / len(counted), spelling, sequence))
    return rows


@given(
    seed=seeds,
    shape=st.tuples(st.integers(0, 4), st.integers(0, 9)),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]),
    integers=st.sampled_from([torch.int64, torch.int32]),
    has_mask=st.booleans(),
)
def test_words_are_pooled_as_one_by_one(seed, shape, dtype, integers, has_mask):
    generator = torch.Generator().manual_seed(seed)

    def integer(low, high):
        return torch.randint(low, high, shape, generator=generator).to(integers)

    x = torch.randn(*shape, 3, generator=generator, dtype=torch.float64).to(dtype)
    word_ids, token_ids = integer(-1, 4), integer(0, 3)
    packed = integer(0, 2).cumsum(1) > 1  # two sequences in a row of the batch
    sequence_ids = 2 * torch.arange(shape[0])[:, None] + packed
    mask = integer(0, 2).bool() if has_mask else None
    if has_mask:
        x[~mask] = torch.nan  # of what does not count, nothing matters
    means, types, sequences = pool_words(x, word_ids, sequence_ids, token_ids=token_ids, mask=mask)
    expected = naive_words(x, word_ids, sequence_ids, token_ids, mask)
    wide = torch.promote_types(dtype, torch.float32)
    assert (means.shape, means.dtype, types.dtype) == ((len(expected), 3), wide, torch.int64)
    if expected:
        pooled = torch.stack([mean for mean, _, _ in expected]).to(wide)
        torch.testing.assert_close(means, pooled, rtol=0, atol=1e-15 if wide == torch.float64 else 1e-7)
    assert sequences.tolist() == [sequence for _, _, sequence in expected]
    same = [[a == b for _, a, _ in expected] for _, b, _ in expected]
    assert (types[:, None] == types).tolist() == same


def test_given_types_are_those_of_the_first_tokens():
    x, words = gaussian(6, 2), torch.tensor([0, 0, -1, 1, 1, 1])
    types = torch.tensor([9, 8, 7, 6, 5, 4], dtype=torch.int32)
    mask = torch.tensor([0, 1, 1, 1, 0, 1]).bool()
    means, of_words, sequences = pool_words(x, words, torch.zeros(6, dtype=torch.int64), types=types, mask=mask)
    assert (of_words.tolist(), of_words.dtype, sequences.tolist()) == ([9, 6], torch.int64, [0, 0])
    torch.testing.assert_close(means, torch.stack((x[1], (x[3] + x[5]) / 2)))


def test_a_word_with_a_nan_is_not_finite_and_the_others_are():
    x = torch.ones(4, 2)
    x[1, 0] = torch.nan
    means, types, _ = pool_words(x, torch.tensor([0, 0, 1, 2]), torch.zeros(4, dtype=torch.int64))
    assert means.isfinite().all(1).tolist() == [False, True, True]
    assert types is None


def test_means_of_many_tokens_do_not_overflow_and_float8_is_float32():
    x = torch.full((1000, 2), 6e4, dtype=torch.float16)
    once = torch.zeros(1000, dtype=torch.int64)
    assert pool_words(x, once, once)[0].tolist() == [[x[0, 0].item()] * 2]
    x = torch.tensor([[1.0], [2.0]]).to(torch.float8_e4m3fn)
    assert pool_words(x, once[:2], once[:2])[0].tolist() == [[1.5]]


@pytest.mark.parametrize("word_ids", [torch.full((2, 3), -1), torch.zeros(2, 3).long()])
def test_without_tokens_that_count_there_is_no_word(word_ids):
    sequence_ids, mask = torch.zeros(2, 3).long(), torch.zeros(2, 3, dtype=torch.bool)
    for kind in ("token_ids", "types"):
        means, types, sequences = pool_words(
            torch.ones(2, 3, 4), word_ids, sequence_ids, mask=mask, **{kind: sequence_ids}
        )
        assert (means.shape, types.shape, sequences.shape) == ((0, 4), (0,), (0,))


def test_word_numbers_of_any_size_are_told_apart():
    words = torch.tensor([2**62, 0, 2**62, 2**62 - 1, 2**61])
    means, _, sequences = pool_words(gaussian(5, 2), words, torch.tensor([0, 0, 1, 1, 1]))
    assert (len(means), sequences.tolist()) == (5, [0, 0, 1, 1, 1])


def test_spellings_of_up_to_two_tokens_never_collide():
    """Two of them do where d₀ + d₁ base = 0 modulo 2⁶³ for differences of ids d₀ and d₁."""
    modulus = 2**63
    distance = min(min(rest, modulus - rest) for rest in (d * _BASE % modulus for d in range(1, 2**18 + 1)))
    assert distance > 2**18


def test_spellings_are_those_of_the_formula_and_never_negative():
    words = [[7], [7, 0], [0, 7], [7, 0, 0], [3, 2**18 - 1, 5] * 4]
    found = spellings(torch.tensor([*chain(*words)]), torch.tensor([*map(len, words)]))
    naive = [sum((token + (i > 0)) * _BASE**i for i, token in enumerate(word)) % 2**63 for word in words]
    assert found.tolist() == naive
    assert naive[0] == 7
    assert len(set(naive)) == 5
