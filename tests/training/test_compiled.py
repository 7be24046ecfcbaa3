"""The monitors on models that are compiled: `prepare`, and what happens without it."""

import sys

import pytest
import torch
from torch._dynamo.utils import counters

from embedgeo import GeometryCallback, GeometryMonitor, StepMonitor
from tests.compiled import CountingBackend
from tests.models import gpt_neox, token_batch
from tests.training.hf_runs import hf_trainer
from tests.training.loops import run_whole
from tests.training.runs import TinyLM, fit, moments, steps, value

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
OPTIONS = {"every_n_steps": 2, "metrics": moments, "on_error": "raise"}


@pytest.fixture(autouse=True)
def dynamo():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def trained(monitor, model, *, prepares=False):
    if prepares:
        monitor.prepare(model)
    run_whole(monitor, 5, lambda: model(**token_batch()).logits.mean().backward(), token_batch())
    return monitor


@pytest.mark.parametrize("prepares", [True, False])
@pytest.mark.slow
def test_a_model_that_is_not_prepared_is_measured_eagerly_with_one_warning(prepares):
    model = torch.compile(gpt_neox(use_cache=False, num_hidden_layers=1), backend="eager")
    monitor = StepMonitor(model, compiled="stable", **OPTIONS)
    with pytest.warns(UserWarning, match="StepMonitor") as caught:
        trained(monitor, model, prepares=prepares)
    (message,) = [str(each.message) for each in caught]
    assert message.startswith(
        'StepMonitor: compiled="stable" needs prepare(model) before torch.compile'
    )
    assert value(monitor, 2, "block.00", "n") == 48


def test_prepare_does_nothing_unless_compiled_is_stable(monkeypatch):
    model = gpt_neox()
    StepMonitor(model).prepare(model)
    assert not any(module._forward_hooks for module in model.modules())
    with pytest.raises(ValueError, match=r'compiled must be "eager" or "stable"; got .fast.'):
        StepMonitor(model, compiled="fast")
    # of a torch that has not what it takes
    monkeypatch.setitem(sys.modules, "embedgeo.capture.graph_hooks", None)
    said = r'"stable" does not work with torch \d.*Error: .*\. Use compiled="eager"\.'
    with pytest.raises(ValueError, match=said):
        StepMonitor(model, compiled="stable")


@pytest.mark.slow
def test_a_function_that_ran_before_prepare_is_compiled_once_more_and_read():
    model = gpt_neox(use_cache=False, num_hidden_layers=1)
    run = torch.compile(lambda batch: model(**batch).logits.mean(), backend="eager")
    run(token_batch()).backward()
    monitor = StepMonitor(model, compiled="stable", measure_last=False, **OPTIONS)
    monitor.prepare(model)
    with monitor.step(0):
        run(token_batch()).backward()
    monitor.close(1)
    assert value(monitor, 0, "block.00", "n") == 48


class Compiling(TinyLM):
    """Compiles its model when training begins."""

    def on_fit_start(self):
        self.model.compile(backend="eager", fullgraph=True)


@pytest.mark.slow
def test_the_lightning_monitor_prepares_the_model_before_it_is_compiled(tmp_path):
    monitor = GeometryMonitor(compiled="stable", **OPTIONS)
    fit(tmp_path, monitor, module=Compiling(), max_steps=4)
    assert steps(monitor) == [0, 2, 4]
    assert value(monitor, 2, "block.00", "n") == value(monitor, 0, "embed", "n") == 48
    assert counters["stats"]["unique_graphs"] >= 1


def test_a_model_that_training_makes_is_not_prepared(tmp_path):
    class Late(TinyLM):
        def __init__(self):
            super().__init__()
            self.made, self.model = [self.model], None

        def configure_model(self):
            self.model = self.made[0]

    monitor = GeometryMonitor(compiled="stable", **OPTIONS)
    with pytest.warns(UserWarning, match="so measured steps run eagerly"):
        fit(tmp_path, monitor, module=Late(), max_steps=2)
    assert steps(monitor) == [0, 2]


@pytest.mark.slow
def test_the_callback_prepares_the_model_that_the_trainer_compiles(tmp_path):
    callback = GeometryCallback(compiled="stable", measure_last=False, **OPTIONS)
    compiled = {"torch_compile": True, "torch_compile_backend": "eager"}
    hf_trainer(tmp_path, callback, max_steps=3, **compiled).train()
    assert steps(callback) == [0, 2]
    assert value(callback, 2, "block.00", "n") == value(callback, 0, "embed", "n") > 0
    assert counters["stats"]["unique_graphs"] > 0


@pytest.mark.parametrize("has_probe", [False, True])
def test_a_loss_that_is_compiled_beside_a_model_runs_eagerly_and_a_line_says_so(caplog, has_probe):
    model = gpt_neox(num_hidden_layers=1)
    loss = torch.compile(lambda logits: logits.mean(), backend="eager")
    monitor = StepMonitor(model, probe=[token_batch()] if has_probe else None, **OPTIONS)
    with caplog.at_level("INFO", "lightning.pytorch"):
        run_whole(monitor, 5, lambda: loss(model(**token_batch()).logits).backward(), token_batch())
    assert caplog.text.count("all that torch.compile has made runs eagerly") == (not has_probe)


@pytest.mark.slow
def test_nothing_of_the_monitor_is_in_the_graph_of_a_compiled_optimizer():
    model = gpt_neox(num_hidden_layers=1)
    step = torch.compile(torch.optim.SGD(model.parameters()).step, backend="eager")
    with StepMonitor(model, **OPTIONS) as monitor:
        for number in range(3):
            with monitor.step(number, token_batch()):
                model(**token_batch()).logits.mean().backward()
            step()
        assert steps(monitor) == [0, 2]
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.slow
def test_a_function_inside_the_blocks_stays_compiled_where_the_measurement_is_stable():
    model, backend = gpt_neox(num_hidden_layers=1), CountingBackend("eager")
    mlp = model.gpt_neox.layers[0].mlp
    mlp.forward = torch.compile(mlp.forward, backend=backend)
    monitor = StepMonitor(model, compiled="stable", measure_last=False, **OPTIONS)
    assert steps(trained(monitor, model, prepares=True)) == [0, 2, 4]
    assert backend.runs == 5
