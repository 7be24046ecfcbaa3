"""What every metric must do: the values are those of the functions, whatever is split, merged,
copied, saved or cast.

Those of two ranks are in `test_ranks.py`.
"""

import copy
import io
import math
import pickle

import lightning
import pytest
import torch

from embedgeo import IntrinsicDimension
from embedgeo.glossary import term
from tests import references
from tests.data import (
    KINDS,
    LISTED,
    assert_values,
    floats,
    gaussian,
    new_metric,
    texts,
    token_rows,
    updated,
    wide_dtypes,
)

REPRESENTATIVE = {
    *("EmbeddingMoments", "TokenMoments", "Anisotropy with all parts", "IntrinsicDimension"),
}
"""One kind for each kind of state; the others run with the slow tests."""

KIND = pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=[] if kind in REPRESENTATIVE else pytest.mark.slow)
        for kind in KINDS
    ],
)
LISTED_KIND = pytest.mark.parametrize("kind", LISTED)

DIM, N = 4, 120


def rows(seed=0):
    return token_rows(N, DIM, mean=100.0, seed=seed)


def values_of(kind, *rows_and_parts):
    return updated(new_metric(kind), *rows_and_parts).compute()


@KIND
def test_any_split_of_whole_sequences_gives_the_same(kind):
    x, ids, sequences = texts(200, DIM, mean=100.0)
    numbers = (sequences + 5) // 10**12
    whole = new_metric(kind)
    whole.update(x, ids, sequence_ids=sequences)
    expected = {
        key: value
        for key, value in whole.compute().items()
        if not key.startswith("anisotropy_batch")
    }
    for place in (numbers % 3, (numbers == 4).long(), (numbers < 0).long()):
        in_parts, merged = new_metric(kind), new_metric(kind, seed=3)
        for index in range(3):
            part = new_metric(kind, seed=index)
            for metric in (in_parts, part):
                metric.update(
                    x[place == index],
                    ids[place == index],
                    sequence_ids=sequences[place == index],
                )
            merged.merge_state(part if index else part.metric_state)
        for metric in (in_parts, merged):
            if kind.startswith("IntrinsicDimension"):  # of other rows
                assert metric.seen == 200
                assert len(metric.rows) == metric.keys.unique().numel() == 40
            else:
                assert_values(metric.compute(), expected, rtol=1e-9, atol=1e-12)


SPLITS = (
    [slice(0, 7), slice(7, 8), slice(8, 8), slice(8, N)],
    [slice(i, i + 5) for i in range(0, N, 5)],
    [slice(0, 0), slice(0, N), slice(N, N)],
)


@KIND
def test_any_split_over_updates_and_forward_gives_the_same(kind):
    x, ids = rows()
    random_state = torch.get_rng_state()
    expected = values_of(kind, x, ids)
    assert torch.get_rng_state().equal(random_state)
    for parts in SPLITS:
        values = values_of(kind, x, ids, parts)
        assert expected.keys() == values.keys()
        assert_values(values, expected, rtol=1e-9)
    forward = new_metric(kind)
    for part in SPLITS[0]:
        batch = forward(x[part], ids[part])
        assert_values(batch, values_of(kind, x[part], ids[part]), rtol=1e-12)
    assert_values(forward.compute(), expected, rtol=1e-9)


def in_module(metric):
    module = lightning.LightningModule()
    module.metric = metric
    return module


CASTS = [
    lambda metric: metric.double(),
    lambda metric: metric.half(),
    lambda metric: metric.float(),
    lambda metric: metric.to(torch.bfloat16),
    lambda metric: metric.set_dtype(torch.float16),
    lambda metric: in_module(metric).to(torch.bfloat16).metric,
    lambda metric: metric.cpu(),
]


@KIND
def test_casts_change_no_state(kind):
    x, ids = rows()
    halves = [slice(0, 50), slice(50, N)]
    expected = values_of(kind, x, ids, halves)
    metric = updated(new_metric(kind), x[:50], ids[:50])
    before = {name: state.dtype for name, state in metric.metric_state.items()}
    for cast in CASTS:
        cast(metric)
        assert {name: state.dtype for name, state in metric.metric_state.items()} == before
    metric.update(x[50:], ids[50:])
    assert_values(metric.compute(), expected, rtol=0)
    metric.reset()
    assert_values(updated(metric, x, ids, halves).compute(), expected, rtol=0)


def reloaded(metric, other, wrap):
    """The other metric with the state dict of this one, as it is saved and read."""
    for each in (metric, other):
        each.persistent(True)
    file = io.BytesIO()
    torch.save(wrap(metric).state_dict(), file)
    file.seek(0)
    wrap(other).load_state_dict(torch.load(file))
    return other


