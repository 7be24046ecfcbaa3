import numpy as np
import pytest
import torch

from embedgeo import Anisotropy, EmbeddingMoments, IntrinsicDimension, TokenMoments
from embedgeo.functional.jackknife import deviations
from research.simulations import Corpus, observe_rows
from research.standard_errors import DIMENSIONS, coverage
from tests import references
from tests.data import assert_values, texts, updated
from tests.observed import kept_rows

CORPUS = Corpus(num_types=40, dim=6)
RANGE = (10, 40)
OF_SOME_TYPES = {"count_range": (5, 60), "regression_count_range": RANGE}


def batches(size=6):
    """Embeddings, token ids and sequence ids; the last batch is smaller."""
    x, ids = CORPUS.draw(26, 30, seed=0)
    sequences = [torch.arange(len(part))[:, None].expand(part.shape) for part in ids.split(size)]
    return list(zip(x.split(size), ids.split(size), sequences, strict=True))


def lengths_mask(ids):
    return torch.arange(ids.shape[1]) < 12 + 3 * torch.arange(len(ids))[:, None]


def measured(make, num_groups, size=6):
    """Values and their errors."""
    with observe_rows(make, num_groups) as geometry:
        for x, ids, _ in batches(size=size):
            geometry.model(x, ids, lengths_mask(ids))
    records = [each for each in geometry.records() if "massive" not in each["metric"]]
    values, errors = (
        {each["metric"]: torch.tensor(each[of], dtype=torch.float64) for each in records}
        for of in ("value", "stderr")
    )
    return values, errors


def naive(metric, num_groups, **options):
    """By the definition: the metric of all rows, and of the rows of all groups but one."""

    def made(left_out):
        of_rows, count = metric(6, **options), 0
        for b, (x, ids, sequences) in enumerate(batches()):
            groups = (b * len(x) + sequences) % num_groups
            mask = lengths_mask(ids) & (groups != left_out)
            count += int((lengths_mask(ids) & (groups == left_out)).sum())
            of_rows.update(x[mask], ids[mask], sequence_ids=sequences[mask])
        return of_rows, count

    whole, _ = made(None)
    without, sizes = zip(*(made(group) for group in range(num_groups)), strict=True)
    for each in without:
        each.hold(whole)
    left_out = [each.compute() for each in without]
    return {
        key: deviations(
            value, torch.stack([each[key] for each in left_out]), torch.tensor(sizes)
        ).norm()
        for key, value in whole.compute().items()
    }


def test_types_without_a_group_are_looked_at_as_among_all_rows():
    """Those that are regressed are as frequent there, and those alike in as many sequences."""
    x, ids, sequences = texts(600, 6)
    kept = sequences > sequences.median()
    whole, some = (TokenMoments(6, regression_count_range=RANGE) for _ in range(2))
    whole.update(x, ids, sequence_ids=sequences)
    some.update(x[kept], ids[kept], sequence_ids=sequences[kept])
    some.hold(whole)
    regressed = kept & torch.from_numpy(references.in_count_range(ids, RANGE))
    every = TokenMoments(6, regression_count_range=(1, 10**9))
    lines = updated(every, x[regressed], ids[regressed]).compute()
    seen_in = {int(t): len(sequences[ids == t].unique()) for t in ids.unique()}
    expected = references.context_values(x[kept], ids[kept], sequences[kept], seen_in)
    expected |= {key: lines[key] for key in {"Q_t_cv", *references.LINES}}
    assert_values(some.compute(), expected, rtol=1e-8)


@pytest.mark.parametrize("num_groups", [2, 5])
@pytest.mark.parametrize(
    ("metric", "options"),
    [
        (TokenMoments, {"regression_count_range": RANGE}),
        (TokenMoments, OF_SOME_TYPES),
        (Anisotropy, {"spectrum": True}),
    ],
)
def test_errors_are_those_of_estimates_without_each_group(metric, options, num_groups):
    _, errors = measured(lambda dim: [metric(dim, **options)], num_groups)
    expected = naive(metric, num_groups, **options)
    assert errors.keys() == expected.keys()
    for key, error in errors.items():
        torch.testing.assert_close(
            error, expected[key], rtol=1e-8, atol=1e-10, equal_nan=True, msg=key
        )


def test_moments_without_a_table_have_errors_too():
    """Those of V_W are from pairs within each group, as its values are from pairs within each
    update.
    """
    _, errors = measured(lambda dim: [EmbeddingMoments(dim)], 4, size=12)
    expected = measured(lambda dim: [TokenMoments(dim)], 4, size=12)[1]
    for key, error in errors.items():
        if "unbiased" in key:
            assert 0 < error < 5 * expected[key]
        else:
            torch.testing.assert_close(error, expected[key], rtol=1e-8, atol=1e-10, msg=key)


def test_the_error_of_the_intrinsic_dimension_is_that_of_the_fit_without_each_group():
    values, errors = measured(lambda dim: [IntrinsicDimension(dim)], 5)
    rows, groups = [], []
    for b, (x, ids, sequences) in enumerate(batches()):
        rows.append(x[lengths_mask(ids)])
        groups.append(((b * len(x) + sequences) % 5)[lengths_mask(ids)])
    x, group = torch.cat(rows), torch.cat(groups)
    nearest = np.sort(references.all_distances(x))
    whole, *left_out = (torch.tensor(references.twonn(nearest[group != i])) for i in range(-1, 5))
    expected = deviations(whole, torch.stack(left_out), group.bincount()).norm()
    torch.testing.assert_close(errors["intrinsic_dimension"], expected, rtol=1e-5, atol=0)
    torch.testing.assert_close(values["intrinsic_dimension"], whole, rtol=1e-6, atol=0)
    assert errors["n_points"].isnan()


def test_numbers_of_a_sample_and_metrics_of_others_have_no_errors():
    values, errors = measured(kept_rows, 4)
    assert values["count"] > 0
    assert all(error.isnan() for error in errors.values())


@pytest.mark.slow
def test_intervals_hold_the_value_of_the_population_as_often_as_they_should():
    """Of 12 small samples; of 200: ``python -m research.standard_errors``."""
    shares = coverage(12, Corpus(), num_groups=8, num_sequences=32)["coverage"]
    is_dimension = shares.index.isin(DIMENSIONS)
    assert shares[~is_dimension].between(0.82, 1).all(), shares
    assert shares[is_dimension].between(0.66, 1).all(), shares  # of 200 samples: 0.90 to 0.95
