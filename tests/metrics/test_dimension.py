import math

import numpy as np
import pytest
import skdim.id
import torch

from embedgeo.functional import merge_duplicates
from embedgeo.metrics import IntrinsicDimension
from tests import references
from tests.data import assert_values, floats, gaussian, texts, updated, wide_dtypes

KEYS = {
    "intrinsic_dimension",
    "intrinsic_dimension_std",
    "duplicate_fraction",
    "mean_cosine_without_top_dim",
    "n_points",
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("size", "num_batches"), [(500, 1), (100, 3)])
def test_values_are_those_of_scikit_dimension_on_the_distinct_rows(dtype, size, num_batches):
    x = gaussian(400, 10).to(dtype)
    metric = updated(IntrinsicDimension(10, size, num_batches), torch.cat((x, x[:100])))
    batches = [merge_duplicates(rows).double() for rows in metric.sample().rows.split(size)]
    dimensions = [skdim.id.TwoNN().fit(batch.numpy()).dimension_ for batch in batches]
    num_points = sum(map(len, batches))
    expected = {
        "intrinsic_dimension": np.mean(dimensions),
        "intrinsic_dimension_std": np.std(dimensions, ddof=1) if num_batches > 1 else math.nan,
        "duplicate_fraction": 1 - num_points / size / num_batches,
        "n_points": float(num_points),
    }
    assert num_points < size * num_batches
    assert_values(metric.compute(), expected, rtol=1e-6)


def labelled(x, ids, sequences, parts=(slice(None),), **options):
    metric = IntrinsicDimension(x.shape[1], **options)
    for part in parts:
        metric.update(x[part], ids[part], sequence_ids=sequences[part])
    return metric


@wide_dtypes
def test_dimensions_and_neighbours_by_label_are_those_of_loops(dtype):
    x, ids, sequences = texts(700, 5, num_sequences=12, mean=3.0)
    x = x.to(dtype)
    metric = labelled(x, ids, sequences)
    expected = references.labelled_dimensions(x, ids, sequences, metric.keys)
    values = metric.compute()
    assert values.keys() == KEYS | expected.keys()
    assert_values(values, expected, rtol=1e-9 if dtype == torch.float64 else 1e-5)
    first = sequences <= sequences.median()  # an update has whole sequences
    halves = labelled(x, ids, sequences, [first, ~first])
    order = torch.cat((first.nonzero(), (~first).nonzero())).flatten()
    expected = references.labelled_dimensions(x[order], ids[order], sequences[order], halves.keys)
    assert_values(halves.compute(), expected, rtol=1e-9 if dtype == torch.float64 else 1e-5)


def test_copies_count_by_their_share_and_ties_by_half():
    """Points at 0, 1, 2 and 10, 10.5; that at 0 is two copies, of types 1 and 2; that at 1 is as
    near to 0 as to 2.
    """
    x = torch.tensor([[0.0], [0.0], [1.0], [2.0], [10.0], [10.5]]).double()
    ids = torch.tensor([1, 2, 1, 1, 3, 4])
    values = floats(labelled(x, ids, torch.arange(6)).compute())
    of_rows = [1, 0, (0.5 + 1) / 2, 1, 0, 0]
    assert values["same_type_neighbors"] == pytest.approx(sum(of_rows) / 6, rel=1e-12)
    others = [2 / 4, 0, 2 / 5, 2 / 5, 0, 0]
    assert values["same_type_neighbors_null"] == pytest.approx(sum(others) / 6, rel=1e-12)
    assert values["same_sequence_neighbors"] == values["same_sequence_neighbors_null"] == 0


