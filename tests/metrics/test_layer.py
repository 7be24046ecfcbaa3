"""The metrics of a layer: groups for standard errors, ranks, and what metrics and layers share in
one forward pass.
"""

import gc
import math

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from embedgeo import Anisotropy, EmbeddingMoments, IntrinsicDimension, TokenMoments, observe
from embedgeo.functional.lockstep import at_once, called, computed, steps, stepwise
from embedgeo.functional.moments import CHUNK_ELEMENTS, row_moments
from embedgeo.functional.rows import BatchIds, RowIds, Rows, row_ids, select_rows
from embedgeo.functional.sampling import Sample
from embedgeo.metrics.layer import LayerMetrics
from tests.data import floats, gaussian, texts
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
    metrics = LayerMetrics(
        every_metric, 6, device=torch.device("cpu"), process_group=group, jackknife=8
    )
    for seed in range(8)[rank::num_ranks]:
        rows = torch.randn(5, 12, 6, generator=torch.Generator().manual_seed(seed))
        sequences = torch.arange(5)[:, None].expand(5, 12)
        metrics.update(rows, row_ids(rows, (7 * rows[..., 0]).long() % 9, None, sequences))
    values = metrics.compute()
    return {key: tuple(pair.tolist()) for key, pair in values.items()}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return on_two_ranks(on_rank, tmp_path_factory.mktemp("ranks"))


@pytest.mark.slow
@FEWER_SEQUENCES
@pytest.mark.parametrize("name", OPTIONS)
def test_standard_errors_are_those_of_one_process(ranks, name):
    one = measured(name)
    for rank, _ in ranks:
        assert rank[name].keys() == one.keys()
        for key, pair in one.items():
            assert rank[name][key] == pytest.approx(pair, rel=1e-9, abs=1e-12, nan_ok=True), key


@pytest.mark.slow
def test_standard_errors_are_those_of_one_process_in_a_process_group(ranks):
    one = in_process_group()
    for _, rank in ranks:
        for key, pair in one.items():
            assert rank[key] == pytest.approx(pair, rel=1e-9, abs=1e-12, nan_ok=True), key


@pytest.mark.slow
@FEWER_SEQUENCES
@pytest.mark.parametrize("name", OPTIONS)
def test_values_are_bit_for_bit_those_without_standard_errors(name):
    plain = measured(name, jackknife=0)
    assert all(math.isnan(error) for _, error in plain.values())
    for key, (value, error) in measured(name).items():
        assert value == plain[key][0] or (math.isnan(value) and math.isnan(plain[key][0])), key
        if key in {
            ("block.01", "M_over_Q"),
            ("block.01", "mean_cosine"),
            ("block.01", "anisotropy"),
        }:
            assert 0 < error < math.inf, key


def test_groups_are_whole_sequences_dealt_in_turn():
    torch.manual_seed(0)
    model = gpt_neox().eval()
    found = measured("tokens", jackknife=3)["block.01", "Q"]
    with torch.no_grad():
        states = [
            model(**batch, output_hidden_states=True).hidden_states[2]
            for batch in batches("tokens")
        ]
    squares = [state.double().square().sum(-1).mean(1) for state in states]  # of each sequence
    groups = torch.cat([(b * len(of) + torch.arange(len(of))) % 3 for b, of in enumerate(squares)])
    q = torch.cat(squares)
    left_out, sizes = torch.stack([q[groups != g].mean() for g in range(3)]), groups.bincount()
    assert sizes.tolist() == [10, 10, 9] or sorted(sizes.tolist()) == [9, 10, 10]
    others = len(q) / sizes - 1
    deviations = others * (q.mean() - left_out)
    variance = ((deviations - (deviations / (others + 1)).sum()).square() / others).mean()
    assert found == pytest.approx((float(q.mean()), float(variance.sqrt())), rel=1e-6)


def test_there_are_no_more_groups_than_sequences():
    made = []

    def metrics(dim):
        made.append(dim)
        return every_metric(dim)

    torch.manual_seed(0)
    model = gpt_neox().eval()
    with observe(model, "block.01", metrics=metrics, jackknife=1000) as geometry, torch.no_grad():
        model(**token_batch(4))
    with pytest.warns(
        UserWarning, match="must not be more groups than there are sequences; got 1000 for 4, so"
    ):
        many = geometry.records()
    assert repr(geometry.records()) == repr(many)  # said once
    assert len(made) < 10
    with observe(model, "block.01", metrics=every_metric, jackknife=4) as geometry, torch.no_grad():
        model(**token_batch(4))
    assert repr(geometry.records()) == repr(many)


def observed(batch, **options):
    with observe(gpt_neox().eval(), **options) as geometry, torch.no_grad():
        geometry.model(**batch)
    return geometry


