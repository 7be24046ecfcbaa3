"""Massive rows, and the largest coordinate: numbers without them, against those of the other rows
or coordinates alone.
"""

import numpy as np
import pytest
import torch

from embedgeo.functional.rows import row_ids
from embedgeo.functional.spectrum import Scatter, row_scatter, spectrum_values
from embedgeo.geometry.computing import layer_values
from embedgeo.metrics import default_metrics, streaming_metrics
from embedgeo.metrics.layer import LayerMetrics, in_sync
from embedgeo.results.findings import KINDS, finding, finding_lines
from tests.data import gaussian, generator, texts
from tests.ranks import on_two_ranks
from tests.report.synthetic import records_of

SEQUENCES, LENGTH, DIM = 12, 150, 16
EIGHT = (
    "V",
    "M_over_Q",
    "V_W_over_V_unbiased",
    "anisotropy",
    "mean_cosine",
    "intrinsic_dimension_between",
    "V_on_M_slope",
    "V_on_M_r2",
)
FOUR = "V", "M_over_Q", "anisotropy", "mean_cosine"
PASSES = slice(0, 4), slice(4, 8), slice(8, 12)


def planted(num_massive, passes=PASSES, *, scale=60.0, dtype=torch.float64):
    """Rows of texts, so many of which in each of the passes are massive; their token ids, and the
    marks.
    """
    x, ids, _ = texts(SEQUENCES * LENGTH, DIM)
    x, ids = x.view(SEQUENCES, LENGTH, DIM).clone(), ids.view(SEQUENCES, LENGTH)
    marks = torch.zeros(SEQUENCES, LENGTH, dtype=torch.bool)
    for some in passes:
        order = torch.randperm(4 * LENGTH, generator=generator(some.start))[:num_massive]
        marks[some].view(-1)[order] = True
    x[marks] *= scale
    return x.to(dtype), ids, marks


def measured(x, ids, passes=PASSES, make=default_metrics, **options):
    """Values and errors of a layer that sees the sequences in passes."""
    return pairs_of(layer_of(x, ids, passes, make, **options))


def layer_of(x, ids, passes, make=default_metrics, **options):
    layer = LayerMetrics(make, x.shape[-1], device=torch.device("cpu"), **options)
    for some in passes:
        rows, of_rows = x[some], ids[some]
        numbers = torch.arange(len(rows))[:, None].expand_as(of_rows)
        layer.update(rows, row_ids(rows, of_rows, None, numbers))
    return layer


def pairs_of(layer):
    with in_sync([layer]):
        (pairs,) = layer_values([layer])
    if isinstance(pairs, Exception):
        raise pairs
    return {key: value for key, (value, _) in pairs.items()}, {
        key: error for key, (_, error) in pairs.items()
    }


def without(x, marks):
    """The rows, with NaN in place of massive ones: they keep their numbers, and do not count."""
    return torch.where(marks[..., None], torch.nan, x)


@pytest.mark.parametrize(
    ("num_massive", "passes", "scale", "dtype"),
    [
        (1, PASSES, 60.0, torch.float32),
        (40, PASSES, 1e8, torch.float64),
        (40, PASSES[1:], 60.0, torch.float64),
        (40, PASSES[:2], 1e8, torch.bfloat16),
        (240, PASSES, 1e8, torch.float32),
    ],
)
def test_numbers_without_massive_rows_are_those_of_the_other_rows(
    num_massive, passes, scale, dtype
):
    """There may be none in the first pass or the last."""
    x, ids, marks = planted(num_massive, passes, scale=scale, dtype=dtype)
    values, _ = measured(x, ids)
    expected, _ = measured(without(x, marks), ids)
    assert values["n_massive"] == marks.sum() == len(passes) * num_massive
    rel = 1e-9 if dtype == torch.float64 else 1e-6
    for key in EIGHT:
        assert values[f"{key}_without_massive"] == pytest.approx(expected[key], rel=rel), key
    for key in FOUR:
        end = "_without_massive_or_top_dim"
        assert values[key + end] == pytest.approx(expected[f"{key}_without_top_dim"], rel=rel), key
    squares = (x.double() - x.double().mean((0, 1))).square().sum(-1)
    share = float(squares[marks].sum() / squares.sum())
    assert values["massive_share_of_V"] == pytest.approx(share, rel=rel)


def test_main_numbers_are_those_of_all_rows_and_without_massive_rows_there_are_no_others():
    x, ids, _ = planted(40)
    values, _ = measured(x, ids)
    every, _ = measured(x, ids, times=1e9)
    assert every["n_massive"] == every["massive_share_of_V"] == 0
    assert not [key for key in every if "without_massive" in key]
    massive = "n_massive", "n_massive_first", "massive_share_of_V"
    assert {key: values[key] for key in every if key not in massive} == pytest.approx(
        {key: value for key, value in every.items() if key not in massive}, nan_ok=True
    )


