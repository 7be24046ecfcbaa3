"""Every way to drive a Trainer: what is measured when, and at which step."""

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from embedgeo import GeometryMonitor, observe
from tests.models import gpt_neox, hooks, token_batch
from tests.training.runs import (
    OPTIONS,
    Manual,
    TinyLM,
    ValidatedLM,
    assert_same_values,
    by_step,
    fit,
    in_one_process,
    loader,
    moments,
    n_at,
    trainer,
)


class Stream(IterableDataset):
    def __iter__(self):
        batch = token_batch(64)
        yield from ({key: values[i] for key, values in batch.items()} for i in range(64))


def stream():
    return DataLoader(Stream(), batch_size=4)  # 16 batches, of which Lightning does not know


BATCH = 4 * 12


class ByClosures(Manual):
    """Two optimizers have a closure each, of which the second one runs the model."""

    def training_step(self, batch, batch_idx):
        first, second = self.optimizers()
        first.step(closure=lambda: None)
        step = TinyLM.training_step
        second.step(closure=lambda: self.manual_backward(step(self, batch, batch_idx)))


class WithLBFGS(TinyLM):
    """Evaluates its closure several times a step, at other weights each time."""

    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=4)


@pytest.mark.parametrize(
    ("module", "options", "expected"),
    [
        (TinyLM, {"max_epochs": 3, "limit_train_batches": 3}, {0: 1, 3: 1, 6: 1}),
        (
            TinyLM,
            {"max_epochs": 2, "limit_train_batches": 5, "accumulate_grad_batches": 2},
            {0: 2, 3: 2},
        ),
        (TinyLM, {"max_epochs": 1, "data": stream()}, {0: 1, 3: 1, 6: 1, 9: 1, 12: 1, 15: 1}),
        (TinyLM, {"barebones": True, "log_every_n_steps": None, "max_steps": 4}, {0: 1, 3: 1}),
        (lambda: Manual(accumulate=2), {"max_steps": 4}, {0: 2, 3: 2}),
        (lambda: Manual(optimizers=2), {"max_steps": 14}, {0: 1, 4: 1, 6: 1, 10: 1, 12: 1}),
        (lambda: ByClosures(optimizers=2), {"max_steps": 8}, {0: 1, 4: 1, 6: 1}),
        (WithLBFGS, {"max_steps": 4}, {0: 1, 3: 1}),
    ],
)
@pytest.mark.filterwarnings("ignore:You are trying to `self.log")
def test_each_loop_is_measured_at_its_optimizer_steps(tmp_path, module, options, expected):
    monitor = GeometryMonitor(3, measure_last=False, **OPTIONS)
    made, _ = fit(tmp_path, monitor, module=module(), **options)
    assert n_at(monitor) == {step: batches * BATCH for step, batches in expected.items()}
    assert hooks(made) == 0


def test_with_two_optimizers_a_window_covers_steps_of_both_and_the_next_one_is_not_lost(tmp_path):
    monitor = GeometryMonitor(3, window=3, measure_last=False, **OPTIONS)
    fit(tmp_path, monitor, module=Manual(optimizers=2), max_steps=16)
    assert n_at(monitor) == dict.fromkeys((0, 4, 8, 12), 2 * BATCH)


def test_a_batch_that_the_module_skips_is_not_measured(tmp_path):
    class Skips(ValidatedLM):
        def on_train_batch_start(self, batch, batch_idx):
            return -1 if batch_idx == 2 else None

        def on_train_epoch_end(self):
            assert hooks(self) == 0

    monitor = GeometryMonitor(1, **OPTIONS)
    options = {
        "max_epochs": 2,
        "val": loader(8),
        "check_val_every_n_epoch": 1,
        "num_sanity_val_steps": 0,
    }
    fit(tmp_path, monitor, module=Skips(), **options)
    assert n_at(monitor) == dict.fromkeys(range(5), BATCH)  # the last is due in a skipped batch


class TwoTowers(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.teacher, self.student = gpt_neox(), gpt_neox(num_hidden_layers=2, hidden_size=8)

    def training_step(self, batch, batch_idx):
        self.teacher(**batch)
        return self.student(**batch, labels=batch["input_ids"]).loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


@pytest.mark.parametrize("with_probe", [False, True])
def test_monitors_on_a_module_inside_and_on_chosen_modules_by_name(tmp_path, with_probe):
    data = loader(4, padding="left")
    options = {"probe": data if with_probe else None, "on_error": "raise"}
    student = GeometryMonitor(2, layers=lambda m: m.student, **options)
    layers = lambda m: {"head": m.student.gpt_neox.layers[1].mlp}  # noqa: E731
    options = {"metrics": moments, "measure_last": False, "on_error": "raise"}  # of no known input
    head = GeometryMonitor(2, layers=layers, prefix="head", **options)
    module, _ = fit(tmp_path, student, head, module=TwoTowers(), data=data, max_steps=2)
    expected = in_one_process(module.student, data)
    assert [*expected] == ["embed", "block.00", "block.01", "final_norm"]
    assert_same_values(by_step(student.history)[0], expected, rel=1e-6)
    assert {record["layer"] for record in head.history} == {"head"}


class Evaluated(ValidatedLM):
    def validation_step(self, batch, batch_idx):
        self.hooks_seen = hooks(self)
        return self.model(**batch).logits.mean()

    predict_step = validation_step


def test_a_monitor_does_nothing_in_evaluation_and_observe_measures_it(tmp_path):
    monitor = GeometryMonitor(1, on_error="raise")
    run, module = trainer(tmp_path, callbacks=[monitor]), Evaluated()
    given = module, loader(16, padding="left")
    with observe(module) as geometry:
        run.validate(*given, verbose=False)
    assert module.hooks_seen > 0
    assert monitor.history == []
    assert geometry.compute()["block.00"]["n"] == 16 * 9
    run.predict(*given)
    assert module.hooks_seen == 0
