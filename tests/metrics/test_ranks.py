"""The metrics on two gloo ranks. One pair of processes does everything; the tests look at what came
back.
"""

import warnings
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from filelock import FileLock

from embedgeo.functional import Sample, anisotropy
from embedgeo.functional.distributed import (
    all_gather,
    all_reduce_max,
    all_reduce_sum,
    current_rank,
    is_distributed,
    reduce_states,
)
from embedgeo.functional.rows import row_ids
from embedgeo.functional.tokens import TokenTable, token_table
from embedgeo.metrics import (
    AfterProcessing,
    EmbeddingMoments,
    IntrinsicDimension,
    NextTokenGeometry,
    OutlierCoordinates,
    TokenMoments,
    TokenOccurrences,
    TokenSimilarity,
)
from embedgeo.metrics.layer import LayerMetrics, reduce
from tests import references
from tests.data import (
    KINDS,
    all_nan,
    assert_values,
    floats,
    gaussian,
    metrics,
    texts,
    token_rows,
    updated,
)
from tests.metrics.own_metric import PositiveShare
from tests.ranks import on_two_ranks

pytestmark = pytest.mark.slow

DIM, N, FIRST = 4, 160, 50
SHARES = {
    "both ranks": ([slice(0, 20), slice(20, FIRST)], [slice(FIRST, N)]),
    "no rows on rank 1": ([slice(0, 20), slice(20, N)], [slice(0, 0)]),
    "no update on rank 1": ([slice(0, N)], []),
    "no rows on rank 0": ([slice(0, 0)], [slice(0, N)]),
    "no update on rank 0": ([], [slice(0, 20), slice(20, N)]),
    "no rows at all": ([slice(0, 0)], []),
}
OTHER_COLLECTIVES = [
    "all_gather",
    "all_gather_object",
    "all_gather_into_tensor",
    "gather",
    "gather_object",
    "all_to_all",
    "broadcast",
]
SAMPLES = 150
ANY_IDS = ([-100, 3, 2**62, 7], [-100, 0, 5, 9])


def rows():
    return token_rows(N, DIM, mean=100.0)


def values_on(rank):
    """Of every kind and every way to share the rows out; computed twice, with an update of one row
    in between.
    """
    warnings.filterwarnings("ignore", "The ``compute`` method of metric")  # no update on this rank
    x, ids = rows()
    values = {}
    for kind in KINDS:
        for share, parts in SHARES.items():
            metric = updated(metrics(DIM)[kind], x, ids, parts[rank])
            values[kind, share] = [metric.compute()]
            updated(metric, x[rank : rank + 1], ids[rank : rank + 1])
            values[kind, share].append(metric.compute())
    return values


def only_rank_0_has_token_ids(rank):
    x, ids = rows()
    return [
        updated(metric, x[rank::2], ids[rank::2] if rank == 0 else None).compute()
        for metric in (EmbeddingMoments(DIM), TokenMoments(DIM))
    ]


def table_on(rank):
    x, ids = rows()
    metric = updated(TokenMoments(DIM), x[rank::2], ids[rank::2])
    local = metric.table()
    with metric.sync_context():
        pooled = metric.table()
    return {"before": local, "synced": pooled, "after": metric.table()}


def table_after_reset_on(rank):
    """The tables of a metric that a layer has given the types of all ranks, and has been used again
    for other rows.
    """
    x, ids = rows()
    layer = LayerMetrics(lambda dim: [TokenMoments(dim)], DIM, device=torch.device("cpu"))
    layer.update(x[rank::2], row_ids(x[rank::2], ids[rank::2]))
    reduce([layer])
    (metric,) = layer.reset()
    empty = metric.table()
    updated(metric, x[:6], torch.full((6,), 99))
    return {"empty": empty["n"].tolist(), "again": metric.table()["token_id"].tolist()}


def occurrences_on(rank):
    """Some of each of three token types, within the context of all ranks and without it."""
    x, ids = rows()
    metric = updated(TokenOccurrences(DIM, ids[:3].tolist(), most=9), x[rank::2], ids[rank::2])
    with metric.sync_context():
        return {"synced": (metric.rows, metric.labels), "plane": metric.plane()}


