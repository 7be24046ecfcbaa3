"""Training that goes on from a checkpoint: between windows, inside one, with and without the
monitor before.
"""

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from embedgeo import GeometryMonitor
from tests.training.runs import (
    Manual,
    TinyLM,
    fit,
    interrupted,
    loader,
    moments,
    n_at,
    steps,
    value,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
    pytest.mark.filterwarnings("ignore:Using ModelCheckpoint with manual optimization"),
    pytest.mark.filterwarnings(
        "ignore:You're resuming from a checkpoint that ended before the epoch ended"
    ),
]


def monitor_of(window=1, **options):
    defaults = {"every_n_steps": 3, "metrics": moments, "on_error": "raise", "measure_last": False}
    return GeometryMonitor(**{**defaults, "window": window, **options})


@pytest.mark.slow
def test_steps_are_optimizer_steps_also_under_accumulation_and_after_a_resume(tmp_path):
    whole, first, second = (monitor_of(extra_steps=(1,)) for _ in range(3))
    options = {"accumulate_grad_batches": 3}
    fit(tmp_path, whole, max_steps=7, data=loader(), **options)
    interrupted(tmp_path, [first], [second], at=4, end=7, **options)
    assert steps(whole) == [0, 1, 3, 6]
    assert steps(first) == [0, 1, 3]
    assert steps(second) == [6]
    assert value(whole, 3, "embed", "n") == 48 * 3
    assert value(first, 3, "block.02", "V") == value(whole, 3, "block.02", "V")


@pytest.mark.parametrize(
    ("window", "at", "before", "after"),
    [
        (1, 3, {0: 48}, {3: 48, 6: 48}),
        (3, 4, {0: 3 * 48, 3: 48}, {3: 2 * 48, 6: 3 * 48}),
    ],
)
def test_what_a_checkpoint_cuts_is_taken_up_again_by_each_monitor(
    tmp_path, window, at, before, after
):
    first, second, added = monitor_of(window), monitor_of(window), monitor_of(2, prefix="added")
    others = [monitor_of(every_n_steps=5, prefix="other") for _ in range(2)]
    interrupted(tmp_path, [first, others[0]], [added, others[1], second], at=at)
    assert n_at(first) == before
    assert n_at(second) == after
    assert steps(others[1]) == [5]
    assert n_at(added) == {3: 2 * 48, 6: 2 * 48} if at == 3 else {6: 2 * 48}


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
    assert n_at(second) == {3: 2 * 48, 6: 3 * 48}


def test_a_window_that_has_become_shorter_is_not_taken_up(tmp_path):
    second = monitor_of()
    interrupted(tmp_path, [monitor_of(window=3)], [second], at=5, end=7)
    assert steps(second) == [6]


def test_a_step_that_two_optimizers_pass_by_is_not_lost_between_two_runs(tmp_path):
    first, second = monitor_of(every_n_steps=5), monitor_of(every_n_steps=5)
    interrupted(tmp_path, [first], [second], at=6, end=10, make=lambda: Manual(optimizers=2))
    assert steps(first) == [0]
    assert steps(second) == [6]


def test_a_monitor_can_be_removed_and_lightning_says_so(tmp_path):
    with pytest.warns(
        UserWarning,
        match=r"add the following callbacks: \[\"GeometryMonitor{'prefix': 'geometry'}\"\]",
    ):
        interrupted(tmp_path, [monitor_of(window=3)], [], at=4)
    assert list((tmp_path / "saved").glob("*step=8.ckpt"))  # training went on