def test_words_are_found_once_a_forward_pass():
    options = {"rows": "words", "word_ids": torch.arange(12).expand(4, 12) // 3}
    found = []
    for layers in ("block.00", "blocks"):
        with Watched() as watched:
            observed(
                token_batch(4), layers=layers, metrics=lambda dim: [Anisotropy(dim)], **options
            )
        found.append(watched.num_unique)
    assert found[0] == found[1] > 0


@pytest.mark.slow
def test_nothing_of_the_ids_is_kept_after_the_measurement():
    gc.collect()
    before = {id(each) for each in gc.get_objects() if type(each) is RowIds}
    geometry = observed(token_batch(4), jackknife=2)
    gc.collect()
    assert {id(each) for each in gc.get_objects() if type(each) is RowIds} <= before
    assert geometry.compute()["block.01"]["n"] == 48


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


@pytest.mark.parametrize("make", [TokenMoments, EmbeddingMoments, Anisotropy])
def test_prepared_rows_give_the_values_of_tensors(make):
    x, ids, sequences = texts(300, 6)
    x[7] = torch.nan
    mask = torch.arange(300) % 5 > 0
    of_tensors, of_rows = make(6), make(6)
    of_tensors.update(x, ids, mask, sequences)
    of_rows.update(select_rows(x, ids, mask, sequences, dim=6))
    assert floats(of_rows.compute()) == pytest.approx(
        floats(of_tensors.compute()), rel=0, abs=0, nan_ok=True
    )
    assert of_rows.num_nonfinite == 1


@pytest.mark.parametrize("is_kept", [True, False])
def test_a_row_alone_that_lies_apart_in_memory_is_a_row(is_kept):
    x = torch.tensor([1.0, 0.0, 2.0, 0.0, 3.0, 0.0])[::2]
    rows = select_rows(x, torch.tensor(7), torch.tensor(is_kept), dim=3)
    assert rows.embeddings.tolist() == [[1.0, 2.0, 3.0]] * is_kept
    assert rows.token_ids.tolist() == [7] * is_kept


def test_prepared_rows_of_another_width_or_with_ids_beside_them_are_refused():
    prepared = Rows.of(gaussian(4, 6), RowIds.of(BatchIds(None, None)))
    with pytest.raises(ValueError, match=r"must have shape \(\.\.\., 5\); got \(4, 6\)"):
        TokenMoments(5).update(prepared)
    with pytest.raises(ValueError, match="Pass the rows alone"):
        TokenMoments(6).update(prepared, torch.arange(4))


def test_a_metric_that_overrides_update_gets_tensors():
    class Own(TokenMoments):
        def update(self, embeddings, token_ids=None, mask=None, sequence_ids=None):
            super().update(2 * embeddings, token_ids, mask, sequence_ids)

    x = gaussian(24, 4).view(2, 12, 4)
    metrics = LayerMetrics(lambda dim: [Own(dim)], 4, device=torch.device("cpu"))
    metrics.update(
        x, row_ids(x, torch.arange(24).view(2, 12) % 5, torch.arange(24).view(2, 12) > 3)
    )
    values = metrics.compute()
    assert float(values["norm_max"][0]) == pytest.approx(
        2 * x.view(24, 4)[4:].norm(dim=1).max().item()
    )


class Watched(TorchDispatchMode):
    """How often different values are looked for, and the largest tensor that is made."""

    def __init__(self):
        super().__init__()
        self.num_unique = 0
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.num_unique += "unique" in str(func)
        self.largest = max(self.largest, result.numel() if isinstance(result, torch.Tensor) else 0)
        return result


class Picky(EmbeddingMoments):
    """Moments, whose values are computed for all layers together, and not where Q is above 100."""

    @stepwise
    def compute(self):
        values = super().compute()
        return (yield from called(if_small, values))


def if_small(of_layers):
    if any(values["Q"] > 100 for values in of_layers):
        raise ValueError("Q is too large")
    return of_layers


@pytest.mark.parametrize("jackknife", [0, 2])
def test_a_layer_that_fails_beside_others_fails_alone(jackknife):
    layers = list[LayerMetrics]()
    for scale in (1.0, 100.0, 0.5):
        layers.append(
            LayerMetrics(
                lambda dim: [Picky(dim), TokenMoments(dim)],
                16,
                device=torch.device("cpu"),
                jackknife=jackknife,
            )
        )
        x, ids, sequences = (each.view(8, 64, *each.shape[1:]) for each in texts(512, 16))
        layers[-1].update(scale * x, row_ids(x, ids, None, sequences))
    first, broken, last = computed(at_once(*(steps(LayerMetrics.compute, each) for each in layers)))
    assert isinstance(broken, ValueError)
    assert broken.__notes__[0] == "in Picky"
    for layer, together in ((layers[0], first), (layers[2], last)):
        for key, pair in layer.compute().items():
            assert together[key].tolist() == pytest.approx(pair.tolist(), nan_ok=True), key


def test_the_moments_of_wide_rows_hold_little_more_than_a_chunk_of_them():
    x = torch.zeros(400, 2**15, dtype=torch.bfloat16)
    with Watched() as watched:
        row_moments(x)
    assert watched.largest <= 2 * CHUNK_ELEMENTS


def test_only_the_rows_that_are_drawn_are_copied():
    x = gaussian(5000, 8).float()
    sample = Sample.empty(8, 100)
    for part in (x[:3000], x[3000:]):
        with Watched() as watched:
            sample = sample.extend(part, seed=0)
        assert watched.largest <= len(part) + 100 < 8 * len(part)
    assert len(sample.rows) == 100
