import pytest

from embedgeo.functional import processed_values, row_scatter
from embedgeo.metrics import AfterProcessing
from tests.data import assert_values, floats, spectral, updated

VARIANCES = [0.7**i for i in range(12)]
PARTS = [slice(0, 100), slice(100, 100), slice(100, 500)]


def test_anisotropies_are_of_all_rows_and_mean_cosines_of_the_sample():
    x = spectral(500, VARIANCES) + 3
    metric = updated(AfterProcessing(12, sample_size=50), x, None, PARTS)
    assert metric.rows.shape == (50, 12)
    assert_values(
        metric.compute(),
        processed_values(row_scatter(x), metric.rows, top=3),
        rtol=1e-9,
        atol=1e-12,
    )


def test_each_of_several_numbers_of_directions_is_removed():
    x = spectral(500, VARIANCES) + 3
    several = floats(updated(AfterProcessing(12, top=(2, 7), sample_size=500), x).compute())
    for top in (2, 7):
        alone = floats(updated(AfterProcessing(12, top=top, sample_size=500), x).compute())
        assert {key: several[key] for key in alone} == alone
    assert {key for key in several if "_removed" in key} == {
        f"{key}_top{top}_removed" for key in ("anisotropy", "mean_cosine") for top in (2, 7)
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top": -1}, "top must"),
        ({"top": (1, 1)}, r"top must be distinct numbers, 0 or more, as 1, 3, 10; got \[1, 1\]"),
        ({"top": ()}, "top must"),
        ({"sample_size": 1}, "sample_size must"),
    ],
)
def test_wrong_arguments_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        AfterProcessing(3, **options)
