"""Anisotropy and spectra, exact and from a sketch, whose values are as close to the exact ones as
its errors say.
"""

import pytest
import torch

from embedgeo.functional import (
    ScatterSketch,
    anisotropy,
    anisotropy_null,
    row_scatter,
    row_sketch,
    sketch_values,
    spectrum_values,
    top_eigenvalue,
)
from embedgeo.functional.spectrum import full_spectrum_values, gaussian_columns
from tests import references
from tests.data import all_nan, assert_values, floats, gaussian, generator, spectral

SPECTRA = {
    "well separated": [100.0, 10.0] + [1.0] * 62,
    "nearly equal at the top": [10.0, 10.0 * (1 - 1e-9), 9.999] + [1.0] * 61,
    "flat": [1.0] * 64,
    "decaying": [0.8**i for i in range(64)],
    "narrow": [5.0, 1.0, 0.1],
    "low rank": [3.0, 2.0] + [0.0] * 62,
}
SPECTRUM = pytest.mark.parametrize("variances", SPECTRA.values(), ids=SPECTRA.keys())
DTYPE = pytest.mark.parametrize(
    ("dtype", "rtol"),
    [(torch.float64, 1e-9), (torch.float32, 1e-5), (torch.bfloat16, 1e-5)],
    ids=str,
)


def exact(x):
    """σ₁²/Σσ² by torch's own singular values in float64."""
    x = x.double()
    squares = torch.linalg.svdvals(x - x.mean(0)).square()
    return (squares[0] / squares.sum()).item()


@SPECTRUM
@DTYPE
@pytest.mark.parametrize("n", [1000, 20])
def test_anisotropy_equals_that_of_the_singular_values(variances, dtype, rtol, n):
    x = spectral(n, variances, dtype=dtype)
    assert anisotropy(x).item() == pytest.approx(exact(x), rel=rtol)


@DTYPE
@pytest.mark.parametrize("gap", [1e-2, 1e-6, 1e-12])
def test_anisotropy_where_the_top_eigenvalues_of_the_sample_are_nearly_equal(dtype, rtol, gap):
    rows = torch.linalg.qr(gaussian(300, 200))[0]
    rows -= rows.mean(0)
    u, s, v = torch.linalg.svd(rows, full_matrices=False)
    s = 1 + torch.arange(200).double().neg() / 250
    s[1] = s[0] * (1 - gap)
    x = (u * s @ v).to(dtype)
    assert anisotropy(x).item() == pytest.approx(exact(x), rel=rtol)


@SPECTRUM
@DTYPE
@pytest.mark.parametrize("mean", [10.0, 1000.0])
def test_anisotropy_far_from_the_origin(variances, dtype, rtol, mean):
    x = (10 * spectral(500, variances) + mean).to(dtype)
    assert anisotropy(x).item() == pytest.approx(exact(x), rel=rtol)


def test_anisotropy_where_float32_cannot_hold_the_mean():
    x = (1e6 + spectral(500, [1.0] * 40)).float()
    assert anisotropy(x).item() == pytest.approx(exact(x), rel=1e-5)


@DTYPE
@pytest.mark.parametrize("precision", ["medium", "highest"])
def test_anisotropy_does_not_depend_on_the_process_settings(dtype, rtol, precision):
    x = spectral(2000, SPECTRA["decaying"], dtype=dtype)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            value = anisotropy(x).item()
        assert torch.get_float32_matmul_precision() == precision
    finally:
        torch.set_float32_matmul_precision(before)
    assert value == pytest.approx(exact(x), rel=rtol)


@pytest.mark.parametrize("scale", [1e25, 1e-22, 1e-30])
def test_the_scale_of_float32_rows_does_not_matter(scale):
    x = (spectral(300, SPECTRA["decaying"]) * scale).float()
    assert anisotropy(x).item() == pytest.approx(exact(x.double() / scale), rel=1e-5)


@pytest.mark.parametrize(("scale", "dim"), [(1e200, 3), (1e200, 200), (1e-200, 3), (1e-200, 200)])
def test_rows_whose_squares_overflow_or_vanish_are_undefined(scale, dim):
    scatter = row_scatter(gaussian(100, dim) * scale)
    values = floats(spectrum_values(scatter, full=True))
    del values["anisotropy_null"]
    assert all_nan(values)


