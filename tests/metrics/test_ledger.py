"""The residual ledger as a metric: against sums in float64 over the rows, however they are split,
and on two ranks.
"""

import copy
import pickle
from itertools import combinations

import pytest
import torch
from hypothesis import given, settings

from embedgeo import ResidualLedger, TokenMoments
from tests.data import assert_values, floats, gaussian, updated
from tests.ranks import on_two_ranks
from tests.strategies import splits

STREAMS = ("stream", "attention", "mlp", "rounding")
DIM, N = 3, 60


def rows():
    """Rows of four streams side by side, with offsets, the last of them tiny; and their token
    types.
    """
    parts = [100 + gaussian(N, DIM), gaussian(N, DIM, seed=1) - 3, 5 * gaussian(N, DIM, seed=2)]
    return torch.cat([*parts, 1e-3 * gaussian(N, DIM, seed=3)], 1), torch.arange(N) % 7


def ledger():
    return ResidualLedger(len(STREAMS) * DIM, STREAMS, by_token_type=True)


def pair_products(x, ids, sequences):
    """V_W_unbiased times the number of rows, by streams, from a loop over all pairs of different
    sequences.
    """
    found = {}
    for each in ids.unique().tolist():
        of_type, place = x[ids == each], sequences[ids == each]
        pairs = [
            of_type[i] - of_type[j]
            for i, j in combinations(range(len(of_type)), 2)
            if place[i] != place[j]
        ]
        products = sum(
            (pair @ pair.T for pair in pairs), torch.zeros(len(STREAMS), len(STREAMS)).double()
        )
        found[each] = len(of_type), len(place.unique()), products, len(pairs)
    few = [each for each in found.values() if each[1] in (2, 3)]
    donors = few or [each for each in found.values() if each[1] > 1]
    pooled = sum(each[2] for each in donors) / (2 * sum(each[3] for each in donors))
    return sum(
        n * (products / (2 * pairs) if pairs else pooled)
        for n, _, products, pairs in found.values()
    )


def naive(x, ids, sequences=None):
    """Q, M, V and V_W and their parts, from the definitions."""
    sequences = torch.arange(len(x)) if sequences is None else sequences
    x = x.double().unflatten(1, (len(STREAMS), DIM))
    of_types = torch.stack([x[ids == each].mean(0) for each in ids.unique()])[
        torch.searchsorted(ids.unique(), ids)
    ]
    forms = {"Q": x, "M": x.mean(0, keepdim=True), "V": x - x.mean(0), "V_W": x - of_types}
    values = {"n": float(len(x))}
    every = {
        name: torch.einsum("nkd,nld->kl", each, each) / len(each) for name, each in forms.items()
    }
    every["V_W_unbiased"] = pair_products(x, ids, sequences) / len(x)
    wholes = {name: float(each.sum(1).square().sum(1).mean()) for name, each in forms.items()}
    for name, products in every.items():
        whole = wholes.get(name, float(products.sum()))
        parts = {STREAMS[k]: products[k, k] for k in range(3)}
        parts |= {
            f"{STREAMS[k]}_{STREAMS[m]}": 2 * products[k, m] for k, m in combinations(range(3), 2)
        }
        parts["rounding"] = products[3, 3] + 2 * products[3, :3].sum()
        values[name] = whole
        values |= {f"{name}_from_{part}": float(value) for part, value in parts.items()}
        values |= {f"{name}_share_{part}": float(value) / whole for part, value in parts.items()}
        values |= {f"{name}_by_{STREAMS[k]}": float(products[k].sum()) / whole for k in range(4)}
    for k in (1, 2):
        squares = x[:, k].square().mean(0)
        values |= {
            f"{STREAMS[k]}_norm_ratio": float(
                (squares.sum() / x[:, 0].square().sum(1).mean()).sqrt()
            ),
            f"{STREAMS[k]}_M_over_Q": float(x[:, k].mean(0).square().sum() / squares.sum()),
            f"{STREAMS[k]}_cosine_to_stream": float(
                torch.cosine_similarity(x[:, 0], x[:, k], dim=1).mean()
            ),
            f"{STREAMS[k]}_top_coordinate": float(squares.argmax()),
            f"{STREAMS[k]}_top_coordinate_share": float(squares.max() / squares.sum()),
        }
    return values


@settings(max_examples=20)
@given(splits(N))
def test_values_are_those_of_the_definitions_however_rows_are_split(parts):
    x, ids = rows()
    found, expected = floats(updated(ledger(), x, ids, parts).compute()), naive(x, ids)
    assert found.keys() == expected.keys()
    assert_values(found, expected, rtol=1e-9, atol=1e-9)


@settings(max_examples=20)
@given(splits(12))
def test_the_unbiased_variance_within_is_that_of_pairs_in_different_sequences(parts):
    x, ids = rows()
    sequences = torch.arange(N) // 5
    ids = torch.where(
        ids == 0, 100 + sequences, ids
    )  # types of one sequence alone, for which others stand
    metric = ledger()
    for part in parts:
        places = torch.arange(12)[part]
        of_part = torch.isin(sequences, places)
        metric.update(x[of_part], ids[of_part], sequence_ids=sequences[of_part])
    found, expected = floats(metric.compute()), naive(x, ids, sequences)
    assert_values(found, expected, rtol=1e-9, atol=1e-9)
    plain = TokenMoments(DIM)
    plain.update(x.unflatten(1, (len(STREAMS), DIM)).sum(1), ids, sequence_ids=sequences)
    assert found["V_W_unbiased"] == pytest.approx(float(plain.compute()["V_W_unbiased"]), rel=1e-9)


def test_merged_copied_and_pickled_it_is_the_same():
    x, ids = rows()
    first, second = (updated(ledger(), x, ids, [part]) for part in (slice(0, 25), slice(25, N)))
    second.merge_state(first)
    for each in (second, copy.deepcopy(second), pickle.loads(pickle.dumps(second))):
        assert_values(floats(each.compute()), naive(x, ids), rtol=1e-9, atol=1e-9)


def test_without_rows_there_is_only_their_number_and_without_token_ids_no_variance_within():
    x, _ = rows()
    assert floats(updated(ledger(), x[:0]).compute()) == {"n": 0.0}
    values = updated(ledger(), x).compute()
    assert "V" in values
    assert not [key for key in values if key.startswith("V_W")]


def on_rank(rank):
    x, ids = rows()
    return floats(updated(ledger(), x, ids, [slice(0, 20), slice(20, N)][rank::2]).compute())


@pytest.mark.slow
def test_two_ranks_give_the_values_of_all_rows(tmp_path):
    for values in on_two_ranks(on_rank, tmp_path):
        assert_values(values, naive(*rows()), rtol=1e-9, atol=1e-9)
