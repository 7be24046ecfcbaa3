"""Training that goes on from a checkpoint: between windows, inside one, with and without the
monitor before.
"""

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from embedgeo import GeometryMonitor
from tests.training.runs import TinyLM, fit, interrupted, loader, moments, steps, value

pytestmark = [
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
    pytest.mark.filterwarnings("ignore:Using ModelCheckpoint with manual optimization"),
    pytest.mark.filterwarnings(
        "ignore:You're resuming from a checkpoint that ended before the epoch ended"
    ),
]


class TwoOptimizers(TinyLM):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        self.manual_backward(super().training_step(batch, batch_idx))
        for optimizer in self.optimizers():
            optimizer.step()

    def configure_optimizers(self):
        return [super(TwoOptimizers, self).configure_optimizers() for _ in range(2)]


def monitor_of(window=1, **options):
    defaults = {"every_n_steps": 3, "metrics": moments, "on_error": "raise", "measure_last": False}
    return GeometryMonitor(**{**defaults, "window": window, **options})


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [1, 3])
def test_steps_are_optimizer_steps_also_under_accumulation_and_after_a_resume(tmp_path, accumulate):
    whole, first, second = (monitor_of(extra_steps=(1,)) for _ in range(3))
    options = {"accumulate_grad_batches": accumulate}
    fit(tmp_path, whole, max_steps=9, data=loader(), **options)
    interrupted(tmp_path, [first], [second], at=4, **options)
    assert steps(whole) == [0, 1, 3, 6]
    assert steps(first) == [0, 1, 3]
    assert steps(second) == [6]
    assert value(whole, 3, "embed", "n") == 48 * accumulate
    assert value(first, 3, "block.02", "V") == value(whole, 3, "block.02", "V")


def test_a_measured_step_at_which_a_checkpoint_was_saved_is_measured_by_the_resumed_run(tmp_path):
    first, second = monitor_of(), monitor_of()
    interrupted(tmp_path, [first], [second], at=3)
    assert steps(first) == [0]
    assert steps(second) == [3, 6]


def test_a_window_that_a_checkpoint_cuts_is_taken_up_again(tmp_path):
    first, second = monitor_of(window=3), monitor_of(window=3)
    interrupted(tmp_path, [first], [second], at=4)
    assert {step: value(second, step, "embed", "n") for step in steps(second)} == {
        3: 2 * 48,
        6: 3 * 48,
    }
    assert {step: value(first, step, "embed", "n") for step in steps(first)} == {0: 3 * 48, 3: 48}


def test_a_window_that_an_exception_cuts_is_taken_up_again(tmp_path):
    class Stops(TinyLM):
        def training_step(self, batch, batch_idx):
            if batch_idx == 4:
                raise RuntimeError("in the middle of a window")
            return super().training_step(batch, batch_idx)

    first, second = monitor_of(window=3), monitor_of(window=3)
    saving = ModelCheckpoint(tmp_path, save_on_exception=True)
    options = {"max_steps": 9, "data": loader(), "enable_checkpointing": True}
    with pytest.raises(RuntimeError, match="in the middle of a window"):
        fit(tmp_path, first, saving, module=Stops(), **options)
    (saved,) = tmp_path.glob("*step=4.ckpt")
    fit(tmp_path, second, ModelCheckpoint(tmp_path), ckpt_path=saved, **options)
    assert {step: value(second, step, "embed", "n") for step in steps(second)} == {
        3: 2 * 48,
        6: 3 * 48,
    }


def test_a_window_that_has_become_shorter_is_not_taken_up(tmp_path):
    second = monitor_of()
    interrupted(tmp_path, [monitor_of(window=3)], [second], at=5)
    assert steps(second) == [6]


def test_a_step_that_two_optimizers_pass_by_is_not_lost_between_two_runs(tmp_path):
    first, second = monitor_of(every_n_steps=5), monitor_of(every_n_steps=5)
    interrupted(tmp_path, [first], [second], at=6, end=10, make=TwoOptimizers)
    assert steps(first) == [0]
    assert steps(second) == [6]


def test_a_monitor_can_be_added(tmp_path):
    added = monitor_of(window=2)
    interrupted(tmp_path, [], [added], at=4)
    assert {step: value(added, step, "embed", "n") for step in steps(added)} == {6: 2 * 48}


def test_a_monitor_can_be_removed_and_lightning_says_so(tmp_path):
    with pytest.warns(
        UserWarning,
        match=r"add the following callbacks: \[\"GeometryMonitor{'prefix': 'geometry'}\"\]",
    ):
        interrupted(tmp_path, [monitor_of(window=3)], [], at=4)
    assert list((tmp_path / "saved").glob("*step=8.ckpt"))  # training went on


def test_a_second_monitor_keeps_its_own_place(tmp_path):
    first, second = monitor_of(window=3), monitor_of(window=3)
    other = [monitor_of(every_n_steps=7, prefix="other") for _ in range(2)]
    interrupted(tmp_path, [first, other[0]], [other[1], second], at=4)
    assert steps(second) == [3, 6]
    assert steps(other[1]) == [7]
