"""A measurement in the background: the same numbers, the same training, and who waits for it."""

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pandas as pd
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from embedgeo import EmbeddingMoments, GeometryMonitor, StepMonitor
from embedgeo.results.parquet import monitored_runs
from embedgeo.training.transformers import GeometryCallback
from tests.models import gpt_neox, token_batch
from tests.training.hf_runs import hf_trainer
from tests.training.loops import assert_same_history, loop
from tests.training.runs import (
    BreaksLate,
    UserError,
    assert_same_training,
    fit,
    loader,
    moments,
    random_state,
    slow,
    steps,
    value,
)


class Waits(EmbeddingMoments):
    """Computed in the background once the gate is open, for at most a minute."""

    gate = threading.Event()

    def compute(self):
        if threading.current_thread() is not threading.main_thread():
            assert self.gate.wait(60)
        return super().compute()


@pytest.fixture
def gate():
    """Closed until it is opened, and in the end."""
    Waits.gate.clear()
    yield Waits.gate
    Waits.gate.set()


def opens_soon(gate):
    """Open it while this thread waits."""
    threading.Timer(0.2, gate.set).start()


def waiting(dim):
    return [Waits(dim)]


def breaking(dim):
    return [BreaksLate(dim)]


@pytest.mark.parametrize("with_probe", [False, True])
@pytest.mark.slow
def test_a_loops_numbers_and_training_are_the_same_bit_for_bit(with_probe):
    plain, _ = loop(5)
    state, logged = random_state(), ({}, {})
    options = {
        "every_n_steps": 3,
        "jackknife": 2,
        "on_error": "raise",
        "probe": loader(4) if with_probe else None,
    }
    _, now = loop(5, **options, log=logged[0].__setitem__)
    monitored, later = loop(5, **options, log=logged[1].__setitem__, background=True)
    assert steps(later) == [0, 3, 5]
    assert_same_history(later, now)
    assert repr(logged[1]) == repr(logged[0])
    assert_same_training(plain, monitored)
    assert monitored.hooks == [0] * 6
    after = random_state()
    assert torch.equal(state[0], after[0])
    assert state[1:] == after[1:]


@pytest.mark.slow
def test_lightning_logs_and_writes_the_same(tmp_path):
    runs = {}
    for background in (False, True):
        folder = tmp_path / str(background)
        monitor = GeometryMonitor(3, background=background, on_error="raise")
        module, run = fit(folder, monitor, max_steps=5, logger=CSVLogger(folder, version=0))
        ((_, file, *_),) = monitored_runs(folder)
        metrics = pd.read_csv(folder / "lightning_logs" / "version_0" / "metrics.csv").dropna(
            axis=1, how="all"
        )
        scalars = metrics[
            [name for name in metrics if name == "step" or name.startswith("geometry.")]
        ]
        runs[background] = (
            monitor,
            module,
            file,
            scalars.dropna(thresh=2).reset_index(drop=True),
            run.callback_metrics,
        )
    now, later = runs[False], runs[True]
    assert_same_history(later[0], now[0])
    pd.testing.assert_frame_equal(later[2], now[2], check_exact=True)
    pd.testing.assert_frame_equal(later[3], now[3], check_exact=True)
    assert repr(later[4]) == repr(now[4])
    assert all(torch.equal(a, b) for a, b in zip(now[1].losses, later[1].losses, strict=True))


@pytest.mark.slow
def test_the_hugging_face_trainer_has_it_before_it_saves(tmp_path):
    monitor = GeometryCallback(4, metrics=slow, background=True, on_error="raise")
    trainer = hf_trainer(tmp_path, monitor, max_steps=6, save_strategy="steps", save_steps=2)
    trainer.train()
    assert steps(monitor) == [0, 4, 6]
    saved = {2: 0, 4: 0, 6: 4}  # step 4 is measured in the fifth step
    for step, last in saved.items():
        text = (tmp_path / f"checkpoint-{step}" / "trainer_state.json").read_text()
        assert (
            max(row["step"] for row in json.loads(text)["log_history"] if "geometry.V/mean" in row)
            == last
        )


def test_training_goes_on_until_the_next_measured_step_waits(gate):
    model = gpt_neox()
    monitor = StepMonitor(
        model, 4, metrics=waiting, background=True, on_error="raise", measure_last=False
    )
    for step in range(6):
        assert monitor.history == []
        if step == 5:  # the step measured before it is over
            opens_soon(gate)
        with monitor.step(step):
            model(**token_batch())
    assert 0 in steps(monitor)  # and 4, where it was soon over
    monitor.close()
    assert steps(monitor) == [0, 4]


def test_what_is_done_is_logged_when_the_next_step_begins():
    model, logged = gpt_neox(), []
    monitor = StepMonitor(
        model, 10, metrics=moments, background=True, log=lambda step, values: logged.append(step)
    )
    with monitor.step(0):
        model(**token_batch())
    deadline = time.monotonic() + 60
    while not logged:
        assert time.monotonic() < deadline
        with monitor.step(1):
            at_start = list(logged)
            time.sleep(0.01)
        assert logged == at_start
    assert logged == [0]
    assert monitor.step(2) is monitor.step(3)  # nothing is pending: a comparison again
    monitor.close()


