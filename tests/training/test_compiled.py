"""The monitors on models that are compiled."""

import pytest
import torch
from torch._dynamo.utils import counters

from embedgeo import StepMonitor
from tests.models import gpt_neox, token_batch
from tests.training.loops import run_whole
from tests.training.runs import moments, steps

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
OPTIONS = {"every_n_steps": 2, "metrics": moments, "on_error": "raise"}


@pytest.fixture(autouse=True)
def dynamo():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


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
