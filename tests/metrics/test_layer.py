"""Standard errors of a layer's metrics: those of one process on any number of ranks, and no value changes for them."""

import math

import pytest
import torch
import torch.distributed as dist

from embedgeo import Anisotropy, EmbeddingMoments, IntrinsicDimension, TokenMoments, observe
from embedgeo.metrics.layer import LayerMetrics
from tests.models import gpt_neox, token_batch
from tests.ranks import WORLD_SIZE, on_two_ranks

SIZES = (6, 6, 6, 6, 5)  # rank 1 has no last batch, which is smaller
OPTIONS = {
    "tokens": {},
    "padded": {},
    "packed": {},
    "means": {"rows": "mean"},
    "first tokens": {"rows": "first"},
    "two groups": {"jackknife": 2},
    "more groups than sequences": {"jackknife": 40},
    "moments alone": {"metrics": lambda dim: [EmbeddingMoments(dim)]},
}


def every_metric(dim):
    return [
        TokenMoments(dim, regression_count_range=(2, 1000)),
        Anisotropy(dim, spectrum=True),
        IntrinsicDimension(dim),
    ]


def batches(name):
    for i, size in enumerate(SIZES):
        batch = token_batch(size, seed=i, padding="right" if name == "padded" else None)
        if name == "packed":
            batch = {"input_ids": batch["input_ids"], "position_ids": torch.arange(12).remainder(4 + i)[None]}
        yield batch


def measured(name, rank=0, num_ranks=1, **options):
    """The value and the standard error of each metric and layer."""
    torch.manual_seed(0)
    model = gpt_neox().eval()
    options = {"metrics": every_metric, "jackknife": 8, **OPTIONS[name], **options}
    with observe(model, ["embed", "block.01"], **options) as geometry, torch.no_grad():
        for batch in list(batches(name))[rank::num_ranks]:
            model(**batch)
    return {(r["layer"], r["metric"]): (r["value"], r["stderr"]) for r in geometry.records()}


def on_rank(rank):
    found = {name: measured(name, rank, WORLD_SIZE) for name in OPTIONS}
    return found, in_process_group(dist.new_group([0, 1]), rank, WORLD_SIZE)


def in_process_group(group=None, rank=0, num_ranks=1):
    """The value and the standard error of each metric."""
    metrics = LayerMetrics(every_metric, 6, device=torch.device("cpu"), process_group=group, jackknife=8)
    for seed in range(8)[rank::num_ranks]:
        rows = torch.randn(5, 12, 6, generator=torch.Generator().manual_seed(seed))
        metrics.update(rows, (7 * rows[..., 0]).long() % 9, None, torch.arange(5)[:, None].expand(5, 12))
    values, _ = metrics.compute()
    return {key: tuple(pair.tolist()) for key, pair in values.items()}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return on_two_ranks(on_rank, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", OPTIONS)
def test_standard_errors_are_those_of_one_process(ranks, name):
    one = measured(name)
    for rank, _ in ranks:
        assert rank[name].keys() == one.keys()
        for key, pair in one.items():
            assert rank[name][key] == pytest.approx(pair, rel=1e-9, abs=1e-12, nan_ok=True), key


def test_standard_errors_are_those_of_one_process_in_a_process_group(ranks):
    one = in_process_group()
    for _, rank in ranks:
        for key, pair in one.items():
            assert rank[key] == pytest.approx(pair, rel=1e-9, abs=1e-12, nan_ok=True), key


@pytest.mark.parametrize("name", OPTIONS)
def test_values_are_bit_for_bit_those_without_standard_errors(name):
    plain = measured(name, jackknife=0)
    assert all(math.isnan(error) for _, error in plain.values())
    for key, (value, error) in measured(name).items():
        assert value == plain[key][0] or (math.isnan(value) and math.isnan(plain[key][0])), key
        if key in {("block.01", "M_over_Q"), ("block.01", "mean_cosine"), ("block.01", "anisotropy")}:
            assert 0 < error < math.inf, key


def test_groups_are_whole_sequences_dealt_in_turn():
    torch.manual_seed(0)
    model = gpt_neox().eval()
    found = measured("tokens", jackknife=3)["block.01", "Q"]
    with torch.no_grad():
        states = [model(**batch, output_hidden_states=True).hidden_states[2] for batch in batches("tokens")]
    squares = [state.double().square().sum(-1).mean(1) for state in states]  # of each sequence
    groups = torch.cat([(b * len(of) + torch.arange(len(of))) % 3 for b, of in enumerate(squares)])
    q = torch.cat(squares)
    left_out, sizes = torch.stack([q[groups != g].mean() for g in range(3)]), groups.bincount()
    assert sizes.tolist() == [10, 10, 9] or sorted(sizes.tolist()) == [9, 10, 10]
    others = len(q) / sizes - 1
    deviations = others * (q.mean() - left_out)
    variance = ((deviations - (deviations / (others + 1)).sum()).square() / others).mean()
    assert found == pytest.approx((float(q.mean()), float(variance.sqrt())), rel=1e-6)
