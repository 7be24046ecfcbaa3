"""The weights after the last step are measured, too, and nothing is changed by that."""

import weakref

import lightning as L
import pandas as pd
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torchmetrics import MeanMetric

from embedgeo import GeometryMonitor, StepMonitor, observe
from embedgeo.report.runs import make_run
from tests.models import gpt_neox, linear_block, token_batch
from tests.training.runs import (
    TinyLM,
    WithoutDropout,
    assert_same_values,
    by_step,
    fit,
    in_one_process,
    loader,
    moments,
    n_at,
    of_monitors,
    steps,
    trainer,
    value,
)


class KeepsBatches(WithoutDropout):
    """Keeps copies of its batches, and knows which of them are alive."""

    def __init__(self):
        super().__init__()
        self.seen = []
        self.ids = []

    def training_step(self, batch, batch_idx):
        self.seen.append({name: tensor.clone() for name, tensor in batch.items()})
        self.ids.append(weakref.ref(batch["input_ids"]))
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(("window", "accumulate"), [(1, 1), (2, 2)])
def test_they_are_measured_on_as_many_of_the_last_training_batches_as_a_measurement_takes(
    tmp_path, window, accumulate
):
    monitor = GeometryMonitor(4, window=window, metrics=moments, on_error="raise")
    options = {"max_steps": 6, "accumulate_grad_batches": accumulate}
    module, _ = fit(tmp_path, monitor, module=KeepsBatches(), **options)
    assert steps(monitor) == [0, 4, 6]
    expected = in_one_process(module.model, module.seen[-window * accumulate :], metrics=moments)
    assert_same_values(by_step(monitor.history)[6], expected)
    assert not any(ids() is not None for ids in module.ids)  # the batches are let go


@pytest.mark.parametrize("sizes", [(4, 4, 2), (4, 4, 2, 2), (4, 6, 5, 4, 4, 3)])
def test_a_loop_keeps_the_last_batch_of_the_usual_size(sizes):
    model = gpt_neox()
    with StepMonitor(model, 100, metrics=moments, on_error="raise") as monitor:
        for step, rows in enumerate(sizes):
            with monitor.step(step, batch := token_batch(rows)["input_ids"]):
                model(batch)
    assert monitor.history[-1]["step"] == len(sizes)
    assert value(monitor, len(sizes), "block.00", "n") == 48


@pytest.mark.parametrize("is_told", [True, False])
def test_a_loop_that_calls_the_model_twice_a_step_says_so_or_has_few_rows_at_the_end(is_told):
    def twice(model, batch):
        model(batch)
        model(batch.flip(1))

    model = gpt_neox()
    options = {"probe_forward": twice} if is_told else {}
    with StepMonitor(model, 2, metrics=moments, on_error="raise", **options) as monitor:
        for step in range(5):
            with monitor.step(step, batch := token_batch(4)["input_ids"]):
                twice(model, batch)
    assert n_at(monitor) == {0: 96, 2: 96, 4: 96, 5: 96 if is_told else 48}
    # which a report leaves out of the extremes
    few_rows = make_run("run", pd.DataFrame(monitor.history)).few_rows
    assert [*few_rows.index] == ([] if is_told else [5])


def test_they_are_left_out_where_told_and_where_they_are_measured_already(tmp_path):
    monitor = GeometryMonitor(4, metrics=moments, measure_last=False, on_error="raise")
    options = {"metrics": moments, "probe": loader(4), "prefix": "held", "on_error": "raise"}
    held = GeometryMonitor(3, **options)
    module, _ = fit(tmp_path, monitor, held, module=KeepsBatches(), max_steps=6)
    assert (steps(monitor), steps(held)) == ([0, 4], [0, 3, 6])
    assert value(held, 6, "embed", "n") == 48
    assert not any(ids() is not None for ids in module.ids)


class WithStatistics(TinyLM):
    """A normalization that updates its buffers in train mode, and a part that is frozen in eval
    mode.
    """

    def __init__(self):
        super().__init__()
        self.model.gpt_neox.final_layer_norm = nn.Sequential(
            nn.Flatten(0, 1), nn.BatchNorm1d(16), nn.Unflatten(0, (4, 12))
        )
        self.modes = []

    def on_train_start(self):
        self.model.gpt_neox.layers[0].eval()
        self.model.gpt_neox.layers[1].register_forward_pre_hook(
            lambda m, args: self.modes.append(m.training)
        )


def test_buffers_and_modes_are_those_that_training_left(tmp_path):
    states, modes = [], []
    for callbacks in (
        (),
        (GeometryMonitor(100, layers="block.*", metrics=moments, on_error="raise"),),
    ):
        L.seed_everything(0, verbose=False)
        module, _ = fit(tmp_path, *callbacks, module=WithStatistics(), max_steps=3)
        states.append(module.state_dict())
        modes.append([m.training for m in module.modules()])
    assert all(torch.equal(a, b) for a, b in zip(*(s.values() for s in states), strict=True))
    assert modes[0] == modes[1]
    assert module.modes == [True] * 4  # as in training, once more


