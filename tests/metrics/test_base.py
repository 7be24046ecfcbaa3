import copy
import inspect
import math
import pickle
from typing import NamedTuple

import lightning
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor
from torchmetrics import Metric

from embedgeo.functional import Moments, row_moments
from embedgeo.functional.distributed import all_reduce_max
from embedgeo.metrics import Anisotropy, EmbeddingMoments, TokenMoments
from embedgeo.metrics.base import GeometryMetric
from tests.data import KINDS, assert_values, floats, gaussian, metrics, token_rows, updated
from tests.strategies import scales, seeds, splits

KIND = pytest.mark.parametrize("kind", KINDS)
DIM, N = 4, 120
POOLED_WITHIN_UPDATES = {"V_W_unbiased", "V_B_unbiased", "V_W_over_V_unbiased"}
LINES = {"V_on_M_slope", "V_on_M_r2", *(f"{key}_freq_{what}" for key in "QMV" for what in ("slope", "r2"))}
SIMILARITIES = ("self_similarity", "different_token_similarity")


def rows(seed=0):
    return token_rows(N, DIM, mean=100.0, seed=seed)


def independent_of_updates(kind, values):
    return {key: v for key, v in values.items() if kind != "EmbeddingMoments" or key not in POOLED_WITHIN_UPDATES}


@KIND
@settings(max_examples=20)
@given(parts=splits(N))
def test_any_split_over_updates_gives_the_same(kind, parts):
    whole = updated(metrics(DIM)[kind], *rows()).compute()
    in_parts = updated(metrics(DIM)[kind], *rows(), parts).compute()
    assert whole.keys() == in_parts.keys()
    assert_values(in_parts, independent_of_updates(kind, whole), rtol=1e-9)


@KIND
@settings(max_examples=15)
@given(parts=splits(N))
def test_any_split_over_forward_gives_the_same(kind, parts):
    metric = metrics(DIM)[kind]
    x, ids = rows()
    for part in parts:
        batch = metric(x[part], ids[part])
        assert_values(batch, updated(metrics(DIM)[kind], x[part], ids[part]).compute(), rtol=1e-12)
    whole = updated(metrics(DIM)[kind], x, ids).compute()
    assert_values(metric.compute(), independent_of_updates(kind, whole), rtol=1e-9)


def part_of(kind, index, **kwargs):
    """One of several metrics to be merged: those that sample need different seeds."""
    metric = metrics(DIM, **kwargs)[kind]
    if kind.startswith("IntrinsicDimension"):
        metric.seed = index
    return metric


@KIND
@settings(max_examples=20)
@given(parts=splits(N))
def test_any_split_over_merge_state_gives_the_same(kind, parts):
    x, ids = rows()
    merged = part_of(kind, 0)
    for index, part in enumerate(parts):
        merged.merge_state(updated(part_of(kind, index), x[part], ids[part]))
    values = merged.compute()
    if kind.startswith("IntrinsicDimension"):
        assert (merged.seen, len(merged.rows), merged.keys.unique().numel()) == (N, 40, 40)
        assert set(merged.rows[:, 0].tolist()) <= set(x[:, 0].tolist())
    else:
        whole = independent_of_updates(kind, updated(metrics(DIM)[kind], x, ids).compute())
        batches = {"anisotropy_batch_mean", "anisotropy_batch_std"}  # these start anew in each metric
        assert_values(values, {key: v for key, v in whole.items() if key not in batches}, rtol=1e-9)


@KIND
def test_merging_and_updating_take_turns(kind):
    x, ids = rows()
    metric = updated(part_of(kind, 0), x[:30], ids[:30])
    metric.merge_state(updated(part_of(kind, 1), x[30:60], ids[30:60]))
    metric.update(x[60:], ids[60:])
    expected = updated(metrics(DIM)[kind], x, ids, [slice(0, 30), slice(30, 60), slice(60, N)]).compute()
    if kind.startswith("IntrinsicDimension"):
        assert metric.seen == N
    elif kind == "Anisotropy with all parts":
        expected = {key: v for key, v in expected.items() if "batch" not in key}
        assert_values(metric.compute(), expected, rtol=1e-9)
    else:
        assert_values(metric.compute(), expected, rtol=1e-9)


