import functools
import itertools

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.nn.utils.rnn import pad_sequence

from embedgeo.functional import Sample
from embedgeo.functional.sampling import row_keys, row_numbers, sample_batches, stream_position
from tests.strategies import seeds

NUMBERS = torch.arange(40.0)[:, None]


def drawn(sample):
    return sorted(sample.rows.flatten().tolist())


def test_keys_are_uniform_and_depend_on_seed_stream_and_place():
    keys = torch.stack(
        [
            row_keys(stream_position(k, 0), 5000, seed=s)
            for s in (0, 1, 2**62, -1)
            for k in (0, 1, 2)
        ]
    )
    assert keys.unique().numel() == keys.numel()
    assert bool(((keys >= 0) & (keys < 1)).all())
    for moment in range(1, 5):
        assert keys.pow(moment).mean().item() == pytest.approx(1 / (moment + 1), abs=0.005)
    assert (torch.corrcoef(keys) - torch.eye(len(keys))).abs().max() < 0.06
    lagged = torch.corrcoef(torch.stack((keys[:, :-1].flatten(), keys[:, 1:].flatten())))
    assert lagged[0, 1].abs() < 0.02


def streams_of(batches, num_streams, size, seed):
    """The samples of streams that take batches in turn, each of which is a slice of `NUMBERS`."""
    samples = [Sample.empty(1, size, seed=seed)] * num_streams
    for i, batch in enumerate(batches):
        stream = i % num_streams
        samples[stream] = samples[stream].extend(
            NUMBERS[batch], stream=stream, num_streams=num_streams
        )
    return samples


def merged(samples):
    return functools.reduce(Sample.merge, samples)


@pytest.mark.parametrize("num_streams", [1, 3])
def test_every_row_is_drawn_as_often_where_batches_of_streams_differ_in_size(num_streams):
    batches = [slice(*pair) for pair in itertools.pairwise([0, 3, 10, 12, 30, 31, 40])]
    repeats, size = 100, 8
    counts = torch.zeros(40)
    for seed in range(repeats):
        rows = merged(streams_of(batches, num_streams, size, seed)).rows.flatten().long()
        assert rows.unique().numel() == size
        counts[rows] += 1
    mean = repeats * size / 40
    assert ((counts - mean) ** 2 / (mean * (1 - size / 40))).sum() * 39 / 40 < 72.1  # 0.999


@settings(max_examples=40)
@given(st.integers(1, 9), st.integers(1, 40), seeds, st.integers(1, 4))
def test_streams_of_even_batches_but_the_last_draw_what_one_does(
    size, batch_size, seed, num_streams
):
    batches = [slice(start, start + batch_size) for start in range(0, 40, batch_size)]
    alone_has_the_last = len(batches) <= num_streams and 40 % batch_size > 0
    one = Sample.empty(1, size, seed=seed).extend(NUMBERS)
    if not alone_has_the_last:  # which else takes the others to be as small
        assert drawn(merged(streams_of(batches, num_streams, size, seed))) == drawn(one)


def test_keys_are_those_of_earlier_versions():
    assert row_keys(0, 2, seed=0).tolist() == [0.6044118051272669, 0.5103517646753791]
    assert row_keys(5000, 2, seed=7).tolist() == [0.08778365843667546, 0.5428146335015667]


@pytest.mark.parametrize(
    ("seen", "lengths"), [(0, [0]), (3, [3]), (8, [8]), (15, [8]), (16, [8, 8]), (40, [8] * 3)]
)
def test_batches_are_whole_or_there_is_one_smaller_one(seen, lengths):
    sample = Sample.empty(1, 24).extend(NUMBERS[:seen], NUMBERS[:seen, 0].long())
    batches = sample_batches(sample, 8)
    rows, labels = [batch.rows for batch in batches], [batch.labels for batch in batches]
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
