"""Numbers without the few rows, the first positions or the coordinate that make them, against all
that is left, measured naively.
"""

from math import nan

import numpy as np
import pandas as pd
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from embedgeo.functional.moments import moments_and_norms
from embedgeo.functional.outliers import outlier_rows
from embedgeo.functional.rows import row_ids, select_rows
from embedgeo.geometry.computing import layer_values
from embedgeo.metrics import Anisotropy, EmbeddingMoments, TokenMoments
from embedgeo.metrics.layer import LayerMetrics
from embedgeo.report.runs import make_run
from embedgeo.report.summary import flags
from embedgeo.results.findings import approximate_error, findings, lines
from tests import references
from tests.data import gaussian, generator, texts, zipf_ids
from tests.ranks import on_two_ranks

SEQUENCES, LENGTH, DIM = 12, 200, 16
KEYS = ("V", "M_over_Q", "V_W_over_V_unbiased", "anisotropy")
OF_COORDINATES = ("V", "M_over_Q", "V_W_over_V", "anisotropy")
LARGE = torch.zeros(SEQUENCES, LENGTH, dtype=torch.bool)
LARGE[3, [5, 9, 17, 30, 199]] = True
FIRST = torch.zeros_like(LARGE)
FIRST[:, 0] = True


def planted(*, large=False, first=False, coordinate=False):
    """Rows of texts, in which five rows, all first positions or a coordinate are huge; their token
    ids.
    """
    x, ids, _ = texts(SEQUENCES * LENGTH, DIM)
    x, ids = x.view(SEQUENCES, LENGTH, DIM).clone(), ids.view(SEQUENCES, LENGTH)
    ids[LARGE] = ids[3, 5]  # of one type and sequence
    if large:
        x[LARGE] *= 60
    if first:
        x[FIRST] += 50 * gaussian(1, DIM, seed=8)
    if coordinate:
        x[..., 7] *= 30
    return x, ids


def measured(x, ids, batches=(slice(None),), metrics=(TokenMoments, Anisotropy), jackknife=0):
    """Values and errors of a layer that sees the sequences in batches."""
    layer = LayerMetrics(
        lambda dim: [each(dim) for each in metrics],
        x.shape[-1],
        device=torch.device("cpu"),
        jackknife=jackknife,
    )
    for batch in batches:
        rows, of_rows = x[batch], ids[batch]
        numbers = torch.arange(len(rows))[:, None].expand_as(of_rows)
        layer.update(rows, row_ids(rows, of_rows, None, numbers))
    (pairs,) = layer_values([layer])
    values = {key: value for key, (value, _) in pairs.items()}
    return values, {key: error for key, (_, error) in pairs.items()}


def naive(x, ids, kept, columns=slice(None)):
    """The headlines of the rows that are kept, of all or of some coordinates."""
    sequences = torch.arange(SEQUENCES)[:, None].expand_as(kept)[kept]
    rows, ids = x[kept][:, columns], ids[kept]
    eigenvalues = np.linalg.eigvalsh(np.cov(rows.numpy().T))
    return {
        **references.row_values(rows),
        **references.token_values(rows, ids),
        **references.unbiased_values(rows, ids, sequences),
        "anisotropy": eigenvalues[-1] / eigenvalues.sum(),
    }


def assert_without(values, what, expected, keys=KEYS):
    got = {key: values[f"{key}_without_{what}"] for key in keys}
    assert got == pytest.approx({key: float(expected[key]) for key in keys}, rel=1e-9)


BATCHES = {
    "at once": [slice(None)],
    "in turn": [slice(0, 2), slice(2, 3), slice(3, 12)],
    "the rest first": [slice(3, 12), slice(0, 3)],
}


@pytest.mark.parametrize("batches", BATCHES.values(), ids=BATCHES)
def test_what_is_left_without_large_rows_and_first_positions_is_as_measured_alone(batches):
    x, ids = planted(large=True, first=True)
    values, _ = measured(x, ids, batches)
    assert values["large_rows"] == 5
    assert values["first_positions"] == SEQUENCES
    for what, left_out in {
        "large_rows": LARGE,
        "first_positions": FIRST,
        "both": LARGE | FIRST,
    }.items():
        assert_without(values, what, naive(x, ids, ~left_out))
    left = naive(x, ids, ~(LARGE | FIRST))
    variance = x[~(LARGE | FIRST)].var(0)
    others = np.delete(np.arange(DIM), int(variance.argmax()))
    of_others = naive(x, ids, ~(LARGE | FIRST), others)
    assert_without(values, "all", of_others, OF_COORDINATES)
    assert_without(values, "both", left, ("V_W_over_V",))
    told = findings(values, DIM)
    assert told.keys() == {"large_rows", "first_positions"}
    squares = (x - x.mean((0, 1))).square().sum(-1)
    share = float(squares[LARGE].sum() / squares.sum())
    assert told["large_rows"].startswith(f"5 rows of 2,400 hold {share:.0%} of the variance; ")
    assert f"{left['V_W_over_V_unbiased']:.4g}" in told["first_positions"]


