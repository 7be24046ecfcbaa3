"""Figures that pages state in a sentence, from simulations of their own."""

import pytest
import torch

from embedgeo.functional import twonn_dimension
from tests.data import gaussian, generator
from tests.docs import blocks


def plain(page):
    """The words of a page in one line."""
    return " ".join(blocks.text(page).split())


def test_noise_raises_the_dimension_of_a_plane_as_the_faq_says():
    x = torch.zeros(4096, 50, dtype=torch.float64)
    x[:, :2] = torch.rand(4096, 2, generator=generator(0), dtype=torch.float64)
    noise = gaussian(4096, 50, seed=1)
    for deviation, dimension in ((0, 2.0), (0.003, 13.6), (0.01, 22.6), (0.03, 27.8)):
        found = float(twonn_dimension(x + deviation * noise).dimension)
        assert found == pytest.approx(dimension, rel=0.06), deviation
    page = plain("docs/faq.md")
    assert (
        "in 50 dimensions, give 2.0. With Gaussian noise of standard deviation 0.003, 0.01 and "
        "0.03 in each" in page
    )
    assert "they give 13.6, 22.6 and 27.8" in page


def test_bfloat16_rounds_small_spreads_around_large_means_as_the_page_says():
    place = torch.rand(1000, generator=generator(2), dtype=torch.float64)
    mean = 1024 * 2**place
    noise = gaussian(2000, 1000, seed=3)

    def ratio(deviations):
        spread = mean / deviations
        return (mean + spread * noise).bfloat16().double().var(0) / spread**2

    at_320, at_1000 = ratio(320), ratio(1000)
    assert float(at_320.mean()) == pytest.approx(1.28, abs=0.02)
    assert float(at_320[place < 0.05].mean()) == pytest.approx(1.52, abs=0.08)
    assert float(at_320[place > 0.95].mean()) == pytest.approx(1.13, abs=0.04)
    low, high = at_1000.quantile(torch.tensor([0.05, 0.95], dtype=torch.float64)).tolist()
    assert low == pytest.approx(0.07, abs=0.02)
    assert high == pytest.approx(10, abs=1)
    assert float(at_1000.mean()) == pytest.approx(3, abs=0.4)
    page = plain("docs/training.md")
    assert "rounding adds 13 to 52 % to the variance, 28 % on average" in page
    assert (
        "0.07 to 10 times the true one in nine coordinates of ten, and as 3 times on average"
        in page
    )