def test_a_pass_of_few_rows_has_no_massive_ones():
    x, ids, _ = planted(40)
    values, _ = measured(x[:, :20], ids[:, :20])
    assert values["n_massive"] == 0


def test_errors_are_those_of_the_other_rows():
    x, ids, marks = planted(40)
    _, errors = measured(x, ids, jackknife=4)
    _, expected = measured(without(x, marks), ids, jackknife=4)
    for key in ("V", "M_over_Q", "V_W_over_V_unbiased", "anisotropy", "V_on_M_slope"):
        assert errors[f"{key}_without_massive"] == pytest.approx(expected[key], rel=1e-9), key


def test_first_positions_among_massive_rows_are_counted():
    x, ids, _ = planted(0)
    x[:, 0] *= 60
    values, _ = measured(x, ids)
    assert values["n_massive"] == values["n_massive_first"] == SEQUENCES


def values_on_rank(rank):
    x, ids, _ = planted(40, PASSES[:1])  # the second rank has none
    layer = layer_of(x, ids, (PASSES[:1], PASSES[1:])[rank])
    if layer.massive is None:
        layer.split_off()  # as a geometry has them agree
    return pairs_of(layer)[0]


@pytest.mark.slow
def test_one_of_two_ranks_has_massive_rows(tmp_path):
    first, second = on_two_ranks(values_on_rank, tmp_path)
    x, ids, _ = planted(40, PASSES[:1])
    expected, _ = measured(x, ids)
    # which occurrence of a token is drawn follows the order of batches over ranks
    expected.pop("intrinsic_dimension_between_without_massive")
    keys = [key for key in expected if "massive" in key]
    assert len(keys) == 3 + 7 + 4
    for values in (first, second):
        assert {key: values[key] for key in keys} == pytest.approx(
            {key: expected[key] for key in keys}, rel=1e-9
        )


def test_numbers_without_the_largest_coordinate_are_those_of_the_others():
    x, ids, _ = planted(0)
    x[..., 7] = 20 * x[..., 7] + 3
    others = np.delete(np.arange(DIM), 7)
    for make in (default_metrics, streaming_metrics):
        values, _ = measured(x, ids, make=make)
        expected, _ = measured(x[..., others], ids, make=make)
        for key in FOUR:
            assert values[f"{key}_without_top_dim"] == pytest.approx(expected[key], rel=1e-9), key


def test_coordinates_that_rounding_makes_are_left_out_of_the_standardized_anisotropy():
    x = gaussian(4096, 64, dtype=torch.float32)
    expected = float(spectrum_values(row_scatter(x[:, 5:]))["anisotropy_standardized"])
    x[:, 3] *= 1e-32
    x[:, 4] = 100 + torch.randint(0, 2, (4096,), generator=generator()) * 2.0**-18
    x[:, :3] = 1.0
    for sizes in ([4096], [1, 4095], [1000, 96, 3000]):
        scatter = Scatter.empty(64)
        for part in x.split(sizes):
            scatter = scatter.merge(row_scatter(part))
        values = spectrum_values(scatter)
        assert float(values["constant_dims"]) == 5
        assert float(values["anisotropy_standardized"]) == pytest.approx(expected, rel=1e-6)


def test_a_flag_names_each_headline_that_moves():
    x, ids, _ = planted(4, scale=200.0)
    x[..., 7] *= 10
    values, errors = measured(x, ids)
    found = {kind: finding(values, errors, kind) for kind in KINDS}
    assert all(found.values())
    assert found["massive"].startswith(f"without {values['n_massive']:.0f} massive rows of 1,800 ")
    for key in ("V", "V_W_over_V_unbiased", "V_on_M_slope"):
        assert f"{values[f'{key}_without_massive']:.4g}" in found["massive"], key
    told = finding_lines(records_of(dict.fromkeys(("block.00", "block.01"), values), DIM, 3, 0.0))
    assert len(told) == 4
    assert "1,800 rows, too few for V_W / V (4,096)" in told[-1]
    assert all("(also at block.01)" in line for line in told)


def test_a_flag_asks_for_two_standard_errors():
    values = {"anisotropy": 0.5, "anisotropy_without_massive": 0.3}
    assert finding(values, {"anisotropy": 0.05}, "massive")
    assert not finding(values, {"anisotropy": 0.11}, "massive")


def test_nothing_is_said_of_an_ordinary_cloud():
    values, errors = measured(
        gaussian(1200, 64).view(12, 100, 64), torch.arange(1200).view(12, 100)
    )
    assert not any(finding(values, errors, kind) for kind in KINDS)