def matrices():
    flat = torch.eye(200) + 1e-7 * spectral(200, [1.0] * 200).T.cov()
    yield "zero", torch.zeros(200, 200)
    yield "one by one", torch.tensor([[3.0]])
    yield "rank one", torch.outer(v := gaussian(200, 1).flatten(), v)
    yield "rank one, at a coordinate axis", torch.diag(torch.eye(200)[5])
    yield "ties", torch.diag(torch.tensor([7.0] * 130 + [1.0] * 70))
    yield "identity", torch.eye(200)
    yield "flat", flat
    yield "sample covariance", gaussian(300, 200).T.cov()
    yield "huge", gaussian(300, 200).T.cov() * 1e200
    yield "tiny", gaussian(300, 200).T.cov() * 1e-200
    yield "wide spectrum", torch.diag(10.0 ** -torch.linspace(0, 63, 200).double())
    yield "top hidden from the start vector", top_orthogonal_to_start(300)


def top_orthogonal_to_start(dim):
    """The first Lanczos vector is an eigenvector, but of the second largest eigenvalue."""
    start = torch.randn(dim, 1, generator=generator(0), dtype=torch.float64)
    axes, _ = torch.linalg.qr(torch.cat((start, gaussian(dim, dim - 1, seed=5)), dim=1))
    eigenvalues = torch.cat((torch.tensor([10.0, 10.001]), torch.linspace(0, 9.99, dim - 2)))
    return axes * eigenvalues @ axes.T


@pytest.mark.parametrize(("name", "s"), list(matrices()), ids=[name for name, _ in matrices()])
def test_top_eigenvalue_of_nasty_matrices(name, s):
    s = s.double()
    expected = torch.linalg.eigvalsh(s)[-1].item()
    assert top_eigenvalue(s).item() == pytest.approx(expected, rel=2e-10, abs=1e-300)


@pytest.mark.parametrize("dim", [3, 200])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_top_eigenvalue_of_a_matrix_that_is_not_finite(dim, bad):
    assert top_eigenvalue(torch.full((dim, dim), bad, dtype=torch.float64)).isnan()


@pytest.mark.parametrize(("n", "dim"), [(2, 5), (10, 1), (20, 20), (100, 5), (40, 200), (500, 50)])
def test_the_gaussian_baseline_is_what_gaussian_rows_give(n, dim):
    repeats = 400
    x = torch.randn(repeats, n, dim, generator=generator(), dtype=torch.float64)
    x -= x.mean(1, keepdim=True)
    squares = torch.linalg.svdvals(x).square()
    simulated = (squares[:, 0] / squares.sum(1)).mean().item()
    assert anisotropy_null(torch.tensor(float(n)).double(), dim).item() == pytest.approx(
        simulated, rel=0.02
    )


@pytest.mark.parametrize("n", [0.0, 1.0])
def test_the_gaussian_baseline_needs_two_rows(n):
    assert anisotropy_null(torch.tensor(n).double(), 5).isnan()


@SPECTRUM
@pytest.mark.parametrize("mean", [0.0, 1000.0])
def test_spectrum_values_equal_the_naive_ones(variances, mean):
    x = spectral(300, variances) + mean * (mean and gaussian(1, len(variances), seed=9))
    expected = references.spectrum(x) if len(variances) > 5 else narrow_spectrum(x)
    low_rank = min(variances) == 0
    for key in ("effective_rank", "rankme"):
        rtol = 1e-4 if low_rank else 1e-9
        assert_values(
            spectrum_values(row_scatter(x), full=True), {key: expected.pop(key)}, rtol=rtol
        )
    if low_rank:
        del expected["anisotropy_without_top5"]  # rounding over rounding
    assert_values(spectrum_values(row_scatter(x), full=True), expected, rtol=1e-9)


def narrow_spectrum(x):
    """Fewer than six dimensions leave nothing without the top five."""
    padded = references.spectrum(torch.cat((x, gaussian(len(x), 6)), dim=1))
    values = references.variances(x)
    standardized = references.variances((x - x.mean(0)) / x.std(0, correction=0))
    singular = values**0.5 / (values**0.5).sum()
    return {key: torch.nan for key in padded if key == "anisotropy_without_top5"} | {
        "anisotropy": values[0] / values.sum(),
        "anisotropy_standardized": standardized[0] / standardized.sum(),
        "participation_ratio": values.sum() ** 2 / (values**2).sum(),
        "effective_rank": float(torch.special.entr(torch.from_numpy(singular)).sum().exp()),
        "effective_rank_eigenvalues": float(
            torch.special.entr(torch.from_numpy(values / values.sum())).sum().exp()
        ),
        "rankme": references.rankme(x),
        "isoscore": references.isoscore(x),
        "top1_share": values[0] / values.sum(),
        "top5_share": 1.0,
    }


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("n", [2, 6, 7, 20])
def test_directions_that_few_rows_do_not_span_count_as_nothing(n, dtype):
    x = gaussian(n, 64).to(dtype)
    variances = torch.from_numpy(references.variances(x)[: n - 1])
    share = variances.sqrt() / variances.sqrt().sum()
    expected = {
        "effective_rank": torch.special.entr(share).sum().exp(),
        "anisotropy_without_top5": variances[5] / variances[5:].sum() if n > 6 else torch.nan,
    }
    assert_values(spectrum_values(row_scatter(x), full=True), expected, rtol=1e-5)


