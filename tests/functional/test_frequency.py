import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from embedgeo.functional import types_by_frequency


def expected_sizes(counts, may_be_shown):
    """N_r of each bin, by the formula of the paper's appendix A, and the bins: lists of indices."""
    counted = [i for i, n in enumerate(counts) if 10 <= n <= 100_000]
    low, high = (math.log10(f(counts[i] for i in counted)) for f in (min, max))
    bins = [[] for _ in range(10)]
    for i in counted:
        if may_be_shown[i]:
            place = (math.log10(counts[i]) - low) / (high - low or 1) * 10
            bins[min(9, math.floor(place + 1e-9))].append(i)
    largest = max(map(len, bins)) or 1
    return [min(len(each), 2 + math.floor(math.sqrt(4 * len(each) / largest))) for each in bins], bins


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(1, 200_000), st.booleans()), min_size=1, max_size=300), st.integers(0, 5))
def test_of_each_bin_as_many_types_are_drawn_as_the_paper_says(types, seed):
    counts, shown = [n for n, _ in types], [may for _, may in types]
    chosen = types_by_frequency(torch.tensor(counts), torch.tensor(shown), seed=seed).tolist()
    assert len(set(chosen)) == len(chosen)
    if not any(10 <= n <= 100_000 for n in counts):
        assert chosen == []
        return
    sizes, bins = expected_sizes(counts, shown)
    assert [len(set(chosen) & set(each)) for each in bins] == sizes
    assert len(chosen) == sum(sizes)
    assert [counts[i] for i in chosen] == sorted((counts[i] for i in chosen), reverse=True)


def test_every_type_of_a_bin_is_drawn_as_often():
    counts = torch.tensor([10] * 40 + [1000] * 5)
    drawn = torch.cat([types_by_frequency(counts, seed=seed) for seed in range(1000)]).bincount(minlength=45)
    assert drawn[:40].sum() == 4000
    assert drawn[40:].sum() == 2000
    chi_square = (drawn[:40] - 100.0).square().sum() / 90
    assert chi_square < 72.1  # the 0.999 quantile for 39 degrees of freedom


@pytest.mark.parametrize("counts", [[], [9], [100_001, 3]])
def test_types_that_are_too_rare_or_too_frequent_are_not_shown(counts):
    assert len(types_by_frequency(torch.tensor(counts, dtype=torch.int64))) == 0
    assert len(types_by_frequency(torch.tensor([*counts, 50]), torch.zeros(len(counts) + 1, dtype=torch.bool))) == 0
