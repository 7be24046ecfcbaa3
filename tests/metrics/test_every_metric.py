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
from hypothesis import given, settings
from hypothesis import strategies as st

from embedgeo.functional import (
    gride_dimensions,
    moment_values,
    outlier_values,
    processed_values,
    row_coordinates,
    row_moments,
    row_scatter,
    row_sketch,
    sketch_values,
    spectrum_values,
    token_table,
    twonn_dimension,
    type_regressions,
    type_values,
    unbiased_split,
    variance_split,
    within_variance,
)
from embedgeo.functional.moments import variance_values
from embedgeo.functional.next_tokens import (
    alignment_values,
    class_distance_values,
    collapse_values,
    labelled_by_next,
)
from embedgeo.functional.rows import select_rows
from embedgeo.functional.sampling import row_keys
from embedgeo.functional.similarity import (
    cosine_deviation,
    sequence_distances,
    sequence_similarity,
    type_distances,
    with_directions,
)
from embedgeo.glossary import term
from tests.data import (
    KINDS,
    LISTED,
    assert_values,
    floats,
    gaussian,
    metrics,
    texts,
    token_rows,
    updated,
)
from tests.strategies import calls, scales, seeds, splits

KIND = pytest.mark.parametrize("kind", KINDS)
LISTED_KIND = pytest.mark.parametrize("kind", LISTED)

DIM, N = 4, 120

POOLED_WITHIN_UPDATES = {"V_W_unbiased", "V_B_unbiased", "V_W_over_V_unbiased"}

LINES = {
    "V_on_M_slope",
    "V_on_M_r2",
    *(f"{key}_freq_{what}" for key in "QMV" for what in ("slope", "r2")),
}

SIMILARITIES = (
    *("self_similarity", "self_similarity_across_sequences"),
    *("different_token_similarity", "different_token_similarity_within_sequence"),
    "different_token_similarity_across_sequences",
)


def rows(seed=0):
    return token_rows(N, DIM, mean=100.0, seed=seed)


def independent_of_updates(kind, values):
    return {
        key: v
        for key, v in values.items()
        if kind != "EmbeddingMoments" or key not in POOLED_WITHIN_UPDATES
    }


@KIND
def test_every_key_has_a_term_and_every_picture_a_key(kind):
    metric = metrics(DIM)[kind]
    values = updated(metric, *rows()).compute()
    assert values
    assert [
        key for key in values if key not in metric.terms and metric.family_term(key) is None
    ] == []
    assert all(term(key).meaning != term("nobody_knows_it").meaning for key in values)
    plotted = {
        key
        for other in metrics(DIM).values()
        if type(other) is type(metric)
        for key in other.plotted
    }
    assert plotted <= metric.terms.keys()


def types_of(rows):
    return token_table(rows.embeddings, rows.token_ids, rows.sequence_ids)


def moments(rows):
    values = moment_values(row_moments(rows.embeddings))
    within = within_variance(types_of(rows).without_rounding(), torch.tensor(rows.num_sequences))
    return values | unbiased_split(values["n"], values["V"], within)


def token_moments(rows):
    types = types_of(rows).without_rounding()
    in_range = types.select((types.n >= 2) & (types.n <= 1000))
    return moments(rows) | variance_split(types) | type_regressions(type_values(in_range))


def in_a_count_range(rows):
    types = types_of(rows).without_rounding()
    counted = types.select((types.n >= 2) & (types.n <= 9))
    regressed = types.select((types.n >= 2) & (types.n <= 1000))
    values = variance_values(*counted.pooled())
    within = within_variance(counted, torch.tensor(rows.num_sequences))
    split = variance_split(counted) | unbiased_split(values["n"], values["V"], within)
    return values | split | type_regressions(type_values(regressed))


def sampled(rows):
    """Two batches of the rows with the smallest keys."""
    return rows.embeddings[row_keys(0, len(rows.embeddings), seed=0).argsort()[:40]].split(20)


def dimension(rows):
    estimates = [twonn_dimension(batch) for batch in sampled(rows)]
    dimensions = torch.stack(
        [torch.as_tensor(each.dimension, dtype=torch.float64) for each in estimates]
    )
    next_scale = torch.tensor([each.next_scale for each in estimates], dtype=torch.float64).mean()
    return {
        "intrinsic_dimension": dimensions.mean(),
        "intrinsic_dimension_std": dimensions.std(),
        "intrinsic_dimension_next_scale": next_scale,
    }


def dimensions_at_scales(rows):
    dimensions = torch.stack(
        [gride_dimensions(batch, (1, 4)).dimensions for batch in sampled(rows)]
    ).mean(0)
    return {f"intrinsic_dimension_at_{scale}": dimensions[i] for i, scale in enumerate((1, 4))}


