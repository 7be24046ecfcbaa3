import pytest
import torch

from embedgeo.functional import anisotropy
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
    expected = references.spectrum(x.double())
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
