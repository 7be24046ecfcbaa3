import pytest
import torch

from embedgeo.functional.jackknife import deviations
from tests.data import generator


def _literal(estimate, left_out, sizes):
    """The delete-m_j jackknife as its authors print it."""
    n, num_groups = sum(sizes), len(sizes)
    ratios = [n / m for m in sizes]
    pseudo = [h * estimate - (h - 1) * value for h, value in zip(ratios, left_out, strict=True)]
    kept = [(1 - m / n) * value for m, value in zip(sizes, left_out, strict=True)]
    center = num_groups * estimate - sum(kept)
    return float(
        (sum((p - center) ** 2 / (h - 1) for p, h in zip(pseudo, ratios, strict=True)) / num_groups)
        ** 0.5
    )


def test_unequal_groups_give_the_published_formula_and_empty_ones_add_nothing():
    left_out = torch.randn(5, dtype=torch.float64, generator=generator())
    sizes, estimate = [3, 5, 2, 7, 4], torch.tensor(1.3, dtype=torch.float64)
    expected = _literal(1.3, left_out.tolist(), sizes)
    for more in ([], [0]):
        of_all = torch.cat((left_out, estimate.expand(len(more))))
        error = deviations(estimate, of_all, torch.tensor(sizes + more)).norm()
        assert float(error) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("sizes", [[0, 0], [5, 0]])
def test_fewer_than_two_groups_give_nan(sizes):
    found = deviations(torch.tensor(1.0), torch.ones(len(sizes)), torch.tensor(sizes))
    assert found.isnan().all()
