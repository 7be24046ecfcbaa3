"""The geometry of rows by the token that follows, against loops, and which token that is."""

import math
from functools import partial

import numpy as np
import pytest
import torch

from embedgeo import observe
from embedgeo.functional.next_tokens import labelled_by_next
from embedgeo.functional.rows import select_rows
from embedgeo.metrics import NextTokenGeometry, TokenMoments
from tests.data import all_nan, assert_values, floats, gaussian, texts, wide_dtypes
from tests.models import gpt_neox, token_batch
from tests.references import token_loop, token_values, unbiased_values

DIM, N, LEAST = 6, 300, 5
KEYS = {
    *("nc1", "nc1_unbiased", "cdnv", "cdnv_plugin", "cdnv_pairs"),
    *("unembedding_alignment", "unembedding_alignment_std", "next_token_types"),
}
make = partial(NextTokenGeometry, DIM, LEAST)


def labelled(x, ids, sequences):
    """The rows that have a next one in their sequence, its token, and their sequence; one row after
    the other.
    """
    kept, labels = [], []
    for i, sequence in enumerate(sequences.tolist()):
        following = next((j for j in range(i + 1, len(x)) if sequences[j] == sequence), None)
        if following is not None:
            kept.append(i)
            labels.append(int(ids[following]))
    return x[kept], torch.tensor(labels), sequences[kept]


def naive_values(x, labels, sequences, unembedding, most=1000):
    """All keys, in loops over types and pairs of them."""
    table = token_loop(x.double(), labels)
    split, unbiased = (
        token_values(x.double(), labels),
        unbiased_values(x.double(), labels, sequences),
    )
    types = sorted(
        (t for t, (n, _, _) in table.items() if n >= LEAST), key=lambda t: (-table[t][0], t)
    )[:most]
    frequent = [(*table[t], np.asarray(unembedding[t], dtype=float)) for t in types]
    plug_in, corrected = [], []
    for i, (n, mean, variance, _) in enumerate(frequent):
        for m, other, others, _ in frequent[:i]:
            distance, of_sample = (
                ((mean - other) ** 2).sum(),
                (variance * n / (n - 1), others * m / (m - 1)),
            )
            plug_in.append((variance + others) / (2 * distance))
            corrected.append((sum(of_sample), distance, of_sample[0] / n + of_sample[1] / m))
    center = sum(n * mean for n, mean, _, _ in frequent) / sum(n for n, _, _, _ in frequent)
    cosines = [
        (mean - center) @ w / np.linalg.norm(mean - center) / np.linalg.norm(w)
        for _, mean, _, w in frequent
    ]
    told_apart = [
        variance / (2 * (distance - noise))
        for variance, distance, noise in corrected
        if distance > 2 * noise
    ]
    return {
        "nc1": split["V_W"] / split["V_B"],
        "nc1_unbiased": unbiased["V_W_unbiased"] / unbiased["V_B_unbiased"],
        "cdnv": np.mean(told_apart),
        "cdnv_plugin": np.mean(plug_in),
        "cdnv_pairs": len(told_apart) / len(plug_in),
        "unembedding_alignment": np.mean(cosines),
        "unembedding_alignment_std": np.std(cosines, ddof=1),
        "next_token_types": len(frequent),
    }


def compact(x, ids, sequences):
    """The same with token ids from 0, which have a row of an output embedding each."""
    return x, ids // 1000, sequences


def updated(metric, x, ids, sequences):
    metric.update(x, ids, sequence_ids=sequences)
    return metric


@wide_dtypes
@pytest.mark.parametrize("mean", [0.0, 100.0])
def test_values_are_those_of_loops(dtype, mean):
    x, ids, sequences = compact(*texts(N, DIM, mean=mean))
    x, unembedding = x.to(dtype), gaussian(60, DIM)
    values = updated(make(unembedding=unembedding), x, ids, sequences).compute()
    expected = naive_values(*labelled(x, ids, sequences), unembedding)
    assert values.keys() == KEYS
    assert_values(values, expected, rtol=1e-9 if dtype == torch.float64 else 1e-5)


def test_the_most_frequent_types_are_compared():
    x, ids, sequences = compact(*texts(N, DIM))
    unembedding = gaussian(60, DIM)
    metric = NextTokenGeometry(DIM, LEAST, 4, unembedding)
    expected = naive_values(*labelled(x, ids, sequences), unembedding, most=4)
    assert expected["next_token_types"] == 4
    assert_values(updated(metric, x, ids, sequences).compute(), expected, rtol=1e-9)


def types_seen(ids, **given):
    found = labelled_by_next(select_rows(torch.ones(*ids.shape, 1), ids, dim=1, **given))
    metric = TokenMoments(1)
    metric.update(found)
    table = metric.table()
    return dict(zip(table["token_id"].tolist(), table["n"].int().tolist(), strict=True))


def test_the_next_token_is_that_of_the_next_position_of_the_sequence():
    ids = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 2]])
    assert types_seen(ids) == {2: 2, 3: 1, 4: 1, 6: 1, 7: 1}
    packed = torch.tensor([[0, 0, 1, 1], [2, 2, 2, 3]])
    assert types_seen(ids, sequence_ids=packed) == {2: 1, 4: 1, 6: 1, 7: 1}
    assert types_seen(ids[:, :1]) == types_seen(ids.flatten()) == {}


def test_a_masked_position_is_a_next_token_but_padding_is_none():
    ids = torch.tensor([[1, 2, 3, 4], [5, 6, 0, 0], [0, 0, 7, 8]])
    assert types_seen(ids, mask=torch.tensor([[1, 0, 1, 1], [1, 1, 0, 0], [0, 0, 1, 1]])) == {
        2: 1,
        4: 1,
        6: 1,
        8: 1,
    }
    assert types_seen(ids, mask=torch.tensor([[0, 1, 0, 1], [0, 0, 0, 0], [0, 1, 0, 0]])) == {3: 1}


def test_what_is_undefined_is_nan():
    x = gaussian(8, DIM).view(2, 4, DIM)
    metric = make()
    metric.update(x[:0], torch.zeros(0, 4, dtype=torch.int64))
    assert all_nan(
        {key: value for key, value in floats(metric.compute()).items() if key != "next_token_types"}
    )
    for ids in (None, torch.zeros(2, 4, dtype=torch.int64), torch.arange(8).view(2, 4)):
        metric.update(x, ids)
        assert metric.compute().keys() == KEYS
    for unembedding in (gaussian(3, DIM), gaussian(60, DIM + 1), gaussian(60, 1)[:, 0]):
        values = floats(updated(make(unembedding=unembedding), *texts(N, DIM)).compute())
        assert math.isnan(values["unembedding_alignment"])
        assert values["cdnv"] > 0


def test_the_layers_of_a_model_are_compared_with_the_output_embedding_that_is_given():
    model = gpt_neox().eval()
    weights = model.get_output_embeddings().weight
    batch = token_batch()
    with (
        torch.no_grad(),
        observe(model, metrics=lambda dim: [NextTokenGeometry(dim, 2, 100, weights)]) as geometry,
    ):
        hidden = model(**batch, output_hidden_states=True).hidden_states
    values = geometry.compute()
    for layer, x in (("embed", hidden[0]), ("final_norm", hidden[-1])):
        metric = NextTokenGeometry(x.shape[-1], 2, 100, weights)
        metric.update(x, batch["input_ids"], batch.get("attention_mask"))
        assert_values(values[layer], metric.compute(), rtol=1e-6)
        assert not math.isnan(values[layer]["unembedding_alignment"])