@KIND
@pytest.mark.parametrize("as_dict", [False, True])
def test_merging_with_an_empty_metric_changes_nothing(kind, as_dict):
    full = updated(metrics(DIM)[kind], *rows())
    expected = full.compute()
    empty = metrics(DIM)[kind]
    empty.merge_state(full.metric_state if as_dict else full)
    full.merge_state(metrics(DIM)[kind])
    for metric in (empty, full):
        assert_values(metric.compute(), expected, rtol=1e-12)


def test_batches_that_are_pending_are_merged():
    x = gaussian(20, DIM)
    metrics_ = [updated(Anisotropy(DIM, batch_size=5), part) for part in (x[:8], x[8:])]
    metrics_[0].merge_state(metrics_[1])
    reordered = torch.cat((x[:5], x[8:18], x[5:8], x[18:]))
    assert_values(metrics_[0].compute(), updated(Anisotropy(DIM, batch_size=5), reordered).compute(), rtol=1e-9)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (EmbeddingMoments(DIM + 1), "can only merge a EmbeddingMoments with dim=4; got a EmbeddingMoments with dim=5"),
        (Anisotropy(DIM), "got a Anisotropy with dim=4"),
        ({"n": torch.tensor(1.0)}, "the same arguments; these states differ"),
    ],
)
def test_another_metric_is_not_merged(other, message):
    with pytest.raises(ValueError, match=message):
        EmbeddingMoments(DIM).merge_state(other)


def test_a_metric_with_other_arguments_is_not_merged():
    for metric, other in (
        (TokenMoments(DIM), TokenMoments(DIM, count_range=(1, 5))),
        (Anisotropy(DIM), Anisotropy(DIM, batch_size=5)),
    ):
        with pytest.raises(ValueError, match="the same arguments"):
            metric.merge_state(other)
        with pytest.raises(ValueError, match="the same arguments"):
            other.merge_state(metric)


class Largest(NamedTuple):
    """The largest coordinates of the rows: a state of the test's own, with a setting."""

    largest: Tensor
    unit: str

    def merge(self, other):
        return self._replace(largest=torch.maximum(self.largest, other.largest))

    def all_reduce(self, group=None):
        return self._replace(largest=all_reduce_max(self.largest, group))


class Range(GeometryMetric):
    """All that a new metric has to say."""

    def __init__(self, dim):
        super().__init__(dim)
        self.declare(Largest(torch.zeros(dim, dtype=torch.float64), "m"))
        self.declare(Moments.empty(dim), "moments_")

    def update_states(self, rows):
        self.extend(row_moments(rows.embeddings))
        held = self.load(Largest)
        for row in rows.embeddings:
            held = held.merge(held._replace(largest=row))
        self.store(held)

    def compute(self):
        largest = self.load(Largest)
        return {f"largest_{largest.unit}": largest.largest.max(), "n": self.load(Moments).n}


def test_a_metric_that_declares_states_and_updates_them_is_merged_cast_and_reset():
    x = rows()[0]
    metric, other = updated(Range(DIM), x[:50]), updated(Range(DIM), x[50:]).half()
    assert metric.metric_state.keys() == {
        "num_rows",
        "num_nonfinite",
        "settings",
        "largest",
        *(f"moments_{key}" for key in Moments._fields),
    }
    metric.merge_state(other)
    assert_values(metric.compute(), {"largest_m": x.max(), "n": float(N)}, rtol=0)
    assert metric.update_count == 2
    metric.reset()
    assert_values(updated(metric, x[:1]).compute(), {"largest_m": x[0].max(), "n": 1.0}, rtol=0)


def test_merging_clears_a_cached_value():
    x = rows()[0]
    metric = updated(Anisotropy(DIM, compute_with_cache=True), x[:50])
    before = metric.compute()["anisotropy"]
    metric.merge_state(updated(Anisotropy(DIM), x[50:]))
    assert metric.compute()["anisotropy"] != before


CASTS = {
    "half": lambda metric: metric.half(),
    "float": lambda metric: metric.float(),
    "to bfloat16": lambda metric: metric.to(torch.bfloat16),
    "set_dtype": lambda metric: metric.set_dtype(torch.float16),
    "in a module cast to bfloat16": lambda metric: in_module(metric).to(torch.bfloat16).metric,
    "cpu": lambda metric: metric.cpu(),
}


