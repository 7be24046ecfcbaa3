"""Similarities against loops over pairs, in the published definitions."""

import math

import numpy as np
import pytest
import torch

from embedgeo.metrics import EmbeddingMoments, TokenSimilarity
from embedgeo.metrics.gaussian import GaussianRows, baseline_values
from tests.data import all_nan, assert_values, floats, gaussian, texts

DIM, N = 6, 150


def cosine(a, b):
    return a @ b / np.sqrt((a @ a) * (b @ b))


def by_pairs(x, token_ids, sequence_ids, dtype=np.float64):
    """All keys, one pair after the other."""
    x, token_ids, sequence_ids = (
        np.asarray(each) for each in (x.double(), token_ids, sequence_ids)
    )
    x = x.astype(dtype)
    pairs = [(cosine(x[i], x[j]), i, j) for i in range(len(x)) for j in range(i)]

    def mean(chosen):
        return np.mean([value for value, i, j in pairs if chosen(i, j)])

    types = [t for t in set(token_ids.tolist()) if (token_ids == t).sum() > 1]
    sequences = [s for s in set(sequence_ids.tolist()) if (sequence_ids == s).sum() > 1]
    rows = [x[sequence_ids == s] for s in sequences]
    values = {
        "self_similarity": np.mean(
            [mean(lambda i, j, t=t: token_ids[i] == token_ids[j] == t) for t in types]
        ),
        "different_token_similarity": mean(lambda i, j: token_ids[i] != token_ids[j]),
        "within_sequence_similarity": mean(lambda i, j: sequence_ids[i] == sequence_ids[j]),
        "intra_sentence_similarity": np.mean(
            [np.mean([cosine(row, of.mean(0)) for row in of]) for of in rows]
        ),
    }
    for key, same_type, same_sequence in (
        ("self_similarity_across_sequences", True, False),
        ("different_token_similarity_within_sequence", False, True),
        ("different_token_similarity_across_sequences", False, False),
    ):
        values[key] = mean(
            lambda i, j, a=same_type, b=same_sequence: (
                (token_ids[i] == token_ids[j]) == a and (sequence_ids[i] == sequence_ids[j]) == b
            )
        )
    values |= {f"{key}_adjusted": value - mean(lambda i, j: True) for key, value in values.items()}
    return values | {"cosine_std": np.std([value for value, _, _ in pairs])}


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


@pytest.mark.parametrize(("dim", "ratio"), [(2, 0.5), (16, 0.0), (64, 4.0)])
def test_noise_about_the_offset_has_the_spread_of_the_baseline_and_a_cosine_of_its_share(
    dim, ratio
):
    offset = math.sqrt(ratio / dim)
    drawn = []
    for seed in range(8):
        x = gaussian(3000, dim, seed=seed) / math.sqrt(dim) + offset
        of_rows = EmbeddingMoments(dim)
        of_rows.update(x)
        drawn.append(
            floats(updated(x, torch.arange(3000), torch.arange(3000)).compute() | of_rows.compute())
        )
    measured = {key: np.array([values[key] for values in drawn]) for key in drawn[0]}
    expected = baseline_values(GaussianRows(frozenset(measured), measured, np.full(8, float(dim))))[
        "cosine_std"
    ]
    assert expected.mean() == pytest.approx(measured["cosine_std"].mean(), rel=0.01, abs=1e-6)
    if not ratio:
        assert expected.mean() == pytest.approx(1 / math.sqrt(dim), rel=0.01)
    if dim >= 16:
        assert measured["mean_cosine"].mean() == pytest.approx(ratio / (1 + ratio), abs=1 / dim)


def test_rows_without_a_direction_are_left_out():
    x, ids, sequences = texts(N, DIM)
    kept = torch.arange(N) % 5 > 0
    zeros = torch.where(kept[:, None], x, 0)
    expected = updated(x[kept], ids[kept], sequences[kept]).compute()
    assert_values(updated(zeros, ids, sequences).compute(), expected, rtol=1e-12)
    metric = TokenSimilarity(DIM)
    metric.update(x, ids, mask=kept, sequence_ids=sequences)
    assert_values(metric.compute(), expected, rtol=1e-12)


def test_what_is_undefined_is_nan():
    x, one = gaussian(3, DIM), torch.zeros(3, dtype=torch.int64)
    nothing = updated(x[:0], one[:0], one[:0]).compute()
    assert len(nothing) == 15
    assert all_nan(floats(nothing))
    assert all_nan(floats(updated(x[:1], one[:1], one[:1]).compute()))
    assert all_nan(floats(updated(0 * x, one, one).compute()))
    alone = floats(updated(x, torch.arange(3), torch.arange(3)).compute())
    assert {key for key, value in alone.items() if math.isnan(value)} == {
        f"{key}{adjusted}"
        for key in (
            *("self_similarity", "self_similarity_across_sequences"),
            *("within_sequence_similarity", "intra_sentence_similarity"),
            "different_token_similarity_within_sequence",
        )
        for adjusted in ("", "_adjusted")
    }
    assert math.isnan(updated(x, one, one).compute()["different_token_similarity"])


def test_without_token_ids_there_are_no_values_of_types():
    metric = TokenSimilarity(DIM)
    metric.update(gaussian(12, DIM).view(3, 4, DIM))
    names = {"within_sequence_similarity", "intra_sentence_similarity"}
    assert metric.compute().keys() == names | {f"{name}_adjusted" for name in names} | {
        "cosine_std"
    }
