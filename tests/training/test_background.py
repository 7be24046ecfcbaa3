"""A measurement in the background: the same numbers, the same training, and who waits for it."""

import atexit
import concurrent.futures.thread
import json
import os
import threading
from concurrent.futures import wait

import pandas as pd
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from embedgeo import EmbeddingMoments, GeometryMonitor, StepMonitor
from embedgeo.results.parquet import read_histories
from embedgeo.training import monitor
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
    steps,
    value,
)


class Waits(EmbeddingMoments):
    """Computed once the gate is open, for at most a minute."""

    gate = threading.Event()

    def compute(self):
        if threading.current_thread() is not threading.main_thread():
            assert self.gate.wait(60)
        return super().compute()


@pytest.fixture
def gate(monkeypatch):
    """Closed until the monitor waits for a measurement; then it stays open."""

    def opens(futures):
        waited.append(len(monitors[0].history))
        Waits.gate.set()
        return wait(futures)

    Waits.gate.clear()
    waited, monitors = [], []
    monkeypatch.setattr(monitor, "wait", opens)
    yield monitors, waited
    Waits.gate.set()


def waiting(dim):
    return [Waits(dim)]


def breaking(dim):
    return [BreaksLate(dim)]


@pytest.mark.parametrize("with_probe", [False, True])
def test_a_loops_numbers_and_training_are_the_same_bit_for_bit(with_probe):
    plain, _ = loop(5)
    state, logged = random_state(), ({}, {})
    options = {"every_n_steps": 3, "jackknife": 2, "on_error": "raise", "probe": loader(4) if with_probe else None}
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


def test_lightning_logs_and_writes_the_same(tmp_path):
    runs = {}
    for background in (False, True):
        folder = tmp_path / str(background)
        monitor = GeometryMonitor(3, background=background, on_error="raise")
        module, run = fit(folder, monitor, max_steps=5, logger=CSVLogger(folder, version=0))
        ((_, _, file),) = read_histories(folder)
        metrics = pd.read_csv(folder / "lightning_logs" / "version_0" / "metrics.csv").dropna(axis=1, how="all")
        scalars = metrics[[name for name in metrics if name == "step" or name.startswith("geometry.")]]
        runs[background] = monitor, module, file, scalars.dropna(thresh=2).reset_index(drop=True), run.callback_metrics
    now, later = runs[False], runs[True]
    assert_same_history(later[0], now[0])
    pd.testing.assert_frame_equal(later[2], now[2], check_exact=True)
    pd.testing.assert_frame_equal(later[3], now[3], check_exact=True)
    assert repr(later[4]) == repr(now[4])
    assert all(torch.equal(a, b) for a, b in zip(now[1].losses, later[1].losses, strict=True))


def test_the_hugging_face_trainer_has_it_before_it_saves(tmp_path, gate):
    monitors, _ = gate
    monitors.append(GeometryCallback(4, metrics=waiting, background=True, on_error="raise"))
    trainer = hf_trainer(tmp_path, *monitors, max_steps=6, save_strategy="steps", save_steps=2)
    trainer.train()
    assert steps(monitors[0]) == [0, 4, 6]
    saved = {2: 0, 4: 0, 6: 4}  # step 4 is measured in the fifth step
    for step, last in saved.items():
        text = (tmp_path / f"checkpoint-{step}" / "trainer_state.json").read_text()
        assert max(row["step"] for row in json.loads(text)["log_history"] if "geometry.V/mean" in row) == last


def test_training_goes_on_until_the_next_measured_step_waits(gate):
    monitors, waited = gate
    model = gpt_neox()
    monitor = StepMonitor(model, 4, metrics=waiting, background=True, on_error="raise", measure_last=False)
    monitors.append(monitor)
    for step in range(6):
        with monitor.step(step):
            model(**token_batch())
        assert waited == ([0] if step == 5 else [])
    assert steps(monitor) == [0]
    monitor.close()
    assert steps(monitor) == [0, 4]


def test_what_is_done_is_logged_when_the_next_step_begins():
    model, logged = gpt_neox(), []
    monitor = StepMonitor(model, 10, metrics=moments, background=True, log=lambda step, values: logged.append(step))
    for step in range(2):
        with monitor.step(step):
            model(**token_batch())
    wait([monitor._pending.records])
    assert logged == []
    for step in (2, 3):
        with monitor.step(step):
            assert logged == [0]
    assert monitor.step(4) is monitor.step(5)  # nothing is pending: a comparison again
    monitor.close()