def texts_on(rank):
    """Whole sequences on each rank; those of the second type of share on one rank alone."""
    x, ids, sequences = texts(N, DIM, mean=100.0)
    values = {}
    for share, own in {
        "even": sequences // 10**12 % 2 == rank,
        "all on rank 1": sequences * 0 == rank - 1,
    }.items():
        for kind in (
            TokenMoments,
            EmbeddingMoments,
            OutlierCoordinates,
            TokenSimilarity,
            NextTokenGeometry,
        ):
            metric = kind(DIM)
            metric.update(x[own], ids[own], sequence_ids=sequences[own])
            values[share, kind.__name__] = metric.compute()
    return values


def samples_on(rank):
    """Rows of each of many samples: FIRST of them on rank 0, the others on rank 1."""
    x = torch.arange(float(N))[:, None]
    samples = []
    for seed in range(SAMPLES):
        metric = IntrinsicDimension(1, batch_size=40, seed=seed)
        metric.update(x[:FIRST] if rank == 0 else x[FIRST:])
        with metric.sync_context():
            samples.append((metric.rows.flatten(), metric.keys, metric.seen))
    return [torch.stack(column) for column in zip(*samples, strict=True)]


def marked_rows_on(rank):
    """Numbers of the rows drawn from 20 a rank of which some do not count: left out, and marked, as
    on a GPU.
    """
    x = torch.arange(20.0)[:, None] + 20 * rank
    kept = torch.arange(20) % 3 > 0
    drawn = []
    for size, rows in ((40, x[kept]), (40, x), (8, x[kept]), (8, x)):
        sample = Sample.empty(1, size).extend(rows, None, kept, stream=rank, num_streams=2)
        drawn.append(reduce_states([sample])[0].rows.flatten().tolist())
    return drawn


def equal_keys_on(rank):
    """A sample in which rows have pairwise equal keys, for each rank takes itself for the only
    one.
    """
    x = torch.arange(1.0, 51.0)[:, None] + 100 * rank
    return reduce_states([Sample.empty(1, 41).extend(x)])[0].rows.flatten()


def repeated_rows_on(rank):
    """What ranks that repeat the same rows, each in a group of its own, make of a sample of
    them.
    """
    group = [dist.new_group([each]) for each in range(dist.get_world_size())][rank]
    x, _ = rows()
    samplers = AfterProcessing(DIM, sample_size=9), IntrinsicDimension(DIM, batch_size=9)
    for metric in samplers:
        metric.process_group = group
    return [updated(metric, x).compute() for metric in samplers]


def traffic_on(rank, dim=48):
    """Elements of the state and elements sent, per kind, where both ranks have seen every token
    type.
    """
    x, ids = gaussian(3000, dim, seed=rank), torch.arange(3000) % 300
    traffic = {}
    for kind, metric in metrics(dim).items():
        updated(metric, x, ids)
        state = sum(value.numel() for value in metric.metric_state.values())
        reduced = []
        with (
            mock.patch.multiple(
                dist, **dict.fromkeys(OTHER_COLLECTIVES, mock.Mock(side_effect=AssertionError))
            ),
            mock.patch.object(dist, "all_reduce", recording(dist.all_reduce, reduced)),
        ):
            metric.compute()
        traffic[kind] = {"state": state, "reduced": reduced}
    return traffic


def any_ids_on(rank):
    """Of token types with any numbers, as words have, and of rows without a type."""
    x, _ = rows()
    found = []
    for numbers in ANY_IDS:
        ids = torch.tensor(numbers)[torch.arange(N) % 4]
        metric = TokenMoments(DIM)
        metric.update(x[rank::2], ids[rank::2])
        with metric.sync_context():
            found.append(tuple(metric.load(TokenTable)))
    return found


def own_states_on(rank):
    """Values of a metric from outside the package, whose states have collectives of their own."""
    return updated(PositiveShare(DIM), rows()[0][rank::2]).compute()


def collectives_on(rank):
    """What each collective makes of a tensor that is another one on each rank, and of the tensor
    itself.
    """
    tensor, ragged = torch.tensor([[1, rank], [rank, 5]]).T, torch.arange(3 * rank)
    results = {
        "sum": all_reduce_sum(tensor),
        "max": all_reduce_max(tensor),
        "gathered": all_gather(ragged),
        "max of floats": all_reduce_max(torch.tensor([-rank - 0.5, rank * 2.0, rank - torch.inf])),
        "large sum": all_reduce_sum(torch.tensor([2**62 + rank, -3 - rank])),
    }
    return results | {"unchanged": tensor, "rank": current_rank(), "distributed": is_distributed()}


