import itertools

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.nn.utils.rnn import pad_sequence

from embedgeo.functional import Sample
from embedgeo.functional.distributed import Ranks
from embedgeo.functional.rows import select_rows
from embedgeo.functional.sampling import (
    ONE_RANK,
    row_keys,
    row_numbers,
    sample_batches,
    stream_position,
)

NUMBERS = torch.arange(40.0)[:, None]


def drawn(sample):
    return sorted(sample.rows.flatten().tolist())


def sample_of(batches, size, seed, ranks=ONE_RANK):
    """A sample of the rows of `NUMBERS` in these slices."""
    sample = Sample.empty(1, size, seed=seed)
    for batch in batches:
        sample = sample.extend(select_rows(NUMBERS[batch], dim=1), ranks=ranks)
    return sample


def reduced(samples):
    """The sample of all ranks, whose tensors are exchanged here."""
    ways = [each.reduction(Ranks(rank, len(samples))) for rank, each in enumerate(samples)]

    def exchanged(tensors, by):
        return {name: by(torch.stack([each[name] for each in tensors])) for name in tensors[0]}

    found = exchanged([way.maxima() for way in ways], lambda each: each.amax(0))
    for phase in ("counts", "sums", "squares"):
        found = exchanged([getattr(way, phase)(found) for way in ways], lambda each: each.sum(0))
    return ways[0].result(found)


def drawn_by_ranks(bounds, num_ranks, size, seed):
    """Rows that ranks draw which take batches between bounds in turn."""
    batches = [slice(*pair) for pair in itertools.pairwise(bounds)]
    ranks = [Ranks(rank, num_ranks) for rank in range(num_ranks)]
    return drawn(
        reduced([sample_of(batches[each.rank :: num_ranks], size, seed, each) for each in ranks])
    )


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_every_row_is_drawn_as_often_where_batches_of_ranks_differ_in_size(num_ranks):
    repeats, size = 60, 8
    counts = torch.zeros(40)
    for seed in range(repeats):
        rows = drawn_by_ranks([0, 3, 10, 12, 30, 31, 40], num_ranks, size, seed)
        assert len({*rows}) == size
        counts[torch.tensor(rows).long()] += 1
    mean = repeats * size / 40
    assert ((counts - mean) ** 2 / (mean * (1 - size / 40))).sum() * 39 / 40 < 72.1  # 0.999


@pytest.mark.parametrize(("num_ranks", "length", "size"), [(2, 7, 9), (3, 13, 5), (4, 6, 40)])
def test_ranks_with_even_batches_but_the_last_draw_what_one_process_does(num_ranks, length, size):
    one = drawn(sample_of([slice(0, 40)], size, 3))
    assert drawn_by_ranks([*range(0, 40, length), 40], num_ranks, size, 3) == one


def test_keys_are_those_of_earlier_versions():
    assert row_keys(0, 2, seed=0).tolist() == [0.6044118051272669, 0.5103517646753791]
    assert row_keys(5000, 2, seed=7).tolist() == [0.08778365843667546, 0.5428146335015667]


@pytest.mark.parametrize(
    ("seen", "lengths"), [(0, [0]), (3, [3]), (8, [8]), (15, [8]), (16, [8, 8]), (40, [8] * 3)]
)
def test_batches_are_whole_or_there_is_one_smaller_one(seen, lengths):
    rows = select_rows(NUMBERS[:seen], NUMBERS[:seen, 0].long(), dim=1)
    sample = Sample.empty(1, 24).extend(rows)
    batches = sample_batches(sample, 8)
    rows, labels = [batch.rows for batch in batches], [batch.labels[:, 1] for batch in batches]
    assert [len(batch) for batch in rows] == lengths
    assert torch.cat(rows).unique().numel() == sum(lengths)
    assert torch.cat(rows)[:, 0].long().equal(torch.cat(labels))


@settings(max_examples=40)
@given(st.lists(st.integers(0, 5), max_size=12), st.integers(1, 4))
def test_row_numbers_are_those_of_one_process(sizes, num_streams):
    expected, positions, start = {}, [], [0] * num_streams
    for batch, size in enumerate(sizes):
        stream = batch % num_streams
        rows = stream_position(stream, start[stream]) + torch.arange(size)
        expected |= {position: len(expected) + i for i, position in enumerate(rows.tolist())}
        start[stream] += size
        positions.append(rows)
    positions = torch.cat([torch.zeros(0, dtype=torch.int64), *positions]).flip(0)
    batches = [
        torch.tensor(sizes[stream::num_streams], dtype=torch.int64) for stream in range(num_streams)
    ]
    assert row_numbers(positions, pad_sequence(batches, batch_first=True)).tolist() == [
        expected[position] for position in positions.tolist()
    ]