@pytest.mark.parametrize("options", [{"seed": 1}, {"neighbors": "other_sequences"}])
def test_a_state_of_other_arguments_is_not_loaded(options):
    x, ids = rows()
    metric = updated(IntrinsicDimension(DIM, 100), x, ids)
    other = updated(IntrinsicDimension(DIM, 100, **options), x[:50], ids[:50])
    for wrap in (lambda each: each, in_module):
        with pytest.raises(ValueError, match="of one with the same arguments alone"):
            reloaded(metric, other, wrap)
    assert other.num_rows == 0


@KIND
def test_copied_pickled_and_saved_metrics_go_on_by_themselves(kind):
    x, ids = rows()
    expected = values_of(kind, x, ids, [slice(0, 50), slice(50, N)])
    metric = updated(new_metric(kind), x[:50], ids[:50])
    before = metric.compute()
    twins = [
        copy.deepcopy(metric),
        pickle.loads(pickle.dumps(metric)),
        reloaded(metric, new_metric(kind), lambda each: each),
        reloaded(metric, new_metric(kind), in_module),
    ]
    for twin in twins:
        if twin.update_called:
            assert_values(twin.compute(), before, rtol=0)
        assert_values(updated(twin, x[50:], ids[50:]).compute(), expected, rtol=0)
    assert_values(metric.compute(), before, rtol=0)


@KIND
def test_autograd_autocast_inference_and_a_reset_change_no_value(kind):
    x, ids = rows()
    x = x.float()
    expected = values_of(kind, x, ids)
    metric = new_metric(kind)
    torch.set_float32_matmul_precision("medium")
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert_values(updated(metric, x, ids).compute(), expected, rtol=0)
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")
    with torch.inference_mode():
        metric.reset()
        assert_values(updated(metric, x.clone(), ids.clone()).compute(), expected, rtol=0)
        metric.reset()
    values = updated(metric, (x.requires_grad_() * 1.0), ids).compute()
    assert not any(value.requires_grad for value in values.values())
    assert_values(values, expected, rtol=0)
    assert x.grad is None
    with torch.inference_mode():
        metric.reset()
    metric.merge_state(updated(new_metric(kind), x, ids))
    assert_values(metric.compute(), expected, rtol=1e-12)


@KIND
def test_the_default_device_does_not_matter(kind):
    x, ids = token_rows(N, 40)
    expected = updated(new_metric(kind, 40), x, ids).compute()
    metric = new_metric(kind, 40)
    with torch.device("meta"):  # tensors that are made there hold no numbers
        metric.update(x[:, None], ids[:, None])
        values = metric.compute()
    assert_values(values, expected, rtol=1e-12)


@KIND
def test_layout_and_shape_do_not_matter(kind):
    x, ids = rows()
    expected = values_of(kind, x, ids)
    strided = torch.stack((x, x + 1), dim=-1)[..., 0]
    for rows_, ids_ in (
        (x.T.contiguous().T, ids),
        (strided, ids.repeat_interleave(2)[::2]),
        (x.view(2, 60, DIM), ids.view(2, 60)),
    ):
        metric = new_metric(kind)
        metric.update(rows_, ids_, sequence_ids=torch.arange(N).view(ids_.shape))
        assert_values(metric.compute(), expected, rtol=1e-12)
    repeated = values_of(kind, x[:1].expand(30, DIM), ids[:1].expand(30))
    assert_values(
        repeated,
        values_of(kind, x[:1].repeat(30, 1), ids[:1].repeat(30)),
        rtol=1e-12,
    )


@KIND
def test_few_rows_or_none_give_values_that_are_undefined_rather_than_wrong(kind):
    x, ids = rows()
    keys = values_of(kind, x, ids).keys()
    for n, updates in ((0, 0), (0, 1), (1, 1), (1, 3), (2, 1)):
        metric = new_metric(kind)
        for _ in range(updates):
            metric.update(x[:n], ids[:n])
            metric.update(x, ids, torch.zeros(N))
        values = floats(untouched(metric) if updates == 0 else metric.compute())
        assert values.keys() == keys
        seen = n * updates
        assert values.get("n", seen) == (
            seen if kind != "TokenMoments in a count range" or updates == 3 else 0
        )
        if seen == 0:
            finite = {key for key, value in values.items() if math.isfinite(value)}
            assert not any(values[key] for key in finite)
            assert kind not in LISTED or finite <= COUNTS | OF_POINTS


def untouched(metric):
    with pytest.warns(UserWarning, match="before the ``update`` method"):
        return metric.compute()


COUNTS = {"n", "n_nonfinite", "token_types", "token_types_regressed"}

