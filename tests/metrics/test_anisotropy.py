import pytest
import torch
from torch.nn.functional import layer_norm

from embedgeo.functional import anisotropy, power_law
from embedgeo.metrics import Anisotropy
from tests import references
from tests.data import assert_values, gaussian, generator, spectral, updated, wide_dtypes

DECAYING = [0.8**i for i in range(40)]
BASE = {"anisotropy", "participation_ratio", "anisotropy_standardized", "anisotropy_null"}
BASE |= {"anisotropy_without_top_dim", "constant_dims"}


@pytest.mark.parametrize("mean", [0.0, 1000.0])
@wide_dtypes
@pytest.mark.parametrize("spectrum", [False, True])
def test_values_equal_the_naive_ones(mean, dtype, spectrum):
    x = (mean + 3 * spectral(300, DECAYING)).to(dtype)
    values = updated(
        Anisotropy(40, spectrum=spectrum), x, None, [slice(0, 100), slice(100, 300)]
    ).compute()
    expected = references.spectrum(x.double()) | references.alpha_req(x.double())
    others = x[:, torch.arange(40) != x.double().square().sum(0).argmax()].double()
    expected |= {
        "anisotropy_without_top_dim": references.spectrum(others)["anisotropy"],
        "constant_dims": 0.0,
    }
    if not spectrum:
        expected = {key: expected[key] for key in BASE - {"anisotropy_null"}}
    assert values.keys() == expected.keys() | {"anisotropy_null"}
    assert_values(values, expected, rtol=1e-9 if spectrum or dtype == torch.float64 else 1e-5)


def test_batch_values_are_over_consecutive_batches_of_whole_size():
    """Rows that are pending on both sides of a merger are the last ones."""
    x = spectral(107, DECAYING)
    parts = slice(0, 33), slice(33, 34), slice(34, 107)
    whole, merged, other = (
        updated(Anisotropy(40, batch_size=20), x, None, some)
        for some in (parts, parts[:1], parts[1:])
    )
    merged.merge_state(other)
    reordered = torch.cat((x[:20], x[33:93], x[20:33], x[93:]))
    for metric, rows in ((whole, x), (merged, reordered)):
        batches = torch.stack([anisotropy(batch) for batch in rows[:100].split(20)])
        expected = {"anisotropy_batch_mean": batches.mean(), "anisotropy_batch_std": batches.std()}
        values = metric.compute()
        assert values.keys() == BASE | expected.keys()
        assert_values(values, expected, rtol=1e-9)


@wide_dtypes
@pytest.mark.parametrize("mean", [0.0, 10.0])
def test_ranks_are_those_of_the_singular_values_where_rows_span_less_or_hardly_more(dtype, mean):
    """Of a few token types before the first block; and of a spectrum over twelve decades, along no
    axes.
    """
    few = gaussian(30, 40)[torch.randint(0, 30, (400,), generator=generator())]
    steep = (
        spectral(400, [i**-7 for i in range(1, 41)]) @ torch.linalg.qr(gaussian(40, 40, seed=1))[0]
    )
    for x in ((mean + few).to(dtype), steep.to(dtype)):
        values = updated(Anisotropy(40, spectrum=True), x).compute()
        expected = references.spectrum(x.double())
        ranks = ("effective_rank", "rankme", "effective_rank_eigenvalues")
        assert_values(values, {key: expected[key] for key in ranks}, rtol=1e-8)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 1}, "batch_size must be"),
        ({"sample_size": 1}, "sample_size must be"),
        ({"sample_size": 16, "spectrum": True}, "must be None with spectrum or batch_size"),
        ({"sample_size": 16, "batch_size": 20}, "must be None with spectrum or batch_size"),
    ],
)
def test_wrong_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Anisotropy(3, **arguments)


@pytest.mark.parametrize(("n", "window"), [(400, (3, 20)), (60, (11, 99)), (20, (1, 2000))])
def test_alpha_is_fitted_to_the_eigenvalues_of_the_window_that_the_rows_span(n, window):
    x = 5 + spectral(n, [i**-1.3 for i in range(1, 121)])
    eigenvalues = updated(Anisotropy(120, spectrum=True), x).eigenvalues()
    values = dict(zip(("alpha_req", "alpha_req_r2"), power_law(eigenvalues, window), strict=True))
    assert_values(values, references.alpha_req(x, window), rtol=1e-9)


def test_alpha_needs_three_eigenvalues_that_are_more_than_rounding():
    x = spectral(300, [1.0] * 12 + [0.0] * 40)
    for window, is_defined in (((10, 99), True), ((11, 99), False), ((60, 70), False)):
        metric = updated(Anisotropy(52, spectrum=True), x @ torch.linalg.qr(gaussian(52, 52))[0])
        for value in power_law(metric.eigenvalues(), window):
            assert value.isnan() != is_defined


@pytest.mark.parametrize("dim", [16, 64, 96])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_alpha_of_normalised_rows_is_not_of_the_rounding_of_their_sum(dim, dtype):
    x = 0.3 + spectral(2048, [i**-0.8 for i in range(1, dim + 1)])
    wide, rows = (layer_norm(each, (dim,)) for each in (x, x.to(dtype)))
    found = updated(Anisotropy(dim, spectrum=True), rows).compute()["alpha_req"]
    expected, _ = references.alpha_req(wide, (11, min(99, dim - 1))).values()
    assert float(found) == pytest.approx(expected, rel=0.01)


def test_a_sample_gives_the_values_of_its_rows():
    x = spectral(500, DECAYING)
    metric = updated(Anisotropy(40, sample_size=60), x, None, [slice(0, 100), slice(100, 500)])
    (places,) = torch.where((x[:, None] == metric.rows).all(2).any(1))
    assert len(places) == 60
    alone = updated(Anisotropy(40), x[places]).compute()
    assert_values(metric.compute(), alone, rtol=1e-9)
    with pytest.raises(ValueError, match="need the scatter of all rows"):
        metric.samples()
    everything = updated(Anisotropy(40, sample_size=500), x).compute()
    assert_values(everything, updated(Anisotropy(40), x).compute(), rtol=1e-9)