def next_tokens(rows):
    labelled = labelled_by_next(rows)
    types = types_of(labelled).without_rounding()
    frequent = types.select(types.n >= 10)
    of_pairs = class_distance_values(frequent) | alignment_values(frequent, None)
    return collapse_values(types, torch.tensor(labelled.num_sequences)) | of_pairs


def similarities(rows):
    rows, directions = with_directions(rows)
    distances, _ = sequence_distances(sequence_similarity(rows, directions))
    distances |= type_distances(
        token_table(directions.embeddings, rows.token_ids, rows.sequence_ids)
    )
    spread = cosine_deviation(row_scatter(directions.embeddings))
    return {key: 1 - distance for key, distance in distances.items()} | {"cosine_std": spread}


FUNCTIONS = {
    "EmbeddingMoments": moments,
    "TokenMoments": token_moments,
    "TokenMoments in a count range": in_a_count_range,
    "Anisotropy": lambda rows: spectrum_values(row_scatter(rows.embeddings)),
    "Anisotropy with all parts": lambda rows: spectrum_values(
        row_scatter(rows.embeddings, small=True), full=True
    ),
    "Anisotropy with a sketch": lambda rows: sketch_values(row_sketch(rows.embeddings, 16)),
    "IntrinsicDimension": dimension,
    "IntrinsicDimension at scales": dimensions_at_scales,
    "AfterProcessing": lambda rows: processed_values(
        row_scatter(rows.embeddings), rows.embeddings, top=3
    ),
    "OutlierCoordinates": lambda rows: outlier_values(
        row_coordinates(rows.embeddings, rows.ids.is_first)
    ),
    "NextTokenGeometry": next_tokens,
    "TokenSimilarity": similarities,
}
"""Values of the rows of one update by `embedgeo.functional`."""

assert FUNCTIONS.keys() == {*LISTED}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@LISTED_KIND
def test_values_are_those_of_the_functions(kind, dtype):
    x, ids, sequences = texts(200, DIM, mean=3.0)
    metric = metrics(DIM)[kind]
    metric.update(x.to(dtype), ids, sequence_ids=sequences)
    expected = FUNCTIONS[kind](select_rows(x.to(dtype), ids, None, sequences, dim=DIM))
    assert_values(metric.compute(), expected, rtol=1e-9, atol=1e-12)