@pytest.mark.parametrize(("n", "mean"), [(5, 1000.0), (90, 1000.0), (90, 1e6)])
def test_rankme_keeps_its_digits_far_from_the_origin(n, mean):
    x = spectral(n, [0.9**i for i in range(40)]) + mean * gaussian(1, 40, seed=9)
    # of an effective rank that is nearly 1
    got = spectrum_values(row_scatter(x), full=True)["rankme"].item() - 1
    assert got == pytest.approx(references.rankme(x) - 1, rel=1e-6)


def test_rankme_is_the_published_one_but_for_its_epsilon():
    x = 0.3 + spectral(900, [0.95**i for i in range(256)])
    ours, published = (
        spectrum_values(row_scatter(x), full=True)["rankme"].item(),
        references.rankme(x, 1e-7),
    )
    assert ours == pytest.approx(references.rankme(x), rel=1e-9)
    assert 1e-6 < published / ours - 1 < 1e-3


def test_ranks_of_singular_values_and_of_eigenvalues_are_far_apart():
    eigenvalues = 1 / torch.arange(1, 2049, dtype=torch.float64)
    values = full_spectrum_values(eigenvalues)
    assert round(values["effective_rank"].item()) == 1587
    assert round(values["effective_rank_eigenvalues"].item()) == 281
    assert values["alpha_req"].item() == pytest.approx(1)


def test_isoscore_of_the_extremes():
    equal = torch.cat((torch.eye(8), -torch.eye(8))).double()
    line = torch.outer(gaussian(20, 1).flatten(), torch.ones(8).double())
    assert spectrum_values(row_scatter(equal), full=True)["isoscore"].item() == pytest.approx(1)
    assert spectrum_values(row_scatter(line), full=True)["isoscore"].item() == pytest.approx(
        0, abs=1e-9
    )
    assert spectrum_values(row_scatter(gaussian(20, 1)), full=True)["isoscore"].isnan()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("constant", [0.0, 0.1, 1234.567])
def test_constant_coordinates_are_left_out_of_the_standardized_rows(dtype, constant):
    x = torch.exp(gaussian(97, 6)).to(dtype) * torch.tensor(
        [1.0, 100.0, 1.0, 0.01, 1.0, 5.0], dtype=dtype
    )
    x[:, 2] = x[:, 4] = constant
    expected = references.spectrum(x[:, [0, 1, 3, 5]].double().repeat(1, 2))[
        "anisotropy_standardized"
    ]
    rtol = 1e-9 if dtype == torch.float64 else 1e-5
    assert_values(spectrum_values(row_scatter(x)), {"anisotropy_standardized": expected}, rtol=rtol)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n", [0, 1, 7])
@pytest.mark.parametrize("dim", [1, 3, 40])
def test_rows_that_do_not_vary_have_no_spectrum(dtype, n, dim):
    x = torch.full((n, dim), 0.1, dtype=dtype)
    values = floats(spectrum_values(row_scatter(x), full=True))
    values.pop("anisotropy_null")
    # that of one direction
    assert values.pop("rankme") == pytest.approx(1 if n else torch.nan, nan_ok=True)
    values["alone"] = anisotropy(x).item()
    assert all_nan(values)


