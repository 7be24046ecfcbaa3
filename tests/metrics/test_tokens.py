"""TokenMoments against a loop over token types, and the split of the variance by pairs in different
sequences.
"""

import pytest
import torch

from embedgeo.metrics import Anisotropy, EmbeddingMoments, TokenMoments
from research.within_token_variance import nested, text_share
from tests import references
from tests.data import assert_values, texts, token_rows, updated, wide_dtypes

NOT_OF_THE_TABLE = {"mean_cosine", "norm_mean", "norm_cv", "norm_max", "top_dim_share"}
NOT_OF_THE_TABLE |= {"first_positions_share", "V_without_top_dim", "M_over_Q_without_top_dim"}
REGRESSIONS = references.LINES | {"token_types_regressed", "Q_t_cv"}


def assert_equals_loop(values, x, ids, of_lines, *, rtol, regression_rtol, without=frozenset()):
    expected = (
        references.row_values(x)
        | references.token_values(x, ids)
        | references.unbiased_values(x, ids)
    )
    expected |= references.context_values(x, ids, range(len(ids)))
    expected = {key: expected[key] for key in expected.keys() - REGRESSIONS - without}
    lines = {key: of_lines[key] for key in REGRESSIONS}
    assert values.keys() == expected.keys() | REGRESSIONS | {"n_nonfinite"}
    assert all(value.dtype == torch.float64 and value.shape == () for value in values.values())
    assert_values(values, expected, rtol=rtol)
    assert_values(values, lines, rtol=regression_rtol)


@pytest.mark.parametrize(
    ("mean", "dtype", "options"),
    [
        (0.0, torch.float64, {}),
        (0.0, torch.float64, {"regression_count_range": (5, 20)}),
        (1000.0, torch.float32, {}),
        (1000.0, torch.bfloat16, {}),
        (1000.0, torch.float16, {}),
    ],
)
def test_values_equal_the_loop(mean, dtype, options):
    x, ids = token_rows(2000, 6, mean=mean)
    x = x.to(dtype)
    values = updated(
        TokenMoments(6, **options), x, ids, [slice(0, 900), slice(900, 2000)]
    ).compute()
    x, rtol = x.double(), 1e-9 if dtype == torch.float64 else 1e-6
    of_lines = references.token_values(x, ids, **options)
    assert_equals_loop(values, x, ids, of_lines, rtol=rtol, regression_rtol=100 * rtol)


@pytest.mark.parametrize("count_range", [(1, 10**6), (10, 100), (30, 31)])
def test_count_range_restricts_every_value_to_types_that_occur_as_often(count_range):
    x, ids = token_rows(2000, 4, mean=1000.0)
    metric = updated(
        TokenMoments(4, count_range=count_range), x, ids, [slice(0, 3), slice(3, 2000)]
    )
    kept = torch.from_numpy(references.in_count_range(ids, count_range))
    assert 0 < kept.sum() <= len(x)
    assert_equals_loop(
        metric.compute(),
        x[kept],
        ids[kept],
        references.token_values(x, ids),
        rtol=1e-9,
        regression_rtol=1e-7,
        without=NOT_OF_THE_TABLE,
    )
    assert metric.table()["token_id"].tolist() == sorted(set(ids[kept].tolist()))


def test_token_ids_must_come_with_every_update_or_with_none():
    x, ids = token_rows(10, 3)
    for first, second in ((ids, None), (None, ids)):
        metric = updated(TokenMoments(3), x, first)
        with pytest.raises(ValueError, match="token_ids must come with every update or with none"):
            metric.update(x, second)
        assert metric.compute()["n"] == 10
        metric.reset()
        metric.update(x, second)
    with pytest.raises(ValueError, match="count_range needs token_ids"):
        TokenMoments(3, count_range=(1, 2)).update(x)


N, DIM = 200, 4