def in_module(metric):
    module = lightning.LightningModule()
    module.metric = metric
    return module


@KIND
@pytest.mark.parametrize("cast", CASTS.values(), ids=CASTS.keys())
def test_casts_change_no_state(kind, cast):
    x, ids = rows()
    expected = updated(metrics(DIM)[kind], x, ids, [slice(0, 50), slice(50, N)]).compute()
    metric = updated(metrics(DIM)[kind], x[:50], ids[:50])
    before = {name: state.dtype for name, state in metric.metric_state.items()}
    cast(metric)
    assert {name: state.dtype for name, state in metric.metric_state.items()} == before
    metric.update(x[50:], ids[50:])
    assert_values(metric.compute(), expected, rtol=0)
    metric.reset()
    assert_values(updated(metric, x, ids, [slice(0, 50), slice(50, N)]).compute(), expected, rtol=0)


@KIND
@pytest.mark.parametrize("twin", [copy.deepcopy, lambda metric: pickle.loads(pickle.dumps(metric))])
def test_copies_go_on_by_themselves(kind, twin):
    x, ids = rows()
    metric = updated(metrics(DIM)[kind], x[:50], ids[:50])
    before = metric.compute()
    other = twin(metric)
    assert_values(other.compute(), before, rtol=0)
    expected = updated(metrics(DIM)[kind], x, ids, [slice(0, 50), slice(50, N)]).compute()
    assert_values(updated(other, x[50:], ids[50:]).compute(), expected, rtol=0)
    assert_values(metric.compute(), before, rtol=0)


@KIND
def test_reset_under_inference_mode_then_update_and_merge(kind):
    expected = updated(metrics(DIM)[kind], *rows()).compute()
    metric = metrics(DIM)[kind]
    with torch.inference_mode():
        updated(metric, *rows(seed=1)).compute()
        metric.reset()
    assert_values(updated(metric, *rows()).compute(), expected, rtol=0)
    with torch.inference_mode():
        metric.reset()
    metric.merge_state(updated(metrics(DIM)[kind], *rows()))
    assert_values(metric.compute(), expected, rtol=1e-12)


@KIND
def test_updates_under_any_context_of_autograd_and_autocast_give_the_same(kind):
    x, ids = rows()
    x = x.float()
    expected = updated(metrics(DIM)[kind], x, ids).compute()
    metric = metrics(DIM)[kind]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_values(updated(metric, x, ids).compute(), expected, rtol=0)
    with torch.inference_mode():
        assert_values(updated(metrics(DIM)[kind], x.clone(), ids.clone()).compute(), expected, rtol=0)
    values = updated(metrics(DIM)[kind], (x.requires_grad_() * 1.0), ids).compute()
    assert not any(value.requires_grad for value in values.values())
    assert_values(values, expected, rtol=0)
    assert x.grad is None


@KIND
def test_the_default_device_does_not_matter(kind):
    x, ids = token_rows(N, 40)
    expected = updated(metrics(40)[kind], x, ids).compute()
    metric = metrics(40)[kind]
    with torch.device("meta"):  # tensors that are made there hold no numbers
        metric.update(x[:, None], ids[:, None])
        values = metric.compute()
    assert_values(values, expected, rtol=1e-12)


@KIND
def test_layout_and_shape_do_not_matter(kind):
    x, ids = rows()
    expected = updated(metrics(DIM)[kind], x, ids).compute()
    strided = torch.stack((x, x + 1), dim=-1)[..., 0]
    for rows_, ids_ in (
        (x.T.contiguous().T, ids),
        (strided, ids.repeat_interleave(2)[::2]),
        (x.view(2, 60, DIM), ids.view(2, 60)),
    ):
        metric = metrics(DIM)[kind]
        metric.update(rows_, ids_, sequence_ids=torch.arange(N).view(ids_.shape))
        assert_values(metric.compute(), expected, rtol=1e-12)
    repeated = updated(metrics(DIM)[kind], x[:1].expand(30, DIM), ids[:1].expand(30)).compute()
    assert_values(repeated, updated(metrics(DIM)[kind], x[:1].repeat(30, 1), ids[:1].repeat(30)).compute(), rtol=1e-12)


