import pytest
import torch
from torch import Tensor

from embedgeo.functional.jackknife import deviations
from tests.data import generator


def _literal(estimate: float, left_out: list[float], sizes: list[int]) -> float:
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


def test_unequal_groups_give_the_published_formula() -> None:
    left_out = torch.randn(5, dtype=torch.float64, generator=generator())
    sizes, estimate = [3, 5, 2, 7, 4], torch.tensor(1.3, dtype=torch.float64)
    error = deviations(estimate, left_out, torch.tensor(sizes)).norm()
    assert float(error) == pytest.approx(_literal(1.3, left_out.tolist(), sizes), rel=1e-12)


def test_deviations_of_differences_and_means_are_those_of_the_deviations() -> None:
    # of two numbers, in six groups
    means = torch.randn(2, 6, dtype=torch.float64, generator=generator())
    sizes = torch.tensor([3, 5, 0, 4, 4, 2])
    whole = (means * sizes).sum(1) / sizes.sum()
    left_out = (whole[:, None] * sizes.sum() - means * sizes) / (sizes.sum() - sizes)

    def found(weights: tuple[float, float]) -> Tensor:
        of_both = torch.tensor(weights, dtype=torch.float64)
        return deviations(of_both @ whole, of_both @ left_out, sizes)

    one, other = found((1, 0)), found((0, 1))
    assert torch.allclose(one, deviations(whole[0], left_out[0], sizes))
    assert torch.allclose(found((1, -1)), one - other)
    assert torch.allclose(found((0.5, 0.5)), (one + other) / 2)
    assert one[2] == 0


@pytest.mark.parametrize("sizes", [[0, 0], [5, 0]])
def test_fewer_than_two_groups_give_nan(sizes: list[int]) -> None:
    found = deviations(torch.tensor(1.0), torch.ones(len(sizes)), torch.tensor(sizes))
    assert found.isnan().all()