def test_scatter_of_parts_merges_to_that_of_the_whole():
    x = torch.cat((gaussian(30, 5), 100 + gaussian(20, 5, seed=1), gaussian(0, 5)))
    parts = row_scatter(x[:30]).merge(row_scatter(x[30:])).merge(row_scatter(x[:0]))
    for got, expected in zip(parts, row_scatter(x), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(parts.scatter, x.T.cov() * 49, rtol=1e-12, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_scatter_is_summed_over_chunks(dtype):
    x = (1000 + gaussian(40_000, 150)).to(dtype)
    expected = x.double().T.cov() * (len(x) - 1)
    torch.testing.assert_close(row_scatter(x).scatter, expected, rtol=1e-6, atol=1e-6 * len(x))


CPU = torch.device("cpu")
DIM, COLUMNS, WIDTH = 400, 32, 4000


def flat(rows_a_dimension):
    """The spectrum of many isotropic rows (Marchenko & Pastur 1967)."""
    x = gaussian(rows_a_dimension * DIM, DIM)
    return torch.linalg.eigvalsh(x.T @ x).flip(0)


def first(*top, rest=1.0):
    return torch.cat((torch.tensor(top), torch.full((DIM - len(top),), rest))).double()


INDEX = torch.arange(1, DIM + 1, dtype=torch.float64)
SKETCHED = {
    **{f"power law {power}": INDEX**-power for power in (0.25, 0.5, 1.0, 2.0)},
    "all equal": first(),
    "flat": flat(8),
    "flat, few rows": flat(2),
    "flat with one spike": flat(8) * first(20.0),
    "a spike that drowns": first(5.0),
    "a spike": first(50.0),
    "most in one": first(1e4),
    "three nearly equal spikes": first(30.0, 29.9, 29.0),
    "two equal": first(1.0, 1.0, rest=1e-3),
    "a step": first(*[1.0] * 20, rest=0.01),
    "low rank": first(*[1.0] * 100, rest=0.0),
    "rank of half the columns": first(*[1.0] * (COLUMNS // 2), rest=0.0),
    "one direction": first(1.0, rest=0.0),
}


def values_of(eigenvalues, columns, axes, width=WIDTH):
    """What a sketch tells of the scatter of these eigenvalues along some coordinates of many, the
    others constant.

    Ω is Gaussian, of independent rows: other axes are another draw of it.
    """
    m2 = torch.zeros(width, dtype=torch.float64)
    m2[axes] = eigenvalues
    product = m2[:, None] * gaussian_columns(width, columns, CPU)
    return sketch_values(ScatterSketch(torch.tensor(1e4), torch.zeros_like(m2), m2, product))


def drawn_axes(random):
    return torch.randperm(WIDTH, generator=random)[:DIM]


@pytest.mark.parametrize("name", SKETCHED)
def test_the_exact_values_are_within_the_errors_in_at_least_95_of_100_cases(name):
    eigenvalues, random, repeats = SKETCHED[name], generator(1), 60
    exact = {
        "anisotropy": eigenvalues.max() / eigenvalues.sum(),
        "participation_ratio": eigenvalues.sum() ** 2 / eigenvalues.square().sum(),
    }
    within = dict.fromkeys(exact, 0)
    for _ in range(repeats):
        values = values_of(eigenvalues, COLUMNS, drawn_axes(random))
        for key, value in exact.items():
            within[key] += bool(
                (values[key] - value).abs() <= values[f"{key}_error"] + 1e-9 * value
            )
    assert within["anisotropy"] >= 0.98 * repeats
    # that 95 of 100 give fewer is as likely as 1 in 30
    assert within["participation_ratio"] >= 0.9 * repeats


def test_a_steep_spectrum_is_told_closely_and_a_flat_one_only_by_its_size():
    random = generator(3)
    found = {
        name: values_of(SKETCHED[name], 128, drawn_axes(random))
        for name in ("power law 1.0", "most in one", "flat")
    }
    for name in ("power law 1.0", "most in one"):
        assert found[name]["anisotropy_error"] < 0.05 * found[name]["anisotropy"]
        assert found[name]["anisotropy"] == pytest.approx(
            float(SKETCHED[name].max() / SKETCHED[name].sum()), rel=0.01
        )
    assert found["flat"]["anisotropy"] == pytest.approx(
        float(SKETCHED["flat"].max() / SKETCHED["flat"].sum()), rel=0.15
    )
    assert found["flat"]["anisotropy"] < found["flat"]["anisotropy_error"] < 5 / DIM


def test_few_columns_do_not_make_the_error_of_the_participation_ratio_too_small():
    random, eigenvalues = generator(2), INDEX**-1.0
    exact, within = eigenvalues.sum() ** 2 / eigenvalues.square().sum(), 0
    for _ in range(200):
        values = values_of(eigenvalues, 8, drawn_axes(random))
        within += bool(
            (values["participation_ratio"] - exact).abs() <= values["participation_ratio_error"]
        )
    assert within >= 0.95 * 200


def test_a_direction_that_chance_has_hardly_drawn_is_told_exactly_where_there_is_no_other():
    width = 200_000
    sizes = torch.linalg.vector_norm(gaussian_columns(width, 8, CPU), dim=1)
    assert sizes.min() < 0.2 * sizes.median()
    values = values_of(SKETCHED["one direction"], 8, sizes.argsort()[:DIM], width)
    assert values["anisotropy"] == pytest.approx(1, rel=1e-9)
    assert values["anisotropy_error"] == 0


def test_of_few_rows_it_tells_the_exact_values():
    x = spectral(40, [0.9**i for i in range(80)], dtype=torch.float64)
    values, exact = sketch_values(row_sketch(x, 128)), spectrum_values(row_scatter(x))
    assert_values(
        values, {key: exact[key] for key in ("anisotropy", "participation_ratio")}, rtol=1e-9
    )
    assert values["anisotropy_error"] == values["participation_ratio_error"] == 0
    assert values["anisotropy_null"] == exact["anisotropy_null"]


@pytest.mark.slow
@pytest.mark.parametrize("mean", [0.0, 1000.0])
@pytest.mark.parametrize(
    ("dtype", "rtol"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 1e-5)]
)
@pytest.mark.parametrize("n", [100, 250_000])
def test_the_product_is_that_of_the_scatter(n, dtype, rtol, mean):
    x = (mean + spectral(n, [1 / (i + 1) for i in range(40)])).to(dtype)
    centred = x.double() - x.double().mean(0)
    expected = centred.T @ centred
    sketch = row_sketch(x, 16)
    omega = gaussian_columns(40, 16, CPU).double()
    torch.testing.assert_close(sketch.mean, x.double().mean(0), rtol=1e-9, atol=1e-7)
    torch.testing.assert_close(sketch.m2, expected.diagonal(), rtol=rtol, atol=0)
    assert torch.linalg.norm(sketch.product - expected @ omega) <= rtol * torch.linalg.norm(
        expected @ omega
    )


def test_parts_merge_to_the_whole_however_wide_the_spectrum():
    x = torch.cat((gaussian(30, 60), 100 + gaussian(20, 60, seed=1), gaussian(0, 60)))
    parts = row_sketch(x[:30], 16).merge(row_sketch(x[30:], 16)).merge(row_sketch(x[:0], 16))
    whole = ScatterSketch.empty(60, 16).merge(row_sketch(x, 16))
    for got, expected in zip(parts, whole, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-11, atol=1e-9)
    assert_values(sketch_values(parts), sketch_values(whole), rtol=1e-9)


def test_equal_numbers_are_drawn_everywhere_and_leave_the_random_state_alone():
    before = torch.get_rng_state()
    omega = gaussian_columns(50, 8, CPU)
    gaussian_columns.cache_clear()
    assert omega.equal(gaussian_columns(50, 8, CPU))
    assert before.equal(torch.get_rng_state())


@pytest.mark.parametrize("scale", [1e25, 1e-22, 1e-30])
def test_the_scale_of_float32_rows_does_not_matter_to_a_sketch(scale):
    x = spectral(300, [0.8**i for i in range(40)])
    values = sketch_values(row_sketch((x * scale).float(), 16))
    assert_values(values, sketch_values(row_sketch(x, 16)), rtol=1e-4)


@pytest.mark.parametrize("scale", [1e200, 1e-200])
def test_in_a_sketch_rows_whose_squares_overflow_or_vanish_are_undefined(scale):
    values = floats(sketch_values(row_sketch(gaussian(100, 20) * scale, 8)))
    assert not torch.tensor(values.pop("anisotropy_null")).isnan()
    assert all_nan(values)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n", [0, 1, 7])
def test_in_a_sketch_rows_that_do_not_vary_have_no_spectrum(dtype, n):
    values = floats(sketch_values(row_sketch(torch.full((n, 20), 0.1, dtype=dtype), 8)))
    values.pop("anisotropy_null")
    assert all_nan(values)


def test_constant_coordinates_add_nothing():
    x = gaussian(90, 12)
    x[:, 3] = 1234.567
    values, exact = sketch_values(row_sketch(x, 40)), spectrum_values(row_scatter(x))
    assert_values(
        values, {key: exact[key] for key in ("anisotropy", "participation_ratio")}, rtol=1e-9
    )
    assert values["anisotropy_error"] == 0


@pytest.mark.parametrize("precision", ["medium", "highest"])
def test_the_process_settings_do_not_matter(precision):
    x = spectral(500, [0.8**i for i in range(40)], dtype=torch.float32)
    expected = row_sketch(x, 16)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = row_sketch(x, 16)
    finally:
        torch.set_float32_matmul_precision(before)
    assert all(map(torch.equal, found, expected))