@KIND
@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
def test_masked_rows_do_not_count(kind, dtype):
    x, ids = rows()
    mask = (torch.arange(N) % 3 > 0).view(4, 30)
    metric = metrics(DIM)[kind]
    metric.update(x.view(4, 30, DIM), ids.view(4, 30), mask.to(dtype), torch.arange(N).view(4, 30))
    kept = mask.flatten()
    assert_values(metric.compute(), updated(metrics(DIM)[kind], x[kept], ids[kept]).compute(), rtol=1e-12)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "Moments" in kind])
def test_rows_that_are_not_finite_are_left_out_and_counted(kind):
    x, ids = rows()
    x[3, 1], x[7, 0], x[8] = math.nan, math.inf, -math.inf
    finite = x.isfinite().all(1)
    values = updated(metrics(DIM)[kind], x, ids, [slice(0, 5), slice(5, N)]).compute()
    expected = updated(metrics(DIM)[kind], x[finite], ids[finite], [slice(0, 4), slice(4, N)]).compute()
    assert_values(values, expected | {"n_nonfinite": torch.tensor(3.0)}, rtol=1e-12)


@KIND
@pytest.mark.parametrize("n", [0, 1, 2])
@pytest.mark.parametrize("updates", [0, 1, 3])
def test_few_rows_or_none_give_values_that_are_undefined_rather_than_wrong(kind, n, updates):
    x, ids = rows()
    metric = metrics(DIM)[kind]
    for _ in range(updates):
        metric.update(x[:n], ids[:n])
        metric.update(x, ids, torch.zeros(N))
    values = floats(untouched(metric) if updates == 0 else metric.compute())
    seen = n * updates
    assert values.get("n", seen) == (seen if kind != "TokenMoments in a count range" or updates == 3 else 0)
    finite = {key for key, value in values.items() if math.isfinite(value)}
    if seen == 0:
        assert finite <= {"n", "n_nonfinite", "token_types", "token_types_regressed", "n_points", "next_token_types"}
    if seen == 1 and kind == "EmbeddingMoments":
        assert finite == {"n", "n_nonfinite", "Q", "M", "V", "M_over_Q", "norm_mean", "norm_cv", "norm_max"}
    full = updated(metrics(DIM)[kind], x, ids).compute()
    assert values.keys() == full.keys()


def untouched(metric):
    with pytest.warns(UserWarning, match="before the ``update`` method"):
        return metric.compute()


ONE_ROW = {
    *("n", "n_nonfinite", "token_types", "token_types_regressed", "n_points"),
    *("Q", "M", "M_over_Q", "norm_mean", "norm_max", "mean_cosine", "rankme"),
    *("max_abs", "max_abs_first", "max_abs_rest"),
    *SIMILARITIES,
}


@KIND
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_one_row_again_and_again_has_a_mean_and_no_variance(kind, dtype):
    x = gaussian(1, DIM, seed=4).to(dtype)
    parts = [slice(0, end) for end in (6, 8, 3, 7, 5)]  # in float64 the means of parts differ in the last digit
    values = floats(updated(metrics(DIM)[kind], x.expand(8, DIM), torch.arange(8) % 2, parts).compute())
    rest = {k: v for k, v in values.items() if k not in ONE_ROW | {"duplicate_fraction", "anisotropy_null"}}
    assert all(abs(value) < 1e-14 for value in rest.values() if not math.isnan(value)), rest


@pytest.mark.parametrize("dim", [0, -1, 2.0, True, "4", None])
@pytest.mark.parametrize("kind", [EmbeddingMoments, TokenMoments, Anisotropy])
def test_a_wrong_dim_is_refused(kind, dim):
    with pytest.raises(ValueError, match="dim must be a positive integer"):
        kind(dim)


@KIND
def test_a_refused_update_leaves_the_states_as_they_were(kind):
    metric = updated(metrics(DIM)[kind], *rows())
    before = metric.compute()
    for embeddings, error in ((torch.zeros(3, DIM + 1), ValueError), (torch.zeros(3, DIM).int(), TypeError)):
        with pytest.raises(error):
            metric.update(embeddings)
    assert_values(metric.compute(), before, rtol=0)