def recording(collective, sizes):
    def call(tensor, **kwargs):
        sizes.append(tensor.numel())
        return collective(tensor, **kwargs)

    return call


def everything_on(rank):
    jobs = (
        *(
            values_on,
            only_rank_0_has_token_ids,
            table_on,
            table_after_reset_on,
            texts_on,
            samples_on,
        ),
        *(
            equal_keys_on,
            marked_rows_on,
            repeated_rows_on,
            traffic_on,
            collectives_on,
            occurrences_on,
        ),
        *(any_ids_on, own_states_on),
    )
    return {job.__name__: job(rank) for job in jobs}


DEALT = {
    "batches of one size": [1000] * 12,
    "the last one is smaller": [1700] * 7 + [100],
    "one batch each, the last one smaller": [4500, 4500, 3000],
    "of all sizes, and no rank has more than are drawn": [1500, 2000, 1000, 700, 1300, 5, 0, 700],
}
"""Sizes of batches, which ranks take in turn."""


def dealt_batches(sizes):
    """Rows, one of them NaN, token ids, and a mask that leaves out a row of all but small
    batches.
    """
    x, ids = token_rows(sum(sizes), DIM, mean=3.0)
    x[1234] = torch.nan
    for rows, of_rows in zip(x.float().split(sizes), ids.split(sizes), strict=True):
        yield rows, of_rows, torch.arange(len(rows)) != 950


def drawn_on(rank, num_ranks=1):
    """Values of rows that are drawn from more of them, which ranks take in turn, and the rows'
    numbers.
    """
    found = {}
    for name, sizes in DEALT.items():
        kinds = (
            IntrinsicDimension(DIM, seed=7),
            AfterProcessing(DIM),
            TokenOccurrences(DIM, [2007, 9007], most=500),
        )
        for metric in kinds:
            for batch in [*dealt_batches(sizes)][rank::num_ranks]:
                metric.update(*batch)
        dimension, processing, occurrences = kinds
        values = {**dimension.compute(), **processing.compute()}
        with dimension.sync_context(), occurrences.sync_context():
            found[name] = values, dimension.samples(), occurrences.plane()
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory, worker_id):
    """What `everything_on` gives on each rank; run once, also where several pytest-xdist workers
    ask for it.
    """
    if worker_id == "master":
        return on_two_ranks(everything_on, tmp_path_factory.mktemp("ranks"))
    shared = tmp_path_factory.getbasetemp().parent / "ranks.pt"
    with FileLock(f"{shared}.lock"):
        if not shared.exists():
            torch.save(on_two_ranks(everything_on, tmp_path_factory.mktemp("ranks")), shared)
    return torch.load(shared)


def test_collectives_leave_their_arguments_and_take_any_length(ranks):
    for rank, result in enumerate(ranks):
        got = result["collectives_on"]
        assert got["sum"].tolist() == [[2, 1], [1, 10]]
        assert got["max"].tolist() == [[1, 1], [1, 5]]
        assert [each.tolist() for each in got["gathered"]] == [[], [0, 1, 2]]
        assert got["max of floats"].tolist() == [-0.5, 2.0, -torch.inf]
        assert got["large sum"].tolist() == [2**63 - 2**64 + 1, -7]
        assert got["unchanged"].tolist() == [[1, rank], [rank, 5]]
        assert (got["rank"], got["distributed"]) == (rank, True)


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("kind", KINDS)
def test_values_are_those_of_one_process(ranks, kind, share):
    x, ids = rows()
    one = metrics(DIM)[kind]
    per_rank = [result["values_on"][kind, share] for result in ranks]
    parts = [part for parts in SHARES[share] for part in parts]
    for step, more in enumerate((parts, [slice(0, 1), slice(1, 2)])):
        expected = updated(one, x, ids, more).compute()
        # of another sample, because batches differ in size
        if kind.startswith("IntrinsicDimension"):
            expected = {key: value for key, value in expected.items() if key == "n_points"}
        if kind == "Anisotropy with all parts":
            expected.update(batch_values(x, share, step))
        for values in per_rank:
            assert_values(values[step], expected, rtol=1e-9)
        assert_values(per_rank[0][step], per_rank[1][step], rtol=0)


