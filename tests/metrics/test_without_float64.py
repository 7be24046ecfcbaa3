"""A device that has no float64, as MPS: sums over a batch in float32, all others in float64 on the
CPU.
"""

import pytest
import torch

from embedgeo import EmbeddingMoments, observe
from embedgeo.functional import precision
from tests.data import KINDS, floats, new_metric, token_rows, updated
from tests.models import gpt_neox, token_batch

CLOSE = 1e-5
"""Relative (a slope or R² near zero: 5e-6), however many rows and updates there are, also at a mean
of 1000 σ.
"""


def has_mps():
    """Tell if there is an MPS device that holds a tensor: those of GitHub's machines have no
    memory.
    """
    try:
        return torch.backends.mps.is_available() and torch.ones(1, device="mps").item() == 1
    except RuntimeError:
        return False


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_values_are_those_of_float64(kind, monkeypatch):
    x, ids = token_rows(3_000 if kind == "Anisotropy with all parts" else 20_000, 16, mean=1000.0)
    x = x.float()
    parts = torch.arange(len(x)).split([200, len(x) - 200])
    expected = floats(updated(new_metric(kind, 16), x.double(), ids, parts).compute())
    monkeypatch.setattr(precision, "has_float64", lambda device: False)
    metric = updated(new_metric(kind, 16), x, ids, parts)
    states = [state for state in metric.metric_state.values() if state.is_floating_point()]
    assert "IntrinsicDimension" in kind or any(state.dtype == torch.float64 for state in states)
    for key, value in floats(metric.compute()).items():
        assert value == pytest.approx(expected[key], rel=CLOSE, abs=5e-6, nan_ok=True), key


@pytest.mark.skipif(not has_mps(), reason="needs MPS, of a Mac")
def test_a_model_on_mps_has_the_numbers_of_the_cpu():
    torch.manual_seed(0)
    model = gpt_neox().eval()

    def records(device):
        with (
            observe(model.to(device), metrics=lambda dim: [EmbeddingMoments(dim)]) as geometry,
            torch.no_grad(),
        ):
            for seed in range(2):
                model(
                    **{
                        name: each.to(device)
                        for name, each in token_batch(16, 12, seed=seed).items()
                    }
                )
        return geometry.records()

    expected = records("cpu")
    for got, want in zip(records("mps"), expected, strict=True):
        assert (got["layer"], got["metric"]) == (want["layer"], want["metric"])
        assert got["value"] == pytest.approx(want["value"], rel=1e-3, abs=1e-6, nan_ok=True), want
