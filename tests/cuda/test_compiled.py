"""Compiled models on a GPU."""

import pytest
import torch
from torch._dynamo.utils import counters

from embedgeo import StepMonitor, default_metrics
from tests.cuda import GPU, deterministic, needs_gpu
from tests.models import gpt_neox, token_batch
from tests.training.runs import steps

# torch's advice on speed, given by its compiler
pytestmark = [
    needs_gpu,
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores for float32:UserWarning"),
]

NUM_STEPS = 6


@pytest.fixture(autouse=True)
def fresh():
    torch.compiler.reset()
    counters.clear()


def loop(every_n_steps=None, compiled=None, **compiling):
    """Weights, losses and monitor (None without) of a few steps of a model that is compiled, if it
    is.
    """
    torch.manual_seed(0)
    model = gpt_neox().to(GPU)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    given = {"metrics": default_metrics, "on_error": "raise", "measure_last": False}
    monitor = None
    if every_n_steps and compiled == "stable":
        monitor = StepMonitor(model, every_n_steps, compiled=compiled, **given)
        monitor.prepare(model)
    run = torch.compile(model, **compiling) if compiling else model
    if every_n_steps and monitor is None:
        monitor = StepMonitor(run, every_n_steps, **given)
    losses = []
    with deterministic():
        for step in range(NUM_STEPS):
            batch = {key: tensor.to(GPU) for key, tensor in token_batch(16, 12, seed=step).items()}
            with monitor.step(step, batch) if monitor else torch.enable_grad():
                loss = run(**batch, labels=batch["input_ids"]).loss
                loss.backward()
            losses.append(loss.detach().clone())
            optimizer.step()
            optimizer.zero_grad()
        if monitor:
            monitor.close()
    return [p.detach().clone() for p in model.parameters()], torch.stack(losses), monitor


def near(monitor, expected):
    """The smooth values are those of the eager run but for rounding; TwoNN and p-values of a fit
    are not smooth.
    """
    assert steps(monitor) == steps(expected)
    for got, want in zip(monitor.history, expected.history, strict=True):
        if want["metric"] in ("n", "Q", "M", "V", "V_W", "anisotropy", "token_types"):
            assert got["value"] == pytest.approx(want["value"], rel=1e-3), want


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_measured_step_of_a_compiled_model_runs_eagerly(backend):
    _, losses, eager = loop(2)
    with torch._dynamo.config.patch(error_on_recompile=True):
        _, compiled_losses, monitor = loop(2, backend=backend)
    near(monitor, eager)
    torch.testing.assert_close(compiled_losses, losses, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "compiling", [{"backend": "aot_eager"}, {"backend": "inductor", "fullgraph": True}], ids=str
)
def test_stable_measured_and_other_steps_are_one_graph(compiling):
    plain, plain_losses, _ = loop(**compiling)
    graphs = counters["stats"]["unique_graphs"]
    torch.compiler.reset()
    counters.clear()
    _, _, eager = loop(2)
    with torch._dynamo.config.patch(error_on_recompile=True):
        weights, losses, monitor = loop(2, "stable", **compiling)
    assert counters["stats"]["unique_graphs"] == graphs
    assert not counters["graph_break"]
    near(monitor, eager)
    torch.testing.assert_close(losses, plain_losses, rtol=1e-4, atol=1e-5)
    torch.compiler.reset()
    # none but the first step is measured
    others, other_losses, _ = loop(NUM_STEPS, "stable", **compiling)
    assert losses.equal(other_losses)
    assert all(a.equal(b) for a, b in zip(weights, others, strict=True))
    if compiling["backend"] == "aot_eager":
        assert all(a.equal(b) for a, b in zip(weights, plain, strict=True))


def test_stable_under_cuda_graphs():
    _, _, expected = loop(2)
    _, _, monitor = loop(2, "stable", mode="reduce-overhead")
    near(monitor, expected)