def batch_values(x, share, step):
    """Batches of seven consecutive rows of one rank."""
    batches = []
    for rank, parts in enumerate(SHARES[share]):
        own = torch.cat([x[:0], *(x[part] for part in parts), x[rank : rank + step]])
        batches += [anisotropy(batch) for batch in own.split(7) if len(batch) == 7]
    values = torch.tensor(batches, dtype=torch.float64)
    spread = values.std() if len(values) > 1 else torch.nan
    return {"anisotropy_batch_mean": values.mean(), "anisotropy_batch_std": spread}


def test_what_needs_token_ids_is_undefined_where_one_rank_has_none(ranks):
    for result in ranks:
        for values in map(floats, result["only_rank_0_has_token_ids"]):
            assert values["n"] == N
            assert all_nan(
                {key: value for key, value in values.items() if key.startswith(("V_", "token_"))}
            )
            assert "V_W_over_V_unbiased" in values


def test_table_is_that_of_all_ranks_within_sync_context(ranks):
    x, ids = rows()
    whole = updated(TokenMoments(DIM), x, ids).table()
    for rank, result in enumerate(ranks):
        local = updated(TokenMoments(DIM), x[rank::2], ids[rank::2]).table()
        for name, expected in {"before": local, "synced": whole, "after": local}.items():
            for key, column in expected.items():
                torch.testing.assert_close(result["table_on"][name][key], column, rtol=1e-9, atol=0)


def test_a_metric_that_is_used_again_has_no_token_types_of_before(ranks):
    for result in ranks:
        assert result["table_after_reset_on"] == {"empty": [], "again": [99]}


def test_token_types_may_have_any_numbers(ranks):
    x, _ = rows()
    for numbers, table, other in zip(
        ANY_IDS, *(result["any_ids_on"] for result in ranks), strict=True
    ):
        expected = token_table(x, torch.tensor(numbers)[torch.arange(N) % 4])
        for state, of_other, of_one in zip(table, other, expected, strict=True):
            assert state.equal(of_other)
            torch.testing.assert_close(state, of_one, rtol=1e-9, atol=1e-9)


def test_states_with_collectives_of_their_own_are_those_of_all_ranks(ranks):
    expected = updated(PositiveShare(DIM), rows()[0]).compute()
    for result in ranks:
        assert_values(result["own_states_on"], expected, rtol=1e-12)


def test_occurrences_are_those_of_the_streams_merged(ranks):
    x, ids = rows()
    sample = Sample.empty(DIM, 9, by_label=True)
    for rank in (0, 1):
        own, of_own = x[rank::2], ids[rank::2]
        kept = torch.isin(of_own, ids[:3])
        sample = sample.merge(
            Sample.empty(DIM, 9, by_label=True).extend(
                own[kept], of_own[kept], kept, stream=rank, num_streams=2
            )
        )
    first, second = (result["occurrences_on"] for result in ranks)
    drawn, labels = first["synced"]
    assert labels.sort().values.equal(sample.labels.sort().values)
    torch.testing.assert_close(drawn.sort(0).values, sample.rows.sort(0).values, rtol=1e-12, atol=0)
    for key, column in first["plane"].items():
        assert column.equal(second["plane"][key])


