"""Anisotropy and spectra against singular values and published algorithms."""

import pytest
import torch

from embedgeo.functional import (
    anisotropy,
    anisotropy_null,
    row_scatter,
    spectrum_values,
    top_eigenvalue,
)
from tests import references
from tests.data import assert_values, gaussian, generator, spectral, wide_dtypes

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
    """The largest share of the variances along all axes."""
    values = references.variances(x.double())
    return values[0] / values.sum()


@SPECTRUM
@DTYPE
def test_anisotropy_equals_that_of_the_singular_values(variances, dtype, rtol):
    for n, mean in ((1000, 0.0), (20, 0.0), (500, 10.0), (500, 1000.0)):
        x = (10 * spectral(n, variances) + mean).to(dtype)
        assert anisotropy(x).item() == pytest.approx(exact(x), rel=rtol), (n, mean)


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


@SPECTRUM
@pytest.mark.parametrize("mean", [0.0, 1000.0])
def test_spectrum_values_equal_the_naive_ones(variances, mean):
    x = spectral(300, variances) + mean * (mean and gaussian(1, len(variances), seed=9))
    expected = references.spectrum(x)
    low_rank = min(variances) == 0
    for key in ("effective_rank", "rankme"):
        rtol = 1e-4 if low_rank else 1e-9
        assert_values(
            spectrum_values(row_scatter(x), full=True), {key: expected.pop(key)}, rtol=rtol
        )
    if low_rank:
        del expected["anisotropy_without_top5"]  # rounding over rounding
    assert_values(spectrum_values(row_scatter(x), full=True), expected, rtol=1e-9)


@wide_dtypes
def test_scatter_of_many_rows(dtype):
    x = (1000 + gaussian(40_000, 20)).to(dtype)
    expected = x.double().T.cov() * (len(x) - 1)
    torch.testing.assert_close(row_scatter(x).scatter, expected, rtol=1e-6, atol=1e-6 * len(x))
