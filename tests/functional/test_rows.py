"""Rows of a batch that count, and words pooled from tokens."""

from collections import defaultdict
from itertools import product

import pytest
import torch
from hypothesis import given, strategies as st

from embedgeo.functional.rows import select_rows, sequence_numbers, sequence_positions
from tests.data import gaussian, pool_words


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize(
    ("dtype", "of_mask"),
    [
        (torch.float64, torch.bool),
        (torch.float32, torch.int64),
        (torch.bfloat16, torch.uint8),
        (torch.float16, torch.float32),
    ],
)
def test_rows_that_are_not_finite_are_left_out_and_counted_unless_masked(bad, dtype, of_mask):
    x, ids = gaussian(6, 4).to(dtype).view(2, 3, 4), torch.arange(6).view(2, 3)
    x[0, 1, 2], x[1, 0, 0], x[1, 0, 1] = bad, bad, -bad
    rows = select_rows(x, ids, (ids != 4).to(of_mask), dim=4)
    assert (rows.token_ids.tolist(), rows.num_nonfinite) == ([0, 2, 5], 2)
    assert rows.embeddings.equal(x.view(6, 4)[[0, 2, 5]])
    assert select_rows(x, mask=x.isfinite().all(-1).to(of_mask), dim=4).num_nonfinite == 0


def test_float8_which_has_no_scale_is_refused_by_name():
    x = torch.ones(2, 1, dtype=torch.float8_e4m3fn)
    once = torch.zeros(2, dtype=torch.int64)
    for take in (lambda: select_rows(x, dim=1), lambda: pool_words(x, once, once)):
        with pytest.raises(TypeError, match=r"float8_e4m3fn.* Pass embeddings\.float\(\) \* scale"):
            take()


@pytest.mark.parametrize(
    ("shape", "position_ids", "token_ids", "expected"),
    [
        ((2, 3), [[0, 1, 0]], [], [[0, 0, 1], [2, 2, 3]]),
        ((2, 3), [[0, 1, 0], [0, 1, 2]], [], [[0, 0, 1], [2, 2, 2]]),
        ((2, 3), [[3, 7, 9], [7, 8, 11]], [], [[0, 0, 0], [1, 1, 1]]),  # drawn, with gaps
        ((2, 2, 2), [[0, 0]], [], [[[0, 0], [0, 0]], [[1, 1], [1, 1]]]),
        ((4,), None, [[[5, 5]], [[7, 7], [7, 7]]], [0, 0, 1, 1]),
        ((4,), [[0, 1, 2, 0]], [[[7, 7], [7, 7]]], [0, 0, 0, 1]),
        ((4,), [[0, 0]], [[[7, 7], [7, 7]]], [0, 0, 1, 1]),
        ((4,), None, [[7, 7, 7, 7]], [0, 0, 0, 0]),
        ((4,), None, [], [0, 1, 2, 3]),
        ((2, 0), None, [], [[], []]),
        ((0,), None, [], []),
    ],
)
def test_sequences_are_numbered(shape, position_ids, token_ids, expected):
    position_ids = None if position_ids is None else torch.tensor(position_ids)
    numbers = sequence_numbers(torch.Size(shape), position_ids, map(torch.tensor, token_ids))
    assert numbers.shape == shape
    assert numbers.tolist() == expected


X, IDS, MASK = torch.zeros(2, 3, 4), torch.zeros(2, 3, dtype=torch.int64), torch.ones(2, 3)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((torch.zeros(2, 3, 5),), ValueError, r"\(\.\.\., 4\); got \(2, 3, 5\)"),
        ((X.long(),), TypeError, "embeddings must be a floating-point tensor; got torch.int64"),
        ((X, IDS.flatten()), ValueError, r"token_ids must have .* \(2, 3\); got \(6,\)"),
        ((X, IDS.float()), TypeError, "token_ids must be an integer tensor; got torch.float32"),
        ((X, None, MASK[:1]), ValueError, r"mask must have .* \(2, 3\); got \(1, 3\)"),
        ((X, None, 2 * MASK), ValueError, "mask must be bool or hold only 0 and 1"),
        ((X, None, MASK * torch.nan), ValueError, "mask must be bool or hold only 0 and 1"),
        ((X, None, None, MASK), TypeError, "sequence_ids must be an integer tensor"),
        ((X, None, None, IDS[:1]), ValueError, "sequence_ids must have the shape"),
    ],
)
def test_wrong_arguments_are_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        select_rows(*arguments, dim=4)


def test_positions_are_numbered_within_packed_sequences():
    real = torch.tensor([[False, True, True, True, True]])
    assert sequence_positions(real, torch.tensor([[0, 0, 1, 0, 1]])).tolist() == [[0, 1, 2, 1, 2]]


def naive_words(x, word_ids, sequence_ids, token_ids, mask):
    """One word after the other: its mean over the tokens that count, its spelling and its
    sequence.
    """
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
    seed=st.integers(0, 2**31),
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
    x[:1, :2] = torch.nan  # the words there are not finite, and the others are
    if has_mask:
        x[~mask] = torch.nan  # of what does not count, nothing matters
    means, types, sequences = pool_words(x, word_ids, sequence_ids, token_ids=token_ids, mask=mask)
    expected = naive_words(x, word_ids, sequence_ids, token_ids, mask)
    wide = torch.promote_types(dtype, torch.float32)
    assert (means.shape, means.dtype, types.dtype) == ((len(expected), 3), wide, torch.int64)
    if expected:
        pooled = torch.stack([mean for mean, _, _ in expected]).to(wide)
        torch.testing.assert_close(
            means, pooled, rtol=0, atol=1e-15 if wide == torch.float64 else 1e-7, equal_nan=True
        )
    assert sequences.tolist() == [sequence for _, _, sequence in expected]
    same = [[a == b for _, a, _ in expected] for _, b, _ in expected]
    assert (types[:, None] == types).tolist() == same