def test_a_checkpoint_of_a_loop_waits(gate):
    monitors, waited = gate
    monitor = StepMonitor(model := gpt_neox(), 10, metrics=waiting, background=True)
    monitors.append(monitor)
    for step in range(2):
        with monitor.step(step):
            model(**token_batch())
    assert monitor.history == []
    assert monitor.state_dict() == {"last_step": 1, "window_start": None}
    assert steps(monitor) == [0]
    assert waited == [0]
    monitor.close()


def test_a_lightning_checkpoint_has_the_last_values(tmp_path, gate):
    monitors, _ = gate
    monitors.append(GeometryMonitor(4, metrics=waiting, background=True, on_error="raise"))
    saves = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=3)
    fit(tmp_path / "run", *monitors, saves, max_steps=5, enable_checkpointing=True)
    saved = torch.load(tmp_path / "step=3.ckpt", weights_only=True)
    (state,) = (state for name, state in saved["callbacks"].items() if name.startswith("GeometryMonitor"))
    assert state["last_values"]["geometry.n/mean"] == 48


def test_values_that_the_trainer_decides_by_are_not_late(tmp_path):
    monitor = GeometryMonitor(2, probe=loader(8), metrics=moments, background=True, on_error="raise")
    saves = ModelCheckpoint(tmp_path, monitor="geometry.V/mean", every_n_train_steps=2, save_top_k=-1)
    fit(tmp_path / "run", monitor, saves, max_steps=4, enable_checkpointing=True)
    means = [sum(value(monitor, step, f"block.0{i}", "V") for i in range(3)) / 3 for step in (2, 4)]
    assert [float(score) for score in saves.best_k_models.values()] == pytest.approx(means, rel=1e-12)


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
    assert "RuntimeError: broken metric at layer 'embed'" in warning
    assert monitor.history == []


def test_a_failure_in_it_is_raised_at_a_later_step():
    monitor = StepMonitor(model := gpt_neox(), 3, metrics=breaking, background=True, on_error="raise")
    for step in (0, 1):
        with monitor.step(step):
            model(**token_batch())
    wait([monitor._pending.records])
    with pytest.raises(RuntimeError, match="broken metric"):
        monitor.step(3).__enter__()


def test_an_exception_of_the_user_waits_for_it_and_is_the_one_raised(gate):
    monitors, _ = gate
    monitor = StepMonitor(model := gpt_neox(), 10, metrics=waiting, background=True)
    monitors.append(monitor)

    def run():
        with monitor:
            for step in range(3):
                with monitor.step(step):
                    model(**token_batch())
            raise UserError("in the loop's body")

    with pytest.raises(UserError):
        run()
    assert steps(monitor) == [0]


def test_what_is_pending_when_the_interpreter_exits_is_written(tmp_path, gate, monkeypatch):
    monitors, _ = gate
    at_exit = []
    monkeypatch.setattr(atexit, "register", lambda function, *args, **kwargs: at_exit.append((function, kwargs)))
    monitors.append(monitor := StepMonitor(model := gpt_neox(), 10, metrics=waiting, background=True, folder=tmp_path))
    for step in range(2):
        with monitor.step(step):
            model(**token_batch())
    for function, kwargs in reversed(at_exit):
        function(**kwargs)
    ((_, _, file),) = read_histories(tmp_path)
    assert set(file["step"]) == {0}
    monitor.close()


@pytest.mark.parametrize("background", [False, True])
def test_a_monitor_closed_while_the_interpreter_exits_computes_without_threads(monkeypatch, background):
    monitor = StepMonitor(model := gpt_neox(), 10, metrics=moments, background=background, on_error="raise")
    with monitor.step(0, token_batch()):
        model(**token_batch())
    # what Python has set when it calls what atexit is given
    monkeypatch.setattr(concurrent.futures.thread, "_shutdown", True)
    monkeypatch.setattr(threading, "main_thread", threading.Thread)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monitor.close()
    assert steps(monitor) == [0, 1]


def test_a_fork_of_the_process_does_not_wait_for_it(gate, monkeypatch):
    monitors, waited = gate
    monitors.append(monitor := StepMonitor(model := gpt_neox(), 10, metrics=waiting, background=True))
    for step in range(2):
        with monitor.step(step, token_batch()):
            model(**token_batch())
    with monkeypatch.context() as in_the_child:
        in_the_child.setattr(os, "getpid", lambda: 0)
        monitor._complete(alone=True)  # what its interpreter calls when it exits
        assert (waited, monitor.history) == ([], [])
    monitor.close()
    assert steps(monitor) == [0, 2]
