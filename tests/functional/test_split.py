import itertools
import math

import pytest
import torch

from embedgeo.functional import TokenTable, token_table, unbiased_split, within_variance
from embedgeo.functional.tokens import SequenceCount, within_moments
from tests import references
from tests.data import all_nan, assert_values, floats, gaussian, texts


def of_table(x, ids, sequences=None):
    num_sequences = len(x) if sequences is None else len(sequences.unique())
    return within_variance(token_table(x, ids, sequences).without_rounding(), torch.tensor(num_sequences)).item()


@pytest.mark.parametrize("num_sequences", [1, 2, 3, 4, 20, 300])
@pytest.mark.parametrize("mean", [0.0, 1000.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_within_variance_is_that_of_all_pairs_in_different_sequences(num_sequences, mean, dtype):
    x, ids, sequences = texts(400, 5, num_sequences=num_sequences, mean=mean)
    x = x.to(dtype)
    rtol = 1e-9 if dtype == torch.float64 else 1e-6
    assert of_table(x, ids, sequences) == pytest.approx(references.within_by_pairs(x, ids, sequences), rel=rtol)
    assert of_table(x, ids) == pytest.approx(references.within_by_pairs(x, ids), rel=rtol)


@pytest.mark.parametrize("dim", [3, 4000])
def test_a_token_type_or_a_run_of_one_in_a_sequence_may_be_longer_than_what_is_centred_at_a_time(dim):
    x, ids, sequences = texts(2000 if dim < 10 else 300, dim, num_sequences=3)
    x, ids = torch.cat((x, x + 1)), torch.cat((ids, torch.full_like(ids, 7)))
    sequences = torch.cat((sequences, sequences.clamp(max=0)))
    assert of_table(x, ids, sequences) == pytest.approx(references.within_by_pairs(x, ids, sequences), rel=1e-9)
    for name, state in token_table(x, ids, sequences)._asdict().items():
        if "sequence" not in name:
            torch.testing.assert_close(state, getattr(token_table(x, ids), name), rtol=1e-9, atol=1e-9)


def test_tables_of_whole_sequences_merge_in_any_order():
    x, ids, sequences = texts(400, 5)
    order = sequences.argsort(stable=True)
    x, ids, sequences = x[order], ids[order], sequences[order]
    cuts = [0, *(sequences.diff().nonzero().flatten() + 1)[[2, 3, 11]].tolist(), 400]
    parts = [slice(a, b) for a, b in itertools.pairwise(cuts)]
    tables = [token_table(x[part], ids[part], sequences[part]) for part in parts]
    whole = token_table(x, ids, sequences)
    for some in (tables, tables[::-1]):
        merged = TokenTable.empty(5)
        for table in some:
            merged = merged.merge(table)
        for got, expected in zip(merged, whole, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)


def test_types_without_pairs_get_the_pooled_value_of_those_in_two_or_three_sequences():
    x = torch.tensor([[0.0], [2.0], [0.0], [4.0], [0.0], [6.0], [0.0], [6.0], [50.0], [60.0]])
    ids = torch.tensor([1, 1, 2, 2, 3, 3, 3, 3, 4, 4])
    sequences = torch.tensor([0, 1, 1, 2, 0, 1, 2, 3, 5, 5])
    # variances: 2 (of one pair), 8 (of one pair), 12; the pair of type 4 is in one sequence: (2 + 8) / 2
    assert of_table(x, ids, sequences) == pytest.approx((2 * 2 + 2 * 8 + 4 * 12 + 2 * 5) / 10)
    assert of_table(x[4:], ids[4:], sequences[4:]) == pytest.approx(12)  # none in two or three: of all with pairs


def test_what_has_no_pairs_is_undefined_and_in_a_single_sequence_rows_are_independent():
    x, ids = gaussian(4, 3), torch.tensor([1, 1, 2, 2])
    assert math.isnan(of_table(x, ids, ids))
    assert math.isnan(of_table(x[:0], ids[:0]))
    assert math.isnan(of_table(x[::2], ids[::2]))
    assert of_table(x, ids, torch.zeros(4).long()) == of_table(x, ids) > 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mean", [3.0, 1e6])
def test_identical_rows_per_token_have_a_variance_of_exactly_zero(dtype, mean):
    _, ids, sequences = texts(3000, 8)
    x = (mean + gaussian(60, 8)).to(dtype)[ids // 1000]
    table = token_table(x, ids, sequences)
    assert table.m2.count_nonzero() == table.sequence_m2.count_nonzero() == 0
    merged = token_table(x[:999], ids[:999], sequences[:999]).merge(table)
    assert within_variance(merged.without_rounding(), torch.tensor(40)) == 0


def test_pairs_far_apart_in_one_sequence_do_not_drown_those_in_different_ones():
    x, sequences = torch.zeros(1001, 1, dtype=torch.float64), torch.zeros(1001).long()
    x[:1000] = 1e6 * gaussian(1000, 1)
    sequences[-1] = 1
    ids = torch.zeros_like(sequences)
    assert of_table(x, ids, sequences) == pytest.approx(references.within_by_pairs(x, ids, sequences), rel=1e-9)


def test_unbiased_split_without_a_variance_within_is_undefined():
    assert all_nan(floats(unbiased_split(*torch.tensor([4.0, 2.0, torch.nan]))))


def test_the_variance_within_batches_is_weighted_by_rows():
    x, ids, sequences = texts(100, 3)
    whole, expected = None, []
    for part in (slice(0, 40), slice(40, 40), slice(40, 99), slice(99, 100)):
        table = token_table(x[part], ids[part], sequences[part])
        batch = within_moments(table, len(sequences[part].unique()))
        whole = batch if whole is None else whole.merge(batch)
        expected.append(
            references.within_by_pairs(x[part], ids[part], sequences[part]) if part.stop - part.start > 1 else 0
        )
    within = 40 * expected[0] + 59 * expected[2]
    assert_values(whole._asdict(), {"n_with_ids": 100.0, "n_paired": 99.0, "within": within}, rtol=1e-9)


def test_numbers_of_sequences_add_up():
    assert SequenceCount(torch.tensor(2.0)).merge(SequenceCount(torch.tensor(3.0))) == (5,)
