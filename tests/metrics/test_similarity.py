"""Similarities against loops over pairs, in the published definitions."""

import math

import numpy as np
import pytest
import torch

from embedgeo.metrics import TokenSimilarity
from tests.data import all_nan, assert_values, floats, gaussian, texts

DIM, N = 6, 150


def cosine(a, b):
    return a @ b / np.sqrt((a @ a) * (b @ b))


def by_pairs(x, token_ids, sequence_ids):
    """All keys, one pair after the other."""
    x, token_ids, sequence_ids = (
        np.asarray(each) for each in (x.double(), token_ids, sequence_ids)
    )
    pairs = [
        (cosine(x[i], x[j]), token_ids[i] == token_ids[j], sequence_ids[i] == sequence_ids[j])
        for i in range(len(x))
        for j in range(i)
    ]
    return {
        "self_similarity_across_sequences": np.mean([c for c, a, b in pairs if a and not b]),
        "different_token_similarity_across_sequences": np.mean(
            [c for c, a, b in pairs if not a and not b]
        ),
        "within_sequence_similarity": np.mean([c for c, _, b in pairs if b]),
    }


def updated(x, ids, sequences):
    metric = TokenSimilarity(x.shape[1])
    metric.update(x, ids, sequence_ids=sequences)
    return metric


@pytest.mark.parametrize(
    ("dtype", "mean"), [(torch.float64, 0.0), (torch.float64, 1e4), (torch.bfloat16, 5.0)]
)
def test_values_are_those_of_loops_over_pairs(dtype, mean):
    x, ids, sequences = texts(N, DIM, mean=mean)
    x = x.to(dtype)
    expected = by_pairs(x, ids, sequences)
    assert_values(updated(x, ids, sequences).compute(), expected, rtol=1e-9, atol=1e-12)
    assert updated(x, ids, sequences).compute().keys() == expected.keys()


def test_rows_without_a_direction_are_left_out():
    x, ids, sequences = texts(N, DIM)
    kept = torch.arange(N) % 5 > 0
    zeros = torch.where(kept[:, None], x, 0)
    expected = updated(x[kept], ids[kept], sequences[kept]).compute()
    assert_values(updated(zeros, ids, sequences).compute(), expected, rtol=1e-12)


def test_what_is_undefined_is_nan():
    x, one = gaussian(3, DIM), torch.zeros(3, dtype=torch.int64)
    assert all_nan(floats(updated(x[:0], one[:0], one[:0]).compute()))
    assert all_nan(floats(updated(x[:1], one[:1], one[:1]).compute()))
    assert all_nan(floats(updated(0 * x, one, one).compute()))
    alone = floats(updated(x, torch.arange(3), torch.arange(3)).compute())
    assert {key for key, value in alone.items() if not math.isnan(value)} == {
        "different_token_similarity_across_sequences"
    }


def test_without_token_ids_there_are_no_values_of_types():
    metric = TokenSimilarity(DIM)
    metric.update(gaussian(12, DIM).view(3, 4, DIM))
    assert metric.compute().keys() == {"within_sequence_similarity"}
