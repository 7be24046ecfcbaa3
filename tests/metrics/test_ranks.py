"""The metrics on two gloo ranks. One pair of processes does everything; the tests look at what came
back.
"""

import warnings
from itertools import product

import pytest
import torch

from embedgeo.functional import anisotropy
from embedgeo.functional.distributed import all_gather, all_reduce_max, current_rank, is_distributed
from embedgeo.metrics import EmbeddingMoments, TokenMoments
from tests.data import KINDS, all_nan, assert_values, floats, new_metric, token_rows, updated
from tests.ranks import on_two_ranks

pytestmark = pytest.mark.slow

DIM, N, FIRST = 4, 160, 50
SHARES = {
    "both ranks": ([slice(0, 20), slice(20, FIRST)], [slice(FIRST, N)]),
    "no rows on rank 1": ([slice(0, 20), slice(20, N)], [slice(0, 0)]),
    "no update on rank 0": ([], [slice(0, 20), slice(20, N)]),
    "no rows at all": ([slice(0, 0)], []),
}


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
            metric = updated(new_metric(kind), x, ids, parts[rank])
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


def collectives_on(rank):
    """What each collective makes of a tensor that is another one on each rank, and of the tensor
    itself.
    """
    tensor, ragged = torch.tensor([[1, rank], [rank, 5]]).T, torch.arange(3 * rank)
    results = {
        "max": all_reduce_max(tensor),
        "gathered": all_gather(ragged),
        "max of floats": all_reduce_max(torch.tensor([-rank - 0.5, rank * 2.0, rank - torch.inf])),
    }
    return results | {"unchanged": tensor, "rank": current_rank(), "distributed": is_distributed()}


def everything_on(rank):
    jobs = values_on, only_rank_0_has_token_ids, collectives_on
    return {job.__name__: job(rank) for job in jobs}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What `everything_on` gives on each rank."""
    return on_two_ranks(everything_on, tmp_path_factory.mktemp("ranks"))


def test_collectives_leave_their_arguments_and_take_any_length(ranks):
    for rank, result in enumerate(ranks):
        got = result["collectives_on"]
        assert got["max"].tolist() == [[1, 1], [1, 5]]
        assert [each.tolist() for each in got["gathered"]] == [[], [0, 1, 2]]
        assert got["max of floats"].tolist() == [-0.5, 2.0, -torch.inf]
        assert got["unchanged"].tolist() == [[1, rank], [rank, 5]]
        assert (got["rank"], got["distributed"]) == (rank, True)


def test_values_are_those_of_one_process(ranks):
    x, ids = rows()
    for kind, (share, of_ranks) in product(KINDS, SHARES.items()):
        one = new_metric(kind)
        per_rank = [result["values_on"][kind, share] for result in ranks]
        parts = [part for parts in of_ranks for part in parts]
        for step, more in enumerate((parts, [slice(0, 1), slice(1, 2)])):
            expected = updated(one, x, ids, more).compute()
            # of another sample, because batches differ in size
            if kind.startswith("IntrinsicDimension"):
                expected = {"n_points": expected.get("n_points", torch.nan)}
                if "n_points" not in per_rank[0][step]:
                    continue
            if kind == "Anisotropy with all parts":
                expected.update(batch_values(x, share, step))
            for values in per_rank:
                assert_values(values[step], expected, rtol=1e-9)
            assert_values(per_rank[0][step], per_rank[1][step], rtol=0)


def batch_values(x, share, step):
    """Batches of seven consecutive rows of one rank, and of those that are left on any."""
    batches, left = [], x[:0]
    for rank, parts in enumerate(SHARES[share]):
        own = torch.cat([x[:0], *(x[part] for part in parts), x[rank : rank + step]])
        num_whole = len(own) // 7 * 7
        batches += [anisotropy(batch) for batch in own[:num_whole].split(7) if len(batch)]
        left = torch.cat([left, own[num_whole:]])
    batches += [anisotropy(batch) for batch in left.split(7) if len(batch) == 7]
    values = torch.tensor(batches, dtype=torch.float64)
    spread = values.std() if len(values) > 1 else torch.nan
    return {"anisotropy_batch_mean": values.mean(), "anisotropy_batch_std": spread}


def test_what_needs_token_ids_is_undefined_where_one_rank_has_none(ranks):
    for result in ranks:
        for values in map(floats, result["only_rank_0_has_token_ids"]):
            assert values["n"] == N
            assert all_nan(
                {key: v for key, v in values.items() if key.startswith(("V_W", "V_B", "token_"))}
            )
            assert "V_W_over_V_unbiased" in values
