"""Training with everything on is bit for bit training without it: losses, weights, the optimizer's
state and the random states.
"""

from contextlib import ExitStack, contextmanager

import pandas as pd
import pytest
import torch
import transformers as hf

from embedgeo import Drift, GeometryCallback, GeometryMonitor, StepMonitor, full_metrics
from tests.models import hooks
from tests.training.hf_runs import hf_trainer, logged, rows
from tests.training.loops import loop
from tests.training.runs import (
    WithoutDropout,
    assert_same_random_state,
    fit,
    loader,
    random_state,
    steps,
)

pytestmark = pytest.mark.slow


def monitors(kind, *model):
    """One of training batches and one of a probe, which draws random numbers."""
    common, layers = {"jackknife": 2, "on_error": "raise"}, ["embed", "mean(last2)"]
    train = {"every_n_steps": 4, "window": 2, "metrics": full_metrics}
    train["layers"] = [*layers, "*.mlp"]
    probe = torch.utils.data.DataLoader(rows(8, "left", seed=1), batch_size=4)
    held = {"every_n_steps": 3, "probe": probe, "listeners": [Drift()], "prefix": "held"}
    held["layers"] = layers
    return [kind(*model, **common, **options) for options in (train, held)]


def assert_measured(train, held, last):
    assert steps(train) == [0, 4, last]
    assert steps(held) == [0, 3, 6, last]
    assert {"effective_rank", "V_W_local"} <= {record["metric"] for record in train.history}
    assert "cka_to_first" in {record["metric"] for record in held.history}


def assert_same(plain, monitored):
    """Two runs: tensors, the random states, and what remains."""
    (tensors, state, *others), (with_monitor, state_with, *others_with) = plain, monitored
    assert len(tensors) == len(with_monitor) > 40
    assert all(torch.equal(a, b) for a, b in zip(tensors, with_monitor, strict=True))
    assert_same_random_state(state, state_with)
    assert others == others_with


def of_optimizer(optimizer):
    states = optimizer.state_dict()["state"].values()
    return [tensor for state in states for tensor in state.values()]


def test_lightning(tmp_path):
    def outcome(*callbacks):
        module, run = fit(tmp_path, *callbacks, max_steps=7, accumulate_grad_batches=2)
        assert hooks(module) == 0
        tensors = *module.state_dict().values(), *of_optimizer(run.optimizers[0]), *module.losses
        return tensors, random_state()

    both = monitors(GeometryMonitor)
    assert_same(outcome(), outcome(*both))
    assert_measured(*both, last=7)


class Both:
    """Two monitors in a loop."""

    def __init__(self, model, **_):
        self.monitors = monitors(StepMonitor, model)

    @contextmanager
    def step(self, step, batch):
        with ExitStack() as stack:
            for monitor in self.monitors:
                stack.enter_context(monitor.step(step, batch))
            yield

    def close(self):
        for monitor in self.monitors:
            monitor.close()


def test_a_loop_of_ones_own():
    def outcome(**kind):
        made, both = loop(7, accumulate=2, optimizer_inside=True, **kind)
        assert made.hooks == [0] * 8
        return ([*made.model.state_dict().values(), *made.losses], random_state()), both

    (plain, _), (monitored, both) = outcome(), outcome(kind=Both, with_monitors=True)
    assert_same(plain, monitored)
    assert_measured(*both.monitors, last=7)


def test_the_hugging_face_trainer(tmp_path):
    def outcome(*callbacks):
        trainer = hf_trainer(
            tmp_path, *callbacks, max_steps=7, gradient_accumulation_steps=2, num_train_epochs=9
        )
        hf.set_seed(0)
        trainer.train()
        assert hooks(trainer.model) == 0
        tensors = *trainer.model.state_dict().values(), *of_optimizer(trainer.optimizer)
        return tensors, random_state(), logged(trainer, "loss")

    both = monitors(GeometryCallback)
    assert_same(outcome(), outcome(*both))
    assert_measured(*both, last=7)


def test_a_loop_has_exactly_the_numbers_of_lightning(tmp_path):
    options = {"every_n_steps": 3, "extra_steps": (1,), "jackknife": 2, "on_error": "raise"}
    online, logged = GeometryMonitor(**options), {}
    _, run = fit(tmp_path, online, module=WithoutDropout(), data=loader(), max_steps=4)
    module = WithoutDropout()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    with StepMonitor(module.model, log=logged.__setitem__, **options) as monitor:
        for step, batch in zip(range(4), loader(), strict=False):
            with monitor.step(step, batch):
                module.model(**batch, labels=batch["input_ids"]).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert steps(monitor) == [0, 1, 3, 4]
    pd.testing.assert_frame_equal(
        pd.DataFrame(monitor.history), pd.DataFrame(online.history), check_exact=True
    )
    tags = {tag for tag in run.callback_metrics if tag.startswith("geometry.")}
    assert {"geometry.Q/block.00", "geometry.M_over_Q/mean"} <= set(logged[0]) < tags