OF_POINTS = {"n_points", "n_points_between", "n_points_within"}

ONE_ROW = COUNTS | OF_POINTS | {"Q", "M", "M_over_Q", "norm_mean", "norm_max", "mean_cosine"}
ONE_ROW |= {"rankme", "M_over_Q_without_top_dim", "mean_cosine_without_top_dim", "constant_dims"}


@LISTED_KIND
@wide_dtypes
def test_one_row_again_and_again_has_a_mean_and_no_variance(kind, dtype):
    x = gaussian(1, DIM, seed=4).to(dtype)
    # in float64 the means of parts differ in the last digit
    parts = [slice(0, end) for end in (6, 8, 3, 7, 5)]
    values = floats(values_of(kind, x.expand(8, DIM), torch.arange(8) % 2, parts))
    rest = values.keys() - ONE_ROW - {"duplicate_fraction", "anisotropy_null"}
    assert {key: values[key] for key in rest if abs(values[key]) >= 1e-14} == {}


@KIND
def test_a_refused_update_leaves_the_states_as_they_were(kind):
    metric = updated(new_metric(kind), *rows())
    before = metric.compute()
    for embeddings, error in (
        (torch.zeros(3, DIM + 1), ValueError),
        (torch.zeros(3, DIM).int(), TypeError),
    ):
        with pytest.raises(error):
            metric.update(embeddings)
    assert_values(metric.compute(), before, rtol=0)


BESIDE_LARGEST = {
    f"{key}_without_top_dim" for key in ("M_over_Q", "mean_cosine", "V", "anisotropy")
}

ABOUT_THE_ORIGIN = BESIDE_LARGEST | references.LINES | {"Q", "M", "M_over_V", "M_over_Q"}
ABOUT_THE_ORIGIN |= {"V_over_Q", "V_W_over_Q", "V_B_over_Q", "mean_cosine", "norm_mean"}
ABOUT_THE_ORIGIN |= {"norm_cv", "norm_max", "Q_t_cv", "rankme"}

PER_AXIS = BESIDE_LARGEST | {"top_dim_share", "anisotropy_standardized", "constant_dims"}


def all_values(x, ids):
    return {key: value for kind in LISTED for key, value in values_of(kind, x, ids).items()}


@pytest.mark.parametrize("seed", [0, 1])
def test_moved_turned_and_reordered_rows_have_the_same_values_but_for_what_is_said_of_it(seed):
    x, ids = token_rows(N, DIM, seed=seed)
    rotation = torch.linalg.qr(gaussian(DIM, DIM, seed=seed + 1))[0]
    before = all_values(x, ids)
    for moved, depends in (
        (x + 50 * gaussian(1, DIM, seed=seed), ABOUT_THE_ORIGIN),
        (x @ rotation, PER_AXIS),
    ):
        expected = {key: value for key, value in before.items() if key not in depends}
        assert_values(all_values(moved, ids), expected, rtol=1e-8, atol=1e-12)
    x, ids = x[:40], ids[:40]  # no more than are sampled
    order = torch.randperm(40, generator=torch.Generator().manual_seed(seed))
    before, got = all_values(x, ids), all_values(x[order], ids[order])
    # which the order of the rows makes
    of_batches = ("anisotropy_batch", "intrinsic_dimension", "n_points_", "same_")
    assert_values(
        got,
        {key: v for key, v in before.items() if not key.startswith(of_batches)},
        rtol=1e-9,
        atol=1e-12,
    )


@pytest.mark.parametrize(
    ("scale", "dtype"),
    [
        *((scale, torch.float64) for scale in (1e-12, 7.5, 1e6)),
        *((2.0**power, torch.float32) for power in (99, 83, -73, -99)),
    ],
)
def test_scaling_scales_values_by_their_units(scale, dtype):
    """Squares of the largest and of the least rows leave the range of float32."""
    x, ids = token_rows(N, DIM)
    x[:, 2] += 9  # the largest coordinate
    x = x.to(dtype)
    before, got = all_values(x, ids), all_values(scale * x, ids)
    units = {key: term(key).unit for key in before if "slope" not in key and "freq" not in key}
    if dtype == torch.float32:  # of the least rows rounding leaves no coordinate
        del units["anisotropy_standardized"], units["constant_dims"]
    powers = {
        key: 2 if "squared embedding units" in unit else "embedding units" in unit
        for key, unit in units.items()
    }
    expected = {key: before[key] * scale**power for key, power in powers.items()}
    assert_values(got, expected, rtol=1e-8 if dtype == torch.float64 else 1e-6)
    assert_values(got, {"V_on_M_slope": before["V_on_M_slope"]}, rtol=1e-6)
