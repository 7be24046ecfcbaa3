"""A sketch of the scatter: what it tells is as close to the exact values as its errors say."""

import pytest
import torch

from embedgeo.functional import ScatterSketch, row_scatter, row_sketch, sketch_values, spectrum_values
from embedgeo.functional.spectrum import gaussian_columns
from tests.data import all_nan, assert_values, floats, gaussian, generator, spectral

CPU = torch.device("cpu")
DIM, COLUMNS = 400, 32


def flat(rows_a_dimension):
    """The spectrum of many isotropic rows (Marchenko & Pastur 1967)."""
    x = gaussian(rows_a_dimension * DIM, DIM)
    return torch.linalg.eigvalsh(x.T @ x).flip(0)


def first(*top, rest=1.0):
    return torch.cat((torch.tensor(top), torch.full((DIM - len(top),), rest))).double()


INDEX = torch.arange(1, DIM + 1, dtype=torch.float64)
SPECTRA = {
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


def values_of(eigenvalues, omega):
    """What a sketch tells of the scatter of these eigenvalues along axes that Ω, of any rotation, does not know."""
    zero = torch.zeros(DIM, dtype=torch.float64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("embedgeo.functional.spectrum.gaussian_columns", lambda *shape: omega)
        return sketch_values(ScatterSketch(torch.tensor(1e4), zero, eigenvalues, eigenvalues[:, None] * omega))


@pytest.mark.parametrize("name", SPECTRA)
def test_the_exact_values_are_within_the_errors_in_at_least_95_of_100_cases(name):
    eigenvalues, random, repeats = SPECTRA[name], generator(1), 60
    exact = {
        "anisotropy": eigenvalues.max() / eigenvalues.sum(),
        "participation_ratio": eigenvalues.sum() ** 2 / eigenvalues.square().sum(),
    }
    within = dict.fromkeys(exact, 0)
    for _ in range(repeats):
        values = values_of(eigenvalues, torch.randn(DIM, COLUMNS, generator=random, dtype=torch.float64))
        for key, value in exact.items():
            within[key] += bool((values[key] - value).abs() <= values[f"{key}_error"] + 1e-9 * value)
    assert within["anisotropy"] >= 0.98 * repeats
    assert within["participation_ratio"] >= 0.9 * repeats  # that 95 of 100 give fewer is as likely as 1 in 30


def test_a_steep_spectrum_is_told_closely_and_a_flat_one_only_by_its_size():
    random = generator(3)
    found = {
        name: values_of(SPECTRA[name], torch.randn(DIM, 128, generator=random, dtype=torch.float64))
        for name in ("power law 1.0", "most in one", "flat")
    }
    for name in ("power law 1.0", "most in one"):
        assert found[name]["anisotropy_error"] < 0.05 * found[name]["anisotropy"]
        assert found[name]["anisotropy"] == pytest.approx(float(SPECTRA[name].max() / SPECTRA[name].sum()), rel=0.01)
    assert found["flat"]["anisotropy"] == pytest.approx(float(SPECTRA["flat"].max() / SPECTRA["flat"].sum()), rel=0.15)
    assert found["flat"]["anisotropy"] < found["flat"]["anisotropy_error"] < 5 / DIM


def test_few_columns_do_not_make_the_error_of_the_participation_ratio_too_small():
    random, eigenvalues = generator(2), INDEX**-1.0
    exact, within = eigenvalues.sum() ** 2 / eigenvalues.square().sum(), 0
    for _ in range(200):
        values = values_of(eigenvalues, torch.randn(DIM, 8, generator=random, dtype=torch.float64))
        within += bool((values["participation_ratio"] - exact).abs() <= values["participation_ratio_error"])
    assert within >= 0.95 * 200


def test_a_direction_that_chance_has_hardly_drawn_is_told_exactly_where_there_is_no_other():
    omega = torch.randn(DIM, COLUMNS, generator=generator(4), dtype=torch.float64)
    omega[0] /= 10
    values = values_of(SPECTRA["one direction"], omega)
    assert values["anisotropy"] == pytest.approx(1, rel=1e-9)
    assert values["anisotropy_error"] == 0


def test_of_few_rows_it_tells_the_exact_values():
    x = spectral(40, [0.9**i for i in range(80)], dtype=torch.float64)
    values, exact = sketch_values(row_sketch(x, 128)), spectrum_values(row_scatter(x))
    assert_values(values, {key: exact[key] for key in ("anisotropy", "participation_ratio")}, rtol=1e-9)
    assert values["anisotropy_error"] == values["participation_ratio_error"] == 0
    assert values["anisotropy_null"] == exact["anisotropy_null"]


@pytest.mark.parametrize("mean", [0.0, 1000.0])
@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 1e-5)])
@pytest.mark.parametrize("n", [100, 250_000])
def test_the_product_is_that_of_the_scatter(n, dtype, rtol, mean):
    x = (mean + spectral(n, [1 / (i + 1) for i in range(40)])).to(dtype)
    centred = x.double() - x.double().mean(0)
    expected = centred.T @ centred
    sketch = row_sketch(x, 16)
    omega = gaussian_columns(40, 16, CPU).double()
    torch.testing.assert_close(sketch.mean, x.double().mean(0), rtol=1e-9, atol=1e-7)
    torch.testing.assert_close(sketch.m2, expected.diagonal(), rtol=rtol, atol=0)
    assert torch.linalg.norm(sketch.product - expected @ omega) <= rtol * torch.linalg.norm(expected @ omega)


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
def test_the_scale_of_float32_rows_does_not_matter(scale):
    x = spectral(300, [0.8**i for i in range(40)])
    values = sketch_values(row_sketch((x * scale).float(), 16))
    assert_values(values, sketch_values(row_sketch(x, 16)), rtol=1e-4)


@pytest.mark.parametrize("scale", [1e200, 1e-200])
def test_rows_whose_squares_overflow_or_vanish_are_undefined(scale):
    values = floats(sketch_values(row_sketch(gaussian(100, 20) * scale, 8)))
    assert not torch.tensor(values.pop("anisotropy_null")).isnan()
    assert all_nan(values)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n", [0, 1, 7])
def test_rows_that_do_not_vary_have_no_spectrum(dtype, n):
    values = floats(sketch_values(row_sketch(torch.full((n, 20), 0.1, dtype=dtype), 8)))
    values.pop("anisotropy_null")
    assert all_nan(values)


def test_constant_coordinates_add_nothing():
    x = gaussian(90, 12)
    x[:, 3] = 1234.567
    values, exact = sketch_values(row_sketch(x, 40)), spectrum_values(row_scatter(x))
    assert_values(values, {key: exact[key] for key in ("anisotropy", "participation_ratio")}, rtol=1e-9)
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