def test_a_first_position_and_large_rows_of_its_type_are_left_out_together():
    x, ids = planted(large=True, first=True)
    ids[3, 0] = ids[3, 5]
    values, _ = measured(x, ids)
    assert_without(values, "both", naive(x, ids, ~(LARGE | FIRST)))


def test_where_none_is_large_the_rows_of_largest_norm_are_left_out():
    x, ids = planted()
    x[..., 7] = 2 * x[..., 7] + 30  # the largest of V, too
    norms = x.norm(dim=-1)
    largest = norms.flatten().topk(3).values
    assert largest[0] < 2 * norms.median()
    assert_without(measured(x, ids)[0], "large_rows", naive(x, ids, norms < largest[-1]))


class Waits(TorchDispatchMode):
    """Counts what a GPU would be waited for."""

    num_waits = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        self.num_waits += func.overloadpacket.__name__ in (
            "_local_scalar_dense",
            "nonzero",
            "_unique2",
        )
        return found


def test_an_update_with_large_rows_waits_for_no_more_than_another():
    waits = []
    for large in (False, True):
        x, ids = planted(large=large, first=large)
        metric, rows = TokenMoments(DIM), select_rows(x, ids, dim=DIM)
        metric.update(rows)  # which finds out what follows from the ids
        with Waits() as found:
            metric.update(rows)
        waits.append(found.num_waits)
        norms = moments_and_norms(rows.embeddings)[1]
        with Waits() as found:
            outlier_rows(rows, norms)
        assert found.num_waits == 0
    assert waits[0] == waits[1]


class OnlyV(EmbeddingMoments):
    def compute(self):
        return {"V": super().compute()["V"]}


def test_a_subclass_may_have_fewer_values():
    values, _ = measured(*planted(large=True), metrics=(OnlyV,))
    assert values.keys() == {"V"}


@pytest.mark.parametrize("scale", [1e-155, 1e155])
def test_rows_whose_squares_leave_the_range_of_float64_are_measured(scale):
    x, ids = planted(coordinate=True)
    values, _ = measured(x.double() * scale, ids)
    assert values["n"] == SEQUENCES * LENGTH


def test_shares_are_the_naive_ones():
    x, ids = planted(large=True, first=True)
    values, _ = measured(x, ids)
    expected = references.outlier_shares(x.view(-1, DIM), FIRST.view(-1))
    assert {key: values[key] for key in expected} == pytest.approx(expected, rel=1e-9)


def test_one_coordinate_is_named_and_left_out():
    x, ids = planted(coordinate=True)
    values, _ = measured(x, ids)
    everything = torch.ones_like(LARGE)
    expected = naive(x, ids, everything, np.delete(np.arange(DIM), 7))
    assert_without(values, "top_dim", expected, OF_COORDINATES)
    assert values["V_top_coordinate"] == 7
    told = findings(values, DIM)
    assert told.keys() == {"top_dim"}
    assert told["top_dim"].startswith(f"coordinate 7 holds {values['top_dim_share']:.0%} of the ")
    assert f"anisotropy is {expected['anisotropy']:.4g}, not " in told["top_dim"]


@pytest.mark.parametrize("of_types", [True, False], ids=["V_B", "V_W"])
def test_a_coordinate_that_makes_the_split_is_told_of(of_types):
    x, ids = planted()
    x[..., 7] = 20 * (gaussian(int(ids.max()) + 1, 1)[ids, 0] if of_types else x[..., 7])
    values, errors = measured(x, ids, jackknife=6)
    expected = naive(x, ids, torch.ones_like(LARGE), np.delete(np.arange(DIM), 7))["V_W_over_V"]
    whole = values["V_W_over_V"]
    assert abs(expected - whole) > 0.1 * whole
    told = findings(values, DIM, errors)["top_dim"]
    assert f"without it V_W / V, plug-in is {expected:.4g}, not {whole:.4g}" in told


def test_rows_that_make_a_number_and_its_jackknife_error_are_told_of():
    values, errors = measured(*planted(large=True), jackknife=6)
    assert errors["V"] > 0.2 * values["V"]
    assert errors["top_rows_share"] > 0
    assert "large_rows" in findings(values, DIM, errors)


def test_rows_are_told_of_where_as_many_others_would_not_do_as_much():
    values = {  # of Gemma 3 270M, block.12
        "n": 8192.0,
        "token_types": 1689.0,
        "V_W_over_V_unbiased": 0.3596,
        "large_rows": 5.0,
        "large_rows_share": 0.0582,
        "V_W_over_V_unbiased_without_large_rows": 0.3145,
        "anisotropy_without_large_rows": 0.5247,
    }
    error = approximate_error("V_W_over_V_unbiased", values, "large_rows")
    assert 2 * error > 0.3596 - 0.3145
    assert findings(values, 640) == {
        "large_rows": "5 rows of 8,192 hold 6% of the variance; without them V_W / V is 0.3145, "
        "not 0.3596"
    }
    assert findings(values | {"large_rows": 300.0}, 640) == {}