@pytest.mark.parametrize("kind", [TokenMoments, EmbeddingMoments])
def test_by_default_the_leading_axis_of_a_batch_tells_the_sequences(kind):
    x, ids, _ = texts(N, DIM)
    mask = torch.arange(N).view(8, 25) % 7 > 0
    sequences = torch.arange(8).repeat_interleave(25)
    kept = mask.flatten()
    expected = references.unbiased_values(x[kept], ids[kept], sequences[kept])
    for wanted, batch in (
        (expected, (x.view(8, 25, DIM), ids.view(8, 25), mask)),
        (expected, (x[kept], ids[kept], None, sequences[kept].int())),
        (references.unbiased_values(x, ids), (x.view(N, 1, DIM), ids.view(N, 1))),
    ):
        metric = kind(DIM)
        metric.update(*batch)
        assert_values(metric.compute(), wanted, rtol=1e-9)


@pytest.mark.parametrize("options", [{}, {"count_range": (1, 100)}])
def test_rows_without_a_type_are_in_no_value_by_type_and_in_all_others(options):
    x, ids = token_rows(2000, DIM, mean=3.0)
    labels = ids.masked_fill(torch.arange(2000) % 3 == 1, -100)
    typed = labels != -100
    metric = TokenMoments(DIM, **options)
    with pytest.warns(UserWarning, match="rows with the token id -100, .* have no token type"):
        metric.update(x[:900], labels[:900])
    metric.update(x[900:], labels[900:])  # it is said once
    of_typed = updated(TokenMoments(DIM, **options), x[typed], labels[typed])
    of_all = {} if options else updated(TokenMoments(DIM), x).compute()
    by_type = {k: v for k, v in of_typed.compute().items() if k not in {*of_all, "V_over_Q"}}
    assert_values(metric.compute(), {**by_type, **of_all}, rtol=1e-9, atol=1e-12)
    assert metric.table()["token_id"].equal(of_typed.table()["token_id"])


@pytest.mark.parametrize("kind", [TokenMoments, EmbeddingMoments, Anisotropy])
def test_other_negative_ids_are_refused_unless_they_are_masked(kind):
    x, ids = token_rows(20, DIM)
    ids[[3, 5]] = torch.tensor([-7, -100])
    metric = kind(DIM)
    with pytest.raises(
        ValueError, match=r"token_ids must not be negative, but for -100, .*; got -7\. Mask"
    ):
        metric.update(x, ids)
    assert metric.num_rows == 0
    metric.update(x, ids, ids >= 0)
    assert metric.num_rows == 18


@pytest.mark.parametrize("num_sequences", [1, 2, 3, 4, 7, 60, 300])
@pytest.mark.parametrize("mean", [0.0, 1000.0])
@wide_dtypes
def test_context_in_and_between_texts_equals_that_of_all_pairs(num_sequences, mean, dtype):
    x, ids, sequences = texts(400, 3, num_sequences=num_sequences, mean=mean)
    x = x.to(dtype)
    metric = TokenMoments(3)
    metric.update(x, ids, sequence_ids=sequences)
    expected = references.context_values(x, ids, sequences)
    expected |= references.unbiased_values(x, ids, sequences)
    assert_values(metric.compute(), expected, rtol=1e-9 if dtype == torch.float64 else 1e-6)


def test_after_a_batch_without_a_finite_row_others_count():
    x, ids, _ = texts(60, 3)
    metric = updated(TokenMoments(3), torch.full_like(x, torch.nan), ids)
    values = updated(metric, x, ids).compute()
    assert_values(
        {**values, "n_nonfinite": 0.0}, updated(TokenMoments(3), x, ids).compute(), rtol=1e-12
    )
    assert values["n_nonfinite"] == 60


@pytest.mark.parametrize(
    ("num_sequences", "burst", "growing"), [(32, 20.0, False), (32, 3.0, True), (128, 0.0, False)]
)
def test_the_share_of_the_texts_is_found(num_sequences, burst, growing):
    drawn = [nested(seed, num_sequences, burst=burst, growing=growing) for seed in range(8)]
    found = sum(text_share(sample) for sample, _ in drawn) / len(drawn)
    assert found == pytest.approx(sum(share for _, share in drawn) / len(drawn), abs=0.04)
