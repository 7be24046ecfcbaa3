"""The weights after the last step are measured, too, and nothing is changed by that."""

import weakref

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging

from embedgeo import GeometryMonitor, StepMonitor
from tests.models import gpt_neox, token_batch
from tests.training.runs import (
    OPTIONS,
    Manual,
    TinyLM,
    WithoutDropout,
    fit,
    loader,
    moments,
    of_monitors,
    steps,
    trainer,
    value,
)


class KeepsBatches(WithoutDropout):
    """Knows which of its batches are alive."""

    def __init__(self):
        super().__init__()
        self.ids = []

    def training_step(self, batch, batch_idx):
        self.ids.append(weakref.ref(batch["input_ids"]))
        return super().training_step(batch, batch_idx)


def test_the_batches_that_they_are_measured_on_are_let_go(tmp_path):
    monitor = GeometryMonitor(4, window=2, **OPTIONS)
    options = {"max_steps": 6, "accumulate_grad_batches": 2}
    module, _ = fit(tmp_path, monitor, module=KeepsBatches(), **options)
    assert steps(monitor) == [0, 4, 6]
    assert not any(ids() is not None for ids in module.ids)


class Raw(Manual, KeepsBatches):
    """Takes steps that Lightning does not count."""

    def optimizers(self):
        return super().optimizers(use_pl_optimizer=False)

    def on_train_epoch_end(self):
        self.num_alive = sum(ids() is not None for ids in self.ids)


def test_of_steps_that_lightning_does_not_count_no_batch_is_kept(tmp_path):
    options = {"data": loader(4 * 76), "max_epochs": 1}
    told = "0 in the 75th batch.*global_step does not count this optimizer"
    with pytest.warns(UserWarning, match=told) as caught:
        module, _ = fit(tmp_path, GeometryMonitor(), module=Raw(accumulate=60), **options)
    assert len(of_monitors(caught)) == 1
    assert module.num_alive < 3


@pytest.mark.parametrize(
    "sizes", [(4, 4, 2), (4, 4, 2, 2), (4, 6, 5, 4, 4, 3), [8] * 9 + [4] * 9 + [3]]
)
def test_a_loop_keeps_the_last_batch_of_the_usual_size(sizes):
    model = gpt_neox()
    with StepMonitor(model, 100, **OPTIONS) as monitor:
        for step, rows in enumerate(sizes):
            with monitor.step(step, batch := token_batch(rows)["input_ids"]):
                model(batch)
    assert monitor.history[-1]["step"] == len(sizes)
    assert value(monitor, len(sizes), "block.00", "n") == 48


modes_of_passes = []
note_mode = modes_of_passes.append  # a list that a hook names is put back after a pass


class Frozen(TinyLM):
    """A part is frozen in eval mode."""

    def on_train_start(self):
        self.model.gpt_neox.layers[0].eval()
        self.model.gpt_neox.layers[1].register_forward_pre_hook(
            lambda m, args: note_mode(m.training)
        )


def test_modes_are_those_that_training_left(tmp_path):
    monitor = GeometryMonitor(100, layers="block.*", **OPTIONS)
    modes = [
        [m.training for m in fit(tmp_path, *callbacks, module=Frozen(), max_steps=3)[0].modules()]
        for callbacks in ((), (monitor,))
    ]
    assert modes[0] == modes[1]
    assert modes_of_passes == [True] * 7  # as in training, of the second run once more


class OnPairs(TinyLM):
    """Batches are lists of ids and labels, which the model does not take."""

    def training_step(self, batch, batch_idx):
        ids, labels = batch
        return self.model(input_ids=ids, labels=labels).loss


def test_what_cannot_be_run_on_a_batch_is_told_once(tmp_path):
    ids = token_batch(32)["input_ids"]
    data = torch.utils.data.DataLoader([(row, row) for row in ids], batch_size=4)
    monitor = GeometryMonitor(2, metrics=moments)
    run = trainer(tmp_path, callbacks=[monitor], max_steps=5)
    told = "last step, 5, are not measured.*probe_forward=.*measure_last=False"
    with pytest.warns(UserWarning, match=told) as caught:
        run.fit(OnPairs(), data)
    assert len(of_monitors(caught)) == 1
    assert steps(monitor) == [0, 2, 4]
    forward = lambda module, batch: module.model(batch[0])  # noqa: E731
    by_hand = GeometryMonitor(2, probe_forward=forward, **OPTIONS)
    fit(tmp_path, by_hand, module=OnPairs(), data=data, max_steps=5)
    assert steps(by_hand) == [0, 2, 4, 5]


@pytest.mark.parametrize("probe", [None, [token_batch(4)]])
def test_averages_are_not_taken_for_the_last_weights(tmp_path, probe):
    options = {"metrics": moments, "probe": probe}
    before, after = (GeometryMonitor(10, prefix=name, **options) for name in "ab")
    with pytest.warns(
        UserWarning, match="last step, 16, .*others have been put in their place"
    ) as caught:
        fit(tmp_path, before, EMAWeightAveraging(), after, max_epochs=1)
    assert len(of_monitors(caught)) == 1
    assert (steps(before), steps(after)) == ([0, 10, 16], [0, 10])


class Moves(L.Callback):
    """Moves the weights after each step."""

    def on_train_batch_end(self, trainer, module, *_):
        weights = {name: 2 * each for name, each in module.state_dict().items()}
        module.load_state_dict(weights)


def test_weights_that_a_callback_moves_after_each_step_are_the_last_ones(tmp_path):
    monitor = GeometryMonitor(2, metrics=moments, probe=[token_batch(4)])
    fit(tmp_path, monitor, Moves(), max_steps=3)
    assert steps(monitor) == [0, 2, 3]


def test_a_mode_that_the_step_sets_is_that_of_the_last_weights():
    model = gpt_neox(hidden_dropout=0.5).eval()
    with StepMonitor(model, 1, **OPTIONS) as monitor:
        for step in range(2):
            with monitor.step(step, batch := token_batch()):
                model.train()
                torch.manual_seed(0)
                model(**batch).logits.mean().backward()
        model.eval()
        torch.manual_seed(0)
    assert not model.training
    assert value(monitor, 2, "block.00", "V") == value(monitor, 0, "block.00", "V")
