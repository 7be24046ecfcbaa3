"""The estimated share of the variance within token types where the true one is known to be 0.6."""

import pytest
import torch

from benchmarks.within_token_variance import bursts, independent, shares
from embedgeo.metrics import TokenMoments

SEEDS = range(8)


def mean_share(samples):
    values = []
    for x, token_ids, sequence_ids in samples:
        metric = TokenMoments(x.shape[1])
        metric.update(x, token_ids, sequence_ids=sequence_ids)
        values.append(metric.compute()["V_W_over_V_unbiased"].item())
    return sum(values) / len(values)


@pytest.mark.parametrize("exponent", [-0.1, 0.0, 0.1, 0.2])
@pytest.mark.parametrize(("n", "tolerance"), [(2_048, 0.035), (8_192, 0.012)])
def test_it_is_found_where_variances_go_with_frequency(n, exponent, tolerance):
    assert mean_share(independent(n, exponent, seed) for seed in SEEDS) == pytest.approx(0.6, abs=tolerance)


def test_it_is_found_where_occurrences_in_one_sequence_are_alike():
    samples = [bursts(seed) for seed in SEEDS]
    assert mean_share(samples) == pytest.approx(0.6, abs=0.02)
    plug_in, pooled, alone, _ = torch.tensor([shares(sample) for sample in samples[:2]]).mean(0).tolist()
    assert max(plug_in, pooled, alone) < 0.5  # what takes rows as independent is far off