def test_pairs_in_different_sequences_are_those_of_all_ranks(ranks):
    x, ids, sequences = texts(N, DIM, mean=100.0)
    pooled = references.unbiased_values(x, ids, sequences)
    parts = [sequences // 10**12 % 2 == rank for rank in (0, 1)]
    within = [
        references.within_by_pairs(x[of], ids[of], sequences[of]) * int(of.sum()) / N
        for of in parts
    ]
    for result in ranks:
        values = result["texts_on"]
        for key in (
            ("even", "TokenMoments"),
            ("all on rank 1", "TokenMoments"),
            ("all on rank 1", "EmbeddingMoments"),
        ):
            assert_values(values[key], pooled, rtol=1e-9)
        expected = references.unbiased_values(x, ids, within=sum(within))
        assert_values(values["even", "EmbeddingMoments"], expected, rtol=1e-9)


@pytest.mark.parametrize("share", ["even", "all on rank 1"])
def test_first_positions_are_those_of_all_ranks(ranks, share):
    x, _, sequences = texts(N, DIM, mean=100.0)
    is_first = torch.tensor([sequence not in sequences[:i] for i, sequence in enumerate(sequences)])
    for result in ranks:
        values = result["texts_on"][share, "OutlierCoordinates"]
        assert_values(values, references.outliers(x, is_first), rtol=1e-9)


@pytest.mark.parametrize("kind", [TokenSimilarity, NextTokenGeometry])
@pytest.mark.parametrize("share", ["even", "all on rank 1"])
def test_values_of_sequences_are_those_of_one_process(ranks, share, kind):
    x, ids, sequences = texts(N, DIM, mean=100.0)
    one = kind(DIM)
    one.update(x, ids, sequence_ids=sequences)
    for result in ranks:
        assert_values(
            result["texts_on"][share, kind.__name__], one.compute(), rtol=1e-9, atol=1e-12
        )


def test_ranks_that_repeat_rows_draw_the_same_sample(ranks):
    first, second = (result["repeated_rows_on"] for result in ranks)
    for values, others in zip(first, second, strict=True):
        assert_values(values, others, rtol=0)


def test_the_sample_is_the_same_on_every_rank_and_that_of_the_streams_merged(ranks):
    x = torch.arange(float(N))[:, None]
    (drawn, keys, seen), other = (result["samples_on"] for result in ranks)
    for mine, others in zip((drawn, keys, seen), other, strict=True):
        assert mine.equal(others)
    assert (seen == N).all()
    for seed in range(0, SAMPLES, 10):
        streams = [
            Sample.empty(1, 40, seed=seed).extend(part, stream=rank, num_streams=2)
            for rank, part in enumerate((x[:FIRST], x[FIRST:]))
        ]
        merged = streams[0].merge(streams[1])
        assert drawn[seed].sort().values.equal(merged.rows.flatten().sort().values)


def test_rows_that_do_not_count_are_not_drawn_where_they_are_marked(ranks):
    for result in ranks:
        left_out, marked, few_left_out, few_marked = result["marked_rows_on"]
        assert (
            sorted(left_out)
            == sorted(marked)
            == [20 * rank + i for rank in (0, 1) for i in range(20) if i % 3]
        )
        assert few_left_out == few_marked


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_the_same_rows_are_drawn_on_any_number_of_ranks(num_ranks, tmp_path):
    one = drawn_on(0)
    for rank in on_two_ranks(drawn_on, tmp_path, num_ranks, world_size=num_ranks):
        for name, (values, samples, plane) in one.items():
            of_rank, samples_of_rank, plane_of_rank = rank[name]
            assert samples_of_rank["positions"].equal(samples["positions"]), name
            assert samples_of_rank["rows"].equal(samples["rows"])
            assert_values(of_rank, values, rtol=1e-9)
            for key, column in plane.items():
                torch.testing.assert_close(plane_of_rank[key], column, rtol=1e-6, atol=1e-6)


def test_every_row_of_every_rank_is_drawn_as_often(ranks):
    drawn = ranks[0]["samples_on"][0]
    assert all(sample.unique().numel() == 40 for sample in drawn)
    counts = torch.bincount(drawn.flatten().long(), minlength=N)
    share = 40 / N
    chi_square = (counts - SAMPLES * share).square().sum() / (SAMPLES * share * (1 - share))
    assert chi_square < 220  # the 0.999 quantile for 159 degrees of freedom


def test_rows_with_equal_keys_are_not_lost(ranks):
    drawn, other = (result["equal_keys_on"] for result in ranks)
    assert drawn.equal(other)
    assert drawn.unique().numel() == 41
    assert drawn.min() >= 1


@pytest.mark.parametrize("kind", KINDS)
def test_synchronising_reduces_about_one_state_and_gathers_none(ranks, kind):
    for result in ranks:
        traffic = result["traffic_on"][kind]
        assert 0 < sum(traffic["reduced"]) <= 2.2 * traffic["state"]
        assert len(traffic["reduced"]) <= 9
