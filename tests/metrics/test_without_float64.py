"""A device that has no float64, as MPS: sums over a batch in float32, all others in float64 on the
CPU.
"""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from embedgeo import EmbeddingMoments, observe
from embedgeo.functional import precision
from embedgeo.functional.moments import row_moments
from embedgeo.functional.spectrum import row_scatter
from embedgeo.functional.tokens import token_table
from tests.data import KINDS, floats, metrics, token_rows, updated
from tests.models import gpt_neox, token_batch

CLOSE = 1e-5
"""Relative (a slope or R² near zero: 5e-6), however many rows and updates there are, also at a mean
of 1000 σ.
"""


class NoFloat64(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        tensors = [
            leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, torch.Tensor)
        ]
        assert all(tensor.dtype != torch.float64 for tensor in tensors), func
        return result


class TwoDevices(TorchDispatchMode):
    """What a device without float64 holds meets float64, which is on the CPU, in a copy from one to
    the other only.
    """

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        tensors = [
            leaf
            for leaf in tree_leaves((args, kwargs))
            if isinstance(leaf, torch.Tensor) and leaf.ndim
        ]
        held = {tensor.dtype for tensor in tensors if tensor.is_floating_point()}
        assert len(held) < 2 or "copy" in func.name(), func
        return func(*args, **(kwargs or {}))


def has_mps():
    """Tell if there is an MPS device that holds a tensor: those of GitHub's machines have no
    memory.
    """
    try:
        return torch.backends.mps.is_available() and torch.ones(1, device="mps").item() == 1
    except RuntimeError:
        return False


@pytest.fixture
def without_float64(monkeypatch):
    monkeypatch.setattr(precision, "has_float64", lambda device: False)


def test_mps_has_none_and_its_sums_are_kept_on_the_cpu():
    assert precision.state_device(torch.device("mps")) == torch.device("cpu")
    assert precision.state_device(torch.device("cuda", 1)) == torch.device("cuda", 1)
    assert not precision.has_float64(torch.device("mps"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_over_a_batch_need_no_float64(without_float64, dtype):
    x, ids = token_rows(3000, 8)
    x = x.to(dtype)
    with NoFloat64():
        parts = row_moments(x), row_scatter(x), token_table(x, ids, ids % 7)[1:]
    assert {sums.dtype for part in parts for sums in part} == {torch.float32}


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_batch_gives_is_moved_before_it_is_added(without_float64, kind):
    x, ids = token_rows(300, 8)
    metric = metrics(8)[kind]
    with TwoDevices():
        updated(metric, x.float(), ids, [slice(0, 100), slice(100, 300)])
    assert metric.update_count == 2


@pytest.mark.slow
@pytest.mark.parametrize("rows_an_update", [200, 40_000])
@pytest.mark.parametrize("mean", [0.0, 1000.0])
@pytest.mark.parametrize("kind", KINDS)
def test_values_are_those_of_float64(kind, mean, rows_an_update, monkeypatch):
    x, ids = token_rows(3_000 if kind == "Anisotropy with all parts" else 40_000, 16, mean=mean)
    x = x.float()
    parts = torch.arange(len(x)).split(rows_an_update)
    expected = floats(updated(metrics(16)[kind], x.double(), ids, parts).compute())
    monkeypatch.setattr(precision, "has_float64", lambda device: False)
    metric = updated(metrics(16)[kind], x, ids, parts)
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