class ByHand(L.LightningModule):
    """A module that only its own training step can run, which leaves traces wherever a module
    can.
    """

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(96, 8)
        self.layers = nn.ModuleList([linear_block(8) for _ in range(2)])
        self.norm = nn.BatchNorm1d(12)
        self.slow = nn.Linear(8, 8).requires_grad_(False)
        self.mean = MeanMetric()
        self.num_steps = 0

    def training_step(self, batch, batch_idx):
        self.last = batch
        self.slow.weight.lerp_(self.layers[0][0].weight.detach(), 0.1)
        self.slow.bias.data = 0.9 * self.slow.bias.data + 0.1 * self.layers[0][0].bias.data
        hidden = self.table(batch["input_ids"])
        for layer in self.layers:
            hidden = nn.functional.dropout(layer(hidden))
        loss = self.norm(hidden).square().mean() + self.slow(hidden).mean()
        self.mean.update(loss)
        self.num_steps += 1
        self.log("loss", loss)
        self.log_dict({"mean": self.mean.compute(), "draw": torch.rand(())})
        self.logger.log_metrics({"direct": loss.item()}, step=self.num_steps)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class ByHandTwice(ByHand):
    """Manual optimization: the training step changes the weights."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        self.manual_backward(super().training_step(batch, batch_idx))
        self.optimizers().step()
        self.optimizers().zero_grad()


def test_a_training_step_is_run_where_there_is_no_forward_and_leaves_nothing_behind(tmp_path):
    found = []
    monitor = GeometryMonitor(2, layers="layers.*", metrics=moments, on_error="raise")
    for name, monitors in {"plain": (), "monitored": (monitor,)}.items():
        logger = CSVLogger(tmp_path, name)
        module, run = fit(tmp_path, *monitors, module=ByHand(), logger=logger, max_steps=5)
        states = {**module.state_dict(), "total": module.mean.mean_value, "random": torch.rand(3)}
        states |= {tag: value for tag, value in run.callback_metrics.items() if "/" not in tag}
        logger.save()
        logged = pd.read_csv(f"{logger.log_dir}/metrics.csv")[
            ["loss", "mean", "draw", "direct"]
        ].dropna(how="all")
        found.append((states, module.num_steps, logged.reset_index(drop=True)))
    (before, num_before, plain), (after, num_after, logged) = found
    assert before.keys() == after.keys()
    assert [name for name, value in before.items() if not torch.equal(value, after[name])] == []
    assert num_before == num_after == 5
    pd.testing.assert_frame_equal(plain, logged, check_exact=True)
    assert steps(monitor) == [0, 2, 4, 5]
    with observe(module, "layers.00", moments) as geometry, torch.no_grad():
        module.layers[0](module.table(module.last["input_ids"]))
    assert value(monitor, 5, "layers.00", "V") == geometry.compute()["layers.00"]["V"]


def test_what_cannot_be_run_on_a_batch_is_told_once(tmp_path):
    monitor = GeometryMonitor(2, layers="layers.*", metrics=moments)
    run = trainer(tmp_path, callbacks=[monitor], logger=CSVLogger(tmp_path), max_steps=5)
    told = "last step, 5, are not measured.*probe_forward=.*measure_last=False"
    with pytest.warns(UserWarning, match=told) as caught:
        run.fit(ByHandTwice(), loader())
    assert len(of_monitors(caught)) == 1
    assert steps(monitor) == [0, 2, 4]
    assert run.global_step == 5
    forward = lambda module, batch: module.layers[0](module.table(batch["input_ids"]))  # noqa: E731
    by_hand = GeometryMonitor(
        2, layers="layers.00", metrics=moments, probe_forward=forward, on_error="raise"
    )
    fit(tmp_path, by_hand, module=ByHandTwice(), logger=CSVLogger(tmp_path), max_steps=5)
    assert steps(by_hand) == [0, 2, 4, 5]


class OnPairs(TinyLM):
    """Batches are lists of ids and labels, and a sweep calls the module with ids."""

    def training_step(self, batch, batch_idx):
        ids, labels = batch
        self.last = ids
        return self.model(input_ids=ids, labels=labels).loss

    def forward(self, input_ids):
        return self.model(input_ids=input_ids).logits


def test_a_training_step_is_run_where_the_forward_does_not_take_a_batch(tmp_path):
    monitor = GeometryMonitor(4, metrics=moments, on_error="raise")
    module, ids = OnPairs(), token_batch(32)["input_ids"]
    module.model = gpt_neox()
    data = torch.utils.data.DataLoader([(row, row) for row in ids], batch_size=4)
    fit(tmp_path, monitor, module=module, data=data, max_steps=6)
    assert steps(monitor) == [0, 4, 6]
    expected = in_one_process(module.model, [{"input_ids": module.last}], metrics=moments)
    assert_same_values(by_step(monitor.history)[6], expected)


class OnIds(TinyLM):
    """A module without a forward, on batches of ids alone, as in examples/pretrain.py."""

    def training_step(self, ids, batch_idx):
        return self.model(input_ids=ids, labels=ids).loss


def test_a_module_without_a_forward_is_run_on_ids_by_the_model_inside(tmp_path):
    monitor = GeometryMonitor(4, metrics=moments, on_error="raise")
    data = torch.utils.data.DataLoader(token_batch(32)["input_ids"], batch_size=4)
    fit(tmp_path, monitor, module=OnIds(), data=data, max_steps=6)
    assert steps(monitor) == [0, 4, 6]
    assert value(monitor, 6, "embed", "n") == 48
