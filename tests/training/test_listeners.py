"""Listeners: in each monitor, over a resumed run and on ranks."""

import warnings

import pytest
import torch

from embedgeo import GeometryMonitor, StepMonitor
from embedgeo.training.transformers import GeometryCallback
from tests.models import gpt_neox, token_batch
from tests.ranks import on_two_ranks
from tests.training.hf_runs import hf_trainer
from tests.training.runs import fit, moments


class Heard:
    """A listener that keeps what it is called with, and fails at a step."""

    def __init__(self, fails_at=None, adds=False):
        self.fails_at = fails_at
        self.adds = adds
        self.steps = []

    def __call__(self, step, records, geometry=None):
        if step == self.fails_at:
            raise RuntimeError("not this one")
        self.steps.append(step)
        assert {record["step"] for record in records} == {step}
        assert {"mean", "block.00"} <= {record["layer"] for record in records}
        return [records[0] | {"metric": "heard", "value": 1.0}] if self.adds else None

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps = list(state["steps"])


def loop(monitor, model, last, first=0):
    """Steps of a loop."""
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)
    with monitor:
        for step in range(first, last):
            batch = token_batch(8, seed=step % 4)
            with monitor.step(step, batch):
                model(**batch, labels=batch["input_ids"]).loss.backward()
            optimizer.step()
            optimizer.zero_grad()


def test_every_monitor_calls_its_listeners(tmp_path):
    heard = Heard(adds=True)
    monitor = GeometryMonitor(2, metrics=moments, listeners=[heard], measure_last=False)
    fit(tmp_path, monitor, max_steps=6)
    assert heard.steps == sorted({record["step"] for record in monitor.history})
    assert {r["step"] for r in monitor.history if r["metric"] == "heard"} == {*heard.steps}
    callback = GeometryCallback(2, metrics=moments, listeners=[other := Heard()])
    hf_trainer(tmp_path / "hf", callback).train()
    assert other.steps == sorted({record["step"] for record in callback.history})


def test_one_that_fails_is_taken_out_with_one_warning_or_raises():
    heard, failing = Heard(), Heard(fails_at=2)
    model = gpt_neox(num_hidden_layers=2)
    monitor = StepMonitor(model, 1, metrics=moments, listeners=[failing, heard])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loop(monitor, model, 5)
    (warning,) = (str(each.message) for each in caught)
    assert "the listener Heard failed at step 2" in warning
    assert "RuntimeError: not this one" in warning
    assert failing.steps == [0, 1]
    assert heard.steps == [0, 1, 2, 3, 4, 5]
    options = {"metrics": moments, "on_error": "raise"}
    with pytest.raises(RuntimeError, match="not this one"):
        loop(StepMonitor(model, 1, listeners=[Heard(fails_at=2)], **options), model, 5)


def test_the_state_of_a_listener_is_saved():
    model = gpt_neox(num_hidden_layers=2)
    first = StepMonitor(model, 1, metrics=moments, listeners=[Heard()], measure_last=False)
    loop(first, model, 3)
    state = first.state_dict()
    second = StepMonitor(model, 1, metrics=moments, listeners=[heard := Heard()])
    second.load_state_dict(state)
    assert heard.steps == [0, 1, 2]


def test_what_is_no_listener_is_refused():
    with pytest.raises(TypeError, match=r"listeners must be a list of functions .*; got int"):
        GeometryMonitor(listeners=[3])
    with pytest.raises(TypeError, match="listeners must be a list of functions"):
        GeometryMonitor(listeners=Heard())


def test_a_configuration_makes_listeners():
    made = {"class_path": "tests.training.test_listeners.Heard", "init_args": {"adds": True}}
    (heard,) = GeometryMonitor(listeners=[made]).listeners
    assert heard.adds


def failing_on_one(rank):
    model = gpt_neox(num_hidden_layers=2)
    heard = Heard()
    monitor = StepMonitor(
        model, 1, metrics=moments, listeners=[Heard(fails_at=1 if rank else None), heard]
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loop(monitor, model, 3)
    return [str(each.message) for each in caught], len(monitor.listeners), heard.steps


@pytest.mark.slow
def test_one_that_fails_on_a_rank_is_taken_out_on_all(tmp_path):
    (first, *left), (second, *others) = on_two_ranks(failing_on_one, tmp_path)
    assert left == others == [1, [0, 1, 2, 3]]
    assert second == []
    assert len(first) == 1
    assert "not this one" in first[0]
