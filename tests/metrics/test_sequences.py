"""Which rows are of one sequence: by default, by ids, in any split, and in the forward passes of a model."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from embedgeo import observe
from embedgeo.metrics import EmbeddingMoments, TokenMoments
from tests import references
from tests.data import assert_values, floats, gaussian, texts, token_rows
from tests.models import gpt_neox, token_batch

N, DIM = 200, 4
KEYS = ("V_W_unbiased", "V_B_unbiased", "V_W_over_V_unbiased")


def updated(metric, x, ids, sequences, groups):
    """The metric after an update by each group of whole sequences."""
    for group in groups:
        of = torch.isin(sequences, torch.tensor(group, dtype=torch.int64))
        metric.update(x[of], ids[of], sequence_ids=sequences[of])
    return metric


def split_of_sequences(sequences, places):
    groups = [[] for _ in range(4)]
    for sequence, place in zip(sequences.unique().tolist(), places, strict=True):
        groups[place].append(sequence)
    return groups


@settings(max_examples=20)
@given(st.lists(st.integers(0, 3), min_size=20, max_size=20), st.booleans())
def test_any_split_of_sequences_over_updates_and_metrics_gives_the_pairs_of_all(places, merges):
    x, ids, sequences = texts(N, DIM, mean=100.0)
    assert len(sequences.unique()) == 20
    groups = split_of_sequences(sequences, places)
    metric = TokenMoments(DIM)
    if merges:
        for group in groups:
            metric.merge_state(updated(TokenMoments(DIM), x, ids, sequences, [group]))
    else:
        updated(metric, x, ids, sequences, groups)
    assert_values(metric.compute(), references.unbiased_values(x, ids, sequences), rtol=1e-9)


@pytest.mark.parametrize("kind", [TokenMoments, EmbeddingMoments])
def test_by_default_the_leading_axis_of_a_batch_tells_the_sequences(kind):
    x, ids, _ = texts(N, DIM)
    mask = torch.arange(N).view(8, 25) % 7 > 0
    sequences = torch.arange(8).repeat_interleave(25)
    kept = mask.flatten()
    expected = references.unbiased_values(x[kept], ids[kept], sequences[kept])
    assert_values(expected, floats_of(kind, x.view(8, 25, DIM), ids.view(8, 25), mask), rtol=1e-9)
    assert_values(expected, floats_of(kind, x[kept], ids[kept], None, sequences[kept].int()), rtol=1e-9)
    alone = references.unbiased_values(x, ids)
    assert_values(alone, floats_of(kind, x, ids), rtol=1e-9)
    assert_values(alone, floats_of(kind, x.view(N, 1, DIM), ids.view(N, 1)), rtol=1e-9)


def floats_of(kind, *batch):
    metric = kind(DIM)
    metric.update(*batch)
    return {key: metric.compute()[key] for key in KEYS}


@pytest.mark.parametrize("kind", [TokenMoments, EmbeddingMoments])
def test_rows_that_are_not_finite_leave_their_sequences(kind):
    x, ids, sequences = texts(N, DIM)
    x[sequences == sequences.max(), 1] = math.nan
    kept = x[:, 1].isfinite()
    expected = references.unbiased_values(x[kept], ids[kept], sequences[kept])
    assert_values(expected, floats_of(kind, x, ids, None, sequences), rtol=1e-9)


@pytest.mark.parametrize("kind", [TokenMoments, EmbeddingMoments])
def test_one_sequence_alone_counts_as_independent_rows_and_two_without_pairs_as_nothing(kind):
    x, ids = token_rows(50, DIM)
    alone = floats_of(kind, x, ids, None, torch.full((50,), 3))
    assert_values(alone, references.unbiased_values(x, ids), rtol=1e-9)
    values = floats_of(kind, torch.cat((x, x)), torch.cat((ids, -ids)), None, torch.arange(2).repeat_interleave(50))
    assert all(math.isnan(value) for value in values.values())


def test_two_updates_of_one_sequence_each_are_two_sequences():
    x, ids = token_rows(50, DIM)
    metric = TokenMoments(DIM)
    for _ in range(2):
        metric.update(x[None], ids[None])
    sequences = torch.arange(2).repeat_interleave(50)
    expected = references.unbiased_values(torch.cat((x, x)), torch.cat((ids, ids)), sequences)
    assert_values(metric.compute(), expected, rtol=1e-9)


@pytest.mark.parametrize(
    ("sequence_ids", "error", "message"),
    [
        (torch.zeros(5), TypeError, "sequence_ids must be an integer tensor"),
        (torch.zeros(4).long(), ValueError, "sequence_ids must have the shape"),
        ([0] * 5, TypeError, "sequence_ids must be a tensor"),
    ],
)
def test_wrong_sequence_ids_are_refused(sequence_ids, error, message):
    with pytest.raises(error, match=message):
        TokenMoments(DIM).update(gaussian(5, DIM), torch.arange(5), sequence_ids=sequence_ids)


def in_forward_passes(model, batches, **options):
    with observe(model, metrics=lambda dim: [TokenMoments(dim)], **options) as geometry, torch.no_grad():
        for batch in batches:
            model(**batch)
    return geometry.compute()["block.01"]


@pytest.mark.parametrize("padding", [None, "left"])
def test_sequences_are_those_of_the_batches_of_a_model(padding):
    model = gpt_neox().eval()
    batches = [token_batch(rows=3, length=12, seed=seed, padding=padding) for seed in (0, 1)]
    hidden, ids, sequences = [], [], []
    for batch in batches:
        with torch.no_grad():
            states = model(**batch, output_hidden_states=True).hidden_states[2]
        mask = batch["attention_mask"].bool()
        hidden.append(states[mask])
        ids.append(batch["input_ids"][mask])
        sequences.append((torch.arange(3) + 3 * len(sequences))[:, None].expand(3, 12)[mask])
    expected = references.unbiased_values(torch.cat(hidden), torch.cat(ids), torch.cat(sequences))
    assert_values(floats(in_forward_passes(model, batches)), expected, rtol=1e-6)


def test_sequences_that_are_packed_are_told_by_their_positions():
    model, batch = gpt_neox().eval(), token_batch(rows=2, length=12)
    del batch["attention_mask"]
    batch["position_ids"] = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in ([5, 4, 3], [1, 11])])
    with torch.no_grad():
        hidden = model(**batch, output_hidden_states=True).hidden_states[2].flatten(0, 1)
    sequences = torch.tensor([0] * 5 + [1] * 4 + [2] * 3 + [3] + [4] * 11)
    expected = references.unbiased_values(hidden, batch["input_ids"].flatten(), sequences)
    assert_values(floats(in_forward_passes(model, [batch])), expected, rtol=1e-6)