@KIND
def test_global_random_numbers_are_left_alone(kind):
    before = torch.get_rng_state()
    updated(metrics(DIM)[kind], *rows(), [slice(0, 50), slice(50, N)]).compute()
    assert torch.get_rng_state().equal(before)


LARGEST = {"max_abs", "max_abs_first"}
ABOUT_THE_ORIGIN = {
    "Q",
    "M",
    "M_over_V",
    "M_over_Q",
    *("V_over_Q", "V_W_over_Q", "V_B_over_Q"),
    "mean_cosine",
    "norm_mean",
    "norm_cv",
    "norm_max",
    "Q_t_cv",
    "rankme",
    *LARGEST,
    *(f"{key}{adjusted}" for key in SIMILARITIES for adjusted in ("", "_adjusted")),
} | LINES
PER_AXIS = {"top_dim_share", "anisotropy_standardized", "anisotropy_z_scored", "mean_cosine_z_scored"} | {
    *("kurtosis", "kurtosis_first", *LARGEST)
}
SQUARED_UNITS = {"Q", "M", "V", "V_W", "V_B", "V_W_unbiased", "V_B_unbiased"}
UNITS = {"norm_mean", "norm_max", *LARGEST}


def all_values(x, ids):
    return {key: value for kind in KINDS for key, value in updated(metrics(DIM)[kind], x, ids).compute().items()}


@settings(max_examples=10)
@given(seeds)
def test_translation_changes_no_variance_and_no_distance(seed):
    x, ids = token_rows(N, DIM, seed=seed)
    expected, got = all_values(x, ids), all_values(x + 50 * gaussian(1, DIM, seed=seed), ids)
    assert_values(got, {key: v for key, v in expected.items() if key not in ABOUT_THE_ORIGIN}, rtol=1e-8)


@settings(max_examples=10)
@given(seeds, scales)
def test_scaling_scales_values_by_their_units(seed, scale):
    x, ids = token_rows(N, DIM, seed=seed)
    before, got = all_values(x, ids), all_values(scale * x, ids)
    powers = {
        key: 2 * (key in SQUARED_UNITS) + (key in UNITS) for key in before if "slope" not in key and "freq" not in key
    }
    assert_values(got, {key: before[key] * scale**power for key, power in powers.items()}, rtol=1e-8)
    assert_values(got, {"V_on_M_slope": before["V_on_M_slope"]}, rtol=1e-6)


@settings(max_examples=10)
@given(seeds)
def test_rotation_changes_only_what_is_said_of_axes(seed):
    x, ids = token_rows(N, DIM, seed=seed)
    rotation = torch.linalg.qr(gaussian(DIM, DIM, seed=seed + 1))[0]
    before, got = all_values(x, ids), all_values(x @ rotation, ids)
    assert_values(got, {key: v for key, v in before.items() if key not in PER_AXIS}, rtol=1e-8, atol=1e-12)


@settings(max_examples=10)
@given(seeds)
def test_the_order_of_rows_does_not_matter(seed):
    x, ids = token_rows(40, DIM, seed=seed)  # no more than are sampled
    order = torch.randperm(40, generator=torch.Generator().manual_seed(seed))
    before, got = all_values(x, ids), all_values(x[order], ids[order])
    of_batches = ("anisotropy_batch", "intrinsic_dimension")
    assert_values(got, {key: v for key, v in before.items() if not key.startswith(of_batches)}, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("hook", "parameters"),
    [
        ("_sync_dist", ["self", "dist_sync_fn", "process_group"]),
        ("_apply", ["self", "fn", "exclude_state"]),
    ],
)
def test_the_private_hooks_of_torchmetrics_are_as_expected(hook, parameters):
    assert list(inspect.signature(getattr(Metric, hook)).parameters) == parameters
    assert list(inspect.signature(getattr(GeometryMetric, hook)).parameters) == parameters


def test_torchmetrics_calls_the_hooks():
    assert "self._sync_dist(" in inspect.getsource(Metric.sync)
    assert "_forward_full_state_update(" in inspect.getsource(Metric.forward)
    assert "metric_state" in dir(Metric)