def test_metrics_without_a_table_or_scatter_tell_what_they_know():
    x, ids = planted(large=True)
    values, _ = measured(x, ids, metrics=(EmbeddingMoments,))
    assert_without(values, "large_rows", naive(x, ids, ~LARGE), ("V", "M_over_Q"))
    assert "V_W_over_V_unbiased_without_large_rows" not in values


def test_first_positions_that_are_not_held_leave_only_what_their_moments_tell():
    ids = zipf_ids(4000).view(800, 5)
    x = gaussian(4000, 3).view(800, 5, 3)
    x[:, 0] += 5
    values, _ = measured(x, ids)
    kept = torch.ones(800, 5, dtype=torch.bool)
    kept[:, 0] = False
    expected = references.row_values(x[kept])
    assert_without(values, "first_positions", expected, ("V", "M_over_Q"))
    assert np.isnan(values["anisotropy_without_first_positions"])
    assert "first_positions" in findings(values, 3)


def test_a_line_names_the_layer_where_most_is_held_and_the_others():
    x, ids = planted(large=True)
    values, _ = measured(x, ids)
    records = [
        {"layer": layer, "width": DIM, "metric": key, "value": value, "stderr": nan}
        for layer in ("block.00", "block.01")
        for key, value in values.items()
    ]
    (line,) = lines(records)
    assert line.startswith("block.00: 5 rows of 2,400 hold ")
    assert "(also at block.01)" in line
    assert "--skip-massive" in line


def test_the_report_has_a_flag_for_each_kind_with_the_layers_and_the_remedy():
    values, errors = measured(*planted(large=True, coordinate=True))
    records = [
        {
            "step": 0,
            "layer": layer,
            "layer_index": place,
            "width": DIM,
            "metric": key,
            "value": value,
            "stderr": errors[key],
        }
        for place, layer in enumerate(("block.00", "block.01"))
        for key, value in values.items()
    ]
    found = {flag.title: flag for flag in flags(make_run("run", pd.DataFrame(records)))}
    rows = found["A few rows make the numbers"]
    assert "--skip-massive" in rows.text
    assert [line.split()[0] for line in rows.details] == ["block.00", "block.01"]
    assert "coordinate 7 holds" in found["One coordinate makes the numbers"].details[0]
    assert "Missing numbers" not in found


SIMULATED = [
    (n, dim, between, seed)
    for n, dim in ((128, 2), (200, 8), (512, 64), (1024, 16), (2048, 128))
    for between in (0.0, 1.0)
    for seed in range(10)
]


@pytest.mark.slow
def test_of_a_hundred_simulations_of_gaussian_rows_and_zipf_types_none_is_told_of():
    told = []
    for n, dim, between, seed in SIMULATED:
        ids = zipf_ids(n, vocabulary=500, seed=seed)
        centers = torch.randn(500, dim, generator=generator(seed + 1), dtype=torch.float64)
        x = 1.0 + gaussian(n, dim, seed=seed + 2) + between * centers[ids]
        values, _ = measured(x.view(-1, n // 8, dim), ids.view(-1, n // 8))
        told += findings(values, dim).values()
    assert told == []


NEARLY_ON_A_LINE = [  # sequences, their length, d, V_W / V, number of token types
    (50, 2, 2, 0.1, 5000),
    (50, 2, 32, 0.6, 5000),
    (64, 2, 16, 1.0, 60),
    (1, 100, 16, 0.1, 60),
    (8, 16, 3, 0.05, 20),
    (1, 200, 64, 1.0, 60),
    (1, 512, 16, 0.02, 20),
    (8, 256, 2, 0.05, 20),
]


@pytest.mark.slow
@pytest.mark.parametrize(("sequences", "length", "dim", "within", "vocabulary"), NEARLY_ON_A_LINE)
def test_rows_nearly_on_a_line_are_no_few_rows(sequences, length, dim, within, vocabulary):
    told = set()
    scale = torch.ones(dim, dtype=torch.float64)
    scale[0] = 14 * dim**0.5
    for seed in range(20):
        ids = zipf_ids(sequences * length, vocabulary=vocabulary, seed=seed)
        centers = gaussian(vocabulary, dim, seed=seed + 1)
        x = within**0.5 * gaussian(len(ids), dim, seed=seed + 2)
        x = 0.3 + (x + (1 - within) ** 0.5 * centers[ids]) * scale
        shape = sequences, length
        values, errors = measured(x.view(*shape, dim), ids.view(shape), jackknife=6)
        told |= findings(values, dim, errors).keys()
    assert told <= {"top_dim"}


@pytest.mark.slow
def test_two_ranks_leave_out_the_rows_of_both(tmp_path):
    expected, _ = measured(*planted(large=True, first=True, coordinate=True))
    for values in on_two_ranks(values_of_a_half, tmp_path):
        assert values == pytest.approx(expected, rel=1e-9, nan_ok=True)


def values_of_a_half(rank):
    x, ids = planted(large=True, first=True, coordinate=True)
    half = slice(0, 4) if rank == 0 else slice(4, SEQUENCES)
    return measured(x[half], ids[half])[0]