def test_a_checkpoint_of_a_loop_waits(gate):
    monitor = StepMonitor(model := gpt_neox(), 10, metrics=waiting, background=True)
    for step in range(2):
        with monitor.step(step):
            model(**token_batch())
    assert monitor.history == []
    opens_soon(gate)
    assert monitor.state_dict() == {"last_step": 1, "window_start": None, "is_new": False}
    assert steps(monitor) == [0]
    monitor.close()


@pytest.mark.slow
def test_a_lightning_checkpoint_has_the_last_values(tmp_path):
    monitor = GeometryMonitor(4, metrics=slow, background=True, on_error="raise")
    saves = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=3)
    fit(tmp_path / "run", monitor, saves, max_steps=5, enable_checkpointing=True)
    saved = torch.load(tmp_path / "step=3.ckpt", weights_only=True)
    (state,) = (
        state for name, state in saved["callbacks"].items() if name.startswith("GeometryMonitor")
    )
    assert state["last_values"]["geometry.n/mean"] == 48


def test_values_that_the_trainer_decides_by_are_not_late(tmp_path):
    monitor = GeometryMonitor(
        2, probe=loader(8), metrics=moments, background=True, on_error="raise"
    )
    saves = ModelCheckpoint(
        tmp_path, monitor="geometry.V/mean", every_n_train_steps=2, save_top_k=-1
    )
    fit(tmp_path / "run", monitor, saves, max_steps=4, enable_checkpointing=True)
    means = [sum(value(monitor, step, f"block.0{i}", "V") for i in range(3)) / 3 for step in (2, 4)]
    assert [float(score) for score in saves.best_k_models.values()] == pytest.approx(
        means, rel=1e-12
    )


def in_a_loop(folder, **options):
    monitored, monitor = loop(6, every_n_steps=2, **options)
    assert_same_training(loop(6)[0], monitored)
    return monitor


def with_lightning(folder, **options):
    fit(folder, monitor := GeometryMonitor(2, **options), max_steps=6)
    return monitor


@pytest.mark.parametrize("train", [in_a_loop, with_lightning])
def test_a_failure_in_it_turns_the_monitor_off_with_one_warning(tmp_path, train):
    with pytest.warns(UserWarning, match="is off for the rest of this run") as caught:
        monitor = train(tmp_path, metrics=breaking, background=True)
    (warning,) = (str(w.message) for w in caught if "Monitor" in str(w.message))
    assert "RuntimeError: broken metric in BreaksLate at layer 'embed'" in warning
    assert monitor.history == []


def test_a_failure_in_it_is_raised_at_a_later_step():
    monitor = StepMonitor(
        model := gpt_neox(), 3, metrics=breaking, background=True, on_error="raise"
    )

    def run(*steps):
        for step in steps:
            with monitor.step(step):
                model(**token_batch())

    run(0)
    with pytest.raises(RuntimeError, match="broken metric"):
        run(1, 2, 3, 4)


def test_an_exception_of_the_user_waits_for_it_and_is_the_one_raised(gate):
    monitor = StepMonitor(model := gpt_neox(), 10, metrics=waiting, background=True)

    def run():
        with monitor:
            for step in range(3):
                with monitor.step(step):
                    model(**token_batch())
            opens_soon(gate)
            raise UserError("in the loop's body")

    with pytest.raises(UserError):
        run()
    assert steps(monitor) == [0]


EXIT = """
import atexit, sys
import torch
from embedgeo import StepMonitor
from tests.models import gpt_neox, token_batch
from tests.training.runs import slow

torch.set_num_threads(2)
for name, background in (("pending", True), ("closed", False), ("closed in the background", True)):
    model = gpt_neox()
    folder = f"{sys.argv[1]}/{name}"
    monitor = StepMonitor(model, 10, metrics=slow, background=background, on_error="raise",
        folder=folder)
    with monitor.step(0, token_batch()):
        model(**token_batch())
    if name == "pending":
        with monitor.step(1, token_batch()):
            model(**token_batch())
    else:
        atexit.register(monitor.close)
"""


@pytest.mark.slow
def test_an_interpreter_that_exits_completes_measurements_without_new_threads(tmp_path):
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", EXIT, tmp_path],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Error" not in done.stderr
    found = {run.name: [*run.records["step"].unique()] for run in monitored_runs(tmp_path)}
    assert found == {"pending": [0], "closed": [0, 1], "closed in the background": [0, 1]}


def test_a_fork_of_the_process_does_not_wait_for_it(gate, monkeypatch):
    monitor = StepMonitor(model := gpt_neox(), 10, metrics=waiting, background=True)
    for step in range(2):
        with monitor.step(step, token_batch()):
            model(**token_batch())
    with monkeypatch.context() as in_the_child:
        in_the_child.setattr(os, "getpid", lambda: 0)
        monitor.state_dict()
        assert monitor.history == []
    opens_soon(gate)
    monitor.close()
    assert steps(monitor) == [0, 2]