@KIND
@settings(max_examples=5)
@given(places=st.lists(st.integers(0, 2), min_size=20, max_size=20))
@pytest.mark.slow
def test_any_split_of_whole_sequences_over_updates_and_metrics_gives_the_same(kind, places):
    x, ids, sequences = texts(200, DIM, mean=100.0)
    place = torch.tensor(places)[(sequences + 5) // 10**12]
    whole, in_parts, merged = metrics(DIM)[kind], metrics(DIM)[kind], part_of(kind, 3)
    whole.update(x, ids, sequence_ids=sequences)
    for index in range(3):
        of = place == index
        part = part_of(kind, index)
        for metric in (in_parts, part):
            metric.update(x[of], ids[of], sequence_ids=sequences[of])
        merged.merge_state(part)
    if kind.startswith("IntrinsicDimension"):  # of other rows
        assert in_parts.seen == merged.seen == 200
        return
    expected = independent_of_updates(kind, whole.compute())
    # these are of rows in their order
    expected = {key: value for key, value in expected.items() if "batch" not in key}
    for metric in (in_parts, merged):
        assert_values(metric.compute(), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.slow
@KIND
@settings(max_examples=20)
@given(parts=splits(N))
def test_any_split_over_updates_gives_the_same(kind, parts):
    whole = updated(metrics(DIM)[kind], *rows()).compute()
    in_parts = updated(metrics(DIM)[kind], *rows(), parts).compute()
    assert whole.keys() == in_parts.keys()
    assert_values(in_parts, independent_of_updates(kind, whole), rtol=1e-9)


@pytest.mark.slow
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
    return metrics(DIM, seed=index, **kwargs)[kind]


@pytest.mark.slow
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
        # these start anew in each metric
        batches = {"anisotropy_batch_mean", "anisotropy_batch_std"}
        assert_values(values, {key: v for key, v in whole.items() if key not in batches}, rtol=1e-9)


@KIND
def test_merging_and_updating_take_turns(kind):
    x, ids = rows()
    metric = updated(part_of(kind, 0), x[:30], ids[:30])
    metric.merge_state(updated(part_of(kind, 1), x[30:60], ids[30:60]))
    metric.update(x[60:], ids[60:])
    expected = updated(
        metrics(DIM)[kind], x, ids, [slice(0, 30), slice(30, 60), slice(60, N)]
    ).compute()
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


CASTS = {
    "double": lambda metric: metric.double(),
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
@pytest.mark.parametrize("wrap", [lambda metric: metric, in_module], ids=["alone", "in a module"])
def test_a_saved_state_dict_goes_on_in_a_new_metric(kind, wrap):
    x, ids = rows()
    metric, other = updated(metrics(DIM)[kind], x[:20], ids[:20]), metrics(DIM)[kind]
    updated(metric, x[20:50], ids[20:50])
    for each in (metric, other):
        each.persistent(True)
    file = io.BytesIO()
    torch.save(wrap(metric).state_dict(), file)
    file.seek(0)
    wrap(other).load_state_dict(torch.load(file))
    for each in (metric, other):
        updated(each, x[50:], ids[50:])
    values = other.compute()
    assert values.keys() == metric.compute().keys()
    assert_values(values, metric.compute(), rtol=0)


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
        assert_values(
            updated(metrics(DIM)[kind], x.clone(), ids.clone()).compute(), expected, rtol=0
        )
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
    assert_values(
        repeated,
        updated(metrics(DIM)[kind], x[:1].repeat(30, 1), ids[:1].repeat(30)).compute(),
        rtol=1e-12,
    )


@KIND
@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
def test_masked_rows_do_not_count(kind, dtype):
    x, ids = rows()
    mask = (torch.arange(N) % 3 > 0).view(4, 30)
    metric = metrics(DIM)[kind]
    metric.update(x.view(4, 30, DIM), ids.view(4, 30), mask.to(dtype), torch.arange(N).view(4, 30))
    kept = mask.flatten()
    assert_values(
        metric.compute(), updated(metrics(DIM)[kind], x[kept], ids[kept]).compute(), rtol=1e-12
    )


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "Moments" in kind])
def test_rows_that_are_not_finite_are_left_out_and_counted(kind):
    x, ids = rows()
    x[3, 1], x[7, 0], x[8] = math.nan, math.inf, -math.inf
    finite = x.isfinite().all(1)
    values = updated(metrics(DIM)[kind], x, ids, [slice(0, 5), slice(5, N)]).compute()
    expected = updated(
        metrics(DIM)[kind], x[finite], ids[finite], [slice(0, 4), slice(4, N)]
    ).compute()
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
    assert values.get("n", seen) == (
        seen if kind != "TokenMoments in a count range" or updates == 3 else 0
    )
    finite = {key for key, value in values.items() if math.isfinite(value)}
    if seen == 0:
        assert [values[key] for key in finite] == [0] * len(finite)
    if seen == 0 and kind in LISTED:
        assert (
            finite
            <= {"n", "n_nonfinite", "token_types", "token_types_regressed", "next_token_types"}
            | OF_POINTS
        )
    if seen == 1 and kind == "EmbeddingMoments":
        assert finite == {
            "n",
            "n_nonfinite",
            "Q",
            "M",
            "V",
            "M_over_Q",
            "norm_mean",
            "norm_cv",
            "norm_max",
        }
    full = updated(metrics(DIM)[kind], x, ids).compute()
    assert values.keys() == full.keys()


def untouched(metric):
    with pytest.warns(UserWarning, match="before the ``update`` method"):
        return metric.compute()


OF_POINTS = {"n_points", "n_points_between", "n_points_within"}

ONE_ROW = OF_POINTS | {
    *("n", "n_nonfinite", "token_types", "token_types_regressed", "n_points"),
    *("Q", "M", "M_over_Q", "norm_mean", "norm_max", "mean_cosine", "rankme"),
    *("max_abs", "max_abs_first", "max_abs_rest"),
    *SIMILARITIES,
}


@LISTED_KIND
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_one_row_again_and_again_has_a_mean_and_no_variance(kind, dtype):
    x = gaussian(1, DIM, seed=4).to(dtype)
    # in float64 the means of parts differ in the last digit
    parts = [slice(0, end) for end in (6, 8, 3, 7, 5)]
    values = floats(
        updated(metrics(DIM)[kind], x.expand(8, DIM), torch.arange(8) % 2, parts).compute()
    )
    rest = {
        k: v
        for k, v in values.items()
        if k not in ONE_ROW | {"duplicate_fraction", "anisotropy_null"}
    }
    assert all(abs(value) < 1e-14 for value in rest.values() if not math.isnan(value)), rest


@KIND
def test_a_refused_update_leaves_the_states_as_they_were(kind):
    metric = updated(metrics(DIM)[kind], *rows())
    before = metric.compute()
    for embeddings, error in (
        (torch.zeros(3, DIM + 1), ValueError),
        (torch.zeros(3, DIM).int(), TypeError),
    ):
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
    "cosine_std",
    "norm_mean",
    "norm_cv",
    "norm_max",
    "Q_t_cv",
    "rankme",
    *LARGEST,
    *(f"{key}{adjusted}" for key in SIMILARITIES for adjusted in ("", "_adjusted")),
} | LINES