def test_what_labels_there_are_decides_on_the_keys():
    x, ids, sequences = texts(100, 4)
    plain = updated(IntrinsicDimension(4), x).compute()
    assert plain.keys() == KEYS
    of_types = {
        "same_type_neighbors",
        "same_type_neighbors_null",
        "intrinsic_dimension_between",
        "n_points_between",
    }
    assert updated(IntrinsicDimension(4), x, ids).compute().keys() == KEYS | of_types
    metric = IntrinsicDimension(4)
    metric.update(x, sequence_ids=sequences)
    assert metric.compute().keys() == KEYS | {
        "same_sequence_neighbors",
        "same_sequence_neighbors_null",
    }
    of_all = labelled(x, ids, sequences).compute()
    assert all(of_all[key].equal(plain[key]) for key in KEYS - {"intrinsic_dimension_std"})


def test_neighbours_of_other_sequences_alone():
    x, ids, sequences = texts(600, 4, num_sequences=6)
    values = labelled(x, ids, sequences, neighbors="other_sequences").compute()
    distances = references.all_distances(x)
    distances[sequences[:, None] == sequences] = math.inf
    expected = references.twonn(np.sort(distances))
    assert float(values["intrinsic_dimension"]) == pytest.approx(expected, rel=1e-9)
    assert values["same_sequence_neighbors"] == 0


def twelve_texts():
    x, ids, _ = texts(600, 5, mean=3.0)
    return x.view(12, 50, 5), ids.view(12, 50)


def of_halves(x, ids, seeds, **options):
    """A metric that has seen the first half, and one that has seen the second."""
    metrics = [IntrinsicDimension(5, seed=seed, **options) for seed in seeds]
    return [updated(*each) for each in zip(metrics, x.split(6), ids.split(6), strict=True)]


@pytest.mark.parametrize("neighbors", ["all", "other_sequences"])
@pytest.mark.parametrize("seeds", [(0, 0), (0, 1)])
def test_metrics_that_have_seen_half_of_the_texts_each_are_merged_into_one_of_all(seeds, neighbors):
    """Both count their rows, and so their sequences, from 0."""
    x, ids = twelve_texts()
    x[3, 7] = torch.nan
    parts = slice(0, 6), slice(6, 12)
    whole = updated(IntrinsicDimension(5, neighbors=neighbors), x, ids, parts)
    halves = of_halves(x, ids, seeds, neighbors=neighbors)
    halves[0].merge_state(halves[1])
    assert_values(halves[0].compute(), whole.compute(), rtol=1e-12)
    for name, column in whole.samples().items():
        assert halves[0].samples()[name].equal(column), name
    for each in (halves[0], whole):
        each.update(x[:2], ids[:2])
    assert_values(halves[0].compute(), whole.compute(), rtol=1e-12)


def test_rows_of_two_samples_keep_their_own_types_and_sequences_when_merged():
    """Of samples that leave out rows."""
    x, ids = twelve_texts()
    halves = of_halves(x, ids, (0, 1), batch_size=200)
    halves[0].merge_state(halves[1])
    sample = halves[0].samples()
    places = sample["positions"]
    assert len(places.unique()) == 200
    assert sample["rows"].equal(x.flatten(0, 1)[places])
    assert sample["token_ids"].equal(ids.flatten()[places])
    assert sample["sequence_ids"].equal(places // 50 * 50)


def test_samples_that_leave_out_rows_are_merged_to_a_uniform_one_whatever_their_seeds():
    x = gaussian(60, 5)
    x[:, 0] = torch.arange(60)
    counts = torch.zeros(60)
    for seed in range(200):
        metric, other, small, apart = (
            updated(IntrinsicDimension(5, batch_size=20, seed=number), rows)
            for number, rows in (
                (seed, x[:30]),
                (seed, x[30:50]),
                (seed, x[50:52]),
                (seed + 1, x[52:]),
            )
        )
        for each in (other, small, apart.metric_state):
            metric.merge_state(each)
        drawn = metric.sample().rows[:, 0].long()
        assert len(drawn.unique()) == 20
        counts[drawn] += 1
    # 200 · 20 / 60, within five standard deviations
    assert counts.min() > 33
    assert counts.max() < 100
