"""Standard errors of layers by groups of whole sequences, on one process and on two ranks."""

import math

import pytest
import torch

from embedgeo import Anisotropy, EmbeddingMoments, IntrinsicDimension, TokenMoments, observe
from tests.data import gaussian
from tests.models import eval_model, gpt_neox, token_batch
from tests.ranks import WORLD_SIZE, on_two_ranks
from tests.training.runs import observed_on

SIZES = (6, 6, 6, 6, 5)  # rank 1 has no last batch, which is smaller

OPTIONS = {
    "padded": {"rows": "mean"},
    "packed": {"jackknife": 2, "metrics": lambda dim: [EmbeddingMoments(dim), Anisotropy(dim)]},
    "more groups than sequences": {"jackknife": 40},
}


FEWER_SEQUENCES = pytest.mark.filterwarnings(
    "ignore:jackknife must not be more groups than there are sequences"
)


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
            batch = {
                "input_ids": batch["input_ids"],
                "position_ids": torch.arange(12).remainder(4 + i)[None],
            }
        yield batch


def measured(name, rank=0, num_ranks=1, **options):
    """The value and the standard error of each metric and layer."""
    model = eval_model("gpt_neox")
    options = {"metrics": every_metric, "jackknife": 8, **OPTIONS.get(name, {}), **options}
    given = list(batches(name))[rank::num_ranks]
    geometry = observed_on(model, given, layers="block.01", **options)
    return {(r["layer"], r["metric"]): (r["value"], r["stderr"]) for r in geometry.records()}


def on_rank(rank):
    return {name: measured(name, rank, WORLD_SIZE) for name in OPTIONS}


@pytest.mark.slow
@FEWER_SEQUENCES
def test_standard_errors_of_two_ranks_are_those_of_one_process(tmp_path):
    ranks = on_two_ranks(on_rank, tmp_path)
    for name in OPTIONS:
        one = measured(name)
        for rank in ranks:
            assert rank[name].keys() == one.keys()
            for key, pair in one.items():
                assert rank[name][key] == pytest.approx(pair, rel=1e-9, abs=1e-12, nan_ok=True), (
                    name,
                    key,
                )


@FEWER_SEQUENCES
@pytest.mark.parametrize("name", OPTIONS)
def test_values_are_bit_for_bit_those_without_standard_errors(name):
    plain = measured(name, jackknife=0)
    assert all(math.isnan(error) for _, error in plain.values())
    for key, (value, error) in measured(name).items():
        assert value == plain[key][0] or (math.isnan(value) and math.isnan(plain[key][0])), key
        if key[1] in {"M_over_Q", "mean_cosine", "anisotropy"}:
            assert 0 < error < math.inf, key


def test_there_are_no_more_groups_than_sequences():
    model = eval_model("gpt_neox")
    options = {"layers": "block.01", "metrics": every_metric}
    geometry = observed_on(model, [token_batch(4)], **options, jackknife=1000)
    with pytest.warns(
        UserWarning, match="must not be more groups than there are sequences; got 1000 for 4, so"
    ):
        many = geometry.records()
    assert repr(geometry.records()) == repr(many)  # said once
    geometry = observed_on(model, [token_batch(4)], **options, jackknife=4)
    assert repr(geometry.records()) == repr(many)


def test_ids_that_change_in_place_between_two_calls_of_the_blocks_count_as_they_are():
    model, ids = gpt_neox().eval(), torch.arange(8).view(2, 4)
    block = model.gpt_neox.layers[0]
    hidden = gaussian(2, 4 * 16).view(2, 4, 16).float()
    positions = model.gpt_neox.rotary_emb(hidden, torch.arange(4)[None])
    with (
        observe(model, "block.00", token_ids=ids, mask=torch.ones(2, 4)) as geometry,
        torch.no_grad(),
    ):
        block(hidden, position_embeddings=positions)
        ids += 100
        block(hidden, position_embeddings=positions)
    table = geometry.token_tables()
    assert sorted(table["token_id"]) == [*range(8), *range(100, 108)]