PER_AXIS = {
    "top_dim_share",
    "anisotropy_standardized",
    "anisotropy_z_scored",
    "mean_cosine_z_scored",
} | {*("kurtosis", "kurtosis_first", *LARGEST)}

SQUARED_UNITS = {
    "Q",
    "M",
    "V",
    "V_W",
    "V_B",
    "V_W_unbiased",
    "V_B_unbiased",
    "V_W_local",
    "V_W_text",
}

UNITS = {"norm_mean", "norm_max", *LARGEST}


def all_values(x, ids):
    return {
        key: value
        for kind in LISTED
        for key, value in updated(metrics(DIM)[kind], x, ids).compute().items()
    }


@pytest.mark.slow
@settings(max_examples=10)
@given(seeds)
def test_translation_changes_no_variance_and_no_distance(seed):
    x, ids = token_rows(N, DIM, seed=seed)
    expected, got = all_values(x, ids), all_values(x + 50 * gaussian(1, DIM, seed=seed), ids)
    assert_values(
        got, {key: v for key, v in expected.items() if key not in ABOUT_THE_ORIGIN}, rtol=1e-8
    )


@pytest.mark.slow
@settings(max_examples=10)
@given(seeds, scales)
def test_scaling_scales_values_by_their_units(seed, scale):
    x, ids = token_rows(N, DIM, seed=seed)
    before, got = all_values(x, ids), all_values(scale * x, ids)
    powers = {
        key: 2 * (key in SQUARED_UNITS) + (key in UNITS)
        for key in before
        if "slope" not in key and "freq" not in key
    }
    assert_values(
        got, {key: before[key] * scale**power for key, power in powers.items()}, rtol=1e-8
    )
    assert_values(got, {"V_on_M_slope": before["V_on_M_slope"]}, rtol=1e-6)


@pytest.mark.slow
@settings(max_examples=10)
@given(seeds)
def test_rotation_changes_only_what_is_said_of_axes(seed):
    x, ids = token_rows(N, DIM, seed=seed)
    rotation = torch.linalg.qr(gaussian(DIM, DIM, seed=seed + 1))[0]
    before, got = all_values(x, ids), all_values(x @ rotation, ids)
    assert_values(
        got, {key: v for key, v in before.items() if key not in PER_AXIS}, rtol=1e-8, atol=1e-12
    )


@pytest.mark.slow
@settings(max_examples=10)
@given(seeds)
def test_the_order_of_rows_does_not_matter(seed):
    x, ids = token_rows(40, DIM, seed=seed)  # no more than are sampled
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


@pytest.mark.slow
@given(st.sampled_from([1, 3, 40]), st.booleans(), st.data())
def test_any_update_is_counted_or_refused_by_a_documented_error(dim, with_ids, data):
    updates = data.draw(st.lists(calls(dim, with_ids=with_ids), min_size=1, max_size=3))
    before = torch.get_rng_state()
    for kind in KINDS:
        if with_ids or kind != "TokenMoments in a count range":
            update_and_compute(metrics(dim)[kind], updates)
    assert torch.get_rng_state().equal(before)


def update_and_compute(metric, updates):
    for call in updates:
        if call.error is None:
            metric.update(call.embeddings, call.token_ids, call.mask)
        else:
            with pytest.raises(call.error):
                metric.update(call.embeddings, call.token_ids, call.mask)
    if metric.update_called:
        for value in metric.compute().values():
            assert (value.dtype, value.shape, value.requires_grad) == (torch.float64, (), False)


def values_at(kind, scale):
    x, ids, sequences = texts(N, 8, num_sequences=12, mean=1.0)
    metric = metrics(8)[kind]
    metric.set_unembedding(gaussian(70_000, 8, seed=5))
    for part in (slice(0, 70), slice(70, N)):
        metric.update(scale * x[part], token_ids=ids[part], sequence_ids=sequences[part])
    return floats(metric.compute())


@KIND
def test_values_of_float64_rows_at_any_scale_are_right_or_are_none(kind):
    usual, twice = values_at(kind, 1.0), values_at(kind, 2.0)
    powers = {
        key: round(math.log2(twice[key] / value)) if value and not math.isnan(value) else 0
        for key, value in usual.items()
    }
    for exponent in (*range(-1000, 1001, 250), -532, -514, -268, -134, 125, 266, 505, 509, 520):
        for key, value in values_at(kind, 2.0**exponent).items():
            if "_freq_" in key:  # regressions of a logarithm of 1 + Q depend on the scale
                continue
            if abs(exponent) > 125 and math.isnan(value):
                continue
            mantissa, power = math.frexp(usual[key])
            power += powers[key] * exponent
            expected = (
                math.ldexp(mantissa, power) if power <= 1024 else math.copysign(math.inf, mantissa)
            )
            assert value == pytest.approx(expected, rel=1e-9, abs=0, nan_ok=True), (key, exponent)
