"""A device that has no float64, as MPS: sums over a batch in float32, all others in float64 on the
CPU.
"""

import pytest
import torch

from embedgeo.functional import precision
from tests.data import KINDS, floats, new_metric, token_rows, updated

CLOSE = 1e-5
"""Relative (a slope or R² near zero: 5e-6), however many rows and updates there are, also at a mean
of 1000 σ.
"""


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
